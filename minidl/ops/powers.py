"""Powers and roots."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import elementwise
from minidl.ops import compare
from minidl.ops.binary import Operand, binary_function, raw_operand
from minidl.ops.conditional import where
from minidl.ops.elementwise import are_integers
from minidl.ops.promotion import alike
from minidl.ops.unary import unary_function
from minidl.tensors import Tensor

__all__ = ["pow", "reciprocal", "sqrt", "square"]


def _pow_back_a(dy: Tensor, a: Any, b: Any) -> Tensor:
    if not isinstance(b, Tensor):
        return dy * 0 if b == 0 else dy * (b * a ** (b - 1))
    return dy * where(b == 0, 0, b * a ** (b - 1))


def _pow_back_b(dy: Tensor, a: Any, b: Any) -> Tensor:
    base = a if isinstance(a, Tensor) else Tensor(torch.full((), a, dtype=dy.dtype, device=dy.device))
    zero = compare.logical_and(base == 0, b >= 0)
    return dy * where(zero, 0, base**b * where(zero, 1, base).log())


Sqrt = unary_function("Sqrt", elementwise.sqrt, elementwise.sqrt_grad, lambda dy, y: dy / (y * 2), keeps="y")
Square = unary_function("Square", elementwise.square, elementwise.square_grad, lambda dy, x: dy * (x * 2))
Reciprocal = unary_function(
    "Reciprocal", elementwise.reciprocal, elementwise.reciprocal_grad, lambda dy, y: -(dy * y * y), keeps="y"
)
Pow = binary_function(
    "Pow", elementwise.pow, elementwise.pow_grad_a, elementwise.pow_grad_b, (_pow_back_a, _pow_back_b)
)


def sqrt(input: Tensor) -> Tensor:
    """Return the square root: NaN below 0. Raises TypeError for integers."""
    return Sqrt.apply(input)


def square(input: Tensor) -> Tensor:
    """Return input squared."""
    return Square.apply(input)


def reciprocal(input: Tensor) -> Tensor:
    """Return 1 / input. Raises TypeError for integers."""
    return Reciprocal.apply(input)


def pow(input: Operand, exponent: Operand) -> Tensor:
    """Return input to the power `exponent`; NaN where input is negative and exponent is not an integer.

    As in torch, the gradient of input is 0 where exponent is 0, and the gradient of exponent is 0 where input is 0 and
    exponent is not negative. torch computes integers, and raises RuntimeError for negative exponents.
    Raises TypeError for two floating types, ValueError for shapes that do not broadcast.
    """
    a, b = alike(input, exponent)
    if isinstance(a, Tensor) and isinstance(b, int | float):
        if b == 2:
            return Square.apply(a)
        if b == 0.5:
            return Sqrt.apply(a)
        if b == -1:
            return Reciprocal.apply(a)
    if are_integers(a, b):
        base: Any = raw_operand(a)
        return Tensor(torch.pow(base, raw_operand(b)))
    return Pow.apply(a, b)
