"""The convolution layers."""

from __future__ import annotations

import math

import torch

from minidl import ops
from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.nn import init
from minidl.nn.layers import Device, _act_repr, _empty
from minidl.nn.module import Module, Parameter
from minidl.ops import conv_transpose
from minidl.ops.conv import check_settings
from minidl.runtime.check import Pair, pair
from minidl.tensors import Tensor


class Conv2d(Module):
    """act(conv(x, weight) + bias): weight [out, in / groups, height, width], named and initialised as torch's.

    Shapes: [N, in, H, W] -> [N, out, OH, OW], see `ops.conv2d`. `act` is fused into the convolution; so is `pool`
    ("max" or "avg" over 2x2 windows) if no gradient is recorded. The weight is in torch.channels_last memory, which the
    kernels read directly; a weight in another layout is copied at every call.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        act: Activation = None,
        pool: str | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        activation.parse(act)
        _check_channels("Conv2d", in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups, self.act = in_channels, out_channels, groups, act
        self.kernel_size = check_settings(kernel_size, stride, padding, dilation, pool)
        self.stride, self.padding, self.dilation, self.pool = stride, padding, dilation, pool
        shape = out_channels, in_channels // groups, *self.kernel_size
        self.weight = _empty(*shape, device=device, dtype=dtype, memory_format=torch.channels_last)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.bias = _bias(self.weight, out_channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.act, pool=self.pool
        )

    def extra_repr(self) -> str:
        pool = "" if self.pool is None else f", pool={self.pool!r}"
        return f"{_shown(self, stride=1, padding=0, dilation=1, groups=1)}{pool}"


class ConvTranspose2d(Module):
    """act(conv_transpose(x, weight) + bias): weight [in, out / groups, height, width], named and initialised as
    torch's.

    Shapes: [N, in, H, W] -> [N, out, OH, OW], see `ops.conv_transpose2d`. `act` is fused into it. The weight is in
    torch.channels_last memory, as that of `Conv2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        output_padding: Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Pair = 1,
        act: Activation = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        activation.parse(act)
        _check_channels("ConvTranspose2d", in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups, self.act = in_channels, out_channels, groups, act
        self.kernel_size = pair("conv_transpose2d", "kernel_size", kernel_size, 1)
        conv_transpose.check_settings(stride, padding, output_padding, dilation)
        self.stride, self.padding, self.output_padding, self.dilation = stride, padding, output_padding, dilation
        shape = in_channels, out_channels // groups, *self.kernel_size
        self.weight = _empty(*shape, device=device, dtype=dtype, memory_format=torch.channels_last)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.bias = _bias(self.weight, out_channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv_transpose2d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation,
            self.act,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return _shown(self, stride=1, padding=0, output_padding=0, dilation=1, groups=1)


def _check_channels(layer: str, in_channels: int, out_channels: int, groups: int) -> None:
    if min(in_channels, out_channels, groups) < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(
            f"{layer}: got {in_channels} input and {out_channels} output channels in {groups} groups; expected "
            "numbers of 1 or more, and both channels multiples of groups"
        )


def _bias(weight: Parameter, channels: int) -> Parameter:
    """A bias in torch's range for `weight`."""
    bias = _empty(channels, device=weight.device, dtype=weight.dtype)
    bound = 1.0 / math.sqrt(math.prod(weight.shape[1:]))
    init.uniform_(bias, -bound, bound)
    return bias


def _shown(layer: Conv2d | ConvTranspose2d, **usual: int) -> str:
    """The layer's settings, without those that have their usual value."""
    shown = f"{layer.in_channels}, {layer.out_channels}, kernel_size={layer.kernel_size}"
    for name, value in usual.items():
        if getattr(layer, name) not in (value, (value, value)):
            shown += f", {name}={getattr(layer, name)!r}"
    return f"{shown}, bias={layer.bias is not None}{_act_repr(layer.act)}"
