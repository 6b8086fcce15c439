"""Pools of images as torch operators."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import pool as kernels
from minidl.kernels.check import pair
from minidl.kernels.pool import Pair, Windows
from minidl.torch.registry import last, may_want, operator

SETTINGS = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"


def _windows(op: str, x: torch.Tensor, settings: Any, **more: Any) -> Windows:
    kernel, stride, padding, dilation, ceil_mode = settings
    return kernels.windows(op, (x.shape[2], x.shape[3]), kernel, stride, padding, dilation, ceil_mode, **more)


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


def _fake_max(x: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *settings, keep = more
    kernel = settings[0]
    dtype = torch.int8 if kernel[0] * kernel[1] <= 127 else torch.int32
    shape = _pooled(x, settings)
    return last(shape, x), last(shape, x, dtype) if keep else x.new_empty(0, dtype=dtype)


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
    kernels.checked("max_pool2d", x)
    y, indices = kernels.max_pool2d(x, _windows("max_pool2d", x, settings), keep)
    dtype = torch.int8 if settings[0][0] * settings[0][1] <= 127 else torch.int32
    return y, x.new_empty(0, dtype=dtype) if indices is None else indices


@operator(
    f"max_pool2d_backward(Tensor dy, Tensor places, SymInt[] size, {SETTINGS}) -> Tensor",
    lambda dy, indices, size, *_: _fake_sized(dy, size),
    replay=True,
)
def max_pool2d_backward(dy: torch.Tensor, indices: torch.Tensor, size: list[int], *settings: Any) -> torch.Tensor:
    image = _shape_of(dy, size)
    return kernels.max_pool2d_grad(dy, indices, _windows("max_pool2d", image, settings))


def _shape_of(dy: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Return a tensor of the image's shape without memory."""
    return dy.new_empty(()).expand(*dy.shape[:2], *size)


def _fake_avg(x: Any, *more: Any) -> torch.Tensor:
    kernel, stride, padding, ceil_mode, *_ = more
    return last(_pooled(x, (kernel, stride, padding, (1, 1), ceil_mode)), x)


def _save_avg(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.size, ctx.settings = inputs[0].shape[2:], inputs[1:]


def _avg_gradients(ctx: Any, dy: torch.Tensor) -> Any:
    return avg_pool2d_backward(dy, list(ctx.size), *ctx.settings), *[None] * 6


_AVERAGE = "int[] kernel, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor"


def _means(x: torch.Tensor, settings: Any) -> Windows:
    kernel, stride, padding, ceil_mode, padded, divisor = settings
    return _windows("avg_pool2d", x, (kernel, stride, padding, 1, ceil_mode), divisor=divisor, padded=padded)


@operator(
    f"avg_pool2d(Tensor x, {_AVERAGE}) -> Tensor", _fake_avg, save=_save_avg, backward=_avg_gradients, replay=True
)
def _avg_pool2d(x: torch.Tensor, *settings: Any) -> torch.Tensor:
    kernels.checked("avg_pool2d", x)
    return kernels.avg_pool2d(x, _means(x, settings))


def _fake_sized(dy: Any, size: Any, *_: Any) -> torch.Tensor:
    return last([*dy.shape[:2], *size], dy)


@operator(f"avg_pool2d_backward(Tensor dy, SymInt[] size, {_AVERAGE}) -> Tensor", _fake_sized, replay=True)
def avg_pool2d_backward(dy: torch.Tensor, size: list[int], *settings: Any) -> torch.Tensor:
    return kernels.avg_pool2d_grad(dy, _means(_shape_of(dy, size), settings))


def _save_adaptive(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.size = inputs[0].shape[2:]


def _adaptive_gradients(ctx: Any, dy: torch.Tensor) -> Any:
    return adaptive_avg_pool2d_backward(dy, list(ctx.size)), None


@operator(
    "adaptive_avg_pool2d(Tensor x, SymInt[] size) -> Tensor", _fake_sized, save=_save_adaptive,
    backward=_adaptive_gradients, replay=True,
)  # fmt: skip
def _adaptive_avg_pool2d(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    image = kernels.checked("adaptive_avg_pool2d", x)
    return kernels.avg_pool2d(x, kernels.adaptive_windows("adaptive_avg_pool2d", image, (size[0], size[1])))


@operator("adaptive_avg_pool2d_backward(Tensor dy, SymInt[] size) -> Tensor", _fake_sized, replay=True)
def adaptive_avg_pool2d_backward(dy: torch.Tensor, size: list[int]) -> torch.Tensor:
    at = kernels.adaptive_windows("adaptive_avg_pool2d", (size[0], size[1]), (dy.shape[2], dy.shape[3]))
    return kernels.avg_pool2d_grad(dy, at)


def max_pool2d(
    input: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.max_pool2d. The result is channels-last. Raises ValueError for return_indices."""
    op = "max_pool2d"
    if return_indices:
        raise ValueError(f"{op}: return_indices is not supported; call torch.nn.functional.{op}")
    kernel = pair(op, "kernel_size", kernel_size, 1)
    step = kernel if stride is None else pair(op, "stride", stride, 1)
    settings = list(kernel), list(step), list(pair(op, "padding", padding, 0)), list(pair(op, "dilation", dilation, 1))
    keep = may_want(input)
    one = input.dim() == 3
    y = _max_pool2d(input.unsqueeze(0) if one else input, *settings, ceil_mode, keep)[0]
    return y.squeeze(0) if one else y


def avg_pool2d(
    input: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.avg_pool2d. The result is channels-last."""
    op = "avg_pool2d"
    kernel = pair(op, "kernel_size", kernel_size, 1)
    step = kernel if stride is None else pair(op, "stride", stride, 1)
    settings = list(kernel), list(step), list(pair(op, "padding", padding, 0)), ceil_mode, count_include_pad
    one = input.dim() == 3
    y = _avg_pool2d(input.unsqueeze(0) if one else input, *settings, divisor_override)
    return y.squeeze(0) if one else y


def adaptive_avg_pool2d(input: torch.Tensor, output_size: int | tuple[int | None, int | None]) -> torch.Tensor:
    """torch.nn.functional.adaptive_avg_pool2d. The result is channels-last."""
    sizes = tuple(output_size) if isinstance(output_size, list | tuple) else (output_size, output_size)
    output_sizes = [
        size if requested is None else requested for size, requested in zip(input.shape[-2:], sizes, strict=True)
    ]
    one = input.dim() == 3
    y = _adaptive_avg_pool2d(input.unsqueeze(0) if one else input, output_sizes)
    return y.squeeze(0) if one else y
