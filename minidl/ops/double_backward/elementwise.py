"""Second derivatives: `backward` of each operation as recorded operations on Tensors.

`backward(create_graph=True)` and `autograd.grad` use these instead of `Function.backward`. Operations that have none,
neither here nor in `activations` and `layers`, are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import lookup as lookup_kernels
from minidl.ops import activation as acts
from minidl.ops import (
    compare,
    conditional,
    extrema,
    index_assignment,
    indexing,
    join,
    lookup,
    pool,
    powers,
    random,
    rearrange,
    reduce,
    resample,
    scatter_gather,
    sorting,
)
from minidl.ops import elementwise as e
from minidl.ops import unary as u
from minidl.ops.conditional import where
from minidl.ops.extrema import Chosen
from minidl.ops.shape import Clone, Contiguous, Diagonal, Expand, Permute, Reshape, To
from minidl.tensors import Tensor

__all__: list[str] = []  # used by the engine, no operations

Raw = Callable[[torch.Tensor], torch.Tensor]


def second(*functions: type[Function]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the second derivative of these functions."""

    def register(derivative: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            function.second = staticmethod(derivative)
        return derivative

    return register


def summed(dy: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the sum that undoes a broadcast from `shape`."""
    if tuple(dy.shape) == tuple(shape):
        return dy
    new = dy.ndim - len(shape)
    dims = [i for i in range(dy.ndim) if i < new or (shape[i - new] == 1 and dy.shape[i] != 1)]
    return dy.sum(dims, keepdim=True).reshape(shape)


def first(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    """Return the gradient of the first input; others are settings."""
    return dx, *(None for _ in ctx.needs[1:])


class Back(Function):
    """The backward of a linear operation as an operation; its own backward is the forward operation."""

    @staticmethod
    def forward(ctx: Any, dy: torch.Tensor, back: Raw, forward_operation: Callable[[Tensor], Tensor]) -> torch.Tensor:
        ctx.forward_operation = forward_operation
        return back(dy)

    @staticmethod
    def backward(ctx: Any, ddx: torch.Tensor) -> Any:
        return ctx.forward_operation(Tensor(ddx)).data, None, None


@second(Back)
def _back(ctx: Any, ddx: Tensor) -> Any:
    return ctx.forward_operation(ddx), None, None


# The backward of views and copies consists of views and copies, which Tensors support, too.
for plain in (
    Reshape,
    Permute,
    Clone,
    Contiguous,
    To,
    join.Cat,
    rearrange.Flip,
    rearrange.Roll,
    reduce.Sum,
):
    second(plain)(plain.backward)


def _linear(function: type[Function], settings: Callable[[Any], tuple[Any, ...]]) -> None:
    @second(function)
    def derivative(ctx: Any, dy: Tensor) -> Any:
        options = settings(ctx)
        context = ctx.context
        back = Back.apply(dy, lambda d: function.backward(context, d)[0], lambda ddx: function.apply(ddx, *options))
        return first(ctx, back)


for function, settings in (
    (indexing.GetItem, lambda ctx: (ctx.index,)),
    (Diagonal, lambda ctx: (ctx.how,)),
    (reduce.Cumsum, lambda ctx: (ctx.dim,)),
    (pool.AvgPool2d, lambda ctx: (ctx.at,)),
    (resample.Resample, lambda ctx: ctx.taps),
):
    _linear(function, settings)


@second(u.Abs, u.Sign, u.Floor, u.Ceil, u.Trunc, u.Round, u.RoundTo, conditional.Clamp, acts.Hardtanh, random.Dropout)
def _diagonal(ctx: Any, dy: Tensor) -> Any:
    """Return the gradient of a piecewise linear function: dy times a constant factor by element."""
    factor = ctx.function.backward(ctx.context, torch.ones_like(dy.data))
    return first(ctx, dy * Tensor(factor[0] if isinstance(factor, tuple) else factor))


@second(extrema.Amax, extrema.Amin, extrema.Max, extrema.Min)
def _extremum(ctx: Any, dy: Tensor) -> Any:
    factor = ctx.function.backward(ctx.context, torch.ones_like(dy.data))[0]
    return first(ctx, dy.reshape(ctx.keepdim_shape) * Tensor(factor))


@second(extrema.Extreme, extrema.Topk, sorting.Sort)
def _positions(ctx: Any, dy: Tensor, *_: None) -> Any:
    (indices,), context = ctx.context.saved, ctx.context
    shape, _, dim = ctx.layout
    if not shape:
        return first(ctx, summed(dy, shape))
    positions = Tensor(indices if indices.dim() == len(shape) else indices.unsqueeze(dim))

    def gather_back(ddx: Tensor) -> Tensor:
        return scatter_gather.gather(ddx, dim, positions).reshape(indices.shape)

    return first(ctx, Back.apply(dy, lambda d: Chosen.backward(context, d, None)[0], gather_back))


@second(pool.MaxPool2d)
def _max_pool(ctx: Any, dy: Tensor, *_: None) -> Any:
    (saved_positions,), context = ctx.context.saved, ctx.context
    positions = pool._positions(saved_positions, ctx.at).flatten(2)

    def gather_back(ddx: Tensor) -> Tensor:
        return scatter_gather.gather(ddx.flatten(2), 2, Tensor(positions)).reshape(saved_positions.shape)

    return first(ctx, Back.apply(dy, lambda d: pool.MaxPool2d.backward(context, d)[0], gather_back))


@second(lookup.Embedding)
def _embedding(ctx: Any, dy: Tensor) -> Any:
    (index,), rows, padding = ctx.context.saved, ctx.rows, ctx.padding

    def back(d: torch.Tensor) -> torch.Tensor:
        return lookup_kernels.embedding_grad(d, index, rows, padding)

    def look_up(table: Tensor) -> Tensor:
        rows_found = lookup.Embedding.apply(index, table, padding)
        return rows_found if padding < 0 else where(Tensor((index == padding).unsqueeze(-1)), 0, rows_found)

    return None, Back.apply(dy, back, look_up), None


@second(Expand)
def _expand(ctx: Any, dy: Tensor) -> Any:
    return summed(dy, ctx.shape), None


@second(index_assignment.Assign)
def _assign(ctx: Any, dy: Tensor) -> Any:
    basic, parts = ctx.index
    dv = None
    if ctx.needs[1]:
        dv = dy[basic] if parts is ... else dy[basic][parts]
        dv = summed(dv, ctx.shape[max(len(ctx.shape) - dv.ndim, 0) :]).reshape(ctx.shape)
    return index_assignment.Assign.apply(dy, 0, ctx.index, False), dv, None, None


@second(rearrange.Split)
def _split(ctx: Any, *grads: Tensor | None) -> Any:
    parts = [
        Tensor(torch.zeros(shape, dtype=dtype, device=device)) if dy is None else dy
        for dy, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    return join.cat(parts, ctx.dim), None, None


@second(reduce.Mean)
def _mean(ctx: Any, dy: Tensor) -> Any:
    count = ctx.shape.numel() // torch.Size(ctx.keepdim_shape).numel() if dy.numel() else 1
    return first(ctx, (dy.reshape(ctx.keepdim_shape) / count).expand(ctx.shape))


@second(reduce.Norm)
def _norm(ctx: Any, dy: Tensor) -> Any:
    x, y = ctx.saved
    y, dy = y.reshape(ctx.keepdim_shape), dy.reshape(ctx.keepdim_shape)
    zero = y == 0
    return first(ctx, x * where(zero, 0, dy / where(zero, 1, y)))


@second(reduce.NormOf)
def _norm_of(ctx: Any, dy: Tensor) -> Any:
    x, y = ctx.saved
    y, dy = y.reshape(ctx.keepdim_shape), dy.reshape(ctx.keepdim_shape)
    if ctx.p == 0:
        return first(ctx, x * dy * 0)
    zero = compare.logical_or(x == 0, y == 0)
    slope = (where(zero, 1, u.abs(x)) / where(y == 0, 1, y)) ** (ctx.p - 1)
    return first(ctx, where(zero, 0, dy * u.sign(x) * slope))


@second(scatter_gather.Summed)
def _summed_rows(ctx: Any, dy: Tensor) -> Any:
    (at,) = ctx.context.saved
    return None, lookup.Embedding.apply(at, dy, -1), None


@second(scatter_gather.Put)
def _put(ctx: Any, dy: Tensor) -> Any:
    (index,) = ctx.context.saved
    values = scatter_gather.gather(dy, ctx.dim, Tensor(index)) if ctx.needs[3] else None
    return scatter_gather.Put.apply(dy, ctx.dim, index, 0), None, None, values


def _register_unary(function: type[Function], derivative: Callable[[Any, Tensor], Tensor]) -> None:
    """Register functions of one operand, which save it, their result, or nothing."""
    second(function)(lambda ctx, dy: derivative(next(iter(ctx.saved), None), dy))


_register_unary(u.Neg, lambda _, dy: -dy)
_register_unary(u.Exp, lambda y, dy: dy * y)
_register_unary(u.Log, lambda x, dy: dy / x)
_register_unary(powers.Sqrt, lambda y, dy: dy / (y * 2))
_register_unary(powers.Square, lambda x, dy: dy * (x * 2))
_register_unary(powers.Reciprocal, lambda y, dy: -(dy * y * y))
_register_unary(u.Sin, lambda x, dy: dy * u.cos(x))
_register_unary(u.Cos, lambda x, dy: -(dy * u.sin(x)))
_register_unary(u.Log1p, lambda x, dy: dy / (x + 1))
_register_unary(u.Expm1, lambda x, dy: dy * u.exp(x))
_register_unary(u.Erf, lambda x, dy: dy * (u.exp(-(x * x)) * (2 / math.sqrt(math.pi))))
_register_unary(u.Log2, lambda x, dy: dy / (x * math.log(2)))


def _register_binary(function: type[Function], way_a: Callable[..., Tensor], way_b: Callable[..., Tensor]) -> None:
    """Register functions of two operands: each gradient from dy and the saved operands."""

    @second(function)
    def derivative(ctx: Any, dy: Tensor) -> Any:
        saved = ctx.saved
        numbers = getattr(ctx, "numbers", [None] * len(saved))
        operands = [x if number is None else number for x, number in zip(saved, numbers, strict=True)]
        grads = zip((way_a, way_b), ctx.shapes[-2:], ctx.needs[-2:], strict=True)
        return *(None for _ in ctx.needs[2:]), *(
            summed(gradient(dy, *operands), size) if need else None for gradient, size, need in grads
        )


def _pow_a(dy: Tensor, a: Any, b: Any) -> Tensor:
    if not isinstance(b, Tensor):
        return dy * 0 if b == 0 else dy * (b * a ** (b - 1))
    return dy * where(b == 0, 0, b * a ** (b - 1))


def _pow_b(dy: Tensor, a: Any, b: Any) -> Tensor:
    base = a if isinstance(a, Tensor) else Tensor(torch.full((), a, dtype=dy.dtype, device=dy.device))
    zero = compare.logical_and(base == 0, b >= 0)
    return dy * where(zero, 0, base**b * where(zero, 1, base).log())


def _share(gradient: Callable[..., torch.Tensor], dy: Tensor, *operands: Any) -> Tensor:
    """Return the gradient of a piecewise linear function, as `_diagonal`."""
    raw = (x.data if isinstance(x, Tensor) else x for x in operands)
    return dy * Tensor(gradient(torch.ones_like(dy.data), *raw))


_register_binary(e.Add, lambda dy: dy, lambda dy: dy)
_register_binary(e.Sub, lambda dy: dy, lambda dy: -dy)
_register_binary(e.Mul, lambda dy, a, b: dy * b, lambda dy, a, b: dy * a)
for quotient in (e.DivTrunc, e.DivFloor):
    _register_binary(quotient, lambda dy, a, b: dy * 0, lambda dy, a, b: dy * 0)
_register_binary(e.Fmod, lambda dy, a, b: dy, lambda dy, a, b: -(dy * e.div(a, b, rounding_mode="trunc")))
_register_binary(e.Remainder, lambda dy, a, b: dy, lambda dy, a, b: -(dy * e.floor_divide(a, b)))
_register_binary(e.Div, lambda dy, a, b: dy / b, lambda dy, a, b: -(dy * a) / (b * b))
_register_binary(powers.Pow, _pow_a, _pow_b)
_register_binary(
    conditional.Where, lambda dy, condition: where(condition, dy, 0), lambda dy, condition: where(condition, 0, dy)
)
_register_binary(acts.PReLU, lambda dy, a, b: dy * where(a > 0, 1, b), lambda dy, a, b: dy * where(a > 0, 0, a))
for extreme in (e.Maximum, e.Minimum):
    _register_binary(extreme, partial(_share, extreme.grad_a), partial(_share, extreme.grad_b))  # type: ignore[attr-defined]
