"""Transposed convolution of images, with bias and activation in the product's epilogue."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd.deferred import may_wait
from minidl.kernels import conv
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair, cached, numbers
from minidl.kernels.conv.geometry import Axis
from minidl.ops.conv import Convolution, DeferredConv
from minidl.ops.conv_geometry import AXES, Shape, added_dim, arranged, axes_in, check_vectors, sizes_of
from minidl.ops.shape import one_or_many
from minidl.tensors import Tensor

__all__ = ["conv_transpose2d"]

OP = "conv_transpose2d"


class ConvTranspose2d(Convolution):
    compute = staticmethod(conv.transposed)

    @staticmethod
    def grad_input(ctx: Any, dz: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return conv.forward(dz, weight, ctx.geometry)[0]

    @staticmethod
    def grad_weight(ctx: Any, dz: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return conv.grad_weight(dz, x, ctx.geometry)


@one_or_many(4)
def conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0,
    output_padding: Pair = 0, groups: int = 1, dilation: Pair = 1, act: Activation = None, *,
    scale: Tensor | None = None, form: str | None = None,
) -> Tensor:  # fmt: skip
    """Return act(scale * conv_transpose(input, weight) + bias): the gradient of `conv2d` for its input, as an
    operation.

    Every pixel of input adds its value times weight to a window of the result; windows are `stride` apart.

    Shapes: input [N, C, H, W], weight [C, M / groups, R, S], bias and scale [M] -> [N, M, OH, OW] with
    OH = (H - 1) stride - 2 padding + dilation (R - 1) + output_padding + 1, in its dtype. Memory is channels-last
    inside: input in torch.channels_last is used as it is, other layouts are copied once; the result is channels-last.

    stride, padding, output_padding, dilation: a number or a (height, width) pair. padding is cut off on every side,
    output_padding is added at the bottom and right; it must be less than stride or than dilation. act: as in `linear`.
    scale, only without a gradient: a factor per output channel, as of a folded batch norm; for float16 and bfloat16 it
    and the bias may be float32.

    In some forms the product has zeros between the weights, so NaN or infinity in the operands may make neighbours NaN.

    form: None takes the fastest form for the shape.

    Raises ValueError for shapes that do not fit, a result without pixels, or a scale with a gradient; TypeError for
    different dtypes. Source: Dumoulin and Visin, arXiv 1603.07285, chapter 4.
    """
    shapes = [None if t is None else t.shape for t in (input, weight, bias, scale)]
    geometry = geometry_of(OP, *shapes, stride, padding, output_padding, groups, dilation)
    if scale is None and act is form is None and may_wait(input):
        conv.check_arguments(OP, input.data, weight.data, None if bias is None else bias.data)
        shape = input.shape[0], weight.shape[1] * int(groups), geometry.h.size, geometry.w.size
        return Tensor._of_deferred(DeferredConv(ConvTranspose2d, shape, (input,), weight, bias, geometry))
    return ConvTranspose2d.run(OP, input, weight, bias, scale, geometry, act, form)


@cached
def geometry_of(
    op: str, x: Shape, weight: Shape, bias: Shape | None, scale: Shape | None, stride: Pair, padding: Pair,
    output_padding: Pair, groups: int, dilation: Pair,
) -> Any:  # fmt: skip
    """Return the geometry of the convolution whose input gradient this is, for these shapes, as
    `conv_geometry.arranged`. Raises ValueError if they do not fit."""
    settings = *sizes_of(op, x, weight, groups), *check_settings(op, stride, padding, output_padding, dilation)
    axes = tuple(_axis(op, *values) for values in zip(AXES[axes_in(op)], *settings, strict=True))
    check_vectors(op, weight[1] * int(groups), bias=bias, scale=scale)
    return arranged(axes, int(groups), added_dim(weight))


def _axis(op: str, name: str, size: int, kernel: int, stride: int, padding: int, end: int, dilation: int) -> Axis:
    out = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + end + 1
    if out < 1:
        raise ValueError(
            f"{op}: the result would have a {name} of {out}; use less padding than {padding}, or a larger image "
            "or kernel"
        )
    return Axis(out, kernel, size, stride, padding, dilation)


def check_settings(
    op: str, stride: Any, padding: Any, output_padding: Any, dilation: Any
) -> tuple[tuple[int, ...], ...]:
    """Return the four for each axis. Raises ValueError for settings that fit no image and weight, TypeError for
    settings that are not whole numbers."""
    axes = axes_in(op)
    strides, dilations = numbers(op, "stride", stride, 1, axes), numbers(op, "dilation", dilation, 1, axes)
    ends = numbers(op, "output_padding", output_padding, 0, axes)
    for end, step, spacing in zip(ends, strides, dilations, strict=True):
        if end >= max(step, spacing):
            raise ValueError(
                f"{op}: output_padding is {output_padding!r}, expected less than stride {stride!r} or than dilation "
                f"{dilation!r}"
            )
    return strides, numbers(op, "padding", padding, 0, axes), ends, dilations
