"""Loads and stores of Triton's interpreter by NumPy's gather over the memory from the lowest to the highest address."""

import ctypes

from triton.runtime import interpreter

np = interpreter.np

# Up to this number of lanes the interpreter's own loop is as fast.
FEW = 64


class Gather:
    """The interpreter's memory, with loads and stores of more than FEW elements by gather."""

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name):
        return getattr(self._original, name)

    def load(self, ptrs, mask, other, dtype):
        mask = np.asarray(mask)
        lanes = _lanes(ptrs, mask, dtype.itemsize) if ptrs.size > FEW else None
        if lanes is None:
            return self._original.load(ptrs, mask, other, dtype)
        low, index, full = lanes
        values = _window(low, index, dtype).take(index)
        return values if full else np.where(mask, values, other)

    def store(self, ptrs, value, mask):
        mask = np.asarray(mask)
        lanes = _lanes(ptrs, mask, value.dtype.itemsize) if ptrs.size > FEW else None
        if lanes is None:
            return self._original.store(ptrs, value, mask)
        low, index, full = lanes
        window = _window(low, index, value.dtype)
        if full:
            window[index] = value
        else:
            window[index[mask]] = value[mask]
        return None

    def atomic_rmw(self, operation, ptrs, value, mask, order):
        """Pass contiguous arrays, because the original ignores strides."""
        return self._original.atomic_rmw(operation, *map(np.ascontiguousarray, (ptrs, value, mask)), order)

    def atomic_cas(self, ptrs, expected, value, order):
        return self._original.atomic_cas(*map(np.ascontiguousarray, (ptrs, expected, value)), order)


def _lanes(ptrs, mask, itemsize):
    """Return (lowest address, index of every lane from there, whether all lanes are active).

    An inactive lane gets the index of an active one. Return None if no lane is active or distances are no multiple of
    the element size: the original function handles these.
    """
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
    """Return an array over the memory from the lowest to the highest address."""
    count = int(index.max()) + 1
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(low), dtype=dtype)
