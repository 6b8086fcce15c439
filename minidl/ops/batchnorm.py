"""Batch norm, and the scale and shift that replace it after a convolution."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import norm as kernels
from minidl.kernels.activation import Activation
from minidl.kernels.norm import alone, fold
from minidl.tensors import Tensor

__all__ = ["batch_norm", "fold_batch_norm"]


class BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        buffers: kernels.Buffers | None,
        training: bool,
        momentum: float | None,
        eps: float,
        act: Activation,
    ) -> torch.Tensor:
        ctx.training, ctx.act = training, act
        if training and momentum is not None and alone.fits(x):
            y, found = alone.normalised(x, weight, bias, buffers, momentum, eps, act)
            ctx.save(x, *found, weight, bias)
            return y
        if training:
            found = kernels.batch_statistics(x, eps, momentum, buffers)
        else:
            assert buffers is not None
            found = fold.running_statistics(buffers.mean, buffers.var, eps, x.dtype)
        ctx.save(x, *found, weight, bias)
        return kernels.normalise(x, found, weight, bias, act)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, mean, rstd, weight, bias = ctx.saved
        want_x, want_weight, want_bias = ctx.needs[:3]
        given = dy, x, kernels.Statistics(mean, rstd), weight, bias, ctx.act
        if ctx.training and want_x and alone.fits(x):
            grads: tuple[torch.Tensor | None, ...] = alone.normalised_grad(*given)
        else:
            grads = kernels.normalise_grad(*given, ctx.training, want_x=want_x, want_affine=want_weight or want_bias)
        dx, dweight, dbias = grads
        return dx, dweight if want_weight else None, dbias if want_bias else None, None, None, None, None, None


def batch_norm(
    x: Tensor,
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
    """act((x - mean) / sqrt(var + eps) * weight + bias), with mean and variance of each channel.

    Shapes: x [N, C] or [N, C, ...] -> the same, in x's dtype; all others [C] or None, in any floating dtype.
    In training, mean and variance are those of the batch (over its M values per channel, the variance divided by M).
    The running statistics move towards them by `momentum` in place, with the variance divided by M - 1; with a
    momentum of None they become the means over all batches. num_batches_tracked ([] int64) counts the batches.
    In evaluation the running statistics are used and not changed.
    Raises ValueError for other shapes, fewer than two values per channel in training, or missing running statistics
    in evaluation; TypeError for integers.
    """
    mean, var, batches = _plain(running_mean), _plain(running_var), _plain(num_batches_tracked)
    kernels.check_arguments(x.data, mean, var, _plain(weight), _plain(bias), training, eps)
    buffers = None if mean is None or var is None else kernels.Buffers(mean, var, batches)
    if training and momentum is None and buffers is not None and batches is None:
        raise ValueError("batch_norm: momentum is None, which needs num_batches_tracked to count the batches")
    return BatchNorm.apply(x, weight, bias, buffers, training, momentum, eps, act)


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
    """(scale, shift) per output channel, so that scale * conv(x, conv_weight) + shift equals the batch norm with its
    running statistics of conv(x, conv_weight) + conv_bias.

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
