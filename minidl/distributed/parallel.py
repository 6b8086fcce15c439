"""A training step by shards: gradients, statistics of batches and losses, joined in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from minidl import nn, random
from minidl.distributed.group import current
from minidl.distributed.parts import Shards, shards
from minidl.distributed.sums import share, summed
from minidl.later import settle_all
from minidl.runtime import launch
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

STREAMS = 2**20  # of random numbers that a step takes, however few it uses: a process may have no example of a batch
_ALIGNED = 16  # values: each tensor begins at a multiple of 16 bytes

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
    `buffers` are those that the steps change, by default the model's. With one shard, a step is a plain one.
    """

    def __init__(self, model: nn.Module, of: Shards | None = None, buffers: Iterable[Tensor] | None = None) -> None:
        self.model, self.shards = model, of or shards()
        share([tensor.data for _, tensor in model.named_tensors()], "the first weights")
        self._buffers = [buffer.data for buffer in (model.buffers() if buffers is None else buffers)]
        self._weights: dict[int, torch.Tensor] = {}
        # What the first step has found out, and for which parameters and modes of modules.
        self._known: tuple[list[int], list[bool]] = [], []
        self._used: list[Tensor] = []
        self._moved: list[torch.Tensor] = []
        self._joined = _Joined([], torch.device("cpu"), 0)

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
        if self.shards.count == 1:
            return _plain(trained, works[0], scale)
        own, stream = self.shards.rows(rows), random.get_state()["stream"]
        before = [buffer.clone() for buffer in self._buffers] if len(works) > 1 else []
        for place, work in enumerate(works):
            if place:
                random.skip(stream - random.get_state()["stream"])
                _copy(self._buffers, before)
            versions = [buffer._version for buffer in self._buffers]
            with random.rows(own[place].start, len(own[place])):
                figures = [value.data for value in _plain(trained, work, scale)]
                settle_all()
            moved = [buffer._version != was for buffer, was in zip(self._buffers, versions, strict=True)]
            self._agree(trained, moved, figures)
            grads = [_dense(parameter) for parameter in self._used]
            _copy(self._joined.views(place), [*grads, *self._moved, *figures])
        if not works:
            self._agree(trained, [False] * len(self._buffers), None)
        random.skip(stream + STREAMS - random.get_state()["stream"])
        found = self._joined.means(self.shards, self._shares(rows), len(works))
        for parameter in trained:
            parameter.grad = None
        for parameter in self._used:
            parameter.grad = Tensor(next(found))
        _copy(self._moved, [next(found) for _ in self._moved])
        if rows < self.shards.count:  # a process without an example has counted no batch
            share([b for b in self._buffers if not b.is_floating_point()], "the counts of batches")
        return [Tensor(value) for value in found]

    def _shares(self, rows: int) -> torch.Tensor:
        """The share of a batch's examples that each of the process's shards has, float64 on the device."""
        if rows not in self._weights:
            own = [len(each) / rows for each in self.shards.rows(rows)]
            place = next(self.model.parameters()).device
            self._weights[rows] = torch.tensor(own, dtype=torch.float64).to(place)
        return self._weights[rows]

    def _agree(self, trained: list[Tensor], moved: list[bool], figures: Sequence[torch.Tensor] | None) -> None:
        """Find out in the first step which parameters get gradients and which buffers change.

        Some processes may have no example in it (`figures` None), or take other branches of the model.
        """
        known = [id(parameter) for parameter in trained], [module.training for module in self.model.modules()]
        used = [parameter.raw_grad is not None for parameter in trained]
        if known == self._known:
            expected = set(map(id, self._used))
            if figures is not None and any(u and id(p) not in expected for p, u in zip(trained, used, strict=True)):
                raise RuntimeError("a parameter has a gradient, and had none in the first step of this DataParallel")
            return
        shapes: Any = (
            None if figures is None else [[str(f.dtype).removeprefix("torch."), list(f.shape)] for f in figures]
        )
        if launch.runs():
            others = current().gathered([used, moved, shapes], "the first step")
            used, moved = ([any(each) for each in zip(*(o[i] for o in others), strict=True)] for i in (0, 1))
            shapes = next(each for *_, each in others if each is not None)
        assert shapes is not None
        self._known, self._used = known, [p for p, u in zip(trained, used, strict=True) if u]
        self._moved = [b for b, m in zip(self._buffers, moved, strict=True) if m and b.is_floating_point()]
        values: list[_Value] = [(t.dtype, t.shape, t.stride()) for t in [*(p.data for p in self._used), *self._moved]]
        for dtype, shape in shapes:
            values.append((getattr(torch, dtype), torch.Size(shape), torch.empty(shape, device="meta").stride()))
        self._joined = _Joined(values, trained[0].device, len(self.shards.own))


def _plain(trained: Sequence[Tensor], work: Callable[[], Given], scale: Tensor | None) -> list[Tensor]:
    """A step without shards, or that of one of them."""
    for parameter in trained:
        parameter.grad = None
    given = work()
    loss, values = given if isinstance(given, tuple) else (given, [given])
    loss.backward(scale)
    return list(values)


def _copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Copy many tensors, in few launches."""
    if to:
        torch._foreach_copy_(to, source)


_Value = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class _Joined:
    """Room for some tensors of each shard, in one row per shard and dtype; `values` are their dtypes and strides."""

    def __init__(self, values: Sequence[_Value], device: torch.device, rows: int) -> None:
        ends: dict[torch.dtype, int] = {}
        self._places: list[tuple[_Value, int]] = []
        for value in values:
            start = ends.get(value[0], 0)
            self._places.append((value, start))
            ends[value[0]] = start + -(-value[1].numel() // _ALIGNED) * _ALIGNED
        self._tables = {dtype: torch.zeros(rows, end, dtype=dtype, device=device) for dtype, end in ends.items()}

    def views(self, row: int) -> list[torch.Tensor]:
        """The tensors of a row."""
        return self._cut({dtype: table[row] for dtype, table in self._tables.items()})

    def means(self, of: Shards, weight: torch.Tensor, filled: int) -> Iterator[torch.Tensor]:
        """The weighted sums of the rows of all processes; of this one's so many are filled."""
        sums = {}
        for dtype, table in self._tables.items():
            table[filled:].zero_()
            sums[dtype] = summed(table, of, weight, "the sum of gradients")
        return iter(self._cut(sums))

    def _cut(self, rows: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for (dtype, shape, strides), start in self._places:
            row = rows[dtype]
            found.append(row.as_strided(shape, strides, row.storage_offset() + start))
        return found


def _dense(parameter: Tensor) -> torch.Tensor:
    """The gradient of a parameter, zeros where it has none."""
    grad: Any = parameter.raw_grad
    if grad is None:
        return torch.zeros_like(parameter.data)
    return grad.dense() if isinstance(grad, RowGrad) else grad
