"""Virtual shards: the parts of a batch, which processes take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from minidl.distributed.group import current
from minidl.distributed.started import USUAL, DistributedError
from minidl.kernels import tree


def cut(count: int, parts: int) -> list[range]:
    """range(count) in so many parts that follow one another; the first ones have one more where they differ."""
    each, more = divmod(count, parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


@dataclass(frozen=True)
class Shards:
    """`count` shards of each batch, shared out to `size` processes, of which this one has the number `rank`.

    Raises DistributedError for more processes than shards, ValueError for a count out of 1 to 64.
    """

    count: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= tree.MOST:
            raise ValueError(f"there are {self.count} shards, expected 1 to {tree.MOST}")
        if self.size > self.count:
            raise DistributedError(
                f"{self.size} processes are more than the {self.count} shards of a batch: start at most {self.count}"
            )

    @cached_property
    def all(self) -> list[range]:
        """The shards of each process."""
        return cut(self.count, self.size)

    @property
    def own(self) -> range:
        """Those of this process."""
        return self.all[self.rank]

    def rows(self, rows: int) -> list[range]:
        """The rows of a batch of so many that each of this process's shards has; none in the last ones of few."""
        return cut(rows, self.count)[self.own.start : self.own.stop]


def shards(count: int | None = None) -> Shards:
    """The shards of this process; `count` in all, if it is left out 8 for several processes and 1 for one.

    What a step gives depends on `count` and not on the number of processes. Raises as `Shards`.
    """
    group = current()
    return Shards(count or (USUAL if group.size > 1 else 1), group.rank, group.size)
