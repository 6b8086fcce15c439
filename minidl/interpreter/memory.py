"""Loads and stores of Triton's interpreter by rows and boxes instead of single elements.

Only lanes whose mask is set are read or written; other lanes get `other`. There are three methods, the fastest first:

    box     a load through a tensor descriptor is a slice of the array that the descriptor names
    outer   addresses row[i] + column[j] are stored as two vectors; a mask that is rows x columns is copied by rows
    gather  any other addresses, by `gather`
"""

import ctypes
import math
from typing import Any

from triton.runtime import interpreter

from minidl.interpreter.gather import FEW, Gather

np = interpreter.np


def install() -> None:
    """Replace the interpreter's loads and stores. Call once."""
    interpreter._interpreter = Gather(interpreter._interpreter)
    builder = interpreter.InterpreterBuilder
    builder.create_addptr = _add_outer(builder.create_addptr)
    builder.create_splat = _create_splat
    builder.create_select = _uniform_select(builder.create_select)
    builder.create_load = _create_load
    builder.create_store = _create_store
    builder.create_masked_load = _outer_load(builder.create_masked_load)
    builder.create_masked_store = _outer_store(builder.create_masked_store)
    builder.create_descriptor_load = _box_load(builder.create_descriptor_load)


class Outer(interpreter.TensorHandle):  # type: ignore[misc] # without types
    """Pointers rows[i] + columns[j] in bytes, i over all axes but the last; `data` is computed on demand."""

    def __init__(self, rows, columns, lead, dtype):
        self.rows, self.columns, self.lead, self.dtype, self.attr = rows, columns, lead, dtype, {}
        self._data = None

    @property
    def data(self):
        if self._data is None:
            self._data = (self.rows[:, None] + self.columns[None, :]).reshape(self.shape)
        return self._data

    @property
    def shape(self):
        return *self.lead, len(self.columns)


def _parts(data):
    """Return (row part, column part) of a block that is constant along one of the two by its strides, else None."""
    if data.ndim < 2 or 0 in data.shape:
        return None
    is_constant = [step == 0 or size == 1 for step, size in zip(data.strides, data.shape, strict=True)]
    if is_constant[-1]:
        return data[..., 0].reshape(-1), None
    if all(is_constant[:-1]):
        return None, data[(0,) * (data.ndim - 1)]
    return None


# The results for the latest blocks of offsets: kernels add one block to several pointers.
_latest_offsets: list[Any] = []


def note_sum(data, left, right):
    """Store the parts of a block of offsets that is the sum of a column and a row."""
    if data.size <= FEW or data.ndim != 2 or left.ndim != 2 or right.ndim != 2:
        return
    for rows, columns in ((left, right), (right, left)):
        is_broadcast = rows.shape[1] == 1 or rows.strides[1] == 0, columns.shape[0] == 1 or columns.strides[0] == 0
        if all(is_broadcast) and (rows.shape[0], columns.shape[1]) == data.shape:
            row_part, column_part = rows[:, 0].astype(np.int64), columns[0].astype(np.int64)
            limits = np.iinfo(data.dtype)
            low, high = (int(f(row_part)) + int(f(column_part)) for f in (np.min, np.max))
            if low < limits.min or high > limits.max:
                return  # the sums overflowed
            del _latest_offsets[1:]
            _latest_offsets.insert(0, (data, (row_part + column_part[0], column_part - column_part[0])))
            return


def _sum_of_parts(data):
    """Return (row part, column part) of offsets that are a sum of the two by their values, else None."""
    if data.size <= FEW or data.ndim < 2 or data.dtype.kind != "i":
        return None
    for offsets, parts in _latest_offsets:
        if offsets is data:
            return parts
    flat = data.reshape(-1, data.shape[-1])
    rows, columns = flat[:, 0].astype(np.int64), flat[0].astype(np.int64) - int(flat[0, 0])
    sample = slice(None, None, max(1, len(flat) // 4))  # rejects most other blocks
    is_sum = all((flat[part] == rows[part, None] + columns).all() for part in (sample, slice(None)))
    parts = (rows, columns) if is_sum else None
    del _latest_offsets[1:]
    _latest_offsets.insert(0, (data, parts))
    return parts


def _add_outer(create_addptr):
    def addptr(builder, ptr, offset):
        base = (ptr.rows, ptr.columns) if isinstance(ptr, Outer) else _parts(ptr.data)
        offsets = (_parts(offset.data) or _sum_of_parts(offset.data)) if base is not None else None
        if offsets is None or ptr.get_element_ty().primitive_bitwidth < 8:
            return create_addptr(builder, ptr, offset)
        size = np.uint64(ptr.get_element_ty().primitive_bitwidth // 8)
        *lead, width = offset.data.shape
        parts = []
        for length, start, step in zip((math.prod(lead), width), base, offsets, strict=True):
            part = np.zeros(length, np.uint64) if start is None else start
            parts.append(part if step is None else part + size * step.astype(np.uint64))
        return Outer(*parts, lead, ptr.dtype)

    return addptr


def _create_splat(builder, shape, scalar):
    """Return a block that shows one element everywhere (strides of 0)."""
    # A comparison of scalars has the type of its operands, but its block must be boolean.
    kind = bool if scalar.data.dtype == bool else interpreter._get_np_dtype(scalar.dtype)
    sizes = tuple(shape.shape)
    block = np.ndarray(sizes, kind, scalar.data.astype(kind), 0, (0,) * len(sizes))
    block.flags.writeable = False
    return interpreter.TensorHandle(block, scalar.dtype.scalar)


def _uniform_select(create_select):
    """Wrap `where`, which returns one of its sides if the condition is the same for the complete block."""

    def select(builder, cond, lhs, rhs):
        if cond.data.size > FEW and not any(cond.data.strides):
            return lhs if cond.data.flat[0] else rhs
        return create_select(builder, cond, lhs, rhs)

    return select


def _size(pointers):
    return pointers.shape if isinstance(pointers, Outer) else pointers.data.shape


def _full_mask(pointers):
    return interpreter.TensorHandle(np.broadcast_to(np.ones(1, bool), _size(pointers)), interpreter.tl.int1)


def _create_load(builder, ptr, *policy):
    return builder.create_masked_load(ptr, _full_mask(ptr), None, *policy)


def _create_store(builder, ptr, value, *policy):
    return builder.create_masked_store(ptr, value, _full_mask(ptr), *policy)


def _outer_load(create_masked_load):
    def load(builder, ptrs, mask, other, *policy):
        if not isinstance(ptrs, Outer):
            return create_masked_load(builder, ptrs, mask, other, *policy)
        element = ptrs.get_element_ty()
        dtype = np.dtype(interpreter._get_np_dtype(element))
        loaded = _rows_of(ptrs, mask.data, dtype)
        if loaded is None:
            return create_masked_load(builder, ptrs, mask, other, *policy)
        block, rows, columns = loaded
        if block is not None and block.size == math.prod(ptrs.shape):
            return interpreter.TensorHandle(block.reshape(ptrs.shape), element)
        values = np.zeros(ptrs.shape, dtype) if other is None else np.array(other.data, dtype, order="C")
        if block is not None:
            values.reshape(-1, ptrs.shape[-1])[rows, columns] = block
        return interpreter.TensorHandle(values, element)

    return load


def _outer_store(create_masked_store):
    def store(builder, ptrs, value, mask, *policy):
        if not isinstance(ptrs, Outer):
            return create_masked_store(builder, ptrs, value, mask, *policy)
        stored = _rows_of(ptrs, mask.data, value.data.dtype, value.data)
        return create_masked_store(builder, ptrs, value, mask, *policy) if stored is None else None

    return store


def _rows_of(ptrs, mask, dtype, value=None):
    """Load (or store `value` in) the lanes of a mask that is rows x columns, with adjacent columns.

    Return (block, rows, columns), with block None if no lane is set; return None for other addresses and masks.
    """
    ranges = _rows_and_columns(np.asarray(mask))
    if ranges is None:
        return None
    rows, columns = ranges
    ends = ptrs.columns[columns]
    starts = ptrs.rows[rows] + ends[0]
    if len(starts) == 0:
        return None, rows, columns
    width, size = len(ends), dtype.itemsize
    if width > 1 and not (np.diff(ends) == size).all():
        return None
    low = int(starts.min())
    distance = (starts - np.uint64(low)).view(np.int64)
    if size > 1 and int(np.bitwise_or.reduce(distance)) & (size - 1):
        return None
    span = int(distance.max()) + width * size
    memory = np.frombuffer((ctypes.c_char * span).from_address(low), dtype=dtype)
    step = int(distance[1] - distance[0]) if len(distance) > 1 else width * size
    if step >= width * size and (distance == step * np.arange(len(distance))).all():
        # Rows of a matrix: a slice of memory is three times as fast as a gather.
        window, at = np.lib.stride_tricks.as_strided(memory, (len(distance), width), (step, size)), slice(None)
    else:
        lines = (span - width * size) // size + 1
        window, at = np.lib.stride_tricks.as_strided(memory, (lines, width), (size, size)), distance // size
    if value is not None:
        window[at] = value.reshape(-1, value.shape[-1])[rows, columns]
        return None, rows, columns
    return window[at].copy() if isinstance(at, slice) else window[at], rows, columns


# As `_latest_offsets`, for masks: several loads and stores use one mask.
_masks: list[Any] = []


def _rows_and_columns(mask):
    """Return (rows, columns) of the lanes of a mask that is rows x columns, else None; no rows if no lane is set."""
    if not any(mask.strides) and mask.flat[0]:
        return slice(None), slice(None)
    for block, ranges in _masks:
        if block is mask:
            return ranges
    flat = mask.reshape(-1, mask.shape[-1])
    rows, used = flat.any(1), np.flatnonzero(flat.any(0))
    count, ranges = int(np.count_nonzero(rows)), None
    if count == 0:
        ranges = rows, slice(None)
    elif int(np.count_nonzero(flat)) == count * len(used) and used[-1] - used[0] + 1 == len(used):
        ranges = slice(None) if count == len(flat) else rows, slice(int(used[0]), int(used[-1]) + 1)
    del _masks[1:]
    _masks.insert(0, (mask, ranges))
    return ranges


def _box_load(create_descriptor_load):
    def load(builder, desc, indices, *policy):
        element = desc.base.get_element_ty()
        dtype = np.dtype(interpreter._get_np_dtype(element))
        if desc.padding != interpreter._ir.PADDING_OPTION.PAD_ZERO:
            return create_descriptor_load(builder, desc, indices, *policy)
        start = [int(index.data.reshape(())) for index in indices]
        assert start[-1] * dtype.itemsize % 16 == 0, "block offset start must be 16-byte aligned"
        values = np.zeros(desc.block_shape, dtype)
        first = [max(s, 0) for s in start]
        last = [
            min(s + b, int(n.data.reshape(()))) for s, b, n in zip(start, desc.block_shape, desc.shape, strict=True)
        ]
        extent = [b - a for a, b in zip(first, last, strict=True)]
        if min(extent) > 0:
            strides = [int(s.data.reshape(())) * dtype.itemsize for s in desc.strides]
            address = int(desc.base.data.reshape(-1)[0]) + sum(a * s for a, s in zip(first, strides, strict=True))
            span = sum((n - 1) * s for n, s in zip(extent, strides, strict=True)) + dtype.itemsize
            memory = np.frombuffer((ctypes.c_char * span).from_address(address), dtype=dtype)
            region = tuple(slice(a - s, b - s) for s, a, b in zip(start, first, last, strict=True))
            values[region] = np.lib.stride_tricks.as_strided(memory, extent, strides)
        return interpreter.TensorHandle(values, element)

    return load
