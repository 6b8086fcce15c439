"""Convolutions of sequences, computed as images of one row or one column, without a copy."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import conv
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair
from minidl.kernels.conv.geometry import Geometry
from minidl.ops import conv_transpose
from minidl.ops.conv import Conv2d, Convolution
from minidl.ops.conv_geometry import ONE, added_dim, geometry_of
from minidl.ops.conv_transpose import ConvTranspose2d
from minidl.ops.shape import one_or_many
from minidl.tensors import Tensor

__all__ = ["conv1d", "conv_transpose1d"]

# Below this batch size columns become rows for the weight gradient: on an H100, 4 taps, batch 1 of 5120 channels takes
# 82 us instead of 391, batch 8 of 4096 channels 215 us instead of 192.
SMALL_BATCH = 4


class _OfRows(Convolution):
    """The base of both: removes the dimension of size 1 from gradients and results."""

    @classmethod
    def infer(cls, x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        dim = added_dim(weight.shape)
        return super().infer(x.unsqueeze(dim), weight.unsqueeze(dim), *args, **options).squeeze(dim)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.at = added_dim(weight.shape)
        return super().forward(ctx, x.unsqueeze(ctx.at), weight.unsqueeze(ctx.at), *how).squeeze(ctx.at)

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        dx, dw, *others = super().backward(ctx, dy.unsqueeze(ctx.at))
        dx, dw = (None if gradient is None else gradient.squeeze(ctx.at) for gradient in (dx, dw))
        return dx, dw, *others


class Conv1d(_OfRows, Conv2d):
    @staticmethod
    def grad_weight(ctx: Any, dz: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _grad_weight(x, dz, ctx.geometry)


class ConvTranspose1d(_OfRows, ConvTranspose2d):
    @staticmethod
    def grad_weight(ctx: Any, dz: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _grad_weight(dz, x, ctx.geometry)


def _grad_weight(x: torch.Tensor, dy: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    if geometry.w == ONE and x.shape[0] < SMALL_BATCH:
        row = Geometry(ONE, geometry.h, geometry.groups)
        return conv.grad_weight(x.transpose(2, 3), dy.transpose(2, 3), row).transpose(2, 3)
    return conv.grad_weight(x, dy, geometry)


@one_or_many(3)
def conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair | str = 0,
    dilation: Pair = 1, groups: int = 1, act: Activation = None, *, scale: Tensor | None = None,
    form: str | None = None,
) -> Tensor:  # fmt: skip
    """Return act(scale * conv(input, weight) + bias) along sequences, as `conv2d` along images, whose kernels compute
    it.

    Shapes: input [N, C, L], weight [M, C / groups, K], bias and scale [M] -> [N, M, OL] with
    OL = (L + 2 padding - dilation (K - 1) - 1) // stride + 1, in its dtype. Memory is channels-last inside,
    [N, L, C]: an input with that layout (`input.transpose(1, 2)` is contiguous) is used as it is, other layouts are
    copied once, and the result has it.

    padding: a number, "valid", "same", or "causal": dilation (K - 1) zeros before the sequence only, so
    that no output reads a later input. The rest as in `conv2d`.

    Raises ValueError for shapes that do not fit, a kernel longer than the padded sequence, or a scale with a gradient;
    TypeError for different dtypes and for settings that are not whole numbers.
    """
    shapes = [None if t is None else t.shape for t in (input, weight, bias, scale)]
    geometry = geometry_of("conv1d", *shapes, stride, padding, dilation, groups)
    return Conv1d.run("conv1d", input, weight, bias, scale, geometry, act, form)


@one_or_many(3)
def conv_transpose1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0,
    output_padding: Pair = 0, groups: int = 1, dilation: Pair = 1, act: Activation = None, *,
    scale: Tensor | None = None, form: str | None = None,
) -> Tensor:  # fmt: skip
    """Return act(scale * conv_transpose(input, weight) + bias) along sequences, as `conv_transpose2d` along images.

    Shapes: input [N, C, L], weight [C, M / groups, K], bias and scale [M] -> [N, M, OL] with
    OL = (L - 1) stride - 2 padding + dilation (K - 1) + output_padding + 1, in its dtype; memory as of `conv1d`. The
    rest as in `conv_transpose2d`.

    Raises ValueError for shapes that do not fit, a result of no length, or a scale with a gradient; TypeError for
    different dtypes.
    """
    op = "conv_transpose1d"
    shapes = [None if t is None else t.shape for t in (input, weight, bias, scale)]
    geometry = conv_transpose.geometry_of(op, *shapes, stride, padding, output_padding, groups, dilation)
    return ConvTranspose1d.run(op, input, weight, bias, scale, geometry, act, form)
