"""Layers for images: pooling and batch norm, with torch's arguments and state_dict names."""

from __future__ import annotations

import torch

from minidl import ops
from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.pool import Pair
from minidl.nn.layers import Called, Device, _act_repr
from minidl.nn.norms import _Affine
from minidl.tensors import Tensor, device_of


class MaxPool2d(Called):
    """The maximum of each window. Shapes: [N, C, H, W] -> [N, C, OH, OW]."""

    _op, _shown = staticmethod(ops.max_pool2d), ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    _given = (*_shown, "return_indices")

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        dilation: Pair = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation, self.ceil_mode = padding, dilation, ceil_mode
        self.return_indices = return_indices


class AvgPool2d(Called):
    """The mean of each window. Shapes: [N, C, H, W] -> [N, C, OH, OW]."""

    _op, _shown = staticmethod(ops.avg_pool2d), ("kernel_size", "stride", "padding")
    _given = (*_shown, "ceil_mode", "count_include_pad", "divisor_override")

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode = padding, ceil_mode
        self.count_include_pad, self.divisor_override = count_include_pad, divisor_override


class AdaptiveAvgPool2d(Called):
    """Means over output_size windows that divide the image. Shapes: [N, C, H, W] -> [N, C, *output_size]."""

    _op, _shown = staticmethod(ops.adaptive_avg_pool2d), ("output_size",)

    def __init__(self, output_size: int | tuple[int | None, int | None]) -> None:
        super().__init__()
        self.output_size = output_size


class _BatchNorm(_Affine):
    """The base of all batch norms; `ranks` are the allowed numbers of dimensions of x."""

    ranks: tuple[int, ...]
    expected: str

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        act: Activation = None,
    ) -> None:
        super().__init__()
        activation.parse(act)
        if num_features < 0:
            raise ValueError(f"{type(self).__name__}: num_features is {num_features}, expected 0 or more")
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(f"{type(self).__name__}: momentum is {momentum!r}, expected a number from 0 to 1 or None")
        self.num_features, self.eps, self.momentum, self.act = num_features, eps, momentum, act
        self.affine, self.track_running_stats = affine, track_running_stats
        self._parameters_of((num_features,), affine, affine and bias, device, dtype)
        buffers: dict[str, torch.Tensor | None] = dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"))
        if track_running_stats:
            place = device_of(device)
            buffers = {
                "running_mean": torch.zeros(num_features, device=place, dtype=dtype),
                "running_var": torch.ones(num_features, device=place, dtype=dtype),
                "num_batches_tracked": torch.zeros((), device=place, dtype=torch.int64),
            }
        for name, buffer in buffers.items():
            self.register_buffer(name, None if buffer is None else Tensor(buffer))

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in self.ranks:
            raise ValueError(f"{type(self).__name__}: input has shape {list(input.shape)}, expected {self.expected}")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__}: input has {input.shape[1]} channels (shape {list(input.shape)}), expected "
                f"num_features, {self.num_features}"
            )
        # Without running statistics, evaluation uses those of the batch too.
        training = self.training or self.running_mean is None
        return ops.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum, self.eps,
            self.act, self.num_batches_tracked,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}{_act_repr(self.act)}"
        )


class BatchNorm1d(_BatchNorm):
    """Batch norm of [N, C] or [N, C, L], then `act`. weight, bias and the running statistics are named as torch's.

    Training uses the statistics of the batch and moves the running ones towards them by `momentum`; with momentum None
    these are means over all batches. Evaluation uses the running statistics, unless track_running_stats is False.
    """

    ranks, expected = (2, 3), "[N, C] or [N, C, L]"


class BatchNorm2d(_BatchNorm):
    """Batch norm of [N, C, H, W]; all else as `BatchNorm1d`."""

    ranks, expected = (4,), "[N, C, H, W]"
