"""Speed-ups that make Triton's interpreter usable for real work on a CPU.

The interpreter replaces the functions of `triton.language` at every launch and again at every call of a helper such
as `tl.sum` (about 200 us each), and computes each int32 sum twice to check for overflow. A process that interprets
never compiles, so this module replaces them once; the overflow check only acts in debug mode. NumPy's warnings about
infinities and NaN are disabled during a launch, as a GPU gives none. A launch holds a lock, because the current program
and the caches belong to the process. `memory` replaces loads and stores, `operators` operators; `libdevice` and
`bfloat16` add missing functions. NumPy types of elements and argument names of kernels are cached. glibc keeps freed
blocks of megabytes, so that the next operation need not map their pages again.

`compile_from_now_on` restores the language in a process that has interpreted and must compile.
"""

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import sys
import types
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from minidl.common import locks
from minidl.interpreter import bfloat16, libdevice, memory, operators


class _PermanentScope:
    """A scope that does not undo the replacement."""

    def restore(self) -> None:
        pass


def speed_up() -> None:
    """Replace the language's functions for the life of the process. Call once, before the first launch."""
    _save_language()
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter._patch_attr = _replace
    interpreter._patch_lang(_function_with_language_globals)
    # numpy >= 2.4 refuses to turn a one-element array into an index, which loop bounds do in Triton 3.6.
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(()))
    interpreter._patch_lang = lambda fn: _PermanentScope()
    interpreter.InterpretedFunction.__call__ = _call_helper
    interpreter.InterpretedFunction.run = _one_at_a_time(interpreter.InterpretedFunction.run)
    interpreter._get_np_dtype = _cached_np_dtype(interpreter._get_np_dtype)
    interpreter.inspect = _caching_inspect()
    libdevice.install()
    bfloat16.install()
    memory.install()
    operators.install()
    _keep_memory()


_language: list[tuple[Any, dict[str, Any]]] = []


def _save_language() -> None:
    """Save the attributes of the language's modules and classes."""
    # Copies: other threads may be importing.
    modules = [module for name, module in sys.modules.copy().items() if name.startswith("triton.language")]
    classes = {
        value
        for module in modules
        for value in vars(module).copy().values()
        if isinstance(value, type) and value.__module__.startswith("triton.language")
    }
    # A class whose own __new__ is deleted would no longer accept arguments.
    tl.block_type.__new__ = lambda cls, *_: object.__new__(cls)
    _language.extend((scope, dict(vars(scope))) for scope in (*modules, *classes))


def compile_from_now_on() -> None:
    """Compile kernels, also existing ones, in this process, which has interpreted them.

    Interpreted functions become JITFunctions in place. Nothing can be interpreted afterwards.
    """
    os.environ["TRITON_INTERPRET"] = "0"
    for scope, before in _language:
        for name in vars(scope).keys() - before.keys():
            delattr(scope, name)
        for name, value in before.items():
            if vars(scope)[name] is not value:
                setattr(scope, name, value)
    # A class with the layout of an interpreted function, so that assigning __class__ converts it everywhere.
    members = {name: value for name, value in vars(JITFunction).items() if name not in ("__dict__", "__weakref__")}
    kind = type("JITFunction", (interpreter.InterpretedFunction, JITFunction), members)
    for function in [function for function in gc.get_objects() if type(function) is interpreter.InterpretedFunction]:
        with contextlib.suppress(ValueError):  # a function without a file, which was never launched
            compiled = JITFunction(function.fn, **function.kwargs)
            function.__class__, function.__dict__ = kind, compiled.__dict__
    # Methods of tensors, such as x.sum(0), are JITFunctions themselves when compiled.
    for name, method in list(vars(tl.tensor).items()):
        for cell in getattr(method, "__closure__", None) or ():
            if isinstance(cell.cell_contents, JITFunction):
                setattr(tl.tensor, name, cell.cell_contents)


def _replace(language, name, member, builder, *scope):
    """Bind a function of the language to the interpreter's semantic, without the wrapper that looks it up."""
    function = getattr(member, "__wrapped__", member)

    def interpreted(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    setattr(language, name, interpreted)


def _cached_np_dtype(find):
    """Cache the results of `find`, which builds a table of all types at each call."""
    dtypes = {}

    def np_dtype(dtype):
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        np_type = dtypes.get(element.name)
        if np_type is None:
            np_type = dtypes[element.name] = find(element)
        return np_type

    return np_dtype


def _caching_inspect() -> types.SimpleNamespace:
    """Return the module `inspect` with a cache: the interpreter inspects a kernel's arguments twice at every launch."""
    spec = functools.cache(inspect.getfullargspec)

    def getcallargs(function, *args, **kwargs):
        names, defaults = spec(function).args, spec(function).defaults or ()
        optional = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        # The original raises the error for anything else.
        if len(arguments) == len(args) + len(kwargs) and arguments.keys() | optional.keys() == set(names):
            return optional | arguments
        return inspect.getcallargs(function, *args, **kwargs)

    return types.SimpleNamespace(**{**vars(inspect), "getfullargspec": spec, "getcallargs": getcallargs})


def _keep_memory() -> None:
    """Let malloc keep up to 1 GiB of freed blocks, of up to 32 MiB each (where the C library is glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_..., M_TOP_PAD
            libc.mallopt(option, value)


def _function_with_language_globals() -> None:
    """Provide globals with both modules in which the interpreter replaces functions."""


core = tl.core


def _call_helper(function, *args, **kwargs):
    return function.rewrite()(*args, **kwargs)


def _one_at_a_time(run):
    """Wrap `run` of a kernel to disable NumPy's warnings and to exclude launches of other threads.

    A launch within a launch, as in a signal handler, restores the program that it interrupted.
    """

    def run_alone(function, *args, **kwargs):
        state = vars(interpreter.interpreter_builder)
        with locks.TRITON, interpreter.np.errstate(all="ignore"):
            before = {name: state[name] for name in ("grid_dim", "grid_idx") if name in state}
            try:
                return run(function, *args, **kwargs)
            finally:
                state.update(before)

    return run_alone
