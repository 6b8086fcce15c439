"""Launch kernels on the CPU, compiled.

The first launch with arguments of these types, alignments and constants makes the TTIR, translates and compiles it;
later ones look up the library. Programs run on torch's number of threads; no bit depends on it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature, native_specialize_impl

from minidl.common import locks
from minidl.cpu import build
from minidl.cpu.translate import translate

# Kernels are specialised as for this GPU; the TTIR of older ones has no descriptors.
TARGET = GPUTarget("cuda", 80, 32)
CONSTANT = "constexpr"
_BACKEND = type(make_backend(TARGET))


class Compiled(NamedTuple):
    """A compiled kernel: its library, its name and line, the bytes of its blocks, and the kinds of its arguments."""

    library: ctypes.CDLL
    name: bytes
    address: int
    scratch: int
    kinds: tuple[Any, ...]

    def bind(self, grid: tuple[int, ...], args: tuple[Any, ...], moving: tuple[int, ...] = ()) -> Launch:
        """Return a launch with these arguments, those at positions `moving` to be given as addresses."""
        positions: list[int] = []
        slots: list[int] = []
        for i, (kind, arg) in enumerate(zip(self.kinds, args, strict=False)):
            positions.append(len(slots))
            slots += _slots(kind, 0 if i in moving else arg)
        if any(kind != CONSTANT for kind in self.kinds[len(args) :]):
            raise TypeError(f"{self.name.decode()}: {len(args)} arguments by position, expected all but constants")
        sizes = (ctypes.c_int64 * 3)(*(*grid, 1, 1)[:3])
        return Launch(self, (ctypes.c_int64 * len(slots))(*slots), sizes, tuple(positions[i] for i in moving))


class Launch(NamedTuple):
    """A launch of a compiled kernel: values of its arguments, the grid, and the positions of addresses."""

    compiled: Compiled
    values: Any
    grid: Any
    moving: tuple[int, ...]

    def run(self, addresses: Iterable[int] = ()) -> None:
        """Run all programs with these addresses. Raises MemoryError."""
        values = type(self.values).from_buffer_copy(self.values)  # other threads may run the launch, too
        for position, address in zip(self.moving, addresses, strict=True):
            values[position] = address
        _, name, address, scratch, _ = self.compiled
        if _threads().launch(address, name, values, self.grid, scratch, torch.get_num_threads()):
            raise MemoryError(f"no memory for {scratch} bytes of blocks on each thread")


_compiled: dict[tuple[Any, ...], Compiled] = {}


def lookup(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> Compiled | None:
    """Return the kernel compiled for such arguments in this process, None if there is none."""
    return _compiled.get(_key(kernel, args, meta))


def _key(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
    parts: list[Any] = [kernel, *meta, *meta.values()]
    for parameter, value in zip(kernel.params, args, strict=False):
        if parameter.is_constexpr:
            parts.append(value)
        else:
            aligned = not parameter.do_not_specialize_on_alignment
            specialized = not parameter.do_not_specialize
            parts.append(native_specialize_impl(_BACKEND, value, parameter.is_const, specialized, aligned))
    return tuple(parts)


def compile_launch(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> Compiled:
    """Compile a kernel for a launch, or load it from the cache.

    Raises NotImplementedError for an operation that is not supported, CompilerError if there is no compiler or it
    fails.
    """
    return _library(kernel, args, meta)()


def compile_ahead(launches: Iterable[tuple[Any, ...]], progress: Callable[[int, int], None]) -> int:
    """Compile the kernels of launches (kernel, grid, arguments, options) with a C compiler on each processor; return
    their number. Raises the exceptions of `compile_launch`."""
    missing = {_key(kernel, args, meta): (kernel, args, meta) for kernel, _, args, meta in launches}
    jobs = [job for key, job in missing.items() if key not in _compiled]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for done, finish in enumerate([_library(*job, threads) for job in jobs], 1):
            finish()
            progress(done, len(jobs))
    return len(jobs)


def _library(
    kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], threads: Executor | None = None
) -> Callable[[], Compiled]:
    """Start to compile a kernel, on one of `threads`; return a function that waits for it."""
    backend, bind = make_backend(TARGET), _binder(kernel)
    # Tensors of minidl's kernels do not overlap, as `deferral` expects.
    defers = kernel.fn.__module__.startswith("minidl.")
    with locks.TRITON:
        bound, specialization, extra = bind(*args, **meta)
        options, signature, constants, attributes = kernel._pack_args(backend, dict(meta), bound, specialization, extra)
        kinds = tuple(map(_kind, signature.values()))
        source = ASTSource(kernel, signature, constants, attributes)
        name = f"{kernel.__name__} {source.hash()} {options.hash()} {defers}"
        library = build.lookup(name)
        code = ttir(source, options) if library is None else ""
    future: Future[ctypes.CDLL] = Future()
    if library is None:
        text, scratch = translate(code, defers)
        text += f"const int64_t scratch_bytes = {scratch};\n"
        job = name, text, ("-ffp-contract=fast" if options.enable_fp_fusion else "-ffp-contract=off",)
        if threads is None:
            library = build.store(*job)
        else:
            future = threads.submit(build.store, *job)
    if library is not None:
        future.set_result(library)

    def finish() -> Compiled:
        built = future.result()
        address = ctypes.cast(built.run, ctypes.c_void_p).value or 0
        scratch = ctypes.c_int64.in_dll(built, "scratch_bytes").value
        where = f"{kernel.__name__} ({kernel.fn.__code__.co_filename}:{kernel.fn.__code__.co_firstlineno})".encode()
        compiled = Compiled(built, where, address, scratch, kinds)
        _compiled[_key(kernel, args, meta)] = compiled
        return compiled

    return finish


@functools.cache
def _binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))


def ttir(source: Any, options: Any) -> str:
    """Return the TTIR of a kernel."""
    backend, context = make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(TARGET, options, functions, modules, context)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


def _kind(kind: Any) -> Any:
    """Return how an argument of this type is passed; a tuple for a tuple."""
    if isinstance(kind, tuple | list):
        return tuple(map(_kind, kind))
    if kind.startswith("tensordesc"):
        raise NotImplementedError("tensor descriptors are not supported on the CPU")
    return "pointer" if kind.startswith("*") else kind if kind in ("fp32", "fp64", CONSTANT) else "integer"


def _slots(kind: Any, value: Any) -> list[int]:
    """Return the numbers of 64 bits that pass an argument."""
    if isinstance(kind, tuple):
        return [slot for each in zip(kind, value, strict=True) for slot in _slots(*each)]
    return [] if kind == CONSTANT else [_SLOTS[kind](value)]


_SLOTS: dict[str, Callable[[Any], int]] = {
    "pointer": lambda value: value if isinstance(value, int) else int(value.data_ptr()),
    "integer": int,
    "fp32": lambda value: int.from_bytes(ctypes.c_float(value), "little"),
    "fp64": lambda value: int.from_bytes(ctypes.c_double(value), "little", signed=True),
}


@functools.cache
def _threads() -> ctypes.CDLL:
    library = build.library("threads", (Path(__file__).parent / "threads.c").read_text())
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.launch.argtypes = [pointer, ctypes.c_char_p, pointer, pointer, integer, ctypes.c_int]
    return library
