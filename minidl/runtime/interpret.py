"""Speed-ups that make Triton's interpreter usable for real work on a CPU.

The interpreter replaces the functions of `triton.language` at every launch and again at every call of a helper such
as `tl.sum` (about 200 us each), and computes each int32 sum twice to look for overflow. A process that interprets
never compiles, so the replacement is done once and kept; the overflow check only acts in debug mode. NumPy's warnings
about infinities and NaN are silenced during a launch: a GPU gives none. `interpret_memory` replaces loads and stores,
`interpret_operators` operators; `interpret_missing` and `interpret_bfloat16` add what the interpreter lacks. The
NumPy types of elements and the argument names of kernels are cached. glibc keeps freed blocks of megabytes for the next
operation, so that their pages need not be mapped again.
"""

import ctypes
import functools
import inspect
import types

import triton.language as tl
from triton.runtime import interpreter

from minidl.runtime import interpret_bfloat16, interpret_memory, interpret_missing, interpret_operators


class _Kept:
    """A scope that does not undo the replacement."""

    def restore(self) -> None:
        pass


def speed_up() -> None:
    """Replace the language's functions for the life of the process. Call once, before the first launch."""
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter._patch_attr = _replace
    interpreter._patch_lang(_sees_the_whole_language)
    # numpy >= 2.4 refuses to turn a one-element array into an index, which loop bounds do in Triton 3.6.
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(()))
    interpreter._patch_lang = lambda fn: _Kept()
    interpreter.InterpretedFunction.__call__ = _call_helper
    interpreter.GridExecutor.__call__ = _without_warnings(interpreter.GridExecutor.__call__)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter.inspect = _remembering()
    interpret_missing.install()
    interpret_bfloat16.install()
    interpret_memory.install()
    interpret_operators.install()
    _keep_memory()


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


def _without_warnings(call):
    def quiet(executor, *args, **kwargs):
        with interpreter.np.errstate(all="ignore"):
            return call(executor, *args, **kwargs)

    return quiet
