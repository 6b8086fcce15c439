"""Markers in lanes that a load did not read, so that a store can name the load.

A floating lane holds a quiet NaN whose highest bits, which conversions between floating types keep, hold the load's
number; an integer lane holds a number that is no valid index, with the load's number in its last 4 bits. Types of 8 and
16 bits without room for a number share one marker, which cannot be distinguished from data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from minidl.testing.sanitizer.findings import Place

# The lowest mark of each floating type, and the bits to the right of the load's number.
_FLOATS = {"fp16": (0x7F00, 3), "bf16": (0x7FE0, 0), "fp32": (0x7FE00000, 16), "fp64": (0x7FFC << 48, 45)}
_LARGE = {1: 0x5A, 2: 0x5A50, 4: 0x5A5A5A50, 8: 0x5A5A5A5A_5A5A5A50}
# NaN of types without room for a number: all bits except the sign and, if that would be infinity, the last.
_SMALL = {"fp8e5": 0x7E, "fp8e4nv": 0x7F, "fp8e4b8": 0x80, "fp8e5b16": 0x80}
_LOADS = 16


class Lanes:
    """The masked loads without `other` of one launch, and the marks of their lanes."""

    def __init__(self) -> None:
        self.masked: list[Place] = []

    def number(self, place: Place) -> int:
        """Return the number of a masked load; when numbers run out, loads share the last one."""
        if place not in self.masked:
            self.masked.append(place)
        return min(self.masked.index(place), _LOADS - 1)

    def of(self, values: np.ndarray, element: Any) -> np.ndarray | None:
        """Return the number of each value's masked load, -1 for none; None if no value comes from a masked load."""
        size = values.dtype.itemsize
        if not self.masked or not _can_mark(element, values.dtype):
            return None
        raw = np.ascontiguousarray(values).view(f"u{size}").reshape(values.shape)
        if element.name in _FLOATS:
            lowest, shift = _FLOATS[element.name]
            numbers = (raw & ((1 << 8 * size - 1) - 1)) - lowest >> shift
        else:
            numbers = raw - np.array(_LARGE[size], raw.dtype)
        marked = numbers < min(len(self.masked), _LOADS)
        return np.where(marked, numbers, 0).astype(np.int64) - ~marked if marked.any() else None


def _can_mark(element: Any, dtype: np.dtype) -> bool:
    """Return whether marks of the type name a load; the interpreter's booleans may have the type of their operands."""
    if element.name in _FLOATS:
        return dtype.itemsize * 8 == element.primitive_bitwidth
    return dtype.itemsize >= 4 and dtype.kind in "iu"


def mark(element: Any, dtype: np.dtype, numbers: Any) -> Any:
    """Return the markers of lanes of the loads with these numbers."""
    size = dtype.itemsize
    if element.name in _FLOATS:
        lowest, shift = _FLOATS[element.name]
        return (lowest | np.asarray(numbers, f"u{size}") << shift).astype(f"u{size}").view(dtype)
    if dtype.kind == "b" or element.name in _SMALL:
        return np.full(np.shape(numbers), _SMALL.get(element.name, 1), dtype)
    return (_LARGE[size] | np.asarray(numbers, f"u{size}")).astype(dtype)


def unread(element: Any, dtype: np.dtype) -> Any:
    """Return the marker of lanes that are out of bounds or in unwritten memory."""
    if dtype.kind == "f":
        return dtype.type(np.nan)
    return np.array(0x7FC0, dtype) if element.name == "bf16" else mark(element, dtype, _LOADS - 1)


def carry_through(function: Callable[..., Any], lanes: Lanes, builder: Any, *arguments: Any) -> Any:
    """Call a conversion, or a function in which NumPy would lose marks, and mark its result."""
    result = function(builder, *arguments)
    for argument in _handles(arguments):
        numbers = lanes.of(argument.data, argument.dtype.scalar)
        if numbers is not None:
            _put(result, np.broadcast_to(numbers, np.shape(result.data)))
    return result


def _handles(arguments: Any) -> Iterator[Any]:
    """Yield the operands among arguments; operands of libdevice functions are in a list."""
    for argument in arguments:
        if isinstance(argument, interpreter.TensorHandle):
            yield argument
        elif isinstance(argument, list):
            yield from _handles(argument)


def carry_through_product(function: Callable[..., Any], lanes: Lanes, builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Call a matrix product, whose sums lose marks: a marked lane marks its row or column."""
    result = function(builder, a, b, *rest)
    a_numbers, b_numbers = (lanes.of(part.data, part.dtype.scalar) for part in (a, b))
    rows = -1 if a_numbers is None else a_numbers.max(axis=-1, keepdims=True)
    columns = -1 if b_numbers is None else b_numbers.max(axis=-2, keepdims=True)
    if a_numbers is not None or b_numbers is not None:
        _put(result, np.broadcast_to(np.maximum(rows, columns), np.shape(result.data)))
    return result


def carry_through_histogram(
    function: Callable[..., Any], lanes: Lanes, builder: Any, values: Any, bins: Any, mask: Any
) -> Any:
    """Call a histogram: a marked lane that is counted marks every bin, since it may belong to any of them."""
    result = function(builder, values, bins, mask)
    numbers = lanes.of(values.data, values.dtype.scalar)
    if numbers is not None:
        counted = numbers if mask is None else np.where(mask.data, numbers, -1)
        _put(result, np.broadcast_to(counted.max(), np.shape(result.data)))
    return result


def carry_through_reduction(function: Callable[..., Any], lanes: Lanes, operation: Any, inputs: Any) -> Any:
    """Call a reduction, which would skip NaN and add integers: a marked lane marks its result."""
    with_index = getattr(operation.combine_fn, "__name__", "").startswith(("_argmin", "_argmax"))
    values = inputs[0]
    numbers = lanes.of(values.handle.data, values.dtype.scalar) if len(inputs) == 1 or with_index else None
    if numbers is None:
        return function(operation, inputs)
    data = np.where(numbers < 0, values.handle.data, np.zeros((), values.handle.data.dtype))
    plain = tl.core.tensor(interpreter.TensorHandle(data, values.handle.dtype), values.type)
    result = function(operation, (plain, *inputs[1:]))
    reduced = numbers.max(axis=operation.axis, keepdims=operation.keep_dims)
    for part in result if isinstance(result, (list, tuple)) else (result,):
        _put(part.handle, reduced)
    return result


def _put(handle: Any, numbers: np.ndarray) -> None:
    data = np.array(handle.data)
    if not _can_mark(handle.dtype.scalar, data.dtype):
        return
    numbers = np.reshape(numbers, data.shape)
    marked = numbers >= 0
    data[marked] = mark(handle.dtype.scalar, data.dtype, numbers[marked])
    handle.data = data
