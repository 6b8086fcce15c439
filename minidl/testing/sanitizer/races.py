"""Checks of an access against earlier ones: unwritten memory, races of programs and meetings of lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from triton.runtime import interpreter

from minidl.testing.sanitizer import findings
from minidl.testing.sanitizer.checked_launch import Launch
from minidl.testing.sanitizer.regions import Region

# The bits of a lane's number with its position in the block (of at most 2^20 elements) and the length of that number.
_POSITION = 2**25 - 1
# The finding for an access after one by another program that it does not see.
_RACES = {
    ("load", "store"): (findings.READ_RACE, "wrote"),
    ("load", "atomic"): (findings.READ_RACE, "changed by an atomic operation"),
    ("store", "store"): (findings.WRITE_RACE, "wrote too"),
    ("store", "atomic"): (findings.WRITE_RACE, "changed by an atomic operation"),
    ("atomic", "store"): (findings.WRITE_RACE, "wrote without an atomic operation"),
    ("narrow atomic", "store"): (findings.WRITE_RACE, "wrote without an atomic operation"),
    ("narrow atomic", "atomic"): (findings.WRITE_RACE, "changed too, beyond the scope of this atomic operation"),
}


class RaceChecks(ABC):
    """The checks of a sanitizer, which knows the current launch and grid and reports bugs."""

    grid: tuple[tuple[int, int, int], tuple[int, int, int]]

    @property
    @abstractmethod
    def running(self) -> Launch:
        """Return the launch that is being checked."""

    @abstractmethod
    def report(self, kind: str, tensor: str, what: str, count: int, index: tuple[int, ...] | None = None) -> None:
        """Record `count` accesses of a kind at the current line."""

    def _check_programs(
        self, region: Region, offsets: np.ndarray, size: int, kind: str, values: np.ndarray | None
    ) -> np.ndarray:
        """Record the accesses, and return the lanes whose memory is written (or is being written)."""
        storage, order = region.storage, self.running.order
        positions = offsets + (region.address - storage.address)
        good = np.ones(len(positions), bool)
        if storage.shadow is not None:
            good = self._check_unwritten(region, offsets, positions, size, kind)
        if order is None:
            return good
        units = [positions // storage.unit + i for i in range(size // storage.unit)]
        for unit in units:
            written = storage.last("store")[unit]
            self._check_race(region, offsets, written, *_RACES[kind, "store"], values)
            if kind != "load":
                self._check_race(region, offsets, storage.last("load")[unit], findings.READ_RACE, "read before")
            if kind != "atomic" and storage.had("atomic"):
                self._check_race(region, offsets, storage.last("atomic")[unit], *_RACES[kind, "atomic"])
            if kind == "store":
                storage.last("store")[unit] = order.stamp
                continue
            last = storage.last("load" if kind == "load" else "atomic")
            # A load of what the program stored itself does not race with other programs that store the same value.
            last[unit] = np.where((written == order.stamp) & (kind == "load"), last[unit], order.join(last[unit]))
        return good

    def _check_unwritten(
        self, region: Region, offsets: np.ndarray, positions: np.ndarray, size: int, kind: str
    ) -> np.ndarray:
        shadow = region.storage.shadow
        assert shadow is not None
        unwritten = shadow.unwritten.numpy()
        units = [positions // shadow.unit + i for i in range(max(1, size // shadow.unit))]
        if kind == "store":
            for unit in units:
                unwritten[unit] = False
            return np.ones(len(positions), bool)
        bad = np.any([unwritten[unit] for unit in units], axis=0)
        if bad.any():
            at = int(offsets[bad][0])
            what = f"{kind} of {region.position(at)}, which nothing has written"
            self.report(findings.UNWRITTEN_READ, region.name, what, int(bad.sum()), region.index(at))
            if kind != "load":
                for unit in units:
                    unwritten[unit] = False
        return ~bad

    def _check_race(
        self, region: Region, offsets: np.ndarray, stamps: np.ndarray, kind: str, did: str,
        values: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Report lanes whose element another program accessed, except stores of the value that it wrote."""
        order = self.running.order
        assert order is not None
        foreign = order.unseen(stamps)
        if foreign.any() and values is not None:
            foreign[foreign] = ~_holds(region, offsets[foreign], values[foreign])
        if foreign.any():
            at, other = int(offsets[foreign][0]), order.program_of(int(stamps[foreign][0]))
            program = np.unravel_index((other or 1) - 1, self.grid[1][::-1])[::-1]
            who = "several programs" if other is None else f"program {tuple(map(int, program))}"
            what = f"{region.position(at)}, which {who} {did}"
            self.report(kind, region.name, what, int(foreign.sum()), region.index(at))

    def _check_other_lanes(
        self, region: Region, offsets: np.ndarray, size: int, kind: str, values: np.ndarray | None,
        since: tuple[int, np.ndarray],
    ) -> None:  # fmt: skip
        """Report lanes that load or change (to `values`) elements that other lanes accessed since a join."""
        storage, (low, lanes) = region.storage, since
        first = (offsets + (region.address - storage.address)) // storage.unit
        stored, loaded = storage.last("store of a lane"), storage.last("load of a lane")
        for unit in (first + i for i in range(size // storage.unit)):
            met = (stored[unit] >= low) & (stored[unit] != lanes)
            if kind in ("load", "store") and storage.had("atomic of a lane"):
                changed = storage.last("atomic of a lane")[unit]
                race, did = _RACES[kind, "atomic"]
                self._report_meeting(race, region, offsets, (changed >= low) & (changed != lanes), did)
            if kind == "load":
                self._report_meeting(findings.READ_RACE, region, offsets, met, "stored")
            else:
                # A store under another shape depends on the load at the same position.
                read = (loaded[unit] >= low) & ((loaded[unit] ^ lanes) & _POSITION != 0)
                if (met | read).any():
                    changes = True if values is None else ~_holds(region, offsets, values)
                    self._report_meeting(findings.WRITE_RACE, region, offsets, met & changes, "stored")
                    self._report_meeting(findings.READ_RACE, region, offsets, read & changes, "loaded")
            if kind == "store":
                stored[unit], loaded[unit] = lanes, 0
            else:
                touched = loaded if kind == "load" else storage.last("atomic of a lane")
                others = (touched[unit] >= low) & (touched[unit] != lanes)
                touched[unit] = lanes
                touched[unit[others | (touched[unit] != lanes)]] = low + 2**32 - 1  # several lanes

    def _report_meeting(self, kind: str, region: Region, offsets: np.ndarray, met: np.ndarray, did: str) -> None:
        if met.any():
            at = int(offsets[met][0])
            what = f"{region.position(at)}, which another lane of the program {did}, with no barrier between"
            self.report(kind, region.name, what, int(met.sum()), region.index(at))


def _holds(region: Region, offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return whether the elements at byte offsets already hold these values."""
    size = values.dtype.itemsize
    addresses = (offsets + region.address).astype(np.uint64)
    present = interpreter._interpreter.load(addresses, np.ones(len(values), bool), np.zeros_like(values), values.dtype)
    same: np.ndarray = present.view(f"u{size}") == np.ascontiguousarray(values).view(f"u{size}")
    return same
