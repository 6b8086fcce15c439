"""Layers that change an image's size or drop its channels, its patches, and tables of vectors; torch's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl import ops
from minidl.kernels import check
from minidl.kernels.check import Pair
from minidl.nn import init
from minidl.nn.layers import Dropout, OperationLayer
from minidl.nn.module import Module, Parameter
from minidl.tensors import Tensor, device_of

Margins = int | Sequence[int]


class Dropout2d(Dropout):
    """Zero each channel with probability p in training, and scale the others by 1 / (1 - p). [N, C, H, W]."""

    _op: Callable[..., Tensor] = staticmethod(ops.dropout2d)

    def forward(self, input: Tensor) -> Tensor:
        return type(self)._op(input, self.p, self.training, self.inplace)


class Dropout1d(Dropout2d):
    """`Dropout2d` of sequences, [N, C, L]."""

    _op = staticmethod(ops.dropout1d)


class Dropout3d(Dropout2d):
    """`Dropout2d` of volumes, [N, C, D, H, W]."""

    _op = staticmethod(ops.dropout3d)


class AdaptiveMaxPool2d(OperationLayer):
    """Maxima over the windows of `AdaptiveAvgPool2d`. Shapes: [N, C, H, W] -> [N, C, *output_size]."""

    _op: Callable[..., Any] = staticmethod(ops.adaptive_max_pool2d)
    _shown, _arguments = ("output_size",), ("output_size", "return_indices")

    def __init__(self, output_size: int | tuple[int | None, ...], return_indices: bool = False) -> None:
        super().__init__()
        self.output_size, self.return_indices = output_size, return_indices


class AdaptiveMaxPool1d(AdaptiveMaxPool2d):
    """Maxima over the windows of `AdaptiveAvgPool1d`. Shapes: [N, C, L] -> [N, C, output_size]."""

    _op = staticmethod(ops.adaptive_max_pool1d)


class AdaptiveMaxPool3d(AdaptiveMaxPool2d):
    """Maxima over the windows of `AdaptiveAvgPool3d`. Shapes: [N, C, D, H, W] -> [N, C, *output_size]."""

    _op = staticmethod(ops.adaptive_max_pool3d)


class Upsample(OperationLayer):
    """Resize images, see `ops.interpolate`."""

    _op, _shown = staticmethod(ops.interpolate), ("size", "scale_factor", "mode")
    _arguments = (*_shown, "align_corners", "recompute_scale_factor")

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        scale_factor: float | tuple[float, float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__()
        self.size, self.scale_factor, self.mode = size, scale_factor, mode
        self.align_corners, self.recompute_scale_factor = align_corners, recompute_scale_factor


class Unfold(OperationLayer):
    """The windows of images as columns, see `ops.unfold`."""

    _op: Callable[..., Any] = staticmethod(ops.unfold)
    _shown: tuple[str, ...] = ("kernel_size", "dilation", "padding", "stride")

    def __init__(self, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1) -> None:
        super().__init__()
        self.kernel_size, self.dilation, self.padding, self.stride = kernel_size, dilation, padding, stride


class Fold(Unfold):
    """The sums of overlapping windows as images, see `ops.fold`."""

    _op, _shown = staticmethod(ops.fold), ("output_size", *Unfold._shown)

    def __init__(
        self, output_size: Pair, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1
    ) -> None:
        super().__init__(kernel_size, dilation, padding, stride)
        self.output_size = output_size


class PixelShuffle(OperationLayer):
    """Rearrange [N, C r^2, H, W] to [N, C, H r, W r], where r = upscale_factor."""

    _op, _shown = staticmethod(ops.pixel_shuffle), ("upscale_factor",)

    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.upscale_factor = upscale_factor


class PixelUnshuffle(OperationLayer):
    """Rearrange [N, C, H r, W r] to [N, C r^2, H, W], where r = downscale_factor."""

    _op, _shown = staticmethod(ops.pixel_unshuffle), ("downscale_factor",)

    def __init__(self, downscale_factor: int) -> None:
        super().__init__()
        self.downscale_factor = downscale_factor


class _Pad(OperationLayer):
    """The base of margins around the last `_axes` dimensions."""

    _op = staticmethod(ops.pad)
    _shown: tuple[str, ...] = ("padding",)
    _arguments = ("padding", "_mode", "value")
    _mode, value, _axes = "constant", 0.0, 2

    def __init__(self, padding: Margins) -> None:
        super().__init__()
        widths = check.integers(type(self).__name__, "padding", padding)
        self.padding = widths if isinstance(padding, list | tuple) else widths * (2 * self._axes)


class ZeroPad2d(_Pad):
    """Margins of zeros: one width, or (left, right, top, bottom)."""


class ZeroPad1d(ZeroPad2d):
    """Margins of zeros: one width, or (left, right)."""

    _axes = 1


class ZeroPad3d(ZeroPad2d):
    """Margins of zeros: one width, or (left, right, top, bottom, front, back)."""

    _axes = 3


class ConstantPad2d(_Pad):
    """Margins of one value: one width, or (left, right, top, bottom)."""

    _shown = ("padding", "value")

    def __init__(self, padding: Margins, value: float) -> None:
        super().__init__(padding)
        self.value = value


class ConstantPad1d(ConstantPad2d):
    """Margins of one value: one width, or (left, right)."""

    _axes = 1


class ConstantPad3d(ConstantPad2d):
    """Margins of one value: one width, or (left, right, top, bottom, front, back)."""

    _axes = 3


class ReflectionPad2d(_Pad):
    """Margins that mirror the inside at the edge: one width, or (left, right, top, bottom)."""

    _mode = "reflect"


class ReflectionPad1d(ReflectionPad2d):
    """Margins that mirror the inside at the edge: one width, or (left, right)."""

    _axes = 1


class ReflectionPad3d(ReflectionPad2d):
    """Margins that mirror the inside at the edge: one width, or (left, right, top, bottom, front, back)."""

    _axes = 3


class ReplicationPad2d(_Pad):
    """Margins that repeat the edge: one width, or (left, right, top, bottom)."""

    _mode = "replicate"


class ReplicationPad1d(ReplicationPad2d):
    """Margins that repeat the edge: one width, or (left, right)."""

    _axes = 1


class ReplicationPad3d(ReplicationPad2d):
    """Margins that repeat the edge: one width, or (left, right, top, bottom, front, back)."""

    _axes = 3


class Embedding(Module):
    """weight[x] for a table [num_embeddings, embedding_dim] of normal numbers. Row padding_idx is 0 and is not trained.

    Shapes: int64 or int32 of any shape -> [*, embedding_dim]. Raises as `ops.embedding`.
    """

    _shown: tuple[str, ...] = ("num_embeddings", "embedding_dim", "padding_idx")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = check.integer(type(self).__name__, "num_embeddings", num_embeddings, 0)
        self.embedding_dim = check.integer(type(self).__name__, "embedding_dim", embedding_dim, 0)
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        if _weight is None:
            device_, kind = device_of(device), dtype or torch.get_default_dtype()
            self.weight = Parameter(torch.empty(num_embeddings, embedding_dim, device=device_, dtype=kind))
            init.normal_(self.weight)
            if padding_idx is not None:
                self.weight.data[padding_idx].zero_()
        else:
            self.weight = Parameter(_weight)
        self.weight.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor | torch.Tensor, freeze: bool = True, **options: Any) -> Embedding:
        """Return a table of these vectors [V, H], not trained unless freeze is False."""
        V, H = embeddings.shape
        return cls(V, H, _weight=embeddings, _freeze=freeze, **options)

    def forward(self, input: Tensor) -> Tensor:
        return ops.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )  # fmt: skip


class EmbeddingBag(Embedding):
    """Means, sums or maxima of bags of rows of a table, see `ops.embedding_bag`."""

    _shown = ("num_embeddings", "embedding_dim", "mode", "padding_idx")

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
        _weight: Tensor | torch.Tensor | None = None, include_last_offset: bool = False,
        padding_idx: int | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        *, _freeze: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            _freeze, device, dtype,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return ops.embedding_bag(
            input, self.weight, offsets, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.mode,
            self.sparse, per_sample_weights, self.include_last_offset, self.padding_idx,
        )  # fmt: skip
