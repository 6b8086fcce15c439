"""The convolution layer."""

from __future__ import annotations

import math

import torch

from minidl import ops
from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair
from minidl.nn import init
from minidl.nn.layers import Device, _act_repr, _empty
from minidl.nn.module import Module, Parameter
from minidl.ops.conv import check_settings
from minidl.tensor import Tensor


class Conv2d(Module):
    """act(conv(x, weight) + bias): weight [out, in / groups, height, width], named and initialised as torch's.

    Shapes: [N, in, H, W] -> [N, out, OH, OW], see `ops.conv2d`. `act` is fused into the convolution; so is `pool`
    ("max" or "avg" over 2x2 windows) where no gradient is wanted. The weight's memory is torch.channels_last, which the
    kernels read as it is; a weight in another layout works too, and is copied at every call.
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
        if min(in_channels, out_channels, groups) < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"Conv2d: got {in_channels} input and {out_channels} output channels in {groups} groups; expected "
                "numbers of 1 or more, and both channels multiples of groups"
            )
        self.in_channels, self.out_channels, self.groups, self.act = in_channels, out_channels, groups, act
        self.kernel_size = check_settings(kernel_size, stride, padding, dilation, pool)
        self.stride, self.padding, self.dilation, self.pool = stride, padding, dilation, pool
        shape = out_channels, in_channels // groups, *self.kernel_size
        self.weight = _empty(*shape, device=device, dtype=dtype, memory_format=torch.channels_last)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.bias: Parameter | None = None
        if bias:
            self.bias = _empty(out_channels, device=device, dtype=dtype)
            bound = 1.0 / math.sqrt(math.prod(self.weight.shape[1:]))
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.act, pool=self.pool
        )

    def extra_repr(self) -> str:
        shown = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        for name, value in usual.items():
            if getattr(self, name) not in (value, (value, value)):
                shown += f", {name}={getattr(self, name)!r}"
        pool = "" if self.pool is None else f", pool={self.pool!r}"
        return f"{shown}, bias={self.bias is not None}{_act_repr(self.act)}{pool}"
