"""The accesses of other programs that a program sees: those that they released and it acquired.

The accesses of a program between two of its releases are a span. A stamp names a program (numbered from 1) and one of
its spans; 0 means none. If several programs read one element, or change it by atomic operations, its stamp is negative
and names the last of them and the previous stamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# Programs, and the last span that each released.
Release = tuple[np.ndarray, np.ndarray]


class Order:
    """The programs of one launch, which run one after another."""

    def __init__(self, programs: int) -> None:
        self._count = programs + 1
        self._program = self._span = 0
        # The last span of each program that the current program sees, -1 for none; and the releases that it acquired.
        self._seen = np.full(self._count, -1)
        self._acquired: dict[int, Release] = {}
        self._released: dict[int, Release] = {}
        # The meaning of each negative stamp; and by stamp, the stamp after an access in the current span.
        self._several: list[tuple[int, int]] = []
        self._joined: dict[int, int] = {}

    def begin(self, program: int) -> None:
        """Start the next program."""
        self._program, self._span = program, 0
        if self._acquired:
            self._seen.fill(-1)
            self._acquired.clear()
        self._joined.clear()

    @property
    def stamp(self) -> int:
        """Return the stamp of the current program's accesses."""
        return self._program + self._count * self._span

    def program_of(self, stamp: int) -> int | None:
        """Return the program of a stamp; None for several."""
        return stamp % self._count if stamp > 0 else None

    def acquire(self, addresses: list[int]) -> None:
        """Acquire all releases at these addresses."""
        for released in {id(r): r for a in addresses if (r := self._released.get(a)) is not None}.values():
            self._acquire(released)

    def _acquire(self, released: Release) -> None:
        if id(released) not in self._acquired:
            self._acquired[id(released)] = released
            programs, spans = released
            self._seen[programs] = np.maximum(self._seen[programs], spans)

    def release(self, addresses: list[int]) -> None:
        """Release all accesses so far to programs that acquire these addresses."""
        self._acquire((np.array([self._program], np.int32), np.array([self._span], np.int32)))
        new, merged = _sparse(self._seen), dict[int, Release]()
        self._acquired[id(new)] = new
        for address in addresses:
            before = self._released.get(address)
            if before is None or id(before) in self._acquired:
                self._released[address] = new
                continue
            if id(before) not in merged:
                seen = self._seen.copy()
                seen[before[0]] = np.maximum(seen[before[0]], before[1])
                merged[id(before)] = _sparse(seen)
            self._released[address] = merged[id(before)]
        self._span += 1
        self._joined.clear()

    def unseen(self, stamps: np.ndarray) -> np.ndarray:
        """Return for each stamp whether it has an access of another program that the current program does not see."""
        return _of_each(stamps, self._is_unseen)

    def join(self, stamps: np.ndarray) -> np.ndarray:
        """Return the stamps of elements after the current program, too, read them or changed them atomically."""
        return _of_each(stamps, self._join)

    def _is_unseen(self, stamp: int) -> bool:
        while stamp:
            stamp, last = self._several[~stamp] if stamp < 0 else (0, stamp)
            span, program = divmod(last, self._count)
            if program != self._program and self._seen[program] < span:
                return True
        return False

    def _join(self, stamp: int) -> int:
        if stamp not in self._joined:
            # A program that sees the current one also sees all programs that the current one sees.
            joined = self.stamp
            if self._is_unseen(stamp):
                before, last = self._several[~stamp] if stamp < 0 else (0, stamp)
                is_current = last % self._count == self._program
                self._several.append((before if is_current else stamp, joined))
                joined = -len(self._several)
            self._joined[stamp] = self._joined[joined] = joined
        return self._joined[stamp]


def _sparse(seen: np.ndarray) -> Release:
    """Return a release with the visible programs only: there may be many releases, each of few programs."""
    programs = np.flatnonzero(seen >= 0)
    return programs.astype(np.int32), seen[programs].astype(np.int32)


def _of_each(stamps: np.ndarray, function: Callable[[int], Any]) -> np.ndarray:
    """Apply a function to each distinct stamp; most stamps of an access are equal."""
    first = stamps[0]
    if (stamps == first).all():
        return np.full(stamps.shape, function(int(first)))
    distinct, indices = np.unique(stamps, return_inverse=True)
    return np.array([function(stamp) for stamp in distinct.tolist()])[indices]
