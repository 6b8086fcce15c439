"""Where the shards of a step leave what they give, and where it goes on from there while others are under way.

A shard's gradients are copied into its row of a bucket once the bucket has all of them; those of the last layers come
first. The last shard's copy sends the bucket: sums over all shards of all processes. While a step is recorded for a
CUDA graph, shards run on streams beside each other and sums on one of their own, so that the graph has them as
branches. Elsewhere all is one stream, which the host fills more slowly than a GPU empties it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minidl.compilation.capture import recording
from minidl.distributed.parts import Shards
from minidl.distributed.sums import segment, summed
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

SIDE_BY_SIDE = 4  # shards, at most

Value = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # with its strides


def like(tensor: torch.Tensor) -> Value:
    """How a tensor lies."""
    return tensor.dtype, tensor.shape, tensor.stride()


def copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copy many tensors, in few launches."""
    if to:
        torch._foreach_copy_(list(to), list(source))


class Joined:
    """Room for some tensors of each shard, in one row per shard and dtype: `views[row]`."""

    def __init__(self, values: Sequence[Value], device: torch.device, rows: int) -> None:
        ends: dict[torch.dtype, int] = {}
        self._places: list[tuple[Value, int]] = []
        for value in values:
            start = ends.get(value[0], 0)
            self._places.append((value, start))
            ends[value[0]] = start + segment(value[1].numel())
        self._tables = {dtype: torch.zeros(rows, end, dtype=dtype, device=device) for dtype, end in ends.items()}
        self.views = [self._cut({dtype: table[row] for dtype, table in self._tables.items()}) for row in range(rows)]

    def means(self, of: Shards, weight: torch.Tensor, filled: int) -> list[torch.Tensor]:
        """The weighted sums of the rows of all processes, weight [shards]; of this one's so many are filled."""
        sums = {}
        for dtype, table in self._tables.items():
            table[filled:].zero_()
            sums[dtype] = summed(table, of, weight, "the sum of gradients")
        return self._cut(sums)

    def _cut(self, rows: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor]:
        return [
            rows[dtype].as_strided(shape, strides, rows[dtype].storage_offset() + start)
            for (dtype, shape, strides), start in self._places
        ]


class Room:
    """Room for the gradients of `used` in buckets of so many bytes, the last parameters first, and for `others`."""

    def __init__(
        self, used: Sequence[Tensor], others: Sequence[Value], device: torch.device, rows: int, cap: float
    ) -> None:
        self.used: list[list[Tensor]] = []
        size = 0.0
        for parameter in reversed(used):
            size += parameter.data.nbytes
            if not self.used or size > cap:
                self.used.append([])
                size = parameter.data.nbytes
            self.used[-1].append(parameter)
        values = [[like(parameter.data) for parameter in each] for each in self.used]
        self.buckets = [Joined(each, device, rows) for each in (*values, others)]
        self.of = {parameter: index for index, each in enumerate(self.used) for parameter in each}


class UnderWay:
    """A step under way: `backward` takes the gradients of the shard that runs, `close` what else it gives.

    `beside`: whether shards may run on streams beside each other, where they wait for none of them.
    """

    def __init__(self, of: Shards, shares: torch.Tensor, works: int, room: Room | None, beside: bool) -> None:
        self._of, self._shares, self._works = of, shares, works
        self.room, self.place = room, 0
        self.sums: list[list[torch.Tensor]] = []  # of the buckets that were sent
        # Of each shard: gradients that no bucket has yet, whether it takes them, and the buckets that are filled, each
        # with the event after which it is.
        self._given: list[dict[Tensor, Any]] = [{} for _ in range(works)]
        self._takes = [False] * works
        self._filled: list[dict[int, Any]] = [{} for _ in range(works)]
        streams = _streams(shares.device)[: 1 + works] if recording() and beside else []
        self._lanes, self._sums = streams[1:], streams[0] if streams else None
        # A bucket is sent as soon as it is full; of one shard after its way back, whose kernels fill the GPU: beside
        # them ResNet-50's exchange cost 1.05 to 1.18 ms on 2 and 4 H200s, alone it takes 0.4.
        self.early = len(self._lanes) != 1
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())

    @contextlib.contextmanager
    def shard(self, place: int) -> Iterator[None]:
        """The block of a shard, on its stream."""
        self.place = place
        with torch.cuda.stream(self._lanes[place % len(self._lanes)]) if self._lanes else contextlib.nullcontext():
            yield

    def backward(self, loss: Tensor, scale: Tensor | None) -> None:
        """Walk back from the loss of the shard that runs."""
        self._takes[self.place] = True
        loss.backward(scale)
        self._takes[self.place] = False

    def arrived(self, parameter: Tensor) -> None:
        """A parameter has its gradient: fill its bucket if that has all."""
        if not self._takes[self.place]:  # there is more to come
            return
        given = self._given[self.place]
        given[parameter], parameter.grad = parameter.raw_grad, None
        if self.room is None or parameter not in self.room.of:
            return
        bucket = self.room.of[parameter]
        used = self.room.used[bucket]
        if all(other in given for other in used):
            self._fill(bucket, [_dense(given.pop(each), each) for each in used])

    def given(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """The parameters with gradients that no bucket has yet, those of the shard that runs."""
        given = self._given[self.place]
        for parameter in trained:
            if parameter.raw_grad is not None:
                given[parameter], parameter.grad = parameter.raw_grad, None
        return list(given)

    def close(self, others: Sequence[torch.Tensor]) -> None:
        """Fill what the shard that runs has not filled so far: the parameters without a gradient have one of zeros."""
        assert self.room is not None
        given = self._given[self.place]
        for bucket, used in enumerate(self.room.used):
            if bucket not in self._filled[self.place]:
                self._fill(bucket, [_dense(given.pop(p, None), p) for p in used])
        self._fill(len(self.room.used), others)

    def _fill(self, bucket: int, values: Sequence[torch.Tensor]) -> None:
        assert self.room is not None
        copy(self.room.buckets[bucket].views[self.place], values)
        self._filled[self.place][bucket] = torch.cuda.current_stream().record_event() if self._lanes else None
        # Every process sends the buckets in their order.
        sent, full = self.sums, self._filled
        while self.early and len(sent) < len(self.room.buckets) and all(len(sent) in each for each in full):
            self._send()

    def _send(self) -> None:
        assert self.room is not None
        bucket = len(self.sums)
        with torch.cuda.stream(self._sums) if self._lanes else contextlib.nullcontext():
            for filled in self._filled if self._lanes else ():
                torch.cuda.current_stream().wait_event(filled[bucket])
            self.sums.append(self.room.buckets[bucket].means(self._of, self._shares, self._works))

    def finish(self) -> None:
        """Send what is left, and wait for all on the stream of the step."""
        assert self.room is not None
        while len(self.sums) < len(self.room.buckets):
            self._send()
        for stream in self._lanes and (*self._lanes, self._sums):
            torch.cuda.current_stream().wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> list[Any]:
    """One for sums and those for shards; a shard of several steps has the same one. None without a GPU."""
    return [torch.cuda.Stream(device) for _ in range(1 + SIDE_BY_SIDE if device.type == "cuda" else 0)]


def _dense(grad: Any, parameter: Tensor) -> torch.Tensor:
    """The gradient of a parameter, zeros where it has none."""
    if grad is None:
        return torch.zeros_like(parameter.data)
    found: torch.Tensor = grad.dense() if isinstance(grad, RowGrad) else grad
    return found
