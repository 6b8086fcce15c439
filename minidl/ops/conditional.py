"""Operations that choose between two values by a condition: `where`, `clamp`, `masked_fill`, `tril`."""

from __future__ import annotations

from typing import Any, overload

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import elementwise, reduce
from minidl.ops.binary import Kernel, Operand, Raw, piecewise_linear, raw_operand, shape_of, shapes_and_needs
from minidl.ops.elementwise import are_bools
from minidl.ops.promotion import alike, python_number
from minidl.ops.shape import sum_to, to
from minidl.tensors import Scalar, Tensor

__all__ = ["clamp", "clip", "masked_fill", "tril", "triu", "where"]


class Where(Function):
    compute, sum_to = staticmethod(elementwise.where), staticmethod(reduce.sum_to)

    @staticmethod
    def forward(ctx: Any, condition: torch.Tensor, a: Raw, b: Raw) -> torch.Tensor:
        ctx.shapes = (), shape_of(a), shape_of(b)
        ctx.save(condition)
        return elementwise.where(condition, a, b)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        (condition,) = ctx.saved
        _, (shape_a, need_a), (shape_b, need_b) = shapes_and_needs(ctx)
        da = cls.sum_to(cls.compute(condition, dy, 0), shape_a) if need_a else None
        return None, da, cls.sum_to(cls.compute(condition, 0, dy), shape_b) if need_b else None


recordable(compute=Where.apply, sum_to=sum_to)(Where)


@recordable(gradient=piecewise_linear(elementwise.clamp_grad))
class Clamp(Function):
    gradient: Kernel = staticmethod(elementwise.clamp_grad)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: Scalar | None, high: Scalar | None) -> torch.Tensor:
        ctx.save(x)
        ctx.range = low, high
        return elementwise.clamp(x, low, high)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return cls.gradient(dy, *ctx.saved, *ctx.range), None, None


@overload
def where(condition: Tensor) -> tuple[Tensor, ...]: ...
@overload
def where(condition: Tensor, input: Operand, other: Operand) -> Tensor: ...
def where(condition: Tensor, input: Operand | None = None, other: Operand | None = None) -> Any:
    """Return input where condition is true, else other; all three broadcast. Of two numbers, float32, or int64 of whole
    ones.

    Of condition alone the positions where it is not 0, as `nonzero` with as_tuple=True.
    Raises TypeError if condition is not torch.bool or for two floating types, ValueError for shapes that do not
    broadcast.
    """
    if input is None and other is None:
        truths = condition.data if condition.dtype == torch.bool else elementwise.ne(condition.data, 0)
        return tuple(map(Tensor, torch.nonzero(truths.reshape(truths.shape or (1,)), as_tuple=True)))
    if input is None or other is None:
        raise TypeError("where: got one of input and other, expected both, or condition alone")
    if not isinstance(input, Tensor | torch.Tensor) and not isinstance(other, Tensor | torch.Tensor):
        kind = torch.result_type(torch.tensor(input), torch.tensor(other))
        input = Tensor(torch.full((), input, dtype=kind, device=condition.device))
    a: Any
    b: Any
    a, b = alike(input, other)
    if are_bools(a, b):
        a, b = (x if isinstance(x, bool) else to(x, torch.uint8) for x in (a, b))
        return to(Where.apply(condition, a, b), torch.bool)
    return Where.apply(condition, a, b)


def clamp(input: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Return input limited to [min, max], numbers or tensors that broadcast; None sets no limit, and above max, min is
    max.

    NaN stays NaN. The gradient goes to input where it is within the limits, else to the limit.
    Raises ValueError when both are None.
    """
    if isinstance(min, Tensor | torch.Tensor) or isinstance(max, Tensor | torch.Tensor):
        above = input if min is None else _limit(input, min, elementwise.lt)
        return above if max is None else _limit(above, max, elementwise.gt)
    (input, min), (_, max) = alike(input, min), alike(input, max)
    return Clamp.apply(input, min, max)


def clip(input: Tensor, min: Scalar | Tensor | None = None, max: Scalar | Tensor | None = None) -> Tensor:
    """Return `clamp`."""
    return clamp(input, min, max)


def _limit(x: Tensor, bound: Operand, beyond: Kernel) -> Tensor:
    """Return the bound where x is beyond it or the bound is NaN; else x."""
    x, bound = alike(x, bound)
    raw, limit = raw_operand(x), raw_operand(bound)
    outside = beyond(raw, limit)
    if isinstance(limit, torch.Tensor):
        outside = torch.logical_or(outside, elementwise.ne(limit, limit))
    return where(Tensor(outside), bound, x)


def masked_fill(input: Tensor, mask: Tensor, value: Scalar | Tensor) -> Tensor:
    """Return value (a number, or a tensor of one element) where mask is true, else input, in input's dtype.

    Raises TypeError for a mask that is not torch.bool, or a fraction among integers; ValueError for other shapes, and
    for a number outside the range of the dtype (a tensor wraps around: reading its value would wait for the device).
    """
    fill: Any = value if isinstance(value, Tensor | torch.Tensor) else python_number(value)
    is_tensor = isinstance(fill, Tensor | torch.Tensor)
    if is_tensor and len(fill.shape):
        raise ValueError(f"masked_fill: value has shape {list(fill.shape)}, expected a number; use where")
    fraction = fill.dtype.is_floating_point if is_tensor else isinstance(fill, float)
    if (fraction and not input.dtype.is_floating_point) or (is_tensor and fill.dtype.is_complex):
        raise TypeError(f"masked_fill: {value!r} does not fit a tensor of {input.dtype}; convert it with .to()")
    if is_tensor:
        fill = to(fill, input.dtype)
    elif input.dtype == torch.bool:
        fill = bool(fill)
    return where(mask, fill, input)


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return 0 above a diagonal of the last two dimensions. Raises ValueError for a vector."""
    return _triangle("tril", input, diagonal)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return 0 below a diagonal of the last two dimensions. Raises ValueError for a vector."""
    return _triangle("triu", input, diagonal)


def _triangle(name: str, x: Tensor, diagonal: int) -> Tensor:
    if x.ndim < 2:
        raise ValueError(f"{name}: input has shape {list(x.shape)}, expected two dimensions or more")
    inside = getattr(torch, name)(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device), diagonal)
    return masked_fill(x, Tensor(~inside), 0)
