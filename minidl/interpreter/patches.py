"""Speed-ups that make Triton's interpreter usable for real work on a CPU.

The interpreter replaces the functions of `triton.language` at every launch and again at every call of a helper such
as `tl.sum` (about 200 us each), and computes each int32 sum twice to look for overflow. A process that interprets
never compiles, so the replacement is done once and kept; the overflow check only acts in debug mode. NumPy's warnings
about infinities and NaN are silenced during a launch: a GPU gives none. A launch holds a lock, as the program that it
is in, and what is cached here, are the process's. `interpret_memory` replaces loads and stores, `interpret_operators`
operators; `interpret_missing` and `interpret_bfloat16` add what the interpreter lacks. The NumPy types of elements and
the argument names of kernels are cached. glibc keeps freed blocks of megabytes for the next operation, so that their
pages need not be mapped again.

`compile_from_now_on` takes back what concerns the language, in a process that has interpreted and is to compile.
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


class _Kept:
    """A scope that does not undo the replacement."""

    def restore(self) -> None:
        pass


def speed_up() -> None:
    """Replace the language's functions for the life of the process. Call once, before the first launch."""
    _keep_language()
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter._patch_attr = _replace
    interpreter._patch_lang(_sees_the_whole_language)
    # numpy >= 2.4 refuses to turn a one-element array into an index, which loop bounds do in Triton 3.6.
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(()))
    interpreter._patch_lang = lambda fn: _Kept()
    interpreter.InterpretedFunction.__call__ = _call_helper
    interpreter.InterpretedFunction.run = _one_at_a_time(interpreter.InterpretedFunction.run)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter.inspect = _remembering()
    libdevice.install()
    bfloat16.install()
    memory.install()
    operators.install()
    _keep_memory()


_language: list[tuple[Any, dict[str, Any]]] = []


def _keep_language() -> None:
    """Note what the names in the language, and in its classes, stand for."""
    modules = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("triton.language")
    }
    # A class that loses a __new__ of its own would make no objects from arguments any more.
    tl.block_type.__new__ = lambda cls, *_: object.__new__(cls)
    _language.extend((place, dict(vars(place))) for place in (*modules, *classes))


def compile_from_now_on() -> None:
    """Have kernels compiled in this process, which has interpreted them: also those that exist already.

    Functions of Triton become those that are compiled, in their places. Nothing can be interpreted afterwards.
    """
    os.environ["TRITON_INTERPRET"] = "0"
    for place, before in _language:
        for name in vars(place).keys() - before.keys():
            delattr(place, name)
        for name, value in before.items():
            if vars(place)[name] is not value:
                setattr(place, name, value)
    # Of the layout of an interpreted function, which so becomes one that is compiled, wherever it is known.
    own = {name: value for name, value in vars(JITFunction).items() if name not in ("__dict__", "__weakref__")}
    kind = type("JITFunction", (interpreter.InterpretedFunction, JITFunction), own)
    for function in [each for each in gc.get_objects() if type(each) is interpreter.InterpretedFunction]:
        with contextlib.suppress(ValueError):  # a function of no file, which has never been launched
            compiled = JITFunction(function.fn, **function.kwargs)
            function.__class__, function.__dict__ = kind, compiled.__dict__
    # A method of a tensor, as x.sum(0), is such a function itself where these are compiled.
    for name, method in list(vars(tl.tensor).items()):
        for cell in getattr(method, "__closure__", None) or ():
            if isinstance(cell.cell_contents, JITFunction):
                setattr(tl.tensor, name, cell.cell_contents)


def _replace(language, name, member, builder, *scope):
    """Bind a function of the language to the interpreter's semantic, without the wrapper that looks for it."""
    function = getattr(member, "__wrapped__", member)

    def interpreted(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    setattr(language, name, interpreted)


def _remembered(find):
    """`find`, which builds a table of all types at each call, with a cache."""
    known = {}

    def np_dtype(dtype):
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = find(element)
        return found

    return np_dtype


def _remembering() -> types.SimpleNamespace:
    """The module `inspect` with a cache: the interpreter asks for a kernel's arguments twice at every launch."""
    spec = functools.cache(inspect.getfullargspec)

    def getcallargs(function, *args, **kwargs):
        names, defaults = spec(function).args, spec(function).defaults or ()
        optional = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        given = dict(zip(names, args, strict=False)) | kwargs
        # Anything else is an error, which the original raises.
        if len(given) == len(args) + len(kwargs) and given.keys() | optional.keys() == set(names):
            return optional | given
        return inspect.getcallargs(function, *args, **kwargs)

    return types.SimpleNamespace(**{**vars(inspect), "getfullargspec": spec, "getcallargs": getcallargs})


def _keep_memory() -> None:
    """Let malloc keep up to 1 GiB of freed blocks, of up to 32 MiB each (where the C library is glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_..., M_TOP_PAD
            libc.mallopt(option, value)


def _sees_the_whole_language() -> None:
    """Its globals name both modules in which the interpreter replaces functions."""


core = tl.core


def _call_helper(function, *args, **kwargs):
    return function.rewrite()(*args, **kwargs)


def _one_at_a_time(run):
    """`run` of a kernel, without NumPy's warnings and without launches of other threads meanwhile.

    A launch within one, as of a signal's handler, gives back the program that it interrupted.
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
