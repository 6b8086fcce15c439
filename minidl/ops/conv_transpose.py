"""Transposed convolution of images, with bias and activation in the product's epilogue."""

from __future__ import annotations

import functools
from typing import Any

import torch

from minidl.autograd import Function, is_grad_enabled
from minidl.kernels import activation, bias_act, conv
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair, pair
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.tensor import Tensor

__all__ = ["conv_transpose2d"]

OP = "conv_transpose2d"


class ConvTranspose2d(Function):
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
        keep_z = any(ctx.needs) and not ctx.from_output
        y, z = conv.transposed(x, weight, geometry, bias, act, preactivation=keep_z, form=form)
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
        dx = conv.forward(dz, weight, ctx.geometry)[0] if ctx.needs[0] else None
        dw = conv.grad_weight(dz, x, ctx.geometry) if ctx.needs[1] else None
        return dx, dw, db, None, None, None


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
    act: Activation = None,
    *,
    scale: Tensor | None = None,
    form: str | None = None,
) -> Tensor:
    """act(scale * conv_transpose(x, weight) + bias): the gradient that `conv2d` has for its input, as an operation.

    Every pixel of x adds weight times its value to a window of the result; windows are `stride` apart.

    Shapes: x [N, C, H, W], weight [C, M / groups, R, S], bias and scale [M] -> [N, M, OH, OW] with
    OH = (H - 1) stride - 2 padding + dilation (R - 1) + output_padding + 1, in x's dtype. Memory is channels-last
    inside: x in torch.channels_last is used as it is, other layouts are copied once, and the result is channels-last.

    stride, padding, output_padding, dilation: a number or a (height, width) pair. padding is cut off at every side,
    output_padding added at the lower and right ones, less of it than stride or than dilation. act: as in `linear`.
    Without a gradient there may be a scale per output channel (a folded batch norm; for float16 and bfloat16 it and the
    bias may be float32).

    What is not finite in x or weight may make neighbours NaN: in some forms the product has zeros between the weights.

    form: None takes the quickest form for the shape.

    Raises ValueError for shapes that do not fit, a result without pixels, or a scale with a gradient; TypeError for
    different dtypes. Source: Dumoulin and Visin, arXiv 1603.07285, chapter 4.
    """
    geometry = _geometry_of(x, weight, stride, padding, output_padding, groups, dilation)
    channels = weight.shape[1] * groups
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and list(vector.shape) != [channels]:
            raise ValueError(f"{OP}: {name} has shape {list(vector.shape)}, expected [{channels}]")
    operands = [t for t in (x, weight, bias, scale) if t is not None]
    if not (is_grad_enabled() and any(t.requires_grad for t in operands)):
        y, _ = conv.transposed(
            x.data, weight.data, geometry, None if bias is None else bias.data, act,
            scale=None if scale is None else scale.data, form=form,
        )  # fmt: skip
        return Tensor(y)
    if scale is not None:
        raise ValueError(f"{OP}: a scale is for inference; call under no_grad(), or use a batch norm")
    return ConvTranspose2d.apply(x, weight, bias, geometry, act, form)


def _geometry_of(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, output_padding: Pair, groups: int, dilation: Pair
) -> Geometry:
    """The convolution whose input's gradient the operation is. Raises ValueError where x and weight do not fit."""
    if x.ndim != 4 or weight.ndim != 4:
        raise ValueError(
            f"{OP}: x has shape {list(x.shape)}, weight {list(weight.shape)}; expected x [N, C, H, W] and "
            "weight [C, M / groups, R, S]"
        )
    # type, because 1.0 and True are found in a cache under 1.
    if type(groups) is not int or groups < 1:
        raise ValueError(f"{OP}: groups is {groups!r}, expected a whole number of 1 or more")
    if x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise ValueError(
            f"{OP}: x has {x.shape[1]} channels, weight {list(weight.shape)}, groups {groups}; expected x's channels "
            f"to be weight's first size, {weight.shape[0]}, and a multiple of groups"
        )
    size, kernel = (x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3])
    if 0 in kernel or 0 in size:
        raise ValueError(f"{OP}: an image of {size} with a kernel of {kernel}: neither may have a size of 0")
    return _geometry(size, kernel, *check_settings(stride, padding, output_padding, dilation), groups)


def check_settings(stride: Any, padding: Any, output_padding: Any, dilation: Any) -> tuple[tuple[int, int], ...]:
    """The four as pairs. Raises ValueError for settings that no image and weight can go with, TypeError for what are
    no whole numbers."""
    strides, dilations = pair(OP, "stride", stride, 1), pair(OP, "dilation", dilation, 1)
    ends = pair(OP, "output_padding", output_padding, 0)
    for end, step, apart in zip(ends, strides, dilations, strict=True):
        if end >= max(step, apart):
            raise ValueError(
                f"{OP}: output_padding is {output_padding!r}, expected less than stride {stride!r} or than dilation "
                f"{dilation!r}"
            )
    return strides, pair(OP, "padding", padding, 0), ends, dilations


@functools.lru_cache(maxsize=4096)
def _geometry(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    output_padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Geometry:
    axes = []
    for name, i in (("height", 0), ("width", 1)):
        out = (size[i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + output_padding[i] + 1
        if out < 1:
            raise ValueError(
                f"{OP}: the result would have a {name} of {out}; use less padding than {padding[i]}, or a larger image "
                "or kernel"
            )
        axes.append(Axis(out, kernel[i], size[i], stride[i], padding[i], dilation[i]))
    return Geometry(axes[0], axes[1], groups)
