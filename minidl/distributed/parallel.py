"""A training step by shards: gradients, statistics of batches and losses, joined in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from minidl import nn, random
from minidl.autograd.deferred import settle_all
from minidl.distributed import lockstep, room
from minidl.distributed.group import current
from minidl.distributed.parts import Shards, cut, shards
from minidl.distributed.sums import share
from minidl.runtime import launch
from minidl.tensors import Tensor

STREAMS = 2**20  # of random numbers that a step takes, however few it uses: a process may have no example of a batch

# What one shard gives: a scalar for backward(), and what is to be averaged in its place.
Given = Tensor | tuple[Tensor, Sequence[Tensor]]


class DataParallel:
    """Steps of a model on the shards of a batch; afterwards every process has the same gradients, bit for bit.

        parallel = DataParallel(model)
        loss = parallel(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()

    At the beginning all processes take the weights of the first. Each shard is computed by itself: batch norms take its
    statistics, a mean is over its examples. Gradients, buffers of floating numbers and losses become means over the
    shards, weighted by their examples. Random numbers are those of the examples' places in the whole batch.
    `buffers` are those that the steps change, by default the model's. Gradients are exchanged while backward goes on,
    in buckets of `bucket_cap_mb` MB. With one shard, a step is a plain one. Raises ValueError for no room in a bucket.

    With an `nn.SyncBatchNorm` in the model, or `sync_batch_norm` for one elsewhere, shards are computed in step: such a
    batch norm takes the statistics of the whole batch. A shard's loss is then a mean over its examples.
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
        # Those that each shard changes, in place of the model's.
        self._copies: list[list[torch.Tensor]] = []
        self._weights: dict[int, torch.Tensor] = {}
        # What the first step has found out, and for which parameters and modes of modules.
        self._known: tuple[list[int], list[bool]] = [], []
        self._room: room.Room | None = None
        self._moved: list[int] = []

    def __call__(self, loss: Callable[..., Tensor], *batch: Tensor) -> Tensor:
        """The mean loss of a batch, whose gradients replace those of the parameters.

        `batch` are tensors with a row for each example, the same in every process; `loss` is called with the rows of
        each of this process's shards. Raises LostError when a process is gone.
        """
        parts = [
            [tensor[rows.start : rows.stop] for tensor in batch] for rows in self.shards.rows(len(batch[0])) if rows
        ]
        return self.step(len(batch[0]), [partial(loss, *part) for part in parts])[0]

    def step(self, rows: int, works: Sequence[Callable[[], Given]], scale: Tensor | None = None) -> list[Tensor]:
        """As a call, of a batch of so many rows: `works` compute this process's shards, those that have examples.

        Each gives a scalar, or with it the values that are returned averaged in its place. `scale`: as that of
        backward(). Raises RuntimeError for a parameter that has a gradient first in a later step.
        """
        trained: list[Tensor] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = None
        if self.shards.count == 1:
            loss, values = _both(works[0]())
            loss.backward(scale)
            return values
        known = [id(parameter) for parameter in trained], [module.training for module in self.model.modules()]
        if known != self._known:
            self._known, self._room = known, None
        own, stream, shares = self.shards.own, random.get_state()["stream"], self._shares(rows)
        model_buffers = [buffer.data for buffer in self._buffers]
        while len(self._copies) < len(own):  # not in the memory of a recording
            self._copies.append([buffer.clone() for buffer in model_buffers])
        for copies in self._copies[: len(works)]:
            room.copy(copies, model_buffers)
        versions = [[buffer._version for buffer in copies] for copies in self._copies]
        in_step = self._sync or any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules())
        step = room.UnderWay(self.shards, shares, len(works), self._room, beside=not in_step)
        hooks = [parameter.register_post_accumulate_grad_hook(step.arrived) for parameter in trained]
        ranges = self.shards.rows(rows)
        parts = [partial(_computed, step, work, ranges[place], scale) for place, work in enumerate(works)]
        turns = lockstep.Turns(step, trained, self._buffers, self._copies)
        try:
            if in_step:
                step.early = not lockstep.lacks(self.shards, rows)
                computed = lockstep.in_step(turns, parts, self.shards, rows, shares)
            else:
                computed = lockstep.in_turn(turns, parts)
            for place, figures in computed:
                changed = self._copies[place]
                moved = [buffer._version != was for buffer, was in zip(changed, versions[place], strict=True)]
                self._agree(step, trained, moved, figures)
                step.close([*(changed[index] for index in self._moved), *figures])
        finally:
            for hook in hooks:
                hook.remove()
            for buffer, own_data in zip(self._buffers, model_buffers, strict=True):
                buffer.data = own_data
        if not works:
            self._agree(step, trained, [False] * len(self._buffers), None)
        random.skip(stream + STREAMS - random.get_state()["stream"])
        step.finish()
        assert self._room is not None
        *gradients, others = step.sums
        for used, found in zip(self._room.used, gradients, strict=True):
            for parameter, gradient in zip(used, found, strict=True):
                parameter.grad = Tensor(gradient)
        room.copy([model_buffers[index] for index in self._moved], others[: len(self._moved)])
        counts = [index for index, buffer in enumerate(model_buffers) if not buffer.is_floating_point()]
        if works:
            room.copy([model_buffers[index] for index in counts], [self._copies[0][index] for index in counts])
        if rows < self.shards.count:  # a process without an example has counted no batch
            share([model_buffers[index] for index in counts], "the counts of batches")
        return [Tensor(value) for value in others[len(self._moved) :]]

    def _shares(self, rows: int) -> torch.Tensor:
        """The share of a batch's examples that each of all shards has, float64 on the device."""
        if rows not in self._weights:
            each = [len(part) / rows for part in cut(rows, self.shards.count)]
            place = next(self.model.parameters()).device
            self._weights[rows] = torch.tensor(each, dtype=torch.float64).to(place)
        return self._weights[rows]

    def _agree(
        self, step: room.UnderWay, trained: list[Tensor], moved: list[bool], figures: Sequence[torch.Tensor] | None
    ) -> None:
        """Find out in the first step which parameters get gradients and which buffers change.

        Some processes may have no example in it (`figures` None), or take other branches of the model.
        """
        given = set() if figures is None else set(step.given(trained))
        if self._room is not None:
            if not given <= self._room.of.keys():
                raise RuntimeError("a parameter has a gradient, and had none in the first step of this DataParallel")
            return
        used = [parameter in given for parameter in trained]
        shapes: Any = (
            None if figures is None else [[str(f.dtype).removeprefix("torch."), list(f.shape)] for f in figures]
        )
        if launch.runs():
            others = current().gathered([used, moved, shapes], "the first step")
            used, moved = ([any(each) for each in zip(*(o[i] for o in others), strict=True)] for i in (0, 1))
            shapes = next(each for *_, each in others if each is not None)
        assert shapes is not None
        self._moved = [i for i, m in enumerate(moved) if m and self._buffers[i].is_floating_point()]
        values = [room.like(self._buffers[i].data) for i in self._moved]
        values += [room.like(torch.empty(shape, dtype=getattr(torch, d), device="meta")) for d, shape in shapes]
        step.room = self._room = room.Room(
            [p for p, u in zip(trained, used, strict=True) if u],
            values,
            trained[0].device,
            len(self.shards.own),
            self._cap,
        )


def _computed(step: room.UnderWay, work: Callable[[], Given], rows: range, scale: Tensor | None) -> list[torch.Tensor]:
    """The figures of a shard, whose gradients the step has then."""
    with random.rows(rows.start, len(rows)):
        loss, values = _both(work())
        step.backward(loss, scale)
        settle_all()
    return [value.data for value in values]


def _both(given: Given) -> tuple[Tensor, list[Tensor]]:
    """What a shard gives, with the values to be averaged."""
    return (given, [given]) if isinstance(given, Tensor) else (given[0], list(given[1]))
