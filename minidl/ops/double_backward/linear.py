"""Second derivatives of linear operations: their backward as recorded operations on Tensors.

`backward(create_graph=True)` and `autograd.grad` call `Function.second` instead of `Function.backward`. Most functions
in `minidl.ops` have one definition for both. Functions without `second` are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import lookup as lookup_kernels
from minidl.ops import (
    extrema,
    indexing,
    join,
    lookup,
    pool,
    rearrange,
    reduce,
    resample,
    scatter_gather,
    sorting,
)
from minidl.ops.conditional import where
from minidl.ops.extrema import Chosen
from minidl.ops.shape import Diagonal, sum_to
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations

Raw = Callable[[torch.Tensor], torch.Tensor]


def second(*functions: type[Function]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the second derivative of these functions."""

    def register(derivative: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            function.second = staticmethod(derivative)
        return derivative

    return register


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


@second(extrema.Extreme, extrema.Topk, sorting.Sort)
def _positions(ctx: Any, dy: Tensor, *_: None) -> Any:
    (indices,), context = ctx.context.saved, ctx.context
    shape, _, dim = ctx.layout
    if not shape:
        return first(ctx, sum_to(dy, shape))
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
        selected = lookup.Embedding.apply(index, table, padding)
        return selected if padding < 0 else where(Tensor((index == padding).unsqueeze(-1)), 0, selected)

    return None, Back.apply(dy, back, look_up), None


@second(rearrange.Split)
def _split(ctx: Any, *grads: Tensor | None) -> Any:
    parts = [
        Tensor(torch.zeros(shape, dtype=dtype, device=device)) if dy is None else dy
        for dy, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    return join.cat(parts, ctx.dim), None, None
