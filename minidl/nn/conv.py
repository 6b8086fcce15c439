"""The convolution layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from minidl import ops
from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair, integer, numbers
from minidl.nn import init
from minidl.nn.layers import Device, _act_repr, _empty
from minidl.nn.module import Module, Parameter
from minidl.ops import conv_transpose
from minidl.ops.conv_geometry import axes_in, check_pool, check_settings
from minidl.tensors import Tensor, device_of


class _Layer(Module):
    """The base of convolutions of any number of axes; `_op` is the operation, whose name has the number. `repr` shows
    settings that differ from `_defaults`."""

    _op: Callable[..., Tensor]
    _modes: tuple[str, ...] = ("zeros",)
    _defaults: ClassVar = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}

    def __init__(self, in_channels: int, out_channels: int, groups: int, padding_mode: str, act: Activation) -> None:
        """Raises ValueError for channels, groups, a mode or an activation that do not fit."""
        super().__init__()
        activation.parse(act)
        layer = type(self).__name__
        if padding_mode not in self._modes:
            raise ValueError(f"{layer}: padding_mode is {padding_mode!r}, expected one of {', '.join(self._modes)}")
        in_channels, out_channels = (
            integer(layer, "in_channels", in_channels),
            integer(layer, "out_channels", out_channels),
        )
        groups = integer(layer, "groups", groups)
        if min(in_channels, out_channels, groups) < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{layer}: got {in_channels} input and {out_channels} output channels in {groups} groups; expected "
                "numbers of 1 or more, and both channels multiples of groups"
            )
        self.in_channels, self.out_channels, self.groups, self.act = in_channels, out_channels, groups, act
        self.padding_mode = padding_mode

    def _set_per_axis(self, **settings: Any) -> None:
        """Store settings as torch's layers do, one number per axis; text unchanged."""
        for name, value in settings.items():
            sizes = (value,) * len(self.kernel_size) if hasattr(value, "__index__") else value
            setattr(self, name, value if isinstance(value, str) else tuple(map(int, sizes)))

    def _add_parameters(self, rows: int, columns: int, bias: bool, device: Device, dtype: torch.dtype | None) -> None:
        """Add a weight [rows, columns, *kernel] with columns last in memory, and a bias, initialised in torch's
        ranges."""
        values = torch.empty(rows, *self.kernel_size, columns, device=device_of(device), dtype=dtype)
        self.weight = Parameter(values.movedim(-1, 1))
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.register_parameter("bias", None)
        if bias:
            self.bias = _empty(self.out_channels, device=self.weight.device, dtype=self.weight.dtype)
            bound = 1.0 / math.sqrt(math.prod(self.weight.shape[1:]))
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        for name, default in self._defaults.items():
            setting = getattr(self, name, default)
            setting = setting[0] if isinstance(setting, tuple) and len({*setting}) == 1 else setting
            if setting != default:
                text += f", {name}={setting!r}"
        return f"{text}, bias={self.bias is not None}{_act_repr(self.act)}"


class _Conv(_Layer):
    _modes = ("zeros", "reflect", "replicate", "circular")

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, stride: Pair = 1, padding: Pair | str = 0,
        dilation: Pair = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros", device: Device = None,
        dtype: torch.dtype | None = None, *, act: Activation = None,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels, groups, padding_mode, act)
        self.kernel_size = check_settings(self._op.__name__, kernel_size, stride, padding, dilation)
        self._set_per_axis(stride=stride, padding=padding, dilation=dilation)
        # Margins of other modes than zeros, under torch's name; as in torch, computed once.
        self._reversed_padding_repeated_twice = self._margins()
        self._add_parameters(self.out_channels, self.in_channels // self.groups, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        input, padding = self._padded(input)
        return type(self)._op(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, self.act)

    def _padded(self, x: Tensor) -> tuple[Tensor, Pair | str]:
        """Return x with margins of other modes than zeros, and the padding for the operation."""
        if self.padding_mode == "zeros":
            return x, self.padding
        return ops.pad(x, self._reversed_padding_repeated_twice, self.padding_mode), 0

    def _margins(self) -> list[int]:
        """Return the widths of the margins on both sides of each axis, the last axis first."""
        op, axes = self._op.__name__, len(self.kernel_size)
        if not isinstance(self.padding, str):
            widths = numbers(op, "padding", self.padding, 0, axes)
            return [width for width in reversed(widths) for _ in range(2)]
        dilations = numbers(op, "dilation", self.dilation, 1, axes)
        totals = [d * (k - 1) for d, k in zip(reversed(dilations), reversed(self.kernel_size), strict=True)]
        before = {"same": [n // 2 for n in totals], "causal": totals, "valid": [0 for _ in totals]}[self.padding]
        after = {"same": [n - n // 2 for n in totals]}.get(self.padding, [0 for _ in totals])
        return [width for both in zip(before, after, strict=True) for width in both]


class Conv1d(_Conv):
    """act(conv(x, weight) + bias): weight [out, in / groups, length], named and initialised as torch's.

    Shapes: [N, in, L] -> [N, out, OL], see `ops.conv1d`, also for padding="causal". `act` is fused into the
    convolution. The weight's channels are the last in memory, which the kernels read directly; a weight in another
    layout is copied at every call.
    """

    _op = staticmethod(ops.conv1d)


class Conv2d(_Conv):
    """act(conv(x, weight) + bias): weight [out, in / groups, height, width], named and initialised as torch's.

    Shapes: [N, in, H, W] -> [N, out, OH, OW], see `ops.conv2d`. `act` is fused into the convolution; so is `pool`
    ("max" or "avg" over 2x2 windows) if no gradient is recorded. The weight is in torch.channels_last memory, which the
    kernels read directly; a weight in another layout is copied at every call.
    """

    _op = staticmethod(ops.conv2d)

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, stride: Pair = 1, padding: Pair | str = 0,
        dilation: Pair = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros", device: Device = None,
        dtype: torch.dtype | None = None, *, act: Activation = None, pool: str | None = None,
    ) -> None:  # fmt: skip
        check_pool(pool)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype, act=act,
        )  # fmt: skip
        self.pool = pool

    def forward(self, input: Tensor) -> Tensor:
        input, padding = self._padded(input)
        return ops.conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, self.act, pool=self.pool
        )

    def extra_repr(self) -> str:
        pool = "" if self.pool is None else f", pool={self.pool!r}"
        return f"{super().extra_repr()}{pool}"


class Conv3d(_Conv):
    """act(conv(x, weight) + bias): weight [out, in / groups, depth, height, width], named and initialised as torch's.

    Shapes: [N, in, D, H, W] -> [N, out, OD, OH, OW], see `ops.conv3d`. `act` is fused into the convolution. The weight
    is in torch.channels_last_3d memory.
    """

    _op = staticmethod(ops.conv3d)


class _ConvTranspose(_Layer):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0,
        output_padding: Pair = 0, groups: int = 1, bias: bool = True, dilation: Pair = 1, padding_mode: str = "zeros",
        device: Device = None, dtype: torch.dtype | None = None, *, act: Activation = None,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels, groups, padding_mode, act)
        op = self._op.__name__
        self.kernel_size = numbers(op, "kernel_size", kernel_size, 1, axes_in(op))
        conv_transpose.check_settings(op, stride, padding, output_padding, dilation)
        self._set_per_axis(stride=stride, padding=padding, output_padding=output_padding, dilation=dilation)
        self._add_parameters(self.in_channels, self.out_channels // self.groups, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError(f"{type(self).__name__}: padding_mode is {self.padding_mode!r}, expected 'zeros'")
        return type(self)._op(
            input, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation,
            self.act,
        )  # fmt: skip


class ConvTranspose1d(_ConvTranspose):
    """act(conv_transpose(x, weight) + bias): weight [in, out / groups, length], named and initialised as torch's.

    Shapes: [N, in, L] -> [N, out, OL], see `ops.conv_transpose1d`. `act` is fused into it. The weight has the
    memory layout of `Conv1d`.
    """

    _op = staticmethod(ops.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose):
    """act(conv_transpose(x, weight) + bias): weight [in, out / groups, height, width], named and initialised as
    torch's.

    Shapes: [N, in, H, W] -> [N, out, OH, OW], see `ops.conv_transpose2d`. `act` is fused into it. The weight is in
    torch.channels_last memory, as that of `Conv2d`.
    """

    _op = staticmethod(ops.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose):
    """act(conv_transpose(x, weight) + bias): weight [in, out / groups, depth, height, width], named and initialised as
    torch's.

    Shapes: [N, in, D, H, W] -> [N, out, OD, OH, OW], see `ops.conv_transpose3d`. `act` is fused into it. The weight is
    in torch.channels_last_3d memory.
    """

    _op = staticmethod(ops.conv_transpose3d)
