"""Which accesses of other programs a program sees: those that they released, and that it acquired.

What a program accesses between two of its releases is a span. A stamp names a program (numbered from 1) and a span of
it; 0 stands for none. Where several programs read one element, its stamp is negative and names the latest span of any.
"""

from __future__ import annotations

import numpy as np


class Order:
    """The programs of one launch, which run one after another."""

    def __init__(self, programs: int) -> None:
        self._count = programs + 1
        self._program = self._span = 0
        # The last span of each program with a load, and the last that the current program sees; -1 for none.
        self._loaded = np.full(self._count, -1)
        self._seen = self._loaded.copy()
        self._released: dict[int, np.ndarray] = {}

    def begin(self, program: int) -> None:
        """Run the next program."""
        self._program, self._span = program, 0
        self._seen = np.full(self._count, -1)

    @property
    def stamp(self) -> int:
        """That of the current program's accesses."""
        return self._program + self._count * self._span

    def program_of(self, stamp: int) -> int | None:
        """The program of a stamp; None for several."""
        return stamp % self._count if stamp > 0 else None

    def acquire(self, addresses: list[int]) -> None:
        """See what was released at these addresses."""
        found = {id(r): r for a in addresses if (r := self._released.get(a)) is not None}
        for released in found.values():
            self._seen = np.maximum(self._seen, released)

    def release(self, addresses: list[int]) -> None:
        """Let those who acquire these addresses see everything up to here."""
        seen = self._seen.copy()
        seen[self._program] = self._span
        merged: dict[int, tuple[np.ndarray | None, np.ndarray]] = {}
        for address in addresses:
            before = self._released.get(address)
            if id(before) not in merged:
                merged[id(before)] = before, seen if before is None else np.maximum(seen, before)
            self._released[address] = merged[id(before)][1]
        self._span += 1

    def unseen(self, stamps: np.ndarray) -> np.ndarray:
        """Whether each stamp is that of another program's access which the current program does not see."""
        others = (stamps != 0) & ((stamps < 0) | (stamps % self._count != self._program))
        if not others.any():
            return others
        known = self._seen[stamps % self._count] >= stamps // self._count
        for stamp in np.unique(stamps[stamps < 0]).tolist():
            seen = self._seen >= np.minimum(self._loaded, -stamp - 1)
            seen[self._program] = True
            known[stamps == stamp] = seen.all()
        result: np.ndarray = others & ~known
        return result

    def read(self, stamps: np.ndarray) -> np.ndarray:
        """The stamps of elements after the current program has read them."""
        self._loaded[self._program] = self._span
        alone = ~self.unseen(stamps)
        if alone.all():
            return np.full(stamps.shape, self.stamp)
        # A program that sees this one also sees those that this one sees.
        latest = np.maximum(np.where(stamps < 0, -stamps - 1, stamps // self._count), self._span)
        return np.where(alone, self.stamp, -latest - 1)
