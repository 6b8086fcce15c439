"""Sums over all shards in one fixed tree: torch.distributed moves bytes, our kernel adds.

Each process adds the tree nodes of its shards, cuts them into one segment per process and sends each segment to its
process, which adds the nodes of all processes in the order of the tree; then the sums are gathered. This moves as many
bytes as a ring all-reduce, and the order of additions does not depend on the number of processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from minidl.distributed.group import current
from minidl.distributed.parts import Shards, shards
from minidl.distributed.rendezvous import exchange
from minidl.kernels import tree
from minidl.runtime import launch
from minidl.tensors import Tensor

# torch 2.13 renamed it.
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_ALIGNMENT = 16  # values: segments begin at multiples of 16 bytes


def segment(values: int, parts: int = 1) -> int:
    """Return the values per part for `parts` of equal size, each beginning at a multiple of 16 bytes."""
    return -(-values // (parts * _ALIGNMENT)) * _ALIGNMENT


def all_reduce_fixed(rows: Tensor, of: Shards | None = None, weights: Tensor | None = None) -> Tensor:
    """Return the sum over all shards of all processes, in one fixed order: rows [own shards, ...] -> [...], same dtype.

    Row i belongs to the i-th shard of this process, and `weights` [own shards] are factors of the rows: all
    processes pass them, or none does. `of` defaults to `shards()`. Every process must call it. Raises ValueError for
    another number of rows, LostError if a process is missing.
    """
    of = of or shards()
    if rows.shape[0] != len(of.local):
        raise ValueError(f"all_reduce_fixed: {rows.shape[0]} rows, expected one for each of {len(of.local)} shards")
    flat = rows.data.reshape(len(of.local), -1)
    if flat.stride(1) != 1:  # torch treats a row of one value as contiguous with any stride
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    if weights is not None:  # of all shards
        weights = Tensor(gathered(weights.data.reshape(-1, 1), of, "the weights of a sum").view(-1))
    return Tensor(summed(flat, of, None if weights is None else weights.data).view(rows.shape[1:]))


def broadcast(tensor: Tensor) -> Tensor:
    """Copy a tensor's values from the first process to all, in place; every process must call it."""
    share([tensor.data], "a broadcast")
    return tensor


def share(tensors: list[torch.Tensor], what: str) -> None:
    """Copy the values of tensors from the first process to all."""
    group = current()
    if group.size == 1 or not launch.runs():
        return
    with group.exchanging(what):
        for tensor in tensors:
            contiguous = tensor if tensor.is_contiguous() else tensor.contiguous()
            if contiguous.numel():
                exchange(dist.broadcast, contiguous.view(-1).view(torch.uint8), 0)
            if contiguous is not tensor:
                tensor.copy_(contiguous)


def summed(x: torch.Tensor, of: Shards, weight: torch.Tensor | None = None, what: str = "a sum") -> torch.Tensor:
    """Return the sum of x [own shards, n] -> [n], see `all_reduce_fixed`; weight [shards]."""
    leaves = tree.leaves(of.count)
    if of.size == 1:
        return tree.sum_rows(x, range(of.count), leaves, weight)
    n = x.shape[1]
    length = segment(n, of.size)
    if of.size == of.count:
        return _gather_all(_sum_of_leaves(x[0], of, length, weight, what), of, what)[:n]
    nodes = [tree.nodes(part.start, part.stop, of.count) for part in of.all]
    mine, wide = nodes[of.rank], launch.acc_torch(x.dtype)
    parts = torch.empty(of.size, len(mine), length, dtype=wide, device=x.device)
    for i, (start, size) in enumerate(mine):
        rows = slice(start - of.local.start, min(start + size, of.local.stop) - of.local.start)
        weights = None if weight is None else weight[start : start + len(x[rows])]
        tree.sum_rows(x[rows], range(len(x[rows])), size, weights, parts[:, i])
    received = torch.empty(sum(map(len, nodes)), length, dtype=wide, device=x.device)
    _exchange(received, parts, [len(part) * length for part in nodes], [len(mine) * length] * of.size, what)
    starts = [start for part in nodes for start, _ in part]
    sums = tree.sum_rows(received, starts, leaves, y=torch.empty(length, dtype=x.dtype, device=x.device))
    return _gather_all(sums, of, what)[:n]


def _sum_of_leaves(x: torch.Tensor, of: Shards, length: int, weight: torch.Tensor | None, what: str) -> torch.Tensor:
    """Return this process's segment of the sum of x [n], contiguous, if each process has one shard: leaves are sent
    without a copy, and 16-bit ones take half the bytes of float32 nodes. The last segments may be short or empty."""
    sizes = [max(0, min(length, len(x) - rank * length)) for rank in range(of.size)]
    mine = sizes[of.rank]
    received = torch.empty(of.size, mine, dtype=x.dtype, device=x.device)
    _exchange(received, x, [mine] * of.size, sizes, what)
    total = torch.empty(length, dtype=x.dtype, device=x.device)
    if mine:
        tree.sum_rows(received, range(of.size), tree.leaves(of.count), weight, total[:mine])
    return total


def _gather_all(x: torch.Tensor, of: Shards, what: str) -> torch.Tensor:
    """Return the values of all processes, equally many each, one after another."""
    y = torch.empty(of.size * x.numel(), dtype=x.dtype, device=x.device)
    if launch.runs():
        with current().exchanging(what):
            exchange(gather, y.view(torch.uint8), x.view(-1).view(torch.uint8))
    return y


def gathered(rows: torch.Tensor, of: Shards, what: str) -> torch.Tensor:
    """Return the rows of all processes in the order of the shards: [own shards, n] -> [shards, n]."""
    if of.size == 1:
        return rows
    padded = rows.new_zeros(len(of.all[0]), rows.shape[1])  # the first process has the most rows
    padded[: len(rows)].copy_(rows)
    tables = _gather_all(padded, of, what).view(of.size, *padded.shape)
    return torch.cat([table[: len(part)] for table, part in zip(tables, of.all, strict=True)])


def _exchange(to: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int], what: str) -> None:
    """Send consecutive runs of `source`, sent[r] values to process r, and receive received[r] values from it."""
    if launch.runs():
        sizes = [count * to.itemsize for count in received], [count * source.itemsize for count in sent]
        with current().exchanging(what):
            parts = to.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
            exchange(dist.all_to_all_single, *parts, *sizes)
