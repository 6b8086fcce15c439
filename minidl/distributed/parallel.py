"""A training step by shards: gradients, batch statistics and losses are added in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from minidl import nn, random
from minidl.autograd.deferred import settle_all
from minidl.distributed import buckets, lockstep
from minidl.distributed.group import current
from minidl.distributed.parts import Shards, cut, shards
from minidl.distributed.sums import share
from minidl.runtime import launch
from minidl.tensors import Tensor

STREAMS = 2**20  # random streams per step, however few it uses: a process may have no example of a batch

# The result of a shard: a scalar for backward(), and optionally the values to average instead of it.
Given = Tensor | tuple[Tensor, Sequence[Tensor]]


class DataParallel:
    """Runs the steps of a model on the shards of a batch; all processes get the same gradients, bit for bit.

        parallel = DataParallel(model)
        loss = parallel(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()

    All processes start with the weights of the first. Each shard is computed separately: batch norms use its
    statistics, a mean is over its examples. Gradients, floating-point buffers and losses become means over the shards,
    weighted by their examples. Random numbers depend on an example's position in the complete batch. `buffers` are the
    buffers that steps change, by default the model's. Gradients are exchanged during backward, in buckets of
    `bucket_cap_mb` MB. One shard gives an ordinary step. Raises ValueError unless bucket_cap_mb is above 0.

    With an `nn.SyncBatchNorm` in the model, or `sync_batch_norm` for one elsewhere, shards are computed in lockstep,
    and these batch norms use the statistics of the complete batch. A shard's loss is then a mean over its examples.
    """

    def __init__(
        self, model: nn.Module, of: Shards | None = None, buffers: Iterable[Tensor] | None = None,
        bucket_cap_mb: float = 25.0, sync_batch_norm: bool = False,
    ) -> None:  # fmt: skip
        if not bucket_cap_mb > 0:
            raise ValueError(f"DataParallel: bucket_cap_mb is {bucket_cap_mb}, expected MB above 0")
        self.model, self.shards, self._cap = model, of or shards(), 1e6 * bucket_cap_mb
        share([tensor.data for _, tensor in model.named_tensors()], "the first weights")
        self._buffers = list(model.buffers() if buffers is None else buffers)
        self._sync = sync_batch_norm
        # One copy of the buffers for each shard, which it changes instead of the model's.
        self._copies: list[list[torch.Tensor]] = []
        self._weights: dict[int, torch.Tensor] = {}
        # Results of the first step, valid for these parameters and modes of modules.
        self._signature: tuple[list[int], list[bool]] = [], []
        self._grad_buckets: buckets.Buckets | None = None
        self._changed: list[int] = []

    def __call__(self, loss: Callable[..., Tensor], *batch: Tensor) -> Tensor:
        """Return the mean loss of a batch, and replace the gradients of the parameters by its gradients.

        `batch` are tensors with a row for each example, the same in every process; `loss` is called with the rows of
        each of this process's shards. Raises LostError if a process is missing.
        """
        parts = [
            [tensor[rows.start : rows.stop] for tensor in batch] for rows in self.shards.rows(len(batch[0])) if rows
        ]
        return self.step(len(batch[0]), [partial(loss, *part) for part in parts])[0]

    def step(self, rows: int, works: Sequence[Callable[[], Given]], scale: Tensor | None = None) -> list[Tensor]:
        """Run a step on a batch of `rows` examples: `works` compute this process's shards that have examples.

        Each returns a scalar, or a scalar and the values to average instead. `scale`: see backward(). Raises
        RuntimeError for a parameter whose first gradient is in a later step.
        """
        trained: list[Tensor] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = None
        if self.shards.count == 1:
            loss, values = _both(works[0]())
            loss.backward(scale)
            return values
        signature = [id(parameter) for parameter in trained], [module.training for module in self.model.modules()]
        if signature != self._signature:
            self._signature, self._grad_buckets = signature, None
        shard_range, stream, shares = self.shards.local, random.get_state()["stream"], self._shares(rows)
        model_buffers = [buffer.data for buffer in self._buffers]
        while len(self._copies) < len(shard_range):  # allocated outside a recording
            self._copies.append([buffer.clone() for buffer in model_buffers])
        for copies in self._copies[: len(works)]:
            buckets.copy(copies, model_buffers)
        versions = [[buffer._version for buffer in copies] for copies in self._copies]
        in_step = self._sync or any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules())
        step = buckets.ShardedStep(self.shards, shares, len(works), self._grad_buckets, parallel=not in_step)
        hooks = [parameter.register_post_accumulate_grad_hook(step.arrived) for parameter in trained]
        ranges = self.shards.rows(rows)
        parts = [partial(_computed, step, work, ranges[shard], scale) for shard, work in enumerate(works)]
        turns = lockstep.Turns(step, trained, self._buffers, self._copies)
        try:
            if in_step:
                step.early = not lockstep.has_idle_process(self.shards, rows)
                computed = lockstep.in_step(turns, parts, self.shards, rows, shares)
            else:
                computed = lockstep.in_turn(turns, parts)
            for shard, figures in computed:
                copies = self._copies[shard]
                changed = [buffer._version != version for buffer, version in zip(copies, versions[shard], strict=True)]
                self._agree(step, trained, changed, figures)
                step.close([*(copies[index] for index in self._changed), *figures])
        finally:
            for hook in hooks:
                hook.remove()
            for buffer, data in zip(self._buffers, model_buffers, strict=True):
                buffer.data = data
        if not works:
            self._agree(step, trained, [False] * len(self._buffers), None)
        random.skip(stream + STREAMS - random.get_state()["stream"])
        step.finish()
        assert self._grad_buckets is not None
        *gradients, others = step.sums
        for used, grads in zip(self._grad_buckets.used, gradients, strict=True):
            for parameter, gradient in zip(used, grads, strict=True):
                parameter.grad = Tensor(gradient)
        buckets.copy([model_buffers[index] for index in self._changed], others[: len(self._changed)])
        counts = [index for index, buffer in enumerate(model_buffers) if not buffer.is_floating_point()]
        if works:
            buckets.copy([model_buffers[index] for index in counts], [self._copies[0][index] for index in counts])
        if rows < self.shards.count:  # a process without an example has counted no batch
            share([model_buffers[index] for index in counts], "the counts of batches")
        return [Tensor(value) for value in others[len(self._changed) :]]

    def _shares(self, rows: int) -> torch.Tensor:
        """Return the share of a batch's examples in each of all shards, float64 on the device."""
        if rows not in self._weights:
            weights = [len(part) / rows for part in cut(rows, self.shards.count)]
            device = next(self.model.parameters()).device
            self._weights[rows] = torch.tensor(weights, dtype=torch.float64).to(device)
        return self._weights[rows]

    def _agree(
        self,
        step: buckets.ShardedStep,
        trained: list[Tensor],
        changed: list[bool],
        figures: Sequence[torch.Tensor] | None,
    ) -> None:
        """Agree in the first step on the parameters that get gradients and the buffers that change.

        Some processes may have no example in it (`figures` None), or take other branches of the model.
        """
        pending = set() if figures is None else set(step.pending(trained))
        if self._grad_buckets is not None:
            if not pending <= self._grad_buckets.of.keys():
                raise RuntimeError("a parameter has a gradient, and had none in the first step of this DataParallel")
            return
        used = [parameter in pending for parameter in trained]
        shapes: Any = (
            None if figures is None else [[str(f.dtype).removeprefix("torch."), list(f.shape)] for f in figures]
        )
        if launch.runs():
            others = current().gathered([used, changed, shapes], "the first step")
            used, changed = ([any(each) for each in zip(*(o[i] for o in others), strict=True)] for i in (0, 1))
            shapes = next(each for *_, each in others if each is not None)
        assert shapes is not None
        self._changed = [i for i, c in enumerate(changed) if c and self._buffers[i].is_floating_point()]
        values = [buckets.like(self._buffers[i].data) for i in self._changed]
        values += [buckets.like(torch.empty(shape, dtype=getattr(torch, d), device="meta")) for d, shape in shapes]
        step.buckets = self._grad_buckets = buckets.Buckets(
            [p for p, u in zip(trained, used, strict=True) if u],
            values,
            trained[0].device,
            len(self.shards.local),
            self._cap,
        )


def _computed(
    step: buckets.ShardedStep, work: Callable[[], Given], rows: range, scale: Tensor | None
) -> list[torch.Tensor]:
    """Compute a shard, pass its gradients to the step, and return its values."""
    with random.rows(rows.start, len(rows)):
        loss, values = _both(work())
        step.backward(loss, scale)
        settle_all()
    return [value.data for value in values]


def _both(result: Given) -> tuple[Tensor, list[Tensor]]:
    """Return the scalar of a shard's result, and the values to average."""
    return (result, [result]) if isinstance(result, Tensor) else (result[0], list(result[1]))
