"""ZeRO-1: the state of an optimiser shared out to the processes. Rajbhandari et al., SC 2020."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidl.distributed.group import current
from minidl.distributed.meeting import exchanged
from minidl.distributed.sums import gather, segment
from minidl.optim import Muon, Optimizer
from minidl.runtime import launch


def shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """Share out an optimiser's state to the processes, as torch's ZeroRedundancyOptimizer does; the same optimiser.

        optimizer = distributed.shard_optimizer(optim.AdamW(model.parameters(), lr=0.01))

    Of W processes each keeps 1 / W of the moments and float32 masters; the weights have the same bits. Gradients must
    be the same in all, as `DataParallel` makes them; those of few rows are made dense. From now on every process must
    call `step`, `state_dict` and `flat_state`: the first gets the whole state, the others {}. States are loaded whole,
    into any number of processes. Alone, nothing changes. A step captured before must be captured again.

    Raises ValueError for Muon, which takes whole matrices, for `lazy`, and for an optimiser that is shared out already.
    """
    group, name = current(), type(optimizer).__name__
    if isinstance(optimizer, Muon):
        raise ValueError("Muon: its iterations take whole matrices, so its state is not shared out; leave it as it is")
    if optimizer.lazy:
        raise ValueError(f"{name}: lazy updates rows, and state is shared out by values: leave one of them out")
    if optimizer._update.part is not None:
        raise ValueError(f"{name}: its state is shared out already")
    if group.size > 1:
        optimizer._dense = True
        optimizer._update.share_out(_Part(group.rank, group.size))
    return optimizer


class _Part:
    """A run of values of each parameter, of which one of `size` processes keeps the moments and masters, and updates it
    with gradients that all have."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.first = rank, size, rank == 0

    def of(self, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The run of a process, by default of this one, in a tensor without gaps: a view [n]."""
        each, count = segment(tensor.numel(), self.size), tensor.numel()
        start = min(count, each * (self.rank if rank is None else rank))
        return tensor.as_strided((min(each, count - start),), (1,), tensor.storage_offset() + start)

    def join(self, params: Sequence[torch.Tensor]) -> None:
        """Give every process what the others have updated."""
        if not launch.runs():  # nothing unknown gets into the parameters
            return
        for dtype in dict.fromkeys(param.dtype for param in params):
            some = [param for param in params if param.dtype == dtype]
            own = torch.empty(
                sum(segment(param.numel(), self.size) for param in some), dtype=dtype, device=some[0].device
            )
            whole = own.new_empty(self.size, len(own))
            torch._foreach_copy_(*self._pairs(own, some, self.rank))
            with current().exchanging("the gathering of weights"):
                exchanged(gather, whole.view(-1).view(torch.uint8), own.view(torch.uint8))
            for rank in range(self.size):
                places, parts = self._pairs(whole[rank], some, rank)
                torch._foreach_copy_(parts, places)

    def whole(self, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """All runs on the CPU, lying as `like`: in the first process, the others get `like`."""
        own = part.new_zeros(segment(like.numel(), self.size))
        own[: len(part)] = part
        found = own.new_empty(self.size, len(own)) if self.first else None
        with current().exchanging("the gathering of the optimizer's state"):
            exchanged(dist.gather, own, None if found is None else list(found))
        return like if found is None else found.view(-1).cpu().as_strided(like.shape, like.stride())

    def _pairs(
        self, row: torch.Tensor, params: Sequence[torch.Tensor], rank: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Places in a row, and a process's parts of parameters, which belong there."""
        parts = [self.of(param, rank) for param in params]
        places = row.split([segment(param.numel(), self.size) for param in params])
        return [place[: len(part)] for place, part in zip(places, parts, strict=True)], parts
