"""Batch norm, and the scale and shift that replace it after a convolution."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function, PendingSum
from minidl.autograd.deferred import Deferred, fuse, in_rows, is_fused, may_wait, waiting
from minidl.kernels import activation, check
from minidl.kernels import norm as kernels
from minidl.kernels.activation import Activation
from minidl.kernels.norm import alone, fold
from minidl.ops import folds, norm_grad
from minidl.ops.activation import activated
from minidl.tensors import Tensor

__all__ = ["batch_norm", "fold_batch_norm"]


class BatchNorm(Function):
    """act(normalised x + added), where `added` has x's shape or is None."""

    accepts_pending_sums = staticmethod(is_fused)
    recorded_backward = staticmethod(norm_grad.batch_norm)

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        added: torch.Tensor | None,
        statistics: kernels.Statistics,
        training: bool,
        act: Activation,
    ) -> torch.Tensor:
        ctx.training, ctx.act, ctx.added = training, act, added is not None
        y = kernels.normalise(x, statistics, weight, bias, act, added)
        # x does not determine the added tensor; the derivative of act follows from the result.
        ctx.save(x, *statistics, weight, bias, None if added is None or act is None else y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | PendingSum) -> Any:
        x, mean, rstd, weight, bias, y = ctx.saved
        want_x, want_weight, want_bias, want_added = ctx.needs[:4]
        operands = x, kernels.Statistics(mean, rstd), weight, bias, ctx.act
        arrived = ctx.pending_gradient(0) if want_x and is_fused() else None
        dx: torch.Tensor | None
        if ctx.training and want_x and y is None and alone.fits(x):
            dz = dy.dense() if isinstance(dy, PendingSum) else dy
            dx, dweight, dbias = alone.normalised_grad(dz, *operands, arrived)
        else:
            first, second = dy if isinstance(dy, PendingSum) else (dy, None)
            dx, dweight, dbias, dz = kernels.normalise_grad(
                first, *operands, ctx.training, more=second, y=y, so_far=arrived, want_x=want_x,
                want_affine=want_weight or want_bias,
            )  # fmt: skip
        affine = zip((dweight, dbias, dz), (want_weight, want_bias, want_added), strict=True)
        return dx, *(grad if want else None for grad, want in affine), None, None, None


class BatchNormAlone(BatchNorm):
    """A batch norm of few values per channel: statistics and result in one launch."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        added: None,
        buffers: kernels.Buffers | None,
        momentum: float,
        eps: float,
        act: Activation,
    ) -> torch.Tensor:
        ctx.training, ctx.act = True, act
        y, statistics = alone.normalised(x, weight, bias, buffers, momentum, eps, act)
        ctx.save(x, *statistics, weight, bias, None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | PendingSum) -> Any:
        return *BatchNorm.backward(ctx, dy), None


class DeferredNorm(Deferred):
    """A batch norm with computed statistics, which can be fused with a sum and an activation."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: kernels.Statistics, training: bool,
        added: Tensor | None = None, act: Activation = None,
    ) -> None:  # fmt: skip
        wants = any(t is not None and t.requires_grad for t in (x, weight, bias, added))
        super().__init__(x.shape, x.dtype, x.device, wants, x, weight, bias, added, *statistics)
        self.inputs = x, weight, bias, statistics, training
        self.added, self.act = added, act

    def compute(self) -> Tensor:
        x, weight, bias, statistics, training = self.inputs
        return BatchNorm.apply(x, weight, bias, self.added, statistics, training, self.act)

    def with_act(self, act: Activation) -> Deferred | None:
        supported = self.added is None or activation.parse(act)[0] in activation.FROM_OUTPUT
        return DeferredNorm(*self.inputs, self.added, act) if self.act is None and supported else None

    def with_sum(self, other: Any) -> Deferred | None:
        return DeferredNorm(*self.inputs, other) if self.act is None and self.added is None else None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    act: Activation = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """Return act((input - mean) / sqrt(var + eps) * weight + bias), with mean and variance of each channel.

    Shapes: input [N, C] or [N, C, ...] -> the same, in its dtype, contiguous if it is, else channels-last; all others
    [C] or None, in any floating dtype.
    In training, mean and variance are the batch's (over its M values per channel, the variance divided by M). The
    running statistics move towards them by `momentum` in place, with the variance divided by M - 1; with a momentum of
    None they become the means over all batches. num_batches_tracked ([] int64) counts the batches.
    In evaluation the running statistics are used and not changed.
    Raises ValueError for other shapes, fewer than two values per channel in training, or missing running statistics
    in evaluation; TypeError for integers.
    """
    activation.parse(act)
    momentum = None if momentum is None else check.real("batch_norm", "momentum", momentum)
    input = in_rows(input)
    vectors = running_mean, running_var, num_batches_tracked, weight, bias
    mean, var, batches, factor, offset = [None if t is None else t.data for t in vectors]
    waiting_input = None if input.ndim != 4 or (mean is None and not training) else waiting(input)
    like = (
        input.data
        if waiting_input is None
        else torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
    )
    kernels.check_arguments(like, mean, var, factor, offset, training, eps)
    if waiting_input is not None and not training:
        fused = fuse(input, "with_norm", running_mean, running_var, weight, bias, eps)
        if fused is not None:
            output = Tensor._of_deferred(fused)
            return output if act is None else activated(output, act)
    buffers = None if mean is None or var is None else kernels.Buffers(mean, var, batches)
    if training and momentum is None and buffers is not None and batches is None:
        raise ValueError("batch_norm: momentum is None, which needs num_batches_tracked to count the batches")
    if training and buffers is not None:
        folds.forget()
        torch.autograd.graph.increment_version([buffer for buffer in buffers if buffer is not None])
    if training and momentum is not None and alone.fits(like):
        return BatchNormAlone.apply(input, weight, bias, None, buffers, momentum, eps, act)
    if training:
        parts = None if waiting_input is None else waiting_input.keep_statistics()
        values = input.data  # computes the input now, and its statistics with it if they were requested
        statistics = kernels.batch_statistics(values, eps, momentum, buffers, parts[0] if parts else None)
    else:
        assert buffers is not None
        statistics = folds.running_statistics(buffers.mean, buffers.var, eps, input.dtype)
    if act is None and may_wait(input):
        return Tensor._of_deferred(DeferredNorm(input, weight, bias, statistics, training))
    return BatchNorm.apply(input, weight, bias, None, statistics, training, act)


def fold_batch_norm(
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) per output channel, so that scale * conv(x, conv_weight) + shift equals the batch norm with
    its running statistics of conv(x, conv_weight) + conv_bias.

    Shapes: conv_weight [M, ...], the others [M] or None -> [M], in conv_weight's dtype, or with `wide` in the dtype of
    its accumulator (float32 for float16, which cannot hold every shift). No gradient is recorded.
    Raises ValueError for other shapes, TypeError for integers.
    """
    scale, shift = fold.fold(
        conv_weight.data, _plain(conv_bias), running_mean.data, running_var.data, _plain(weight), _plain(bias), eps,
        wide=wide,
    )  # fmt: skip
    return Tensor(scale), Tensor(shift)


def _plain(tensor: Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.data
