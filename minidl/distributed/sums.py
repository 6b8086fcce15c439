"""Sums over all shards in one fixed tree: torch.distributed moves bytes, our kernel adds.

Each process adds those nodes of the tree that lie in its shards, cuts them into as many segments as there are processes
and sends each to its process, which adds the nodes of all in the order of the tree; the sums are gathered. As many
bytes go round as in a ring all-reduce, and every value is added in the same order whatever the number of processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from minidl.distributed.group import current
from minidl.distributed.meeting import exchanged
from minidl.distributed.parts import Shards, shards
from minidl.kernels import tree
from minidl.runtime import launch
from minidl.tensors import Tensor

# torch 2.13 has given it another name.
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_ALIGNED = 16  # values: segments begin at multiples of 16 bytes


def segment(values: int, parts: int = 1) -> int:
    """How many values each of so many parts has room for, so that each begins at a multiple of 16 bytes."""
    return -(-values // (parts * _ALIGNED)) * _ALIGNED


def all_reduce_fixed(rows: Tensor, of: Shards | None = None, weights: Tensor | None = None) -> Tensor:
    """The sum over all shards of all processes, in one fixed order: rows [own shards, ...] -> [...], in its dtype.

    Row i belongs to the i-th shard of this process, and `weights` [own shards] are factors of the rows: all processes
    give some, or none does. `of`: as `shards()` by default. Every process must call it. Raises ValueError for another
    number of rows, LostError when a process is gone.
    """
    of = of or shards()
    if rows.shape[0] != len(of.own):
        raise ValueError(f"all_reduce_fixed: {rows.shape[0]} rows, expected one for each of {len(of.own)} shards")
    flat = rows.data.reshape(len(of.own), -1)
    if flat.stride(1) != 1:  # a row of one value is contiguous to torch whatever its stride
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    if weights is not None:  # of all shards
        weights = Tensor(gathered(weights.data.reshape(-1, 1), of, "the weights of a sum").view(-1))
    return Tensor(summed(flat, of, None if weights is None else weights.data).view(rows.shape[1:]))


def broadcast(tensor: Tensor) -> Tensor:
    """Give a tensor the values that it has in the first process, in place; every process must call it."""
    share([tensor.data], "a broadcast")
    return tensor


def share(tensors: list[torch.Tensor], what: str) -> None:
    """Give tensors the values of the first process."""
    group = current()
    if group.size == 1 or not launch.runs():
        return
    with group.exchanging(what):
        for tensor in tensors:
            held = tensor if tensor.is_contiguous() else tensor.contiguous()
            if held.numel():
                exchanged(dist.broadcast, held.view(-1).view(torch.uint8), 0)
            if held is not tensor:
                tensor.copy_(held)


def summed(x: torch.Tensor, of: Shards, weight: torch.Tensor | None = None, what: str = "a sum") -> torch.Tensor:
    """x [own shards, n] -> [n], see `all_reduce_fixed`; weight [shards]."""
    leaves = tree.leaves(of.count)
    if of.size == 1:
        return tree.sum_rows(x, range(of.count), leaves, weight)
    n = x.shape[1]
    each = segment(n, of.size)
    if of.size == of.count:
        return _whole(_sum_of_leaves(x[0], of, each, weight, what), of, what)[:n]
    nodes = [tree.nodes(own.start, own.stop, of.count) for own in of.all]
    mine, wide = nodes[of.rank], launch.acc_torch(x.dtype)
    parts = torch.empty(of.size, len(mine), each, dtype=wide, device=x.device)
    for place, (start, size) in enumerate(mine):
        own = slice(start - of.own.start, min(start + size, of.own.stop) - of.own.start)
        weights = None if weight is None else weight[start : start + len(x[own])]
        tree.sum_rows(x[own], range(len(x[own])), size, weights, parts[:, place])
    there = torch.empty(sum(map(len, nodes)), each, dtype=wide, device=x.device)
    _exchange(there, parts, [len(own) * each for own in nodes], [len(mine) * each] * of.size, what)
    starts = [start for own in nodes for start, _ in own]
    found = tree.sum_rows(there, starts, leaves, y=torch.empty(each, dtype=x.dtype, device=x.device))
    return _whole(found, of, what)[:n]


def _sum_of_leaves(x: torch.Tensor, of: Shards, each: int, weight: torch.Tensor | None, what: str) -> torch.Tensor:
    """A process's segment of the sum of x [n], contiguous, where each has one shard: leaves are sent as they are, of 16
    bits half the bytes of nodes in float32, and without a copy. The last segments may be short, or empty."""
    sizes = [max(0, min(each, len(x) - rank * each)) for rank in range(of.size)]
    mine = sizes[of.rank]
    there = torch.empty(of.size, mine, dtype=x.dtype, device=x.device)
    _exchange(there, x, [mine] * of.size, sizes, what)
    found = torch.empty(each, dtype=x.dtype, device=x.device)
    if mine:
        tree.sum_rows(there, range(of.size), tree.leaves(of.count), weight, found[:mine])
    return found


def _whole(found: torch.Tensor, of: Shards, what: str) -> torch.Tensor:
    """What all processes have found, as many values each, one after another."""
    whole = torch.empty(of.size * found.numel(), dtype=found.dtype, device=found.device)
    if launch.runs():
        with current().exchanging(what):
            exchanged(gather, whole.view(torch.uint8), found.view(-1).view(torch.uint8))
    return whole


def gathered(rows: torch.Tensor, of: Shards, what: str) -> torch.Tensor:
    """rows [own shards, n] -> [shards, n]: those of all processes, in the order of the shards."""
    if of.size == 1:
        return rows
    own = rows.new_zeros(len(of.all[0]), rows.shape[1])  # the first process has the most
    own[: len(rows)].copy_(rows)
    whole = _whole(own, of, what).view(of.size, *own.shape)
    return torch.cat([part[: len(each)] for part, each in zip(whole, of.all, strict=True)])


def _exchange(there: torch.Tensor, here: torch.Tensor, come: list[int], go: list[int], what: str) -> None:
    """Of `here` go[r] values, one run after another, go to process r; of `there` come[r] values came from it."""
    if launch.runs():
        sizes = [count * there.itemsize for count in come], [count * here.itemsize for count in go]
        with current().exchanging(what):
            parts = there.view(-1).view(torch.uint8), here.view(-1).view(torch.uint8)
            exchanged(dist.all_to_all_single, *parts, *sizes)
