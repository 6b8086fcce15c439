"""Arithmetic element by element, with broadcasting.

Operands come to one dtype by `promotion`; a Python number takes the tensor's. Shapes broadcast as in torch, and each
gradient is summed back to its operand's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from minidl.autograd import Function, UnknownTensor
from minidl.autograd.deferred import Deferred, fuse, may_wait
from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.ops.binary import (
    Add,
    AddAct,
    Div,
    DivFloor,
    DivTrunc,
    Fmod,
    Maximum,
    Minimum,
    Mul,
    Operand,
    Remainder,
    Sub,
    raw_operand,
)  # fmt: skip
from minidl.ops.promotion import alike, dtype_of, python_number
from minidl.tensors import Scalar, Tensor

__all__ = ["add", "div", "floor_divide", "fmod", "lerp", "maximum", "minimum", "mul", "remainder", "sub"]


class DeferredSum(Deferred):
    """A sum of two tensors of one shape, which an activation can be fused with."""

    def __init__(self, a: Tensor, b: Tensor, act: Activation = None) -> None:
        super().__init__(a.shape, a.dtype, a.device, a.requires_grad or b.requires_grad, a, b)
        self.a, self.b, self.act = a, b, act

    def compute(self) -> Tensor:
        return Add.apply(self.a, self.b) if self.act is None else AddAct.apply(self.a, self.b, self.act)

    def with_act(self, act: Activation) -> Deferred | None:
        supported = self.act is None and activation.parse(act)[0] in activation.FROM_OUTPUT
        return DeferredSum(self.a, self.b, act) if supported else None


def add(input: Operand, other: Operand, *, alpha: Scalar = 1) -> Tensor:
    """Return input + alpha other; of bools, whether either is true. Raises TypeError for two floating types, or an
    alpha that is a fraction for integers; ValueError for shapes that do not broadcast."""
    a, b = scale_operand("add", input, other, alpha)
    if are_bools(a, b):
        return of_bools(torch.bitwise_or, a, b)
    if not (_may_defer(a) and _may_defer(b) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)):
        return Add.apply(a, b)
    for deferred, other in ((a, b), (b, a)):
        fused = fuse(deferred, "with_sum", other)
        if fused is not None:
            return Tensor._of_deferred(fused)
    return Tensor._of_deferred(DeferredSum(a, b)) if a.ndim > 1 else Add.apply(a, b)


def _may_defer(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and may_wait(x) and x.dtype.is_floating_point


def scale_operand(name: str, a: Operand, b: Operand, alpha: Scalar) -> tuple[Any, Any]:
    """Return a and alpha b in one dtype, which alpha does not change. Raises TypeError for an alpha that does not fit
    it."""
    a, b = alike(a, b)
    if type(alpha) is int and alpha == 1:
        return a, b
    alpha = python_number(alpha)
    kind = dtype_of(a) or dtype_of(b)
    if isinstance(alpha, bool) and kind not in (None, torch.bool):
        raise TypeError(f"{name}: alpha is {alpha}, expected a number; True and False are for bools only")
    if isinstance(alpha, float) and kind is not None and not kind.is_floating_point:
        raise TypeError(f"{name}: alpha is {alpha}, expected a whole number for {kind}; convert the tensor with .to()")
    if kind == torch.bool:
        return a, b if alpha else False
    if isinstance(alpha, float) and alpha == 1:
        return a, b
    return a, mul(b, alpha) if isinstance(b, Tensor | torch.Tensor) else b * alpha


def are_bools(*operands: Any) -> bool:
    """Return whether all are torch.bool, for which only logic is defined; one may be True or False."""
    if False in [isinstance(x, bool) or dtype_of(x) is torch.bool for x in operands]:
        return False
    return not all(isinstance(x, bool) for x in operands)


def of_bools(function: Callable[..., torch.Tensor], a: Any, b: Any) -> Tensor:
    return Tensor(function(raw_operand(a), raw_operand(b)))


def are_integers(*operands: Any) -> bool:
    """Return whether they are integers, tensors or numbers, and one at least a tensor."""
    try:
        kinds = [x.dtype if isinstance(x, Tensor | torch.Tensor) else None for x in operands]
    except UnknownTensor:
        return False
    numbers = all(kind is not None or isinstance(x, int) for x, kind in zip(operands, kinds, strict=True))
    return numbers and any(kinds) and not any(kind is not None and kind.is_floating_point for kind in kinds)


def sub(input: Operand, other: Operand, *, alpha: Scalar = 1) -> Tensor:
    """Return input - alpha other. Raises TypeError for bools or two floating types, ValueError for shapes that do not
    broadcast."""
    return Sub.apply(*scale_operand("sub", input, other, alpha))


def mul(input: Operand, other: Operand) -> Tensor:
    """Return input times other, element by element; of bools, whether both are true. Raises as `add`."""
    a: Any
    b: Any
    a, b = alike(input, other)
    if are_bools(a, b):
        return of_bools(torch.bitwise_and, a, b)
    return Mul.apply(a, b)


def div(input: Operand, other: Operand, *, rounding_mode: str | None = None) -> Tensor:
    """Return input / other; float32 for integers. Raises as `add`.

    With rounding_mode "floor" or "trunc" a whole number, rounded down or towards 0, of integers an integer; its
    gradient is 0. Raises ValueError for another mode.
    """
    if rounding_mode is None:
        return Div.apply(*alike(input, other, floating=True))
    if rounding_mode not in ("floor", "trunc"):
        raise ValueError(f'div: rounding_mode is {rounding_mode!r}, expected None, "floor" or "trunc"')
    function = DivFloor if rounding_mode == "floor" else DivTrunc
    return _divide(function, lambda a, b: torch.div(a, b, rounding_mode=rounding_mode), input, other)


def floor_divide(input: Operand, other: Operand) -> Tensor:
    """Return input / other rounded down: `div` with rounding_mode "floor"."""
    return div(input, other, rounding_mode="floor")


def remainder(input: Operand, other: Operand) -> Tensor:
    """Return the remainder of `floor_divide`, with other's sign: input - floor(input / other) other, rounded once.

    NaN for an infinite input or a divisor of 0, and where the quotient overflows float64. Raises as `add`.
    """
    return _divide(Remainder, torch.remainder, input, other)


def fmod(input: Operand, other: Operand) -> Tensor:
    """Return the remainder of a quotient rounded towards 0, with input's sign; exact. Otherwise as `remainder`."""
    return _divide(Fmod, torch.fmod, input, other)


def _divide(function: type[Function], integer_function: Callable[..., Any], a: Operand, b: Operand) -> Tensor:
    """Return a whole quotient or its remainder; torch computes it for integers and bools."""
    a, b = alike(a, b)
    if not are_integers(a, b):
        return function.apply(a, b)
    return Tensor(integer_function(*(x if isinstance(x, int) else raw_operand(x) for x in (a, b))))


def maximum(input: Operand, other: Operand) -> Tensor:
    """Return the larger of two; NaN where either is NaN. Where they are equal, each gets half of the gradient.

    Raises TypeError for two floating types, ValueError for shapes that do not broadcast.
    """
    return Maximum.apply(*alike(input, other))


def minimum(input: Operand, other: Operand) -> Tensor:
    """Return the smaller of two; otherwise as `maximum`."""
    return Minimum.apply(*alike(input, other))


def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Return input + weight (end - input), weight a number or a tensor. Raises as `add`."""
    return add(input, mul(sub(end, input), weight))
