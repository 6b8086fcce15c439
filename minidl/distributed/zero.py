"""ZeRO-1: distribute the state of an optimiser over the processes. Rajbhandari et al., SC 2020."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidl.distributed.group import current
from minidl.distributed.rendezvous import exchange
from minidl.distributed.sums import gather, segment
from minidl.optim import Muon, Optimizer
from minidl.runtime import launch


def shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """Distribute an optimiser's state over the processes, as torch's ZeroRedundancyOptimizer does, and return it.

        optimizer = distributed.shard_optimizer(optim.AdamW(model.parameters(), lr=0.01))

    Each of W processes stores 1 / W of the moments and float32 masters; weights have the same bits. All processes must
    have the same gradients, as `DataParallel` computes them; row gradients become dense. Every process must then call
    `step`, `state_dict` and `flat_state`: rank 0 gets the complete state, the others {}. A complete state can be loaded
    by any number of processes. With one process nothing changes. Capture the step again afterwards.

    Raises ValueError for Muon, which needs complete matrices, for `lazy`, and for an optimiser already distributed.
    """
    group, name = current(), type(optimizer).__name__
    if isinstance(optimizer, Muon):
        raise ValueError("Muon needs complete matrices: do not distribute its state")
    if optimizer.lazy:
        raise ValueError(f"{name}: lazy updates cannot be combined with distributed state; use lazy=False")
    if optimizer._update.part is not None:
        raise ValueError(f"{name}: its state is already distributed")
    if group.size > 1:
        optimizer._dense = True
        optimizer._update.share_out(_Part(group.rank, group.size))
    return optimizer


class _Part:
    """The segment of each parameter that one of `size` processes updates; it stores the moments and masters of that."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.first = rank, size, rank == 0

    def of(self, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a view [n] of the segment of a process (default: this one) in a tensor without gaps."""
        size, count = segment(tensor.numel(), self.size), tensor.numel()
        start = min(count, size * (self.rank if rank is None else rank))
        return tensor.as_strided((min(size, count - start),), (1,), tensor.storage_offset() + start)

    def join(self, params: Sequence[torch.Tensor]) -> None:
        """Exchange the updated segments between all processes."""
        if not launch.runs():  # recorded: parameters keep their values
            return
        for dtype in dict.fromkeys(param.dtype for param in params):
            group = [param for param in params if param.dtype == dtype]
            segments = torch.empty(
                sum(segment(param.numel(), self.size) for param in group), dtype=dtype, device=group[0].device
            )
            gathered = segments.new_empty(self.size, len(segments))
            torch._foreach_copy_(*self._pairs(segments, group, self.rank))
            with current().exchanging("the gathering of weights"):
                exchange(gather, gathered.view(-1).view(torch.uint8), segments.view(torch.uint8))
            for rank in range(self.size):
                sources, parts = self._pairs(gathered[rank], group, rank)
                torch._foreach_copy_(parts, sources)

    def whole(self, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return all segments on the CPU, in the layout of `like`, in rank 0; the others return `like`."""
        padded = part.new_zeros(segment(like.numel(), self.size))
        padded[: len(part)] = part
        gathered = padded.new_empty(self.size, len(padded)) if self.first else None
        with current().exchanging("the gathering of the optimizer's state"):
            exchange(dist.gather, padded, None if gathered is None else list(gathered))
        return like if gathered is None else gathered.view(-1).cpu().as_strided(like.shape, like.stride())

    def _pairs(
        self, row: torch.Tensor, params: Sequence[torch.Tensor], rank: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of a row, and a process's parts of parameters with the same values."""
        parts = [self.of(param, rank) for param in params]
        views = row.split([segment(param.numel(), self.size) for param in params])
        return [view[: len(part)] for view, part in zip(views, parts, strict=True)], parts
