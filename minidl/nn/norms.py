"""Normalization layers of rows and of groups of channels, with torch's arguments and state_dict names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minidl import ops
from minidl.kernels import check
from minidl.nn.layers import Device
from minidl.nn.module import Module, Parameter
from minidl.tensors import Tensor, device_of


def _full(shape: tuple[int, ...], value: float, device: Device, dtype: torch.dtype | None) -> Parameter:
    return Parameter(torch.full(shape, value, device=device_of(device), dtype=dtype or torch.get_default_dtype()))


class _Affine(Module):
    """The base class of layers with a weight and a bias."""

    weight: Parameter | None
    bias: Parameter | None

    def _register_affine(
        self, shape: tuple[int, ...], weight: bool, bias: bool, device: Device, dtype: torch.dtype | None
    ) -> None:
        self.register_parameter("weight", _full(shape, 1.0, device, dtype) if weight else None)
        self.register_parameter("bias", _full(shape, 0.0, device, dtype) if bias else None)


class LayerNorm(_Affine):
    """((x - mean) / sqrt(var + eps)) weight + bias over the last dimensions, normalized_shape. Keeps the shape."""

    _shown = ("normalized_shape", "eps", "elementwise_affine")

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = check.integers(type(self).__name__, "normalized_shape", normalized_shape)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self._register_affine(shape, elementwise_affine, elementwise_affine and bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """(x / sqrt(mean(x^2) + eps)) weight over the last dimensions, without a bias as in torch.

    eps None means torch.finfo(input.dtype).eps.
    """

    weight: Parameter | None
    _shown = ("normalized_shape", "eps", "elementwise_affine")

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = check.integers(type(self).__name__, "normalized_shape", normalized_shape)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self.register_parameter("weight", _full(shape, 1.0, device, dtype) if elementwise_affine else None)

    def forward(self, input: Tensor) -> Tensor:
        return ops.rms_norm(input, self.normalized_shape, self.weight, self.eps)


class GroupNorm(_Affine):
    """Normalise each of num_groups groups of channels, with a weight and bias per channel. Shapes: [N, C, ...]."""

    _shown = ("num_groups", "num_channels", "eps", "affine")

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        num_groups, num_channels = (
            check.integer("GroupNorm", name, value)
            for name, value in (("num_groups", num_groups), ("num_channels", num_channels))
        )
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"GroupNorm: num_channels {num_channels} is no multiple of num_groups {num_groups}")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self._register_affine((num_channels,), affine, affine and bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return ops.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
