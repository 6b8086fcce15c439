"""Subclasses of torch's layers that compute with minidl's operators.

`accelerating.accelerate` assigns them to the `__class__` of a model's layers, which keep parameters, buffers and hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from minidl.nn.recurrent import RNNBase
from minidl.ops.recurrent import recurrence
from minidl.torch import activations, convolution, pooling, resampling, rows
from minidl.torch import normalisation as norms
from minidl.torch.layer import Layer, few_rows, wide_volume
from minidl.torch.recorded import recorded
from minidl.torch.registry import straight


class _Conv(Layer):
    _minidl_watched_methods = ("_conv_forward",)

    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        return "" if module.padding_mode == "zeros" else f"padding_mode {module.padding_mode!r}"

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        return super()._minidl_takes(input, *more) and input.dim() == len(self.kernel_size) + 2

    def _minidl_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight  # read once: a parametrization computes it, and may return another value each time
        geometry = (
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.output_padding if self.transposed else None,
        )
        settings = convolution.settings_of(self._minidl_op, weight, *geometry)
        return convolution.convolved(input, weight, self.bias, settings, how=None)


class _Conv3d(_Conv):
    @classmethod
    def _minidl_slow_reason(cls, module: Any) -> str:
        if wide_volume(module.weight, module.groups):
            return (
                "with so many channels torch needs 0.74 of minidl's time (H100); `accelerate` times both on an example"
            )
        return ""


class _ConvTranspose(_Conv):
    _minidl_watched_methods = ("_output_padding",)


class _BatchNorm(Layer):
    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        if module.momentum is None and module.num_batches_tracked is None:
            return "momentum is None and no batches are counted"
        return ""

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        takes = super()._minidl_takes(input, *more)
        return takes and not (self._minidl_uses_batch_statistics and input.numel() == 0)

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


class _Linear(Layer):
    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        if not super()._minidl_takes(input, *more):
            return False
        # Comparing the number of rows would put a guard on the dynamic batch size of a compiled graph.
        # Under a dispatch mode, such as `batch_invariant`, all are minidl's.
        is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        return is_traced or not few_rows(input, self.in_features, self.out_features)


class _CrossEntropy(Layer):
    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        has_target = len(more) == 1 and isinstance(more[0], torch.Tensor)
        return has_target and super()._minidl_takes(input) and not more[0].requires_grad

    def _minidl_forward(self: Any, *inputs: Any, **_: Any) -> Any:
        options = {name: getattr(self, name) for name in ("weight", "ignore_index", "reduction", "label_smoothing")}
        return rows.cross_entropy(*inputs, **options)


class _Recurrent(Layer):
    _ops, _linear, _tensor_class = torch, staticmethod(activations.linear), torch.Tensor
    _forward_packed, _layers, _suffixes = RNNBase._forward_packed, RNNBase._layers, RNNBase._suffixes
    _layer, _states, _check_input = RNNBase._layer, RNNBase._states, RNNBase._check_input

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        x = input.data if isinstance(input, PackedSequence) else input
        is_eager = not torch.compiler.is_compiling() and straight((x,))  # it is no operator
        return is_eager and super()._minidl_takes(x, *more[1:]) and x.numel() > 0

    def _minidl_forward(self: Any, *inputs: Any, **_: Any) -> Any:
        return RNNBase.forward(self, *inputs)

    @staticmethod
    def _recurrence(x: torch.Tensor, state: Any, weights: Any, biases: Any, mode: str, sizes: list[int]) -> Any:
        operands, D = [*weights, *biases, *state], len(weights)
        if torch.is_autocast_enabled(x.device.type):  # x is the result of a linear layer
            operands = [None if t is None else t.to(x.dtype) for t in operands]
        return recorded(lambda x, *t: recurrence(x, t[2 * D :], t[:D], t[D : 2 * D], mode, sizes), x, *operands)


_MAX, _AVG = "kernel_size stride padding dilation ceil_mode", "kernel_size stride padding ceil_mode count_include_pad"
# The bases of our classes, the function of torch's name, and the attributes that the layer passes to it.
_LAYERS: dict[Any, tuple[type[Layer], Any, str]] = {
    nn.Conv1d: (_Conv, convolution.conv1d, ""),
    nn.Conv2d: (_Conv, convolution.conv2d, ""),
    nn.Conv3d: (_Conv3d, convolution.conv3d, ""),
    nn.ConvTranspose1d: (_ConvTranspose, convolution.conv_transpose1d, ""),
    nn.ConvTranspose2d: (_ConvTranspose, convolution.conv_transpose2d, ""),
    nn.ConvTranspose3d: (_ConvTranspose, convolution.conv_transpose3d, ""),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), (_BatchNorm, norms.batch_norm, "")),
    nn.Linear: (_Linear, activations.linear, "weight bias"),
    nn.MaxPool2d: (Layer, pooling.max_pool2d, _MAX),
    nn.MaxPool3d: (Layer, pooling.max_pool3d, _MAX),
    nn.AvgPool2d: (Layer, pooling.avg_pool2d, f"{_AVG} divisor_override"),
    nn.AvgPool3d: (Layer, pooling.avg_pool3d, f"{_AVG} divisor_override"),
    nn.AdaptiveAvgPool2d: (Layer, pooling.adaptive_avg_pool2d, "output_size"),
    nn.AdaptiveAvgPool3d: (Layer, pooling.adaptive_avg_pool3d, "output_size"),
    nn.Upsample: (Layer, resampling.interpolate, "size scale_factor mode align_corners recompute_scale_factor"),
    nn.LayerNorm: (Layer, rows.layer_norm, "normalized_shape weight bias eps"),
    nn.RMSNorm: (Layer, rows.rms_norm, "normalized_shape weight eps"),
    nn.GroupNorm: (Layer, rows.group_norm, "num_groups weight bias eps"),
    nn.Softmax: (Layer, rows.softmax, "dim"),
    nn.CrossEntropyLoss: (_CrossEntropy, rows.cross_entropy, ""),
    **dict.fromkeys((nn.LSTM, nn.GRU), (_Recurrent, None, "")),
}


def _subclass(torch_class: Any, base: type[Layer], function: Any, settings: str) -> Any:
    members = {"_minidl_function": staticmethod(function), "_minidl_settings": settings.split()}
    return type(torch_class.__name__, (base, torch_class), {"_minidl_op": getattr(function, "__name__", ""), **members})


CLASSES: dict[type[nn.Module], type[Layer]] = {kind: _subclass(kind, *layer) for kind, layer in _LAYERS.items()}
