"""Patches of images as columns, and the sums of overlapping patches: one is the gradient of the other.

Both move rows of a matrix [pixels, images]: `unfold` looks them up, `fold` adds rows of equal pixels in order.
"""

from __future__ import annotations

import math

import torch

from minidl.kernels import check
from minidl.kernels.check import Pair
from minidl.ops.indexing import getitem
from minidl.ops.lookup import Embedding
from minidl.ops.resample import pad
from minidl.ops.scatter_gather import Summed
from minidl.ops.shape import one_or_many, reshape, transpose
from minidl.tensors import Tensor

__all__ = ["fold", "unfold"]


class _Windows:
    """The windows of an image [H, W] with margins: how many, and the pixel of each position of each window."""

    def __init__(
        self, name: str, size: tuple[int, int], kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
    ) -> None:
        self.kernel = check.pair(name, "kernel_size", kernel_size, 1)
        self.dilation, self.stride = check.pair(name, "dilation", dilation, 1), check.pair(name, "stride", stride, 1)
        self.padding = check.pair(name, "padding", padding, 0)
        self.padded = [n + 2 * p for n, p in zip(size, self.padding, strict=True)]
        extents = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        self.counts = [(n - e) // s + 1 for n, e, s in zip(self.padded, extents, self.stride, strict=True)]
        if min(self.counts) < 1:
            raise ValueError(f"{name}: an image of {list(size)} with margins {self.padding} has no window of {extents}")

    def pixels(self, device: torch.device) -> torch.Tensor:
        """Return the number of each pixel, [kernel, windows] in one dimension, int64."""
        rows, columns = (
            torch.arange(k, device=device)[:, None] * d + torch.arange(n, device=device) * s
            for k, d, n, s in zip(self.kernel, self.dilation, self.counts, self.stride, strict=True)
        )
        return (rows[:, None, :, None] * self.padded[1] + columns[None, :, None, :]).reshape(-1)


@one_or_many(4)
def unfold(input: Tensor, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1) -> Tensor:
    """Return the windows of images as columns: [N, C, H, W] -> [N, C kernel_size, windows], or without N.

    Raises ValueError for other shapes, sizes below 1, or an image smaller than the window; TypeError for integers.
    """
    check.floating("unfold", input=input.data)
    if input.ndim != 4:
        raise ValueError(f"unfold: input has shape {list(input.shape)}, expected [N, C, H, W] or [C, H, W]")
    N, C, H, W = input.shape
    at = _Windows("unfold", (H, W), kernel_size, dilation, padding, stride)
    top, left = at.padding
    table = transpose(reshape(pad(input, (left, left, top, top)), N * C, math.prod(at.padded)), 0, 1)
    columns = Embedding.apply(at.pixels(input.device), table, -1)
    return reshape(transpose(columns, 0, 1), N, C * math.prod(at.kernel), math.prod(at.counts))


@one_or_many(3)
def fold(
    input: Tensor, output_size: Pair, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1
) -> Tensor:
    """Return images with the sums of all windows that contain a pixel: [N, C kernel_size, windows] -> [N, C, H, W], or
    without N. Sums have a fixed order.

    Raises ValueError for other shapes, sizes below 1, or an output_size smaller than the window; TypeError for
    integers.
    """
    check.floating("fold", input=input.data)
    H, W = check.pair("fold", "output_size", output_size, 1)
    at = _Windows("fold", (H, W), kernel_size, dilation, padding, stride)
    area, windows = math.prod(at.kernel), math.prod(at.counts)
    if input.ndim != 3 or input.shape[1] % area or input.shape[2] != windows:
        raise ValueError(
            f"fold: input has shape {list(input.shape)}, expected [N, C x {area}, {windows}], or without N"
        )
    N, C = input.shape[0], input.shape[1] // area
    rows = transpose(reshape(input, N * C, area * windows), 0, 1)
    image = Summed.apply(at.pixels(input.device), rows, math.prod(at.padded))
    image = reshape(transpose(image, 0, 1), N, C, *at.padded)
    top, left = at.padding
    return getitem(image, (slice(None), slice(None), slice(top, top + H), slice(left, left + W)))
