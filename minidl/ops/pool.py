"""Pooling of images [N, C, H, W], or of one [C, H, W], and of sequences [N, C, L] as images of one row.

Results of contiguous images are contiguous; all others are channels-last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import pool as kernels
from minidl.kernels.pool import Pair, Windows
from minidl.ops.scatter_gather import gather
from minidl.ops.shape import one_or_many, reshape, squeeze, to, unsqueeze
from minidl.tensors import Tensor

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "avg_pool1d",
    "avg_pool2d", "max_pool1d", "max_pool2d",
]  # fmt: skip


def _at_maxima(ctx: Any, x: Tensor) -> Tensor:
    """Return x at the positions of the maxima, in the result's dtype."""
    (taps,) = ctx.saved
    at = Tensor(positions(taps, ctx.at).flatten(2))
    return to(gather(reshape(x, *x.shape[:2], -1), 2, at).reshape(taps.shape), ctx.dtypes[1])


@linear(_at_maxima)
class MaxPool2d(Function):
    """The maxima; with `indices` also their positions in the image: row times W plus column, int64."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Windows, indices: bool, dtype: torch.dtype | None = None) -> Any:
        y, taps = kernels.max_pool2d(x, at, indices or ctx.needs[0], dtype)
        ctx.save(taps)
        ctx.at, ctx.dtypes, ctx.contiguous = at, (x.dtype, y.dtype), ctx.needs[0] and kernels.planes(x) is not None
        if not indices:
            return y
        assert taps is not None
        return y, positions(taps, at)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: None = None) -> Any:
        (taps,) = ctx.saved
        return kernels.max_pool2d_grad(dy, taps, ctx.at, ctx.dtypes[0], ctx.contiguous), *(None for _ in ctx.needs[1:])


def positions(taps: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return positions in the image, from positions in windows [N, C, OH, OW]."""
    tap, columns = taps.long(), at.kernel[1]
    first = [
        torch.arange(n, device=tap.device) * (size if at.adaptive else step) // (n if at.adaptive else 1) - pad
        for n, size, step, pad in zip(at.output, at.size, at.stride, at.padding, strict=True)
    ]
    rows = first[0][:, None] + tap // columns * at.dilation[0]
    return rows * at.size[1] + first[1] + tap % columns * at.dilation[1]


@linear(lambda ctx, x: AvgPool2d.apply(x, ctx.at, ctx.dtypes[1]))
class AvgPool2d(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Windows, dtype: torch.dtype | None = None) -> torch.Tensor:
        ctx.at, ctx.dtypes = at, (x.dtype, dtype or x.dtype)
        ctx.contiguous = ctx.needs[0] and kernels.planes(x) is not None
        return kernels.avg_pool2d(x, at, dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return kernels.avg_pool2d_grad(dy, ctx.at, ctx.dtypes[0], ctx.contiguous), *(None for _ in ctx.needs[1:])


@one_or_many(4)
def max_pool2d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Return the maximum of each window; NaN if any element is NaN. Padding is never the maximum.

    With return_indices (maxima, their positions in the image: row times W plus column, int64).

    Shapes: [N, C, H, W] -> [N, C, OH, OW], OH = (H + 2 padding - dilation (kernel_size - 1) - 1) / stride + 1, rounded
    down, or up with ceil_mode, where the last window may reach beyond the edge. stride None is kernel_size.
    The gradient goes to the first of equal maxima in row-major order.
    Raises ValueError for sizes below 1, padding above half of the kernel, or an image smaller than the window;
    TypeError for integers.
    """
    size = kernels.checked("max_pool2d", input.data)
    at = kernels.windows("max_pool2d", size, kernel_size, stride, padding, dilation, ceil_mode)
    return MaxPool2d.apply(input, at, return_indices)


@one_or_many(4)
def avg_pool2d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean of each window: the sum divided by divisor_override, or by the window's number of elements (with
    padding if count_include_pad).

    Shapes as `max_pool2d`. The part of a window beyond the padding (with ceil_mode) is not counted.
    Raises as `max_pool2d`, ValueError if divisor_override is 0, and TypeError if it is not a whole number.
    """
    size, divisor = kernels.checked("avg_pool2d", input.data), divisor_of("avg_pool2d", divisor_override)
    at = kernels.windows("avg_pool2d", size, kernel_size, stride, padding, 1, ceil_mode, divisor, count_include_pad)
    return AvgPool2d.apply(input, at)


def divisor_of(op: str, divisor: Any) -> int | None:
    """Return a divisor_override. Raises TypeError unless it is a whole number or None."""
    if divisor is None:
        return None
    if isinstance(divisor, bool) or not hasattr(divisor, "__index__"):
        raise TypeError(f"{op}: divisor_override is {divisor!r}, expected a whole number or None")
    return operator.index(divisor)


@one_or_many(4)
def adaptive_avg_pool2d(input: Tensor, output_size: int | tuple[int | None, int | None]) -> Tensor:
    """Return means over windows that divide the image evenly into output_size results (None: the size of the image).

    Shapes: [N, C, H, W] -> [N, C, *output_size]. Window o of O holds the pixels from floor(o H / O) up to
    ceil((o + 1) H / O). With output_size 1 the result is the mean of the image.
    Raises ValueError for an image without pixels or a negative size, TypeError for integers.
    """
    size = kernels.checked("adaptive_avg_pool2d", input.data)
    return AvgPool2d.apply(input, kernels.adaptive_windows("adaptive_avg_pool2d", size, output_size))


@one_or_many(4)
def adaptive_max_pool2d(
    input: Tensor, output_size: int | tuple[int | None, int | None], return_indices: bool = False
) -> Any:
    """Return maxima over the windows of `adaptive_avg_pool2d`; of equal ones the first has the gradient.

    return_indices as for `max_pool2d`. Raises as `adaptive_avg_pool2d`.
    """
    size = kernels.checked("adaptive_max_pool2d", input.data)
    at = kernels.adaptive_windows("adaptive_max_pool2d", size, output_size)
    if 0 not in at.output and not any(n % o for n, o in zip(size, at.output, strict=True)):
        return max_pool2d(input, at.kernel, return_indices=return_indices)  # windows that do not overlap
    return MaxPool2d.apply(input, at, return_indices)


@one_or_many(3)
def max_pool1d(
    input: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0, dilation: int = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Return `max_pool2d` of sequences: [N, C, L] -> [N, C, OL]."""
    sizes = (_of_rows(n, k) for n, k in ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1)))
    return _rows(max_pool2d, input, *sizes, ceil_mode, return_indices)


@one_or_many(3)
def avg_pool1d(
    input: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """Return `avg_pool2d` of sequences: [N, C, L] -> [N, C, OL]."""
    sizes = (_of_rows(n, k) for n, k in ((kernel_size, 1), (stride, 1), (padding, 0)))
    return _rows(avg_pool2d, input, *sizes, ceil_mode, count_include_pad)


@one_or_many(3)
def adaptive_avg_pool1d(input: Tensor, output_size: int) -> Tensor:
    """Return `adaptive_avg_pool2d` of sequences: [N, C, L] -> [N, C, output_size]."""
    return _rows(adaptive_avg_pool2d, input, (1, _one("adaptive_avg_pool1d", output_size)))


@one_or_many(3)
def adaptive_max_pool1d(input: Tensor, output_size: int, return_indices: bool = False) -> Any:
    """Return `adaptive_max_pool2d` of sequences: [N, C, L] -> [N, C, output_size]."""
    return _rows(adaptive_max_pool2d, input, (1, _one("adaptive_max_pool1d", output_size)), return_indices)


def _of_rows(size: Any, along: int) -> Any:
    """Return a size along sequences as one of images of one row; torch lets it be a tuple."""
    if isinstance(size, tuple | list):
        size = size[0] if len(size) == 1 else size or None
    return size if size is None else (along, size)


def _one(name: str, size: Any) -> Any:
    if isinstance(size, tuple | list) and len(size) != 1:
        raise ValueError(f"{name}: output_size is {size!r}, expected a whole number")
    return size[0] if isinstance(size, tuple | list) else size


def _rows(pool: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Return a pool of images for sequences [N, C, L], which are images of one row."""
    if x.ndim != 3:
        raise ValueError(f"{pool.__name__[:-2]}1d: input has shape {list(x.shape)}, expected [N, C, L]")
    y = pool(unsqueeze(x, 2), *arguments)
    return tuple(squeeze(each, 2) for each in y) if isinstance(y, tuple) else squeeze(y, 2)
