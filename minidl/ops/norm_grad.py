"""Gradients of norms by recorded operations, for gradients of every order.

With n = (x - mean) rstd, and g the gradient of n: dx = rstd (g - mean(g) - n mean(g n)). An RMS norm has no mean(g).
"""

from __future__ import annotations

from typing import Any

from minidl.autograd.modes import no_grad
from minidl.kernels import activation
from minidl.kernels import row_norm as rows_kernels
from minidl.ops.activation import activated
from minidl.ops.activation_grad import bias_act_grad
from minidl.ops.shape import sum_to, wide
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


def _normalised(x: Tensor, dims: tuple[int, ...], rstd: Tensor, rms: bool) -> tuple[Tensor, Tensor]:
    """Return n and rstd as functions of x; eps follows from the value of rstd."""
    away = x if rms else x - x.mean(dims, True)
    var = away.square().mean(dims, True)
    with no_grad():
        eps = rstd.square().reciprocal() - var.detach()
    factor = (var + eps).sqrt().reciprocal()
    return away * factor, factor


def _grad_input(g: Tensor, normed: Tensor, factor: Tensor, dims: tuple[int, ...], rms: bool) -> Tensor:
    along = g - normed * (g * normed).mean(dims, True)
    return factor * (along if rms else along - g.mean(dims, True))


def row_norm(ctx: Any, dy: Tensor) -> Any:
    """Return the gradients of `RowNorm`."""
    x = ctx.input(0, ctx.context.saved[0])
    return *_row_norm(ctx, x, 1, ctx.needs[1:3], dy), None, None, None


def add_rms_norm(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> Any:
    """Return the gradients of `AddRMSNorm`, whose sum is an output."""
    dweight = None
    if dy is not None:
        dx, dweight, _ = _row_norm(ctx, ctx.saved[0], 2, (ctx.needs[2], False), dy)
        dtotal = dx if dtotal is None else dx + dtotal
    return dtotal, dtotal, dweight, None, None


def _row_norm(ctx: Any, x: Tensor, weight_index: int, needs: tuple[bool, bool], dy: Tensor) -> list[Any]:
    """Return the gradients of x, weight and bias."""
    dtype, raw_weight, x, dy = x.dtype, ctx.context.saved[1], wide(x), wide(dy)
    rows = ctx.mean.numel(), -1
    normed, factor = _normalised(x.reshape(rows), (1,), Tensor(ctx.rstd.view(-1, 1)), ctx.rms)
    # The affine parameters have a value per channel, or per position of the last dimensions.
    shape = [x.shape[1], *(1 for _ in x.shape[2:])] if ctx.seen[0] is rows_kernels.groups else None
    g = dy
    if raw_weight is not None:
        weight = wide(ctx.input(weight_index, raw_weight.view(ctx.shapes[0])))
        g = dy * (weight if shape is None else weight.reshape(shape))
    dx = _grad_input(g.reshape(rows), normed, factor, (1,), ctx.rms).reshape(x.shape)
    sums = [
        sum_to(t, size if shape is None else shape).reshape(size).to(dtype) if need else None
        for t, size, need in zip((dy * normed.reshape(x.shape), dy), ctx.shapes, needs, strict=True)
    ]
    return [dx.to(dtype), *sums]


def batch_norm(ctx: Any, dy: Tensor) -> Any:
    """Return the gradients of `BatchNorm`."""
    saved_x, mean, rstd, weight, bias, y = ctx.saved
    x, dy, shape = wide(saved_x), wide(dy), [saved_x.shape[1], *(1 for _ in saved_x.shape[2:])]
    dims = (0, *range(2, x.ndim))
    if ctx.training:
        normed, factor = _normalised(x, dims, rstd.reshape(shape), False)
    else:
        factor = rstd.reshape(shape)
        normed = (x - mean.reshape(shape)) * factor
    from_output = activation.parse(ctx.act)[0] in activation.FROM_OUTPUT
    if y is None:
        y = normed if weight is None else normed * wide(weight).reshape(shape)
        y = y if bias is None else y + wide(bias).reshape(shape)
        y = activated(y, ctx.act) if from_output and ctx.act is not None else y
    dz, _ = bias_act_grad(dy, wide(y), None, ctx.act, from_output, want_x=True, want_bias=False)
    g = dz if weight is None else dz * wide(weight).reshape(shape)
    dx = _grad_input(g, normed, factor, dims, False) if ctx.training else g * factor
    sums = [
        sum_to(t, shape).reshape(-1).to(like.dtype) if need else None
        for t, like, need in zip((dz * normed, dz), (weight, bias), ctx.needs[1:3], strict=True)
    ]
    added = dz.to(saved_x.dtype) if ctx.needs[3] else None
    return dx.to(saved_x.dtype), *sums, added, *(None for _ in ctx.needs[4:])
