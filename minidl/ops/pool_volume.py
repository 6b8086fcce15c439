"""Pooling of volumes [N, C, D, H, W], or of one [C, D, H, W]: of all slices as images, then along the depth.

A window is the product of one in a slice and one along the depth, and so is its divisor. The first maximum in row-major
order is the first one of the first slice that has it. Results have the memory order of contiguous volumes; those of
others are in torch.channels_last_3d.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import pool as kernels
from minidl.kernels.pool import Pair, Windows, volume
from minidl.ops.pool import adaptive_avg_pool2d, divisor_of, positions
from minidl.ops.scatter_gather import gather
from minidl.ops.shape import one_or_many, reshape
from minidl.tensors import Tensor

__all__ = ["adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d"]

SHAPE = "N, C, D, H, W"
Three = int | tuple[int | None, int | None, int | None]


def _positions(ctx: Any) -> torch.Tensor:
    """Return the positions of the maxima in the volume, [N, C, OD, OH, OW]."""
    (inside, along), (slices, depth) = ctx.saved, ctx.at
    (N, C), pixels = along.shape[:2], depth.size[1]
    # A position among the pooled slices says in which slice the position of the maximum is.
    in_slice = positions(inside, slices).reshape(N, -1, C, pixels).transpose(1, 2).flatten(2)
    row = positions(along, depth).flatten(2)
    result = in_slice.gather(2, row) + row // max(pixels, 1) * (slices.size[0] * slices.size[1])
    return result.view(*ctx.shape[:2], depth.output[0], *slices.output)


def _at_maxima(ctx: Any, x: Tensor) -> Tensor:
    at = _positions(ctx)
    return gather(reshape(x, *x.shape[:2], -1), 2, Tensor(at.flatten(2))).reshape(at.shape)


@linear(_at_maxima)
class MaxPool3d(Function):
    """The maxima; with `indices` also their positions in the volume, int64."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slices: Windows, depth: Windows, indices: bool) -> Any:
        y, *taps = volume.max_pool3d(x, slices, depth, indices or ctx.needs[0])
        ctx.save(*taps)
        ctx.at, ctx.shape = (slices, depth), x.shape
        return (y, _positions(ctx)) if indices else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: None = None) -> Any:
        return volume.max_pool3d_grad(dy, *ctx.saved, *ctx.at), None, None, None


@linear(lambda ctx, x: AvgPool3d.apply(x, *ctx.at))
class AvgPool3d(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slices: Windows, depth: Windows) -> torch.Tensor:
        ctx.at, ctx.alone = (slices, depth), volume.by_channel(x)
        return volume.avg_pool3d(x, slices, depth)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return volume.avg_pool3d_grad(dy, *ctx.at, ctx.alone), None, None


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
