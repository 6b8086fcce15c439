"""Images enlarged, shrunk, padded and shuffled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import check, memory_layout
from minidl.kernels import resample as kernels
from minidl.kernels.resample import Taps
from minidl.ops.pool import adaptive_avg_pool1d, adaptive_avg_pool2d
from minidl.ops.pool_volume import adaptive_avg_pool3d
from minidl.ops.shape import contiguous, permute, reshape
from minidl.tensors import Tensor

__all__ = ["interpolate", "pad", "pixel_shuffle", "pixel_unshuffle"]

# The mode of interpolation, and the mean over areas, by the number of dimensions of the input.
LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
AREA: dict[int, Callable[..., Tensor]] = {3: adaptive_avg_pool1d, 4: adaptive_avg_pool2d, 5: adaptive_avg_pool3d}
Sizes = int | float | Sequence[int] | Sequence[float] | None


@linear(lambda ctx, x: Resample.apply(x, *ctx.taps))
class Resample(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Taps, columns: Taps, fill: float = 0.0) -> torch.Tensor:
        ctx.taps, ctx.last = (rows, columns), memory_layout.channels_last(x)
        return kernels.resample(x, rows, columns, fill)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        rows, columns = (taps.back for taps in ctx.taps)
        # Of one pixel both orders are the same, and the gradient's says nothing.
        return kernels.resample(dy, rows, columns, last=ctx.last), *(None for _ in ctx.needs[1:])


def interpolate(
    input: Tensor,
    size: Sizes = None,
    scale_factor: Sizes = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Return images in another size, by the "nearest" neighbour ("nearest-exact" uses pixel centres) or by
    interpolation:
    "linear", "bilinear" or "trilinear" for 3, 4 or 5 dimensions, "bicubic" for [N, C, H, W], or "area", the mean over
    the area of a pixel. Pixel positions are torch's.

    Shapes: [N, C, L], [N, C, H, W] or [N, C, D, H, W] -> [N, C, *size], or sizes times scale_factor rounded down.
    Raises ValueError for another mode or number of dimensions, for both or neither of size and scale_factor, and for
    antialias, which is not supported; TypeError for integers.
    """
    options = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    y: Tensor = resampled(AREA, _along, input, *options)
    return y


def resampled(
    area: Any, resample: Callable[..., Any], input: Any, size: Sizes, scale_factor: Sizes, mode: str,
    align_corners: bool | None, recompute_scale_factor: bool | None, antialias: bool,
) -> Any:  # fmt: skip
    """Return `interpolate` of a Tensor or torch's tensor, by `resample(image, rows, columns)` and the means `area`."""
    check.floating("interpolate", input=input)
    simple = "nearest", "nearest-exact", "area"
    if mode not in (*simple, *LINEAR.values(), "bicubic"):
        raise ValueError(
            f"interpolate: unknown mode {mode!r}; known: {', '.join((*simple, *LINEAR.values()))}, bicubic"
        )
    curved = mode not in simple
    if not 3 <= input.ndim <= 5 or (curved and mode not in (LINEAR[input.ndim], "bicubic" if input.ndim == 4 else "")):
        raise ValueError(f"interpolate: input of shape {list(input.shape)} does not fit mode {mode!r}")
    if antialias:
        raise ValueError("interpolate: antialias is not supported; leave it out, or use avg_pool2d")
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give one of size and scale_factor")
    if not curved and align_corners is not None:
        raise ValueError('interpolate: align_corners is for mode "bilinear" and its like')
    N, C, *old = input.shape
    scales: tuple[float | None, ...] = (None,) * len(old)
    if scale_factor is None:
        new = tuple(check.integer("interpolate", "size", n) for n in _each(size, len(old)))
    else:
        factors = _each(scale_factor, len(old))
        new = tuple(math.floor(float(n) * s) for n, s in zip(old, factors, strict=True))
        scales = scales if recompute_scale_factor else factors
    if min(*new, *old) < 1:
        raise ValueError(f"interpolate: sizes must be 1 or more, got {old} to {list(new)}")
    if mode == "area":
        return area[input.ndim](input, new)
    flag = bool(align_corners) if curved else mode == "nearest-exact"
    axes = [(mode, n, o, s, flag) for n, o, s in zip(old, new, scales, strict=True)]
    if len(old) == 2:
        return resample(input, *axes)
    one = mode, 1, 1, None, flag
    if len(old) == 1:
        return _planes(resample, input, (N * C, 1, *old, 1), one, axes[0], (N, C, *new))
    y = _planes(resample, input, (N * C * old[0], *old[1:], 1), axes[1], axes[2], (N, C, old[0], *new[1:]))
    return _planes(resample, y, (N * C, old[0], 1, new[1] * new[2]), axes[0], one, (N, C, *new))


def _along(x: Tensor, *axes: Any) -> Tensor:
    return Resample.apply(x, *(kernels.taps_of(*axis) for axis in axes))


def _planes(resample: Callable[..., Any], x: Any, planes: Any, rows: Any, columns: Any, shape: Any, *fill: Any) -> Any:
    """Return x as planes [N, rows, columns, inner], resampled along the middle two, in another shape."""
    y = resample(x.reshape(*planes).permute(0, 3, 1, 2), rows, columns, *fill)
    return y.permute(0, 2, 3, 1).reshape(*shape)


def _each(value: Any, count: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, list | tuple | torch.Size) else (value,) * count
    if len(values) != count:
        raise ValueError(f"interpolate: got {value!r}, expected one number or {count}")
    return values


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Return input with margins along its last dimensions: (before, after) of the last, then of the one before it, and
    so on.

    mode "constant" makes margins of `value` (0), "reflect" mirrors the inside at the edge, "replicate" repeats the
    edge, "circular" goes on with the other end. Negative margins cut. Raises ValueError for another mode, an odd
    number of margins or too many, and for margins wider than what they repeat or that leave nothing to repeat;
    TypeError for integers in other modes than "constant", and for a fraction as their value.
    """
    if mode != "constant":
        check.floating("pad", input=input.data)
    if mode not in ("constant", "reflect", "replicate", "circular"):
        raise ValueError(f'pad: unknown mode {mode!r}; known: "constant", "reflect", "replicate", "circular"')
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise ValueError(f"pad: {list(pad)} does not fit {list(input.shape)}; expected two margins for each dimension")
    most = {"constant": math.inf, "reflect": -1, "replicate": math.inf, "circular": 0}[mode]
    x, fill = input, float(value or 0.0) if mode == "constant" else 0.0
    margins = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    for at, (before, after) in enumerate(margins):
        size = input.shape[-1 - at]
        if max(before, after) > size + most or size + before + after < 0 or (mode != "constant" and size == 0):
            raise ValueError(f"pad: margins {before} and {after} do not fit a size of {size} with mode {mode!r}")
        if mode == "circular" and size + min(before, 0) + min(after, 0) <= 0:
            raise ValueError(f"pad: margins {before} and {after} leave nothing of a size of {size} to go on with")
    if not input.dtype.is_floating_point:
        if isinstance(value, float) and not value.is_integer():
            raise TypeError(f"pad: value is {value}, expected a whole number for {input.dtype}; convert it with .to()")
        return Tensor(torch.nn.functional.pad(input.data, tuple(pad), value=value))
    # Two dimensions at a time, the last two first; those before them are planes, those behind lie inside.
    for at in range(0, len(margins), 2):
        (columns, rows), shape = (*margins[at:], (0, 0))[:2], list(x.shape)
        end = len(shape) - at
        H, W = shape[end - 2] if end > 1 else 1, shape[end - 1]
        taps = kernels.padded(H, *rows, mode), kernels.padded(W, *columns, mode)
        if x.ndim == 4 and at == 0:
            x = Resample.apply(x, *taps, fill)
        elif (*rows, *columns) != (0, 0, 0, 0) or at == 0:
            first = shape[: max(end - 2, 0)]
            new = [*first, *([H + sum(rows)] if end > 1 else []), W + sum(columns), *shape[end:]]
            planes = math.prod(first), H, W, math.prod(shape[end:])
            x = _planes(Resample.apply, x, planes, *taps, new, fill)
    return contiguous(x, torch.channels_last) if x.ndim == 4 and memory_layout.channels_last(input.data) else x


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Return [N, C r^2, H, W] as [N, C, H r, W r] for r = upscale_factor. Raises ValueError where r^2 divides no
    channels."""
    r = check.integer("pixel_shuffle", "upscale_factor", upscale_factor)
    if input.ndim < 3 or r < 1 or input.shape[-3] % (r * r):
        raise ValueError(f"pixel_shuffle: input {list(input.shape)} has no multiple of {r * r} channels")
    *first, channels, H, W = input.shape
    C = channels // (r * r)
    if memory_layout.channels_last(input.data) and input.ndim == 4:
        x = reshape(permute(input, 0, 2, 3, 1), *first, H, W, C, r, r)
        return permute(reshape(permute(x, 0, 1, 4, 2, 5, 3), *first, H * r, W * r, C), 0, 3, 1, 2)
    x = reshape(input, math.prod(first), C, r, r, H, W)
    return reshape(permute(x, 0, 1, 4, 2, 5, 3), *first, C, H * r, W * r)


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Return [..., C, H r, W r] as [..., C r^2, H, W] for r = downscale_factor: what `pixel_shuffle` undoes."""
    r = downscale_factor
    if input.ndim < 3 or r < 1 or input.shape[-1] % r or input.shape[-2] % r:
        raise ValueError(f"pixel_unshuffle: input {list(input.shape)} is no image of a multiple of {r} pixels each way")
    *first, C, H, W = input.shape
    x = reshape(input, math.prod(first), C, H // r, r, W // r, r)
    return reshape(permute(x, 0, 1, 3, 5, 2, 4), *first, C * r * r, H // r, W // r)
