"""torch's layers with minidl's operators: each is the class that `accelerate` gives a module in place of torch's own.

A module keeps its parameters, buffers, hooks and name; only its class, and with it `forward`, is another one, a
subclass of what it was. What an operator cannot take when it is called, as a tensor on a device without kernels, goes
to torch's own forward.
"""

from __future__ import annotations

import copy
import copyreg
import math
from typing import Any, ClassVar

import torch
from torch import nn

from minidl.runtime import check, launch
from minidl.torch import activations, convolution, pooling, rows
from minidl.torch import normalisation as norms
from minidl.torch.convolution import Settings

FEW = 32  # rows


def ready(x: Any) -> bool:
    """Whether kernels can take a tensor where it is: bfloat16 is not interpreted."""
    if not isinstance(x, torch.Tensor) or x.dtype not in check.FLOATING:
        return False
    if not launch.INTERPRETED:
        return launch.is_gpu(x.device)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        return False
    return x.dtype != torch.bfloat16 and x.device.type in ("cpu", "cuda")


class Accelerated(nn.Module):
    """The base of all classes that `accelerate` gives; `_minidl_torchs` is the one that a module had.

    A copy is accelerated as well; what is pickled is a module of torch's class.
    """

    _minidl_torchs: ClassVar[type[nn.Module]]
    _minidl_folds: ClassVar[tuple[Any, ...]] = ()  # of an outermost one: what a trace of it folds at once

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError("torch.jit.script takes no modules of minidl; call minidl.torch.restore(model) first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg._reconstructor, (self._minidl_torchs, object, None), vars(self)  # type: ignore[attr-defined]


class Layer(Accelerated):
    """The base of those of layers."""

    @classmethod
    def _minidl_refuses(cls, module: Any) -> str:
        """Why a module of torch's class stays what it is; empty where nothing speaks against this one."""
        return ""

    @classmethod
    def _minidl_slower(cls, module: Any) -> str:
        """Why it stays so unless both are timed; from what was measured at drawn shapes (`benchmarks/notes.md`)."""
        return ""


class _Conv(Layer):
    @classmethod
    def _minidl_refuses(cls, module: Any) -> str:
        if module.padding_mode != "zeros":
            return f"padding_mode {module.padding_mode!r}"
        return ""

    def _minidl_settings(self: Any, weight: torch.Tensor) -> Settings:
        """What operators are given."""
        return convolution.settings_of(self._minidl_op, weight, self.stride, self.padding, self.dilation, self.groups)

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not ready(input) or input.dim() != len(self.kernel_size) + 2:
            return self._minidl_torchs.forward(self, input)
        weight = self.weight  # once: a parametrization computes it, and may change with each time
        return convolution.convolved(input, weight, self.bias, self._minidl_settings(weight), None)


class Conv1d(_Conv, nn.Conv1d):
    _minidl_torchs, _minidl_op = nn.Conv1d, "conv1d"


class Conv2d(_Conv, nn.Conv2d):
    _minidl_torchs, _minidl_op = nn.Conv2d, "conv2d"


class Conv3d(_Conv, nn.Conv3d):
    _minidl_torchs, _minidl_op = nn.Conv3d, "conv3d"

    @classmethod
    def _minidl_slower(cls, module: Any) -> str:
        # Of ten such eight were slower, forward 0.73 and with the way back 0.74 in the mean; 34 others 2.0 and 2.3
        # (H100, float16).
        wide = module.groups == 1 and module.in_channels >= 64 and module.out_channels >= 32
        if wide and math.prod(module.kernel_size) >= 4:
            return "torch takes 0.74 of the time of such volumes (H100); with an example both are timed"
        return ""


class _ConvTranspose(_Conv):
    def _minidl_settings(self: Any, weight: torch.Tensor) -> Settings:
        how = self.stride, self.padding, self.dilation, self.groups, self.output_padding
        return convolution.settings_of(self._minidl_op, weight, *how)

    def forward(self: Any, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        if output_size is not None:
            return self._minidl_torchs.forward(self, input, output_size)
        return _Conv.forward(self, input)


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    _minidl_torchs, _minidl_op = nn.ConvTranspose1d, "conv_transpose1d"


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    _minidl_torchs, _minidl_op = nn.ConvTranspose2d, "conv_transpose2d"


class _BatchNorm(Layer):
    @classmethod
    def _minidl_refuses(cls, module: Any) -> str:
        if module.momentum is None and module.num_batches_tracked is None:
            return "momentum is None and no batches are counted"
        return ""

    @property
    def _minidl_of_batch(self: Any) -> bool:
        """Whether statistics are those of the batch."""
        return self.training or (self._buffers["running_mean"] is None and self._buffers["running_var"] is None)

    def _minidl_empty(self, x: torch.Tensor) -> bool:
        """Whether there is nothing to have statistics of, which torch lets pass."""
        return self._minidl_of_batch and x.numel() == 0

    def _minidl_moved(self: Any) -> tuple[Any, ...]:
        """The running statistics, their counter, momentum and eps of a call that uses those of the batch."""
        if not self.track_running_stats or not self.training or self.running_mean is None:
            return None, None, None, 0.1, self.eps
        return self.running_mean, self.running_var, self.num_batches_tracked, self.momentum, self.eps

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return self._minidl_normalised(input, None, None, 0.0)

    def _minidl_normalised(
        self: Any, x: torch.Tensor, added: torch.Tensor | None, act: str | None, slope: float
    ) -> Any:
        """act(batch norm of x + added)."""
        if not ready(x) or self._minidl_empty(x):
            assert added is None
            assert act is None
            return self._minidl_torchs.forward(self, x)
        self._check_input_dim(x)
        affine = self.weight, self.bias
        if self._minidl_of_batch:
            return norms.batch_norm_training(x, *affine, added, *self._minidl_moved(), act, slope)[0]
        of = self.running_mean, self.running_var, self.eps
        return norms.batch_norm_inference(x, *affine, added, *of, act, slope)[0]


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    _minidl_torchs = nn.BatchNorm1d


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    _minidl_torchs = nn.BatchNorm2d


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    _minidl_torchs = nn.BatchNorm3d


class Linear(Layer, nn.Linear):
    _minidl_torchs = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input) or self._minidl_few(input):
            return nn.Linear.forward(self, input)
        return activations.linear(input, self.weight, self.bias)

    def _minidl_few(self, input: torch.Tensor) -> bool:
        """Whether the rows are so few that torch is faster: 0.91 of the time in the mean of 10 (H100, float16)."""
        wide = self.in_features >= 256 and self.out_features >= 256
        return wide and not torch.compiler.is_compiling() and input.numel() < FEW * self.in_features


class MaxPool2d(Layer, nn.MaxPool2d):
    _minidl_torchs = nn.MaxPool2d

    @classmethod
    def _minidl_refuses(cls, module: Any) -> str:
        return "return_indices" if module.return_indices else ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input):
            return nn.MaxPool2d.forward(self, input)
        return pooling.max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        )  # fmt: skip


class AvgPool2d(Layer, nn.AvgPool2d):
    _minidl_torchs = nn.AvgPool2d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input):
            return nn.AvgPool2d.forward(self, input)
        how = self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad
        return pooling.avg_pool2d(input, *how, self.divisor_override)


class AdaptiveAvgPool2d(Layer, nn.AdaptiveAvgPool2d):
    _minidl_torchs = nn.AdaptiveAvgPool2d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input):
            return nn.AdaptiveAvgPool2d.forward(self, input)
        return pooling.adaptive_avg_pool2d(input, self.output_size)  # type: ignore[arg-type]


class LayerNorm(Layer, nn.LayerNorm):
    _minidl_torchs = nn.LayerNorm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input):
            return nn.LayerNorm.forward(self, input)
        return rows.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Layer, nn.RMSNorm):
    _minidl_torchs = nn.RMSNorm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not ready(x):
            return nn.RMSNorm.forward(self, x)
        return rows.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(Layer, nn.GroupNorm):
    _minidl_torchs = nn.GroupNorm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input):
            return nn.GroupNorm.forward(self, input)
        return rows.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class Softmax(Layer, nn.Softmax):
    _minidl_torchs = nn.Softmax

    @classmethod
    def _minidl_refuses(cls, module: Any) -> str:
        return "dim is None" if module.dim is None else ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not ready(input) or self.dim is None:
            return nn.Softmax.forward(self, input)
        return rows.softmax(input, self.dim)


class CrossEntropyLoss(Layer, nn.CrossEntropyLoss):
    _minidl_torchs = nn.CrossEntropyLoss

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not ready(input) or target.requires_grad:
            return nn.CrossEntropyLoss.forward(self, input, target)
        return rows.cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


CLASSES: dict[type[nn.Module], type[Layer]] = {
    each._minidl_torchs: each
    for each in (
        Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, BatchNorm1d, BatchNorm2d, BatchNorm3d, Linear,
        MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, LayerNorm, RMSNorm, GroupNorm, Softmax, CrossEntropyLoss,
    )
}  # fmt: skip
