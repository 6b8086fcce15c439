"""Pooling of images [N, C, H, W]. Results lie in channels-last memory."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import pool as kernels
from minidl.kernels.pool import Pair, Windows
from minidl.tensor import Tensor

__all__ = ["adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"]


class MaxPool2d(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Windows) -> torch.Tensor:
        y, places = kernels.max_pool2d(x, at, keep=ctx.needs[0])
        ctx.save(places)
        ctx.at = at
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (places,) = ctx.saved
        return kernels.max_pool2d_grad(dy, places, ctx.at), None


class AvgPool2d(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Windows) -> torch.Tensor:
        ctx.at = at
        return kernels.avg_pool2d(x, at)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return kernels.avg_pool2d_grad(dy, ctx.at), None


def max_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The maximum of each window; NaN where one is. Padding is never the maximum.

    Shapes: [N, C, H, W] -> [N, C, OH, OW], OH = (H + 2 padding - dilation (kernel_size - 1) - 1) / stride + 1, rounded
    down, or up with ceil_mode, when a last window may reach over the edge. stride: kernel_size where it is None.
    The gradient goes to the first of equal maxima, row by row.
    Raises ValueError for sizes below 1, padding above half of the kernel, or no window that fits; TypeError for
    integers.
    """
    size = kernels.checked("max_pool2d", x.data)
    return MaxPool2d.apply(x, kernels.windows("max_pool2d", size, kernel_size, stride, padding, dilation, ceil_mode))


def avg_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window: its sum over its size, with the padding in it if count_include_pad, or over
    divisor_override.

    Shapes as `max_pool2d`. What reaches beyond the padding with ceil_mode is not counted.
    Raises as `max_pool2d`, ValueError for a divisor_override of 0, and TypeError for one that is no whole number.
    """
    if divisor_override is not None and type(divisor_override) is not int:
        raise TypeError(f"avg_pool2d: divisor_override is {divisor_override!r}, expected a whole number or None")
    size = kernels.checked("avg_pool2d", x.data)
    at = kernels.windows(
        "avg_pool2d", size, kernel_size, stride, padding, 1, ceil_mode, divisor_override, count_include_pad
    )
    return AvgPool2d.apply(x, at)


def adaptive_avg_pool2d(x: Tensor, output_size: int | tuple[int | None, int | None]) -> Tensor:
    """Means over windows that share the image out evenly, so that output_size of them (None: as many as pixels) result.

    Shapes: [N, C, H, W] -> [N, C, *output_size]. Window o of O holds the pixels from floor(o H / O) up to
    ceil((o + 1) H / O). An output_size of 1 is the mean of the image.
    Raises ValueError for an image without pixels or a negative size, TypeError for integers.
    """
    size = kernels.checked("adaptive_avg_pool2d", x.data)
    return AvgPool2d.apply(x, kernels.adaptive_windows("adaptive_avg_pool2d", size, output_size))
