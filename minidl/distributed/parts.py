"""Virtual shards: the parts of a batch, distributed over the processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from minidl.distributed.group import current
from minidl.distributed.started import USUAL, DistributedError
from minidl.kernels import tree


def cut(count: int, parts: int) -> list[range]:
    """Split range(count) into consecutive parts, of which the first ones may be longer by one."""
    size, longer = divmod(count, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


@dataclass(frozen=True)
class Shards:
    """`count` shards of each batch, distributed over `size` processes; this one has number `rank`.

    Raises DistributedError for more processes than shards, ValueError for a count outside 1 to 64.
    """

    count: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= tree.MOST:
            raise ValueError(f"count is {self.count}, expected 1 to {tree.MOST} shards")
        if self.size > self.count:
            raise DistributedError(
                f"{self.size} processes are more than the {self.count} shards of a batch: start at most {self.count}"
            )

    @cached_property
    def all(self) -> list[range]:
        """The shards of each process."""
        return cut(self.count, self.size)

    @property
    def local(self) -> range:
        """The shards of this process."""
        return self.all[self.rank]

    def rows(self, rows: int) -> list[range]:
        """Return the rows of a batch for each of this process's shards; some are empty in a small batch."""
        return cut(rows, self.count)[self.local.start : self.local.stop]


def shards(count: int | None = None) -> Shards:
    """Return this process's part of `count` shards (default: 8 for several processes, 1 for one).

    Results of a step depend on `count`, not on the number of processes. Raises the errors of `Shards`.
    """
    group = current()
    return Shards(count or (USUAL if group.size > 1 else 1), group.rank, group.size)
