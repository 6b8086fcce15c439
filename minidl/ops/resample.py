"""Images enlarged, shrunk, padded and shuffled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import resample as kernels
from minidl.kernels.resample import Taps
from minidl.ops.view import permute, reshape
from minidl.runtime import check, order
from minidl.tensors import Tensor

__all__ = ["interpolate", "pad", "pixel_shuffle"]

Sizes = int | float | Sequence[int] | Sequence[float] | None


class Resample(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Taps, columns: Taps) -> torch.Tensor:
        ctx.taps = rows, columns
        return kernels.resample(x, rows, columns)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return kernels.resample(dy, *(taps.back() for taps in ctx.taps)), None, None


def interpolate(
    input: Tensor,
    size: Sizes = None,
    scale_factor: Sizes = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Images in another size, by "nearest" neighbour or "bilinear" interpolation, as torch places their pixels.

    Shapes: [N, C, H, W] -> [N, C, *size], or sizes times scale_factor rounded down.
    Raises ValueError for another mode or number of dimensions, for both or neither of size and scale_factor, and for
    antialias, which is not built; TypeError for integers.
    """
    check.floating("interpolate", input=input.data)
    if mode not in ("nearest", "bilinear"):
        raise ValueError(f'interpolate: mode {mode!r} is not built; use "nearest" or "bilinear"')
    if input.ndim != 4:
        raise ValueError(f"interpolate: input has shape {list(input.shape)}, expected [N, C, H, W]")
    if antialias:
        raise ValueError("interpolate: antialias is not built; leave it out, or use avg_pool2d")
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give one of size and scale_factor")
    if mode == "nearest" and align_corners is not None:
        raise ValueError('interpolate: align_corners is for mode "bilinear"')
    scales: tuple[float | None, ...] = (None, None)
    sizes = _both(size)
    if scale_factor is not None:
        factors = _both(scale_factor)
        sizes = tuple(math.floor(float(n) * s) for n, s in zip(input.shape[2:], factors, strict=True))
        scales = (None, None) if recompute_scale_factor else factors
    if min(*sizes, *input.shape[2:]) < 1:
        raise ValueError(f"interpolate: sizes must be 1 or more, got {list(input.shape[2:])} to {list(sizes)}")
    how = kernels.nearest if mode == "nearest" else kernels.bilinear
    rest = () if mode == "nearest" else (bool(align_corners),)
    taps = (how(n, int(o), s, *rest) for n, o, s in zip(input.shape[2:], sizes, scales, strict=True))
    return Resample.apply(input, *taps)


def _both(value: Any) -> tuple[Any, ...]:
    given = tuple(value) if isinstance(value, list | tuple | torch.Size) else (value, value)
    if len(given) != 2:
        raise ValueError(f"interpolate: got {value!r}, expected one number or a pair")
    return given


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """input with margins along its last dimension (left, right), or its last two (left, right, top, bottom).

    mode "constant" makes margins of zeros, and negative ones cut; "reflect" mirrors the inside at the edge. Other
    modes, values and numbers of margins are not built: they raise ValueError, as does a margin too wide to mirror.
    """
    check.floating("pad", input=input.data)
    if mode not in ("constant", "reflect") or (value or 0) != 0:
        raise ValueError(f'pad: mode {mode!r} with value {value} is not built; use zeros, or mode="reflect"')
    if len(pad) not in (2, 4) or input.ndim < len(pad) // 2:
        raise ValueError(f"pad: {list(pad)} does not fit {list(input.shape)}; expected margins of the last one or two")
    margins = (*pad, 0, 0)[:4]
    H, W = (1, *input.shape)[-2:] if input.ndim == 1 else tuple(input.shape[-2:])
    for size, before, after in ((W, *margins[:2]), (H, *margins[2:])):
        if (mode == "reflect" and not 0 <= max(before, after) < size) or size + before + after < 0:
            raise ValueError(f"pad: margins {before} and {after} do not fit a size of {size} with mode {mode!r}")
        if mode == "reflect" and min(before, after) < 0:
            raise ValueError(f"pad: margins {before} and {after} are negative, which only mode='constant' takes")
    whole = input if input.ndim == 4 else reshape(input, 1, math.prod(input.shape[:-2]), H, W)
    reflect = mode == "reflect"
    rows, columns = (kernels.padded(n, a, b, reflect) for n, a, b in ((H, *margins[2:]), (W, *margins[:2])))
    y = Resample.apply(whole, rows, columns)
    if input.ndim == 4:
        return y
    return reshape(y, *input.shape[:-2], *([] if input.ndim == 1 else [y.shape[2]]), y.shape[3])


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """[N, C r^2, H, W] as [N, C, H r, W r] for r = upscale_factor. Raises ValueError where r^2 divides no channels."""
    r = upscale_factor
    if input.ndim < 3 or r < 1 or input.shape[-3] % (r * r):
        raise ValueError(f"pixel_shuffle: input {list(input.shape)} has no multiple of {r * r} channels")
    *first, channels, H, W = input.shape
    C = channels // (r * r)
    if order.channels_last(input.data) and input.ndim == 4:
        x = reshape(permute(input, 0, 2, 3, 1), *first, H, W, C, r, r)
        return permute(reshape(permute(x, 0, 1, 4, 2, 5, 3), *first, H * r, W * r, C), 0, 3, 1, 2)
    x = reshape(input, math.prod(first), C, r, r, H, W)
    return reshape(permute(x, 0, 1, 4, 2, 5, 3), *first, C, H * r, W * r)
