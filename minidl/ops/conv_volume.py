"""Convolution of volumes, also transposed, with bias and activation in the product's epilogue."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair
from minidl.kernels.conv import volume
from minidl.ops import conv_transpose
from minidl.ops.conv import Convolution
from minidl.ops.conv_geometry import geometry_of
from minidl.ops.shape import one_or_many
from minidl.tensors import Tensor

__all__ = ["conv3d", "conv_transpose3d"]


class Conv3d(Convolution):
    @staticmethod
    def compute(x: torch.Tensor, weight: torch.Tensor, geometry: Any, *how: Any, form: None, **options: Any) -> Any:
        return volume.forward(x, weight, geometry, *how, **options)

    @staticmethod
    def grad_input(ctx: Any, dz: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return volume.grad_input(dz, weight, ctx.geometry)

    @staticmethod
    def grad_weight(ctx: Any, dz: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return volume.grad_weight(x, dz, ctx.geometry)


class ConvTranspose3d(Convolution):
    @staticmethod
    def compute(x: torch.Tensor, weight: torch.Tensor, geometry: Any, *how: Any, form: None, **options: Any) -> Any:
        return volume.transposed(x, weight, geometry, *how, **options)

    @staticmethod
    def grad_input(ctx: Any, dz: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return volume.forward(dz, weight, ctx.geometry)[0]

    @staticmethod
    def grad_weight(ctx: Any, dz: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return volume.grad_weight(dz, x, ctx.geometry)


@one_or_many(5)
def conv3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair | str = 0,
    dilation: Pair = 1, groups: int = 1, act: Activation = None, *, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return act(scale * conv(input, weight) + bias) of volumes, as `conv2d` of images.

    Shapes: input [N, C, D, H, W], weight [M, C / groups, Q, R, S], bias and scale [M] -> [N, M, OD, OH, OW], sizes as
    in `conv2d`, in its dtype. Memory is channels-last inside: input in torch.channels_last_3d is used as it is, other
    layouts are copied once, and the result is in torch.channels_last_3d. All taps are one sum, of float32 for float16
    and bfloat16.

    stride, padding, dilation: a number or (depth, height, width); padding also "valid" or "same". The rest as in
    `conv2d`, where NaN and infinity may spread to neighbouring outputs, here also in neighbouring slices.

    Raises ValueError for shapes that do not fit, a kernel larger than the padded volume, or a scale with a gradient;
    TypeError for different dtypes and for settings that are not whole numbers.
    """
    shapes = [None if t is None else t.shape for t in (input, weight, bias, scale)]
    geometry = geometry_of("conv3d", *shapes, stride, padding, dilation, groups)
    return Conv3d.run("conv3d", input, weight, bias, scale, geometry, act)


@one_or_many(5)
def conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0,
    output_padding: Pair = 0, groups: int = 1, dilation: Pair = 1, act: Activation = None, *,
    scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return act(scale * conv_transpose(input, weight) + bias) of volumes, as `conv_transpose2d` of images.

    Shapes: input [N, C, D, H, W], weight [C, M / groups, Q, R, S], bias and scale [M] -> [N, M, OD, OH, OW], sizes as
    in `conv_transpose2d`, in its dtype; memory as of `conv3d`. The rest as in `conv_transpose2d`.

    Raises ValueError for shapes that do not fit, a result without voxels, or a scale with a gradient; TypeError for
    different dtypes.
    """
    op = "conv_transpose3d"
    shapes = [None if t is None else t.shape for t in (input, weight, bias, scale)]
    geometry = conv_transpose.geometry_of(op, *shapes, stride, padding, output_padding, groups, dilation)
    return ConvTranspose3d.run(op, input, weight, bias, scale, geometry, act)
