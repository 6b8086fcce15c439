"""Triton's interpreter, made quick enough for real work on a CPU.

The interpreter replaces the functions of `triton.language` at every launch and again at every call of a helper such
as `tl.sum` (about 200 us each), and computes each int32 sum twice to look for overflow. A process that interprets
never compiles, so the replacement is done once and kept; the overflow check only acts in debug mode. NumPy's warnings
about infinities and NaN are silenced during a launch: a GPU gives none. Loads and stores of blocks go through NumPy's
gather over the memory that the pointers span. Only lanes whose mask is set are read or written, as before. And glibc
keeps the megabytes of a block for the next operation, in place of returning them to the system and faulting them in.
"""

import ctypes

import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """Stands for the scope that would undo the replacement."""

    def restore(self) -> None:
        pass


def speed_up() -> None:
    """Replace the language's functions now and for good. Safe to call once, before the first launch."""
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter._patch_lang(_sees_the_whole_language)
    # numpy >= 2.4 refuses to turn a one-element array into an index, which loop bounds do in Triton 3.6.
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(()))
    interpreter._patch_lang = lambda fn: _Kept()
    interpreter.InterpretedFunction.__call__ = _call_helper
    interpreter.GridExecutor.__call__ = _without_warnings(interpreter.GridExecutor.__call__)
    interpreter._interpreter = _Memory(interpreter._interpreter)
    _keep_memory()
    interpreter.InterpreterBuilder.create_splat = _keeping_bools(interpreter.InterpreterBuilder.create_splat)


def _keep_memory() -> None:
    """Let malloc keep up to 1 GiB of freed blocks, of up to 32 MiB each (where the C library is glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_..., M_TOP_PAD
            libc.mallopt(option, value)


def _sees_the_whole_language() -> None:
    """Its globals name both modules that the interpreter replaces functions in."""


core = tl.core


def _call_helper(function, *args, **kwargs):
    return function.rewrite()(*args, **kwargs)


def _without_warnings(call):
    def quiet(executor, *args, **kwargs):
        with interpreter.np.errstate(all="ignore"):
            return call(executor, *args, **kwargs)

    return quiet


def _keeping_bools(create_splat):
    def splat(builder, shape, scalar):
        # A comparison of scalars carries the type of its operands; as a block it would become numbers of that type.
        block = create_splat(builder, shape, scalar)
        if scalar.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    return splat


class _Memory:
    """The interpreter's memory: everything as it was, but loads and stores of more than a few elements by gather."""

    FEW = 64

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name):
        return getattr(self._original, name)

    def load(self, ptrs, mask, other, dtype):
        mask = interpreter.np.asarray(mask)
        lanes = _lanes(ptrs, mask, dtype.itemsize) if ptrs.size > self.FEW else None
        if lanes is None:
            return self._original.load(ptrs, mask, other, dtype)
        low, index, full = lanes
        values = _window(low, index, dtype).take(index)
        return values if full else interpreter.np.where(mask, values, other)

    def store(self, ptrs, value, mask):
        mask = interpreter.np.asarray(mask)
        lanes = _lanes(ptrs, mask, value.dtype.itemsize) if ptrs.size > self.FEW else None
        if lanes is None:
            return self._original.store(ptrs, value, mask)
        low, index, full = lanes
        window = _window(low, index, value.dtype)
        if full:
            window[index] = value
        else:
            window[index[mask]] = value[mask]
        return None


def _lanes(ptrs, mask, itemsize):
    """(lowest address, index of every lane from there, whether all lanes are active).

    An inactive lane gets the place of an active one. None where no lane is active or addresses are not whole elements
    apart: the original then does it.
    """
    np = interpreter.np
    full = bool(mask.all())
    if not full:
        first = int(mask.argmax())
        if not mask.flat[first]:
            return None
        ptrs = np.where(mask, ptrs, ptrs.flat[first])
    low = ptrs.min()
    distance = ptrs - low
    if itemsize > 1:
        if int(np.bitwise_or.reduce(distance, axis=None)) & (itemsize - 1):
            return None
        distance >>= np.uint64(itemsize.bit_length() - 1)
    return int(low), distance.view(np.int64), full


def _window(low, index, dtype):
    """An array over the memory from the lowest to the highest address."""
    count = int(index.max()) + 1
    return interpreter.np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(low), dtype=dtype)
