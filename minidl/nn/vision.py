"""Layers for images: pooling and batch norm, with torch's arguments and state_dict names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl import ops
from minidl.kernels import activation, check
from minidl.kernels.activation import Activation
from minidl.kernels.pool import Pair
from minidl.nn.layers import Device, OperationLayer, _act_repr
from minidl.nn.module import Module
from minidl.nn.norms import _Affine
from minidl.ops.sync_batchnorm import sync_batch_norm
from minidl.tensors import Tensor, device_of


class MaxPool2d(OperationLayer):
    """The maximum of each window. Shapes: [N, C, H, W] -> [N, C, OH, OW]."""

    _op: Callable[..., Any] = staticmethod(ops.max_pool2d)
    _shown = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    _arguments = (*_shown, "return_indices")

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
        return_indices: bool = False, ceil_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation, self.ceil_mode = padding, dilation, ceil_mode
        self.return_indices = return_indices


class AvgPool2d(OperationLayer):
    """The mean of each window. Shapes: [N, C, H, W] -> [N, C, OH, OW]."""

    _op: Callable[..., Any] = staticmethod(ops.avg_pool2d)
    _shown = ("kernel_size", "stride", "padding")
    _arguments = (*_shown, "ceil_mode", "count_include_pad", "divisor_override")

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode = padding, ceil_mode
        self.count_include_pad, self.divisor_override = count_include_pad, divisor_override


class MaxPool3d(MaxPool2d):
    """The maximum of each window. Shapes: [N, C, D, H, W] -> [N, C, OD, OH, OW]."""

    _op = staticmethod(ops.max_pool3d)


class AvgPool3d(AvgPool2d):
    """The mean of each window. Shapes: [N, C, D, H, W] -> [N, C, OD, OH, OW]."""

    _op = staticmethod(ops.avg_pool3d)


class MaxPool1d(MaxPool2d):
    """The maximum of each window. Shapes: [N, C, L] -> [N, C, OL]."""

    _op = staticmethod(ops.max_pool1d)


class AvgPool1d(OperationLayer):
    """The mean of each window. Shapes: [N, C, L] -> [N, C, OL]."""

    _op, _shown = staticmethod(ops.avg_pool1d), ("kernel_size", "stride", "padding")
    _arguments = (*_shown, "ceil_mode", "count_include_pad")

    def __init__(
        self, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode, self.count_include_pad = padding, ceil_mode, count_include_pad


class AdaptiveAvgPool2d(OperationLayer):
    """Means over output_size windows that divide the image. Shapes: [N, C, H, W] -> [N, C, *output_size]."""

    _op: Callable[..., Any] = staticmethod(ops.adaptive_avg_pool2d)
    _shown = ("output_size",)

    def __init__(self, output_size: int | tuple[int | None, ...]) -> None:
        super().__init__()
        self.output_size = output_size


class AdaptiveAvgPool1d(AdaptiveAvgPool2d):
    """Means over output_size windows that divide the sequence. Shapes: [N, C, L] -> [N, C, output_size]."""

    _op = staticmethod(ops.adaptive_avg_pool1d)


class AdaptiveAvgPool3d(AdaptiveAvgPool2d):
    """Means over output_size windows that divide the volume. Shapes: [N, C, D, H, W] -> [N, C, *output_size]."""

    _op = staticmethod(ops.adaptive_avg_pool3d)


class _Norm(_Affine):
    """The base of norms of channels with running statistics; `ranks` are the allowed numbers of dimensions of x."""

    _version = 2  # 1 had no num_batches_tracked
    ranks: tuple[int, ...]
    expected: str

    def __init__(
        self, num_features: int, eps: float, momentum: float | None, affine: bool, track_running_stats: bool,
        device: Device, dtype: torch.dtype | None, bias: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        num_features = check.integer(type(self).__name__, "num_features", num_features, 0)
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(f"{type(self).__name__}: momentum is {momentum!r}, expected a number from 0 to 1 or None")
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self._register_affine((num_features,), affine, affine and bias, device, dtype)
        buffers: dict[str, torch.Tensor | None] = dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"))
        if track_running_stats:
            device_ = device_of(device)
            buffers = {
                "running_mean": torch.zeros(num_features, device=device_, dtype=dtype),
                "running_var": torch.ones(num_features, device=device_, dtype=dtype),
                "num_batches_tracked": torch.zeros((), device=device_, dtype=torch.int64),
            }
        for name, buffer in buffers.items():
            self.register_buffer(name, None if buffer is None else Tensor(buffer))

    def _check(self, input: Tensor, dim: int = 1) -> None:
        """Raise ValueError for an unsupported number of dimensions, or one of channels that the state does not have."""
        if input.dim() not in self.ranks:
            raise ValueError(f"{type(self).__name__}: input has shape {list(input.shape)}, expected {self.expected}")
        if input.shape[dim] != self.num_features and self.saved_tensors():
            raise ValueError(
                f"{type(self).__name__}: input has {input.shape[dim]} channels (shape {list(input.shape)}), expected "
                f"num_features, {self.num_features}"
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        counted = self._buffers.get("num_batches_tracked")
        if counted is not None and (local_metadata.get("version") or 1) < 2:
            state_dict.setdefault(f"{prefix}num_batches_tracked", counted)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )


class _BatchNorm(_Norm):
    _op: Callable[..., Tensor] = staticmethod(ops.batch_norm)

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, device: Device = None, dtype: torch.dtype | None = None, *, bias: bool = True,
        act: Activation = None,
    ) -> None:  # fmt: skip
        activation.parse(act)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        # Without running statistics, evaluation uses those of the batch too.
        training = self.training or (mean is None and var is None)
        if self.training and not self.track_running_stats:
            mean = var = count = None
        return self._op(input, mean, var, self.weight, self.bias, training, self.momentum, self.eps, self.act, count)

    def extra_repr(self) -> str:
        return super().extra_repr() + _act_repr(self.act)


class _InstanceNorm(_Norm):
    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False,
        track_running_stats: bool = False, device: Device = None, dtype: torch.dtype | None = None, *,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias)

    def forward(self, input: Tensor) -> Tensor:
        single = input.dim() == self.ranks[0]
        self._check(input, 0 if single else 1)
        x = ops.unsqueeze(input, 0) if single else input
        y = ops.instance_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias,
            self.training or not self.track_running_stats, self.momentum or 0.0, self.eps,
        )  # fmt: skip
        return ops.squeeze(y, 0) if single else y


class BatchNorm1d(_BatchNorm):
    """Batch norm of [N, C] or [N, C, L], then `act`. weight, bias and the running statistics are named as torch's.

    Training uses the statistics of the batch and moves the running statistics towards them by `momentum`; with momentum
    None these are means over all batches. Evaluation uses the running statistics, unless track_running_stats is False.
    """

    ranks, expected = (2, 3), "[N, C] or [N, C, L]"


class BatchNorm2d(_BatchNorm):
    """Batch norm of [N, C, H, W], then `act`. As BatchNorm1d."""

    ranks, expected = (4,), "[N, C, H, W]"


class BatchNorm3d(_BatchNorm):
    """Batch norm of [N, C, D, H, W], then `act`. As BatchNorm1d."""

    ranks, expected = (5,), "[N, C, D, H, W]"


class SyncBatchNorm(_BatchNorm):
    """Batch norm of [N, C, ...], then `act`; in steps of `distributed.DataParallel` with the statistics of all shards.

    Elsewhere, and with one shard, it is a `BatchNorm1d`. Raises ValueError for a process_group.
    """

    _op = staticmethod(sync_batch_norm)
    ranks, expected = (2, 3, 4, 5), "[N, C] or [N, C, ...] of up to 5 dimensions"

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: None = None, device: Device = None,
        dtype: torch.dtype | None = None, *, bias: bool = True, act: Activation = None,
    ) -> None:  # fmt: skip
        _check_no_group(process_group)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias, act=act)

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: None = None) -> Module:
        """Replace every BatchNorm1d, 2d and 3d by a SyncBatchNorm with its parameters and buffers; returns `module`.

        If `module` is such a batch norm itself, returns a new module instead. Raises as the class.
        """
        _check_no_group(process_group)
        if isinstance(module, BatchNorm1d | BatchNorm2d | BatchNorm3d):
            norm = cls.__new__(cls)
            norm.__dict__.update(module.__dict__)
            return norm
        for name, child in module.named_children():
            module._modules[name] = cls.convert_sync_batchnorm(child)
        return module


def _check_no_group(process_group: None) -> None:
    if process_group is not None:
        raise ValueError("SyncBatchNorm: process_group is given, expected None: all shards of DataParallel are joined")


class InstanceNorm1d(_InstanceNorm):
    """Normalise each channel of each example: [N, C, L], or one [C, L]. As InstanceNorm2d."""

    ranks, expected = (2, 3), "[N, C, L] or [C, L]"


class InstanceNorm2d(_InstanceNorm):
    """Normalise each channel of each image: [N, C, H, W], or one [C, H, W].

    With track_running_stats evaluation uses running statistics, which training moves by `momentum` towards the means of
    the images' statistics.
    """

    ranks, expected = (3, 4), "[N, C, H, W] or [C, H, W]"


class InstanceNorm3d(_InstanceNorm):
    """Normalise each channel of each volume: [N, C, D, H, W], or one [C, D, H, W]. As InstanceNorm2d."""

    ranks, expected = (4, 5), "[N, C, D, H, W] or [C, D, H, W]"
