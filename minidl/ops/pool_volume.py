"""Pooling of volumes [N, C, D, H, W], or of one [C, D, H, W]: of all slices as images, then along the depth.

A window is the product of one in a slice and one along the depth, and so is its divisor. The first maximum in row-major
order is the first one of the first slice that has it. Between both steps values have the dtype of the computation, so
results and gradients are rounded once. Results have the memory order of contiguous volumes; those of
others are in torch.channels_last_3d.
"""

from __future__ import annotations

from typing import Any

from minidl.kernels import pool as kernels
from minidl.kernels.pool import Pair, Windows
from minidl.ops.pool import AvgPool2d, MaxPool2d, adaptive_avg_pool2d, divisor_of
from minidl.ops.shape import one_or_many, permute, reshape
from minidl.runtime import launch
from minidl.tensors import Tensor

__all__ = ["adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d"]

SHAPE = "N, C, D, H, W"
Three = int | tuple[int | None, int | None, int | None]


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
    return _maxima(input, *at, return_indices)


@one_or_many(5)
def avg_pool3d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean of each window, as `avg_pool2d`. Shapes as `max_pool3d`. Raises as `avg_pool2d`."""
    op = "avg_pool3d"
    size, divisor = kernels.checked(op, input.data, SHAPE), divisor_of(op, divisor_override)
    at = kernels.volume_windows(op, size, kernel_size, stride, padding, 1, ceil_mode, divisor, count_include_pad)
    return _means(input, *at)


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
    return _means(input, slices, depth)


@one_or_many(5)
def adaptive_max_pool3d(input: Tensor, output_size: Three, return_indices: bool = False) -> Any:
    """Return maxima over the windows of `adaptive_avg_pool3d`; of equal ones the first has the gradient.

    return_indices as for `max_pool3d`. Raises as `adaptive_avg_pool3d`.
    """
    size = kernels.checked("adaptive_max_pool3d", input.data, SHAPE)
    at = kernels.adaptive_volume_windows("adaptive_max_pool3d", size, output_size)
    return _maxima(input, *at, return_indices)


def _planes(x: Tensor) -> Tensor:
    """Return contiguous volumes [N, C, D, H, W] as [N C, 1, D, H, W]; others as they are."""
    N, C, *size = x.shape
    return reshape(x, N * C, 1, *size) if C > 1 and x.data.is_contiguous() else x


def _means(x: Tensor, slices: Windows, depth: Windows) -> Tensor:
    lead, x = x.shape[:2], _planes(x)
    pooled = AvgPool2d.apply(_images(x), slices, launch.acc_torch(x.dtype))
    y = _volumes(AvgPool2d.apply(_columns(pooled, x), depth, x.dtype), slices, depth)
    return reshape(y, *lead, *y.shape[2:])


def _maxima(x: Tensor, slices: Windows, depth: Windows, indices: bool) -> Any:
    lead, x = x.shape[:2], _planes(x)
    acc, (N, C, D, H, W) = launch.acc_torch(x.dtype), x.shape
    if not indices:
        pooled = MaxPool2d.apply(_images(x), slices, False, acc)
        y = _volumes(MaxPool2d.apply(_columns(pooled, x), depth, False, x.dtype), slices, depth)
        return reshape(y, *lead, *y.shape[2:])
    pooled, inside = MaxPool2d.apply(_images(x), slices, True, acc)
    y, before = MaxPool2d.apply(_columns(pooled, x), depth, True, x.dtype)
    # A position among the pooled slices says in which slice the position of the maximum is.
    pixels = depth.size[1]
    places = inside.data.reshape(N, D, C, pixels).transpose(1, 2).flatten(2)
    rows = before.data.flatten(2)
    positions = places.gather(2, rows) + rows // max(pixels, 1) * (H * W)
    size = *lead, depth.output[0], *slices.output
    return reshape(_volumes(y, slices, depth), *size), Tensor(positions.view(size))


def _images(x: Tensor) -> Tensor:
    """Return the slices of volumes, [N D, C, H, W]."""
    N, C, D, H, W = x.shape
    return permute(reshape(permute(x, 0, 2, 3, 4, 1), N * D, H, W, C), 0, 3, 1, 2)


def _columns(slices: Tensor, x: Tensor) -> Tensor:
    """Return slices of volumes x as images [N, C, D, H W]."""
    N, C, D = x.shape[:3]
    rows, columns = slices.shape[2:]
    return permute(reshape(permute(slices, 0, 2, 3, 1), N, D, rows * columns, C), 0, 3, 1, 2)


def _volumes(y: Tensor, slices: Windows, depth: Windows) -> Tensor:
    N, C = y.shape[:2]
    return permute(reshape(permute(y, 0, 2, 3, 1), N, depth.output[0], *slices.output, C), 0, 4, 1, 2, 3)
