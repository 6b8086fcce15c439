"""Convolution of images, with bias and activation in the product's epilogue."""

from __future__ import annotations

import functools
from typing import Any

import torch

from minidl.autograd import Function, is_grad_enabled
from minidl.kernels import activation, bias_act, conv
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair, pair
from minidl.kernels.conv.geometry import Geometry
from minidl.ops import pool as pools
from minidl.tensor import Tensor

__all__ = ["conv2d"]


class Conv2d(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        geometry: Geometry,
        act: Activation,
        form: str | None,
    ) -> torch.Tensor:
        name, _ = activation.parse(act)
        ctx.act, ctx.geometry, ctx.from_output = act, geometry, name in activation.FROM_OUTPUT
        ctx.form = form if form == "fft" and geometry.h.stride == geometry.w.stride == 1 else None
        keep_z = any(ctx.needs) and not ctx.from_output
        y, z = conv.forward(x, weight, geometry, bias, act, preactivation=keep_z, form=form)
        if any(ctx.needs):
            ctx.save(x, weight, z if keep_z else y if name is not None else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, kept = ctx.saved
        dy = conv.channels_last(dy)
        kept = dy if kept is None else conv.channels_last(kept)
        dz, db = bias_act.bias_act_grad(dy, kept, None, ctx.act, ctx.from_output, want_bias=ctx.needs[2])
        assert dz is not None
        dz = dz.permute(0, 3, 1, 2)
        dx = conv.grad_input(dz, weight, ctx.geometry, form=ctx.form) if ctx.needs[0] else None
        dw = conv.grad_weight(x, dz, ctx.geometry) if ctx.needs[1] else None
        return dx, dw, db, None, None, None


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    act: Activation = None,
    *,
    scale: Tensor | None = None,
    pool: str | None = None,
    form: str | None = None,
) -> Tensor:
    """act(scale * conv(x, weight) + bias), the cross-correlation that deep learning calls convolution, in one kernel.

    Shapes: x [N, C, H, W], weight [M, C / groups, R, S], bias and scale [M] -> [N, M, OH, OW] with
    OH = (H + 2 padding - dilation (R - 1) - 1) // stride + 1, in x's dtype. Memory is channels-last inside: x in
    torch.channels_last is used as it is, other layouts are copied once, and the result is channels-last.

    stride, padding, dilation: a number or a (height, width) pair; padding also "valid" (none) or "same" (as much as
    keeps the size, the odd pixel at the end; for stride 1). act: as in `linear`. Without a gradient there may be a
    scale per output channel (a folded batch norm; for float16 and bfloat16 it and the bias may be float32) and a pool
    "max" or "avg" over 2x2 windows after the activation, in the same kernel; with a gradient a pool is an operation of
    its own.

    What is not finite in x or weight may make neighbours in the same rows NaN: with few channels the product has zeros
    between the weights.

    form: None takes the quickest direct form for the shape. "fft" convolves by Fourier transforms, in float32 with 64
    channels or more and kernels of 5x5 and more 2 to 8 times quicker (H200); its error is small beside the largest
    values of the image and not beside each result, and what is not finite spreads over a tile of pixels. For stride and
    dilation 1.

    Raises ValueError for shapes that do not fit, a kernel larger than the padded image, or a scale with a gradient;
    TypeError for different dtypes, and for settings that are no whole numbers. Source: Dumoulin and Visin, arXiv
    1603.07285.
    """
    geometry = _geometry_of(x, weight, stride, padding, dilation, groups)
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and list(vector.shape) != [weight.shape[0]]:
            raise ValueError(f"conv2d: {name} has shape {list(vector.shape)}, expected [{weight.shape[0]}]")
    if pool not in (None, "max", "avg"):
        raise ValueError(f'conv2d: pool is {pool!r}, expected "max", "avg" or None')
    if pool is not None and min(geometry.h.output, geometry.w.output) < 2:
        raise ValueError(
            f"conv2d: a 2x2 pool needs two rows and columns, got {geometry.h.output} x {geometry.w.output}"
        )
    operands = [t for t in (x, weight, bias, scale) if t is not None]
    if not (is_grad_enabled() and any(t.requires_grad for t in operands)):
        y, _ = conv.forward(
            x.data, weight.data, geometry, None if bias is None else bias.data, act,
            scale=None if scale is None else scale.data, pool=pool, form=form,
        )  # fmt: skip
        return Tensor(y)
    if scale is not None:
        raise ValueError("conv2d: a scale is for inference; call under no_grad(), or use a batch norm")
    y = Conv2d.apply(x, weight, bias, geometry, act, form)
    return y if pool is None else _pooled(y, pool)


def _pooled(y: Tensor, pool: str) -> Tensor:
    return pools.max_pool2d(y, 2) if pool == "max" else pools.avg_pool2d(y, 2)


def _geometry_of(x: Tensor, weight: Tensor, stride: Pair, padding: Pair | str, dilation: Pair, groups: int) -> Geometry:
    """How x [N, C, H, W] and weight [M, C / groups, R, S] meet. Raises ValueError where they do not fit."""
    if x.ndim != 4 or weight.ndim != 4:
        raise ValueError(
            f"conv2d: x has shape {list(x.shape)}, weight {list(weight.shape)}; expected x [N, C, H, W] and "
            "weight [M, C / groups, R, S]"
        )
    # type, because 1.0 and True are found in a cache under 1.
    if type(groups) is not int or groups < 1:
        raise ValueError(f"conv2d: groups is {groups!r}, expected a whole number of 1 or more")
    channels, M = x.shape[1], weight.shape[0]
    if channels != weight.shape[1] * groups or M % groups:
        raise ValueError(
            f"conv2d: x has {channels} channels, weight {list(weight.shape)}, groups {groups}; expected x's channels "
            f"to be groups * {weight.shape[1]} and weight's {M} outputs a multiple of groups"
        )
    size, kernel = (x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3])
    if 0 in kernel or 0 in size:
        raise ValueError(f"conv2d: an image of {size} with a kernel of {kernel}: neither may have a size of 0")
    strides, dilations = pair("conv2d", "stride", stride, 1), pair("conv2d", "dilation", dilation, 1)
    return _geometry(size, kernel, strides, _padding(padding, kernel, strides, dilations), dilations, groups)


_geometry = functools.lru_cache(maxsize=4096)(Geometry.of)


def check_settings(kernel: Any, stride: Any, padding: Any, dilation: Any, pool: Any) -> tuple[int, int]:
    """The (height, width) of a kernel. Raises ValueError for settings that no image and weight can go with, TypeError
    for what are no whole numbers."""
    size = pair("conv2d", "kernel_size", kernel, 1)
    _padding(padding, size, pair("conv2d", "stride", stride, 1), pair("conv2d", "dilation", dilation, 1))
    if pool not in (None, "max", "avg"):
        raise ValueError(f'conv2d: pool is {pool!r}, expected "max", "avg" or None')
    return size


def _padding(
    padding: Pair | str, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right))."""
    if isinstance(padding, str):
        if padding == "valid":
            return (0, 0), (0, 0)
        if padding != "same":
            raise ValueError(f'conv2d: padding is {padding!r}, expected "same", "valid", a whole number or a pair')
        if stride != (1, 1):
            raise ValueError(f'conv2d: padding "same" is for stride 1, got stride {stride}')
        (a, b), (c, d) = (
            ((k - 1) * s // 2, (k - 1) * s - (k - 1) * s // 2) for k, s in zip(kernel, dilation, strict=True)
        )
        return (a, b), (c, d)
    h, w = pair("conv2d", "padding", padding, 0)
    return (h, h), (w, w)
