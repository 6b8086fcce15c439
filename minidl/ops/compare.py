"""Comparisons, and the logic of their results."""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl.kernels import elementwise as elementwise_kernels
from minidl.ops import elementwise, unary
from minidl.ops.binary import Kernel, Operand, raw_operand
from minidl.ops.promotion import alike, python_number
from minidl.ops.shape import to
from minidl.tensors import Tensor

__all__ = [
    "allclose", "eq", "equal", "ge", "gt", "isclose", "isfinite", "isinf", "isnan", "le", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "ne",
]  # fmt: skip


def eq(input: Operand, other: Operand) -> Tensor:
    """Return input == other, as torch.bool. Raises as `add`."""
    return _compare(elementwise_kernels.eq, input, other)


def ne(input: Operand, other: Operand) -> Tensor:
    """Return input != other, as torch.bool. Raises as `add`."""
    return _compare(elementwise_kernels.ne, input, other)


def lt(input: Operand, other: Operand) -> Tensor:
    """Return input < other, as torch.bool. Raises as `add`."""
    return _compare(elementwise_kernels.lt, input, other)


def le(input: Operand, other: Operand) -> Tensor:
    """Return input <= other, as torch.bool. Raises as `add`."""
    return _compare(elementwise_kernels.le, input, other)


def gt(input: Operand, other: Operand) -> Tensor:
    """Return input > other, as torch.bool. Raises as `add`."""
    return _compare(elementwise_kernels.gt, input, other)


def ge(input: Operand, other: Operand) -> Tensor:
    """Return input >= other, as torch.bool. Raises as `add`."""
    return _compare(elementwise_kernels.ge, input, other)


def _compare(kernel: Kernel, a: Operand, b: Operand) -> Tensor:
    a, b = alike(a, b)
    # The number may be outside the range of the tensor's type.
    a, b = _widen(a, b), _widen(b, a)
    return Tensor(kernel(raw_operand(a), raw_operand(b)))


def _widen(x: Any, other: Any) -> Any:
    """Return x as int64 if it has integers of a type whose range does not include the number `other`."""
    if type(other) is not int or isinstance(x, int | float) or x.dtype.is_floating_point or x.dtype == torch.bool:
        return x
    limits = torch.iinfo(x.dtype)
    return x if limits.min <= other <= limits.max else to(x, torch.int64)


def isnan(input: Tensor) -> Tensor:
    """Return whether each element is NaN."""
    return ne(input, input)


def isinf(input: Tensor) -> Tensor:
    """Return whether each element is infinite, of either sign."""
    return eq(unary.abs(input), math.inf)


def isfinite(input: Tensor) -> Tensor:
    """Return whether each element is neither infinite nor NaN."""
    return lt(unary.abs(input), math.inf)


def isclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Return whether |input - other| <= atol + rtol |other|, by element.

    Raises TypeError for two floating types, ValueError for a negative tolerance.
    """
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"isclose: rtol is {rtol} and atol {atol}, expected numbers from 0")
    difference = unary.abs(elementwise.sub(input, other))
    close = le(difference, elementwise.add(elementwise.mul(unary.abs(other), rtol), atol))
    close = logical_or(logical_and(close, isfinite(difference)), eq(input, other))
    return logical_or(close, logical_and(isnan(input), isnan(other))) if equal_nan else close


def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Return whether `isclose` is true for every element."""
    return bool(torch.all(isclose(input, other, rtol, atol, equal_nan).data))


def equal(input: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape and the same values; NaN equals nothing."""
    return input.shape == other.shape and bool(torch.all(eq(input, other).data))


def contains(input: Tensor, element: Any) -> bool:
    """Return whether any element equals `element`, a number or a tensor that broadcasts. Raises TypeError for all
    else."""
    element = Tensor(element) if isinstance(element, torch.Tensor) else python_number(element)
    if not isinstance(element, Tensor | int | float):
        raise TypeError(f"in: got {type(element).__name__}, expected a number or a Tensor")
    return bool(torch.any(eq(input, element).data))


def nonzero_mask(x: Tensor) -> torch.Tensor:
    """Return whether each element is not 0, as a mask."""
    return x.data if x.dtype == torch.bool else ne(x, 0).data


def logical_not(input: Tensor) -> Tensor:
    """Return whether each element is 0."""
    return Tensor(torch.logical_not(nonzero_mask(input)))


def logical_and(input: Tensor, other: Tensor) -> Tensor:
    """Return whether neither is 0."""
    return Tensor(torch.logical_and(nonzero_mask(input), nonzero_mask(other)))


def logical_or(input: Tensor, other: Tensor) -> Tensor:
    """Return whether either is not 0."""
    return Tensor(torch.logical_or(nonzero_mask(input), nonzero_mask(other)))


def logical_xor(input: Tensor, other: Tensor) -> Tensor:
    """Return whether just one of them is not 0."""
    return Tensor(torch.logical_xor(nonzero_mask(input), nonzero_mask(other)))
