"""Batch norm with the statistics of all shards of a batch, exchanged between threads (`joins`).

Shard v contributes its mean and variance in forward, and in backward the sums s_v of dz and t_v of dz n:

    mean = sum w_v mean_v         var = sum w_v [var_v + (mean_v - mean)^2]
    dx_v = weight rstd (dz - (sum_u w_u s_u + n sum_u w_u t_u) / n_v)

w_v is the shard's share of the batch's examples, so that each counts equally, and n_v its number of values per channel.
backward starts from the gradient of the shard's own loss, a mean over its examples: its gradients, dx_v included, are
multiplied by w_v at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minidl import random
from minidl.autograd import Function
from minidl.autograd.deferred import settle_all
from minidl.kernels import norm as kernels
from minidl.kernels import tree
from minidl.kernels.activation import Activation
from minidl.ops import folds
from minidl.ops.batchnorm import _plain, batch_norm
from minidl.tensors import Tensor

__all__: list[str] = []  # users have `nn.SyncBatchNorm`


class Part(NamedTuple):
    """The shard that a thread computes: its number of rows, the total, and the shares of all shards in float64.

    `meet` contributes a row of numbers, waits for all shards, and returns all rows.
    """

    examples: int
    rows: int
    shares: torch.Tensor
    meet: Callable[[torch.Tensor], torch.Tensor]


_thread = threading.local()


def joins(part: Part) -> None:
    """Let this thread's batch norms share statistics with other shards from now on."""
    _thread.part = part


class SyncBatchNorm(Function):
    """act(normalised x) of a shard, with the statistics of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
        statistics: kernels.Statistics, act: Activation,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save(x, *statistics, weight, bias)
        ctx.act = act
        return kernels.normalise(x, statistics, weight, bias, act, None)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, mean, rstd, *affine = ctx.saved
        part = getattr(_thread, "part", None)
        if part is None:
            raise RuntimeError("SyncBatchNorm: backward() of a shard's loss was called outside the thread of a shard")
        # The shards exchange unrounded sums.
        wide = (None if t is None else t.to(mean.dtype) for t in affine)
        operands, dx = (dy, x, kernels.Statistics(mean, rstd), *wide, ctx.act, True), None
        _, dweight, dbias, _ = kernels.normalise_grad(*operands, want_x=False)
        assert dweight is not None
        assert dbias is not None
        if ctx.needs[0]:
            rows = part.meet(torch.cat([dbias, dweight]))
            sums = tree.sum_rows(rows, range(len(rows)), tree.leaves(len(rows)), part.shares).view(2, -1)
            dx = kernels.normalise_grad(*operands, sums=sums, want_affine=False)[0]
        parts = zip((dweight, dbias), ctx.needs[1:3], affine, strict=True)
        return dx, *(grad.to(like.dtype) if need else None for grad, need, like in parts), None, None


def sync_batch_norm(input: Tensor, *settings: Any) -> Tensor:
    """Apply `batch_norm`, in training with the statistics of the whole batch if this thread's shard `joins` others.

    Raises RuntimeError for a shard that does not, and for unequal numbers of values per example.
    """
    running_mean, running_var, weight, bias, training, momentum, eps, act, num_batches_tracked = settings
    part = getattr(_thread, "part", None)
    if not training or part is None:
        if training and random.in_part():
            raise RuntimeError(
                "SyncBatchNorm: shards are computed one after another, as the model of this DataParallel has no "
                "SyncBatchNorm: give it sync_batch_norm=True"
            )
        return batch_norm(input, *settings)
    x = input.data
    mean, var, batches = (_plain(buffer) for buffer in (running_mean, running_var, num_batches_tracked))
    batch = torch.empty(1, dtype=x.dtype, device=x.device).expand(part.rows, *x.shape[1:])
    kernels.check_arguments(batch, mean, var, _plain(weight), _plain(bias), training, eps)
    buffers = None if mean is None or var is None else kernels.Buffers(mean, var, batches)
    if momentum is None and buffers is not None and batches is None:
        raise ValueError("batch_norm: momentum is None, which needs num_batches_tracked to count the batches")
    values, remainder = divmod(x.numel() // max(1, x.shape[1]), part.examples)
    if remainder:
        raise RuntimeError(
            f"SyncBatchNorm: {part.examples} examples have input {list(x.shape)}, expected as many values each"
        )
    if buffers is not None:
        folds.forget()
        torch.autograd.graph.increment_version([buffer for buffer in buffers if buffer is not None])
    settle_all()  # no deferred result of this shard stays open while another one runs
    rows = part.meet(torch.cat(kernels.batch_statistics(x, None, momentum, buffers)))
    statistics = kernels.join_shards(rows, part.shares, values * part.rows, x.dtype, eps, momentum, buffers)
    return SyncBatchNorm.apply(input, weight, bias, statistics, act)
