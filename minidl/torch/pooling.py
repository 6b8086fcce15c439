"""Pools of images and volumes as torch operators. A pool of volumes is one of slices, then one along the depth."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import pool as kernels
from minidl.kernels.check import numbers
from minidl.kernels.pool import Pair
from minidl.ops.shape import one_or_many
from minidl.torch.registry import accumulator, last, may_want, operator, save_linear

SETTINGS = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"


def _pooled(x: Any, settings: Any) -> list[Any]:
    """Return the shape of a result; sizes may be symbolic."""
    kernel, stride, padding, dilation, ceil_mode = settings
    result = list(x.shape[:2])
    for axis, size in enumerate(x.shape[2:]):
        reach, step = (kernel[axis] - 1) * dilation[axis] + 1, stride[axis]
        count = (size + 2 * padding[axis] - reach + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= size + padding[axis]:
            count -= 1
        result.append(count)
    return result


def _fake(shape: Any, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a result in the memory order that the kernels choose for `like`."""
    if kernels.planes(like) is None:
        return last(shape, like, dtype)
    return like.new_empty(shape, dtype=dtype or like.dtype)


def _fake_max(x: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *settings, keep = more
    kernel = settings[0]
    dtype = torch.int8 if kernel[0] * kernel[1] <= 127 else torch.int32
    shape = _pooled(x, settings)
    return _fake(shape, x), _fake(shape, x, dtype) if keep else x.new_empty(0, dtype=dtype)


def _save_max(ctx: Any, inputs: Any, output: Any) -> None:
    x, *ctx.settings, keep = inputs
    if not keep:
        raise ValueError("minidl::max_pool2d: its gradient needs keep=True")
    ctx.mark_non_differentiable(output[1])
    ctx.size = x.shape[2:]
    ctx.save_for_backward(output[1])


def _max_gradients(ctx: Any, dy: torch.Tensor, _: Any) -> Any:
    (indices,) = ctx.saved_tensors
    return max_pool2d_backward(dy, indices, list(ctx.size), *ctx.settings), *[None] * 6


@operator(
    f"max_pool2d(Tensor x, {SETTINGS}, bool keep) -> (Tensor, Tensor)", _fake_max, save=_save_max,
    backward=_max_gradients, replay=True,
)  # fmt: skip
def _max_pool2d(x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *settings, keep = more
    at = kernels.windows("max_pool2d", kernels.checked("max_pool2d", x), *settings)
    y, indices = kernels.max_pool2d(x, at, keep)
    dtype = torch.int8 if settings[0][0] * settings[0][1] <= 127 else torch.int32
    return y, x.new_empty(0, dtype=dtype) if indices is None else indices


@operator(
    f"max_pool2d_backward(Tensor dy, Tensor places, SymInt[] size, {SETTINGS}) -> Tensor",
    lambda dy, indices, size, *_: _fake([*dy.shape[:2], *size], indices, dy.dtype),
    replay=True,
)
def max_pool2d_backward(dy: torch.Tensor, indices: torch.Tensor, size: list[int], *settings: Any) -> torch.Tensor:
    at = kernels.windows("max_pool2d", (size[0], size[1]), *settings)
    return kernels.max_pool2d_grad(dy, indices, at, contiguous=kernels.planes(indices) is not None)


def _fake_avg(x: Any, size: Any, output: Any, *more: Any) -> torch.Tensor:
    shape = [*x.shape[:2], *(size or output or _pooled(x, (*more[:3], (1, 1), more[3]))[2:])]
    return last(shape, x) if size else _fake(shape, x)


def _avg_gradients(ctx: Any, dy: torch.Tensor) -> Any:
    return _avg_pool2d(dy, ctx.size, *ctx.settings), *[None] * 8


@operator(
    "avg_pool2d(Tensor x, SymInt[] size, SymInt[] output, int[] kernel, int[] stride, int[] padding, bool ceil_mode, "
    "bool count_include_pad, int? divisor) -> Tensor",
    _fake_avg, save=save_linear, backward=_avg_gradients, replay=True,
)  # fmt: skip
def _avg_pool2d(x: torch.Tensor, size: Any, output: Any, kernel: Any, *more: Any) -> torch.Tensor:
    """Without a kernel, windows divide the image evenly."""
    stride, padding, ceil_mode, padded, divisor = more
    op, image = "avg_pool2d", (*(size or kernels.checked("avg_pool2d", x)),)
    if kernel:
        at = kernels.windows(op, image, kernel, stride, padding, 1, ceil_mode, divisor, padded)
    else:
        at = kernels.adaptive_windows(op, image, tuple(output))
    return (kernels.avg_pool2d_grad if size else kernels.avg_pool2d)(x, at)


def _settings(op: str, axes: int, kernel: Pair, stride: Any, padding: Pair, dilation: Pair = 1) -> list[Any]:
    """Return kernel, stride, padding and dilation, for each axis."""
    sizes = numbers(op, "kernel_size", kernel, 1, axes)
    steps = numbers(op, "stride", sizes if stride is None or stride == () else stride, 1, axes)
    margins, dilations = numbers(op, "padding", padding, 0, axes), numbers(op, "dilation", dilation, 1, axes)
    return [sizes, steps, margins, dilations]


@one_or_many(4)
def max_pool2d(
    input: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.max_pool2d. The result of a contiguous x is contiguous, else channels-last.

    Raises ValueError for return_indices.
    """
    if return_indices:
        raise ValueError("max_pool2d: return_indices is not supported; call torch.nn.functional.max_pool2d")
    settings = _settings("max_pool2d", 2, kernel_size, stride, padding, dilation)
    y: torch.Tensor = _max_pool2d(input, *settings, ceil_mode, may_want(input))[0]
    return y


@one_or_many(4)
def avg_pool2d(
    input: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.avg_pool2d. The result of a contiguous x is contiguous, else channels-last."""
    settings = _settings("avg_pool2d", 2, kernel_size, stride, padding)[:3]
    y: torch.Tensor = _avg_pool2d(input, [], [], *settings, ceil_mode, count_include_pad, divisor_override)
    return y


@one_or_many(4)
def adaptive_avg_pool2d(input: torch.Tensor, output_size: int | tuple[int | None, int | None]) -> torch.Tensor:
    """torch.nn.functional.adaptive_avg_pool2d. The result of a contiguous x is contiguous, else channels-last."""
    size = kernels.checked("adaptive_avg_pool2d", input)
    sizes = output_size if isinstance(output_size, list | tuple) else (output_size, output_size)
    output = [extent if requested is None else requested for extent, requested in zip(size, sizes, strict=True)]
    y: torch.Tensor = _avg_pool2d(input, [], output, [], [], [], False, True, None)
    return y


def _of_volumes(op: str, pool: Any, x: torch.Tensor, plane: Any, depth: Any) -> Any:
    """Return the pool of volumes, by the arguments of a pool of slices, and of columns [D, OH OW]."""
    kernels.checked(op, x, "N, C, D, H, W")
    lead, in_order = x.shape[:2], torch._C._are_functorch_transforms_active() or x.is_contiguous()
    x = x.flatten(0, 1).unsqueeze(1) if in_order else x.contiguous(memory_format=torch.channels_last_3d)
    slices = x.movedim(2, 1).flatten(0, 1)
    y = pool(slices, *plane)
    columns = pool(y.unflatten(0, (-1, x.shape[2])).movedim(1, 2).flatten(3), *depth)
    volumes = columns.unflatten(3, y.shape[2:])
    return volumes.flatten(0, 1).unflatten(0, lead) if in_order else volumes


def _split(settings: list[Any]) -> tuple[Any, Any]:
    """Return settings of slices, and along the depth."""
    return [each[1:] for each in settings], [(each[0], int(i != 2)) for i, each in enumerate(settings)]


@one_or_many(5)
def max_pool3d(
    input: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """torch.nn.functional.max_pool3d, as `max_pool2d`."""
    plane, depth = _split(_settings("max_pool3d", 3, kernel_size, stride, padding, dilation))
    more = ceil_mode, return_indices
    return _of_volumes("max_pool3d", max_pool2d, input, (*plane, *more), (*depth, *more))


@one_or_many(5)
def avg_pool3d(
    input: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    """torch.nn.functional.avg_pool3d, as `avg_pool2d`; 16-bit values are cast to float32."""
    plane, depth = _split(_settings("avg_pool3d", 3, kernel_size, stride, padding)[:3])
    more = ceil_mode, count_include_pad
    plane, depth = (*plane, *more, divisor_override), (*depth, *more, None if divisor_override is None else 1)
    wide = input.to(accumulator(input.dtype))  # the means of slices are not rounded
    return _of_volumes("avg_pool3d", avg_pool2d, wide, plane, depth).to(input.dtype)


@one_or_many(5)
def adaptive_avg_pool3d(input: torch.Tensor, output_size: int | tuple[int | None, int | None, int | None]) -> Any:
    """torch.nn.functional.adaptive_avg_pool3d, as `adaptive_avg_pool2d`; 16-bit values are cast to float32."""
    depth, *plane = output_size if isinstance(output_size, list | tuple) else (output_size,) * 3
    wide = input.to(accumulator(input.dtype))
    return _of_volumes("adaptive_avg_pool3d", adaptive_avg_pool2d, wide, [plane], [(depth, None)]).to(input.dtype)
