"""Subclasses of torch's layers that compute with minidl's operators.

`accelerating.accelerate` assigns them to the `__class__` of a model's layers, which keep parameters, buffers and hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from minidl.nn.recurrent import RNNBase
from minidl.torch import activations, convolution, pooling, recurrent, resampling, rows
from minidl.torch import normalisation as norms
from minidl.torch.layer import Layer, few_rows, wide_volume


class _Conv(Layer):
    _minidl_watched_methods = ("_conv_forward",)

    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        return "" if module.padding_mode == "zeros" else f"padding_mode {module.padding_mode!r}"

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        return (
            super()._minidl_takes(input, *more) and self.padding_mode == "zeros"
            and input.dim() == len(self.kernel_size) + 2
        )  # fmt: skip

    def _minidl_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight  # read once: a parametrization computes it, and may return another value each time
        geometry = self.stride, self.padding, self.dilation, self.groups, *self._minidl_more_settings()
        settings = convolution.settings_of(self._minidl_op, weight, *geometry)
        return convolution.convolved(input, weight, self.bias, settings, how=None)

    def _minidl_more_settings(self) -> tuple[Any, ...]:
        """Return the last arguments of `convolution.settings_of`, after groups."""
        return ()


class Conv3d(_Conv, nn.Conv3d):
    _minidl_op = "conv3d"

    @classmethod
    def _minidl_slow_reason(cls, module: Any) -> str:
        if wide_volume(module.weight, module.groups):
            return (
                "with so many channels torch needs 0.74 of minidl's time (H100); `accelerate` times both on an example"
            )
        return ""


class _ConvTranspose(_Conv):
    _minidl_watched_methods = ("_output_padding",)

    def _minidl_more_settings(self: Any) -> tuple[Any, ...]:
        return (self.output_padding,)


class _BatchNorm(Layer):
    _minidl_op = "batch_norm"

    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        if module.momentum is None and module.num_batches_tracked is None:
            return "momentum is None and no batches are counted"
        return ""

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        if not super()._minidl_takes(input, *more) or (self._minidl_uses_batch_statistics and input.numel() == 0):
            return False
        return self.momentum is not None or self.num_batches_tracked is not None

    @property
    def _minidl_uses_batch_statistics(self: Any) -> bool:
        """Return whether mean and variance come from the batch rather than from the running statistics."""
        return self.training or (self.running_mean is None and self.running_var is None)

    def _minidl_forward(self: Any, input: torch.Tensor) -> Any:
        self._check_input_dim(input)
        affine, added, name, slope = (self.weight, self.bias), None, None, 0.0  # no addition, no activation
        if not self._minidl_uses_batch_statistics:
            running = self.running_mean, self.running_var, self.eps
            return norms.normalise_running(input, *affine, added, *running, name, slope)
        updates_running = self.training and self.track_running_stats and self.running_mean is not None
        buffers = (self.running_mean, self.running_var, self.num_batches_tracked) if updates_running else (None,) * 3
        momentum = self.momentum if updates_running else 0.1  # unused; None would rule out the one-launch kernel
        return norms.batch_norm_training(input, *affine, added, *buffers, momentum, self.eps, name, slope)[0]


class Linear(Layer, nn.Linear):
    _minidl_op = "linear"

    def _minidl_takes(self, input: Any, *more: Any) -> bool:
        if not super()._minidl_takes(input, *more):
            return False
        # Comparing the number of rows would put a guard on the dynamic batch size of a compiled graph.
        return torch.compiler.is_compiling() or not few_rows(input, self.in_features, self.out_features)

    def _minidl_forward(self, input: torch.Tensor) -> torch.Tensor:
        return activations.linear(input, self.weight, self.bias)


class _MaxPool(Layer):
    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        return "return_indices" if module.return_indices else ""

    def _minidl_takes(self, input: Any, *more: Any) -> bool:
        return super()._minidl_takes(input, *more) and not self.return_indices

    def _minidl_forward(self: Any, input: torch.Tensor) -> Any:
        settings = self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        return getattr(pooling, self._minidl_op)(input, *settings)


class _AvgPool(Layer):
    def _minidl_forward(self: Any, input: torch.Tensor) -> Any:
        settings = self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad
        return getattr(pooling, self._minidl_op)(input, *settings, self.divisor_override)


class _AdaptiveAvgPool(Layer):
    def _minidl_forward(self: Any, input: torch.Tensor) -> Any:
        return getattr(pooling, self._minidl_op)(input, self.output_size)


class Upsample(Layer, nn.Upsample):
    _minidl_op = "interpolate"

    def _minidl_takes(self, input: Any, *more: Any) -> bool:
        return super()._minidl_takes(input, *more) and 0 not in input.shape[2:]

    def _minidl_forward(self, input: torch.Tensor) -> torch.Tensor:
        options = self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor
        return resampling.interpolate(input, *options)


class LayerNorm(Layer, nn.LayerNorm):
    _minidl_op = "layer_norm"

    def _minidl_forward(self, input: torch.Tensor) -> torch.Tensor:
        return rows.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Layer, nn.RMSNorm):
    _minidl_op = "rms_norm"

    def _minidl_forward(self, x: torch.Tensor) -> torch.Tensor:
        return rows.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(Layer, nn.GroupNorm):
    _minidl_op = "group_norm"

    def _minidl_forward(self, input: torch.Tensor) -> torch.Tensor:
        return rows.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class Softmax(Layer, nn.Softmax):
    _minidl_op = "softmax"

    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        return "dim is None" if module.dim is None else ""

    def _minidl_takes(self, input: Any, *more: Any) -> bool:
        return super()._minidl_takes(input, *more) and self.dim is not None

    def _minidl_forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.dim is not None
        return rows.softmax(input, self.dim)


class CrossEntropyLoss(Layer, nn.CrossEntropyLoss):
    _minidl_op = "cross_entropy"

    def _minidl_takes(self, input: Any, *more: Any) -> bool:
        return super()._minidl_takes(input) and len(more) == 1 and not more[0].requires_grad

    def _minidl_forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return rows.cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


class _Recurrent(Layer):
    _recurrence, _ops, _tensor_class = staticmethod(recurrent.recurrence), recurrent, torch.Tensor
    _minidl_forward, _forward_packed, _layers = RNNBase.forward, RNNBase._forward_packed, RNNBase._layers
    _direction, _states, _check_input = RNNBase._direction, RNNBase._states, RNNBase._check_input
    _suffixes = RNNBase._suffixes

    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        return f"proj_size {module.proj_size}" if module.proj_size else ""

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        x = input.data if isinstance(input, PackedSequence) else input
        return super()._minidl_takes(x, *more[1:]) and x.numel() > 0 and not self.proj_size


# Classes that only name torch's class and function.
_NAMED: dict[type[Layer], dict[Any, str]] = {
    _Conv: {nn.Conv1d: "conv1d", nn.Conv2d: "conv2d"},
    _ConvTranspose: {
        nn.ConvTranspose1d: "conv_transpose1d", nn.ConvTranspose2d: "conv_transpose2d",
        nn.ConvTranspose3d: "conv_transpose3d",
    },
    _BatchNorm: dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "batch_norm"),
    _MaxPool: {nn.MaxPool2d: "max_pool2d", nn.MaxPool3d: "max_pool3d"},
    _AvgPool: {nn.AvgPool2d: "avg_pool2d", nn.AvgPool3d: "avg_pool3d"},
    _Recurrent: dict.fromkeys((nn.LSTM, nn.GRU), ""),
    _AdaptiveAvgPool: {nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d", nn.AdaptiveAvgPool3d: "adaptive_avg_pool3d"},
}  # fmt: skip


def _named(torch_class: Any, base: type[Layer], op: str) -> Any:
    return type(torch_class.__name__, (base, torch_class), {"_minidl_op": op})


CLASSES: dict[type[nn.Module], type[Layer]] = {
    each._minidl_torch_class: each
    for each in (
        *(_named(torch_class, base, op) for base, ops in _NAMED.items() for torch_class, op in ops.items()),
        Conv3d, Linear, Upsample, LayerNorm, RMSNorm, GroupNorm, Softmax, CrossEntropyLoss,
    )
}  # fmt: skip
