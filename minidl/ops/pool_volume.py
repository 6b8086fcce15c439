"""Pooling of volumes [N, C, D, H, W], or of one [C, D, H, W]: of all slices as images, then along the depth.

A window is the product of one in a slice and one along the depth, and so is its divisor. The first maximum in row-major
order is the first one of the first slice that has it. Between both steps values have the dtype of the computation, so
results and gradients are rounded once. Results have the memory order of contiguous volumes; those of
others are in torch.channels_last_3d.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import pool as kernels
from minidl.kernels.pool import Pair, Windows
from minidl.ops.pool import adaptive_avg_pool2d, divisor_of, positions
from minidl.ops.scatter_gather import gather
from minidl.ops.shape import one_or_many, reshape
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed
from minidl.tensors import Tensor

__all__ = ["adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d"]

SHAPE = "N, C, D, H, W"
Three = int | tuple[int | None, int | None, int | None]


def _seen(x: torch.Tensor, *size: int) -> torch.Tensor:
    """Return x [N, C, ...] with its channels last and other sizes in place of N and ..., [size[0], C, ...]."""
    return x.movedim(1, -1).reshape(*size, x.shape[1]).movedim(-1, 1)


@replayed
def _pool(x: torch.Tensor, slices: Windows, depth: Windows, mean: bool, keep: bool) -> tuple[torch.Tensor, Any, Any]:
    """Return means or maxima, and the taps of the maxima in both steps, as images, None unless `keep`."""
    lead, dtype, size = x.shape[:2], x.dtype, (depth.output[0], *slices.output)
    y = x.flatten(0, 1).unsqueeze(1) if x.is_contiguous() else x  # each channel as a volume
    N, taps = len(y), []
    first = (N * depth.size[0], *slices.size), slices, launch.acc_torch(dtype)
    for seen, at, kind in (first, ((N, *depth.size), depth, dtype)):
        images = _seen(y, *seen)
        y, tap = (kernels.avg_pool2d(images, at, kind), None) if mean else kernels.max_pool2d(images, at, keep, kind)
        taps.append(tap)
    return _seen(y, N, *size).reshape(*lead, *size), taps[0], taps[1]


@replayed
def _pool_grad(dy: torch.Tensor, inside: Any, along: Any, slices: Windows, depth: Windows, alone: bool) -> torch.Tensor:
    """Return dx from dy and the taps, None for means; `alone`: each channel is a volume."""
    lead, size = dy.shape[:2], (depth.size[0], *slices.size)
    dx = dy.flatten(0, 1).unsqueeze(1) if alone else dy
    N = len(dx)
    first = (N, *depth.output), along, depth, launch.acc_torch(dy.dtype)
    for seen, taps, at, kind in (first, ((N * size[0], *slices.output), inside, slices, dy.dtype)):
        d = _seen(dx, *seen)
        dx = kernels.avg_pool2d_grad(d, at, kind) if taps is None else kernels.max_pool2d_grad(d, taps, at, kind)
    return _seen(dx, N, *size).reshape(*lead, *size)


def _positions(ctx: Any) -> torch.Tensor:
    """Return the positions of the maxima in the volume, [N, C, OD, OH, OW]."""
    (inside, along), (slices, depth) = ctx.saved, ctx.at
    (N, C), pixels = along.shape[:2], depth.size[1]
    # A position among the pooled slices says in which slice the position of the maximum is.
    in_slice = positions(inside, slices).reshape(N, depth.size[0], C, pixels).transpose(1, 2).flatten(2)
    row = positions(along, depth).flatten(2)
    result = in_slice.gather(2, row) + row // max(pixels, 1) * (slices.size[0] * slices.size[1])
    return result.view(*ctx.shape[:2], depth.output[0], *slices.output)


def _at_maxima(ctx: Any, x: Tensor) -> Tensor:
    at = _positions(ctx)
    return gather(reshape(x, *x.shape[:2], -1), 2, Tensor(at.flatten(2))).reshape(at.shape)


@linear(_at_maxima)
class MaxPool3d(Function):
    """The maxima; with `indices` also their positions in the volume, int64."""

    mean = False

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, slices: Windows, depth: Windows, indices: bool = False) -> Any:
        y, *taps = _pool(x, slices, depth, cls.mean, indices or ctx.needs[0])
        ctx.save(*taps)
        ctx.at, ctx.shape, ctx.alone = (slices, depth), x.shape, x.is_contiguous()
        return (y, _positions(ctx)) if indices else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: None = None) -> Any:
        return _pool_grad(dy, *ctx.saved, *ctx.at, ctx.alone), *(None for _ in ctx.needs[1:])


@linear(lambda ctx, x: AvgPool3d.apply(x, *ctx.at))
class AvgPool3d(MaxPool3d):
    mean = True


@one_or_many(5)
def max_pool3d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Return the maximum of each window, as `max_pool2d`.

    With return_indices (maxima, their positions in the volume: (slice times H plus row) times W plus column, int64).

    Shapes: [N, C, D, H, W] -> [N, C, OD, OH, OW], sizes as in `max_pool2d`. Settings are numbers or (depth, height,
    width). Raises as `max_pool2d`.
    """
    size = kernels.checked("max_pool3d", input.data, SHAPE)
    at = kernels.volume_windows("max_pool3d", size, kernel_size, stride, padding, dilation, ceil_mode)
    return MaxPool3d.apply(input, *at, return_indices)


@one_or_many(5)
def avg_pool3d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean of each window, as `avg_pool2d`. Shapes as `max_pool3d`. Raises as `avg_pool2d`."""
    op = "avg_pool3d"
    size, divisor = kernels.checked(op, input.data, SHAPE), divisor_of(op, divisor_override)
    at = kernels.volume_windows(op, size, kernel_size, stride, padding, 1, ceil_mode, divisor, count_include_pad)
    return AvgPool3d.apply(input, *at)


@one_or_many(5)
def adaptive_avg_pool3d(input: Tensor, output_size: Three) -> Tensor:
    """Return means over windows that divide the volume evenly into output_size results, as `adaptive_avg_pool2d`.

    Shapes: [N, C, D, H, W] -> [N, C, *output_size]. Raises as `adaptive_avg_pool2d`.
    """
    size = kernels.checked("adaptive_avg_pool3d", input.data, SHAPE)
    slices, depth = kernels.adaptive_volume_windows("adaptive_avg_pool3d", size, output_size)
    if depth.output == slices.output == (1, 1):  # a reduction, which splits the volume over several programs
        N, C, D, H, W = input.shape
        return reshape(adaptive_avg_pool2d(reshape(input, N, C, D * H, W), 1), N, C, 1, 1, 1)
    return AvgPool3d.apply(input, slices, depth)


@one_or_many(5)
def adaptive_max_pool3d(input: Tensor, output_size: Three, return_indices: bool = False) -> Any:
    """Return maxima over the windows of `adaptive_avg_pool3d`; of equal ones the first has the gradient.

    return_indices as for `max_pool3d`. Raises as `adaptive_avg_pool3d`.
    """
    size = kernels.checked("adaptive_max_pool3d", input.data, SHAPE)
    at = kernels.adaptive_volume_windows("adaptive_max_pool3d", size, output_size)
    return MaxPool3d.apply(input, *at, return_indices)
