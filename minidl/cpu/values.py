"""Blocks as expressions: a value is a function of the indices of its elements, and takes memory only where it must.

- range: `tl.arange`, the index plus a constant, `data`
- compute: an operation on elements with the same indices; `data` makes C of the C of its operands
- view: another value at other indices, for example a broadcast or transposed one; `data` makes its indices of these
- buffer: memory that a load, a product, a reduction or a loop has filled; `data` is its name and strides
- load: elements in a tensor's memory, loaded by the loop that uses them (`deferral`); `data` is (pointer, mask, other)
- name: a number in a variable of C, `data`
- constant: one number for all elements, as C in `data`
- join: two values, chosen by the last index
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

C_TYPES = {
    "f32": "float", "f16": "float", "bf16": "float", "f64": "double", "i1": "int32_t", "i8": "int8_t",
    "i16": "int16_t", "i32": "int32_t", "i64": "int64_t",
}  # fmt: skip
# Types in the memory of tensors, where they differ.
MEMORY = {"f16": "uint16_t", "bf16": "uint16_t", "i1": "uint8_t"}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}


def c_type(element: str) -> str:
    """Return the type of a variable of C. Raises NotImplementedError for a type without one."""
    if element.startswith("ptr<"):
        return "int64_t"
    if element not in C_TYPES:
        raise NotImplementedError(f"the type {element}")
    return C_TYPES[element]


class Index(NamedTuple):
    """An index of C: a sum of loop variables with factors, and a constant."""

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{name} * {factor}" for name, factor in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return parts[0] if len(parts) == 1 and "*" not in parts[0] else f"({' + '.join(parts)})"

    def factor(self, name: str) -> int:
        """Return the factor of a loop variable."""
        return dict(self.terms).get(name, 0)

    def scaled(self, factor: int) -> Index:
        """Return the index times a number."""
        return Index(tuple((name, factor * each) for name, each in self.terms if factor), self.constant * factor)

    def plus(self, other: Index) -> Index:
        """Return the sum of two indices."""
        terms = dict(self.terms)
        for name, factor in other.terms:
            terms[name] = terms.get(name, 0) + factor
        return Index(tuple(item for item in terms.items() if item[1]), self.constant + other.constant)

    def without(self, name: str) -> Index:
        """Return the index where a loop variable is 0."""
        return Index(tuple(item for item in self.terms if item[0] != name), self.constant)


Indices = tuple[Index, ...]
ZERO = Index()


@dataclass(eq=False)
class Value:
    """A block, or a number (shape ()), of one of the kinds above."""

    kind: str
    element: str
    shape: tuple[int, ...]
    args: tuple[Value, ...] = ()
    data: Any = None
    operation: str = ""

    def viewed(self, shape: tuple[int, ...], at: Callable[[Indices], Indices]) -> Value:
        """Return a view: `at` turns its indices into indices of this value."""
        return Value("view", self.element, shape, (self,), at)

    def pointers(self) -> list[Value]:
        """Return the pointers of the loads in this expression; a chain of `deferral` has no views."""
        if self.kind == "load":
            return [self.data[0]]
        return [pointer for each in self.args for pointer in each.pointers()] if self.kind == "compute" else []


def bytes_of(element: str) -> int:
    """Return the bytes of an element in the memory of tensors. Raises NotImplementedError for a type without one."""
    if element not in BYTES and not element.startswith("ptr<"):
        raise NotImplementedError(f"the type {element}")
    return BYTES.get(element, 8)


def name(text: str, element: str) -> Value:
    """Return a number that is in a variable of C."""
    return Value("name", element, (), data=text)


def constant(text: str, element: str, shape: tuple[int, ...] = ()) -> Value:
    """Return a number of C for all elements of a block."""
    return Value("constant", element, shape, data=text)


def buffer(text: str, element: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Value:
    """Return a block in memory."""
    return Value("buffer", element, shape, data=(text, strides))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous block."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def linear(indices: Indices, strides: tuple[int, ...]) -> Index:
    """Return the index in memory."""
    result = ZERO
    for index, stride in zip(indices, strides, strict=True):
        result = result.plus(index.scaled(stride))
    return result


def size_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    result = 1
    for size in shape:
        result *= size
    return result


def integer(value: Value) -> int | None:
    """Return the number of a constant integer, None for any other value."""
    if value.kind == "constant" and re.fullmatch(r"-?\d+", value.data):
        return int(value.data)
    if value.kind == "view":
        return integer(value.args[0])
    if value.kind == "compute" and value.operation in ("extsi", "extui", "trunci") and value.args[0].element != "i1":
        number = integer(value.args[0])
        most = 1 if value.element == "i1" else 2 ** (8 * BYTES[value.element] - 1) - 1
        return number if number is not None and 0 <= number <= most else None
    return None


def conjuncts(mask: Value, indices: Indices) -> Iterator[tuple[Value, Indices]]:
    """Return the parts of a mask that `and` joins, each with its indices."""
    while mask.kind == "view":
        mask, indices = mask.args[0], mask.data(indices)
    if mask.kind == "compute" and mask.operation == "andi":
        for each in mask.args:
            yield from conjuncts(each, indices)
    else:
        yield mask, indices
