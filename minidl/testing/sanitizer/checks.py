"""The checks of each launch, load, store and atomic operation of an interpreted kernel.

The highest 16 bits of a pointer hold the number of its argument. Pointer arithmetic keeps them, so that an access is
attributed to the intended tensor, however far out of bounds it is.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from minidl.interpreter import libdevice, memory, operators, patches
from minidl.testing.sanitizer import findings
from minidl.testing.sanitizer.findings import Finding, Place, SanitizerError
from minidl.testing.sanitizer.lanes import Lanes, mark, unread
from minidl.testing.sanitizer.order import Order
from minidl.testing.sanitizer.regions import Region, Regions
from minidl.testing.sanitizer.unwritten import Unwritten

_NUMBER = np.uint64(48)
ADDRESS = np.uint64(2**48 - 1)
# The bits of a lane's number with its place in the block (of at most 2^20 elements) and the length of their number.
_PLACE = 2**25 - 1
# Frames in these folders and files are not the kernel's.
_OURS = (
    *(str(Path(str(module.__file__)).parent) for module in (triton, np)),
    str(Path(__file__).parent),
    *(str(module.__file__) for module in (patches, memory, libdevice, operators)),
)

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


class Launch:
    """One run of a kernel over its grid: its arguments' regions, and which programs see each other's writes."""

    def __init__(self, kernel: str, unwritten: Unwritten) -> None:
        self.kernel = kernel
        self.regions = Regions(unwritten)
        self.order: Order | None = None
        self._joins = 0
        self._shapes: dict[tuple[int, ...], int] = {}
        self.lanes = Lanes()
        self._names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def name(self, name: str, argument: Any) -> None:
        self._names[id(argument)] = name

    def number(self, argument: Any, tensor: torch.Tensor) -> int:
        """The number of an argument's pointers; `tensor` is the argument or what it wraps."""
        known = self._numbers.get(id(argument))
        if known is None:
            name = self._names.get(id(argument), "an argument")
            known = self._numbers[id(argument)] = self.regions.add(name, tensor)
        return known

    def join(self) -> None:
        """All lanes of the program wait for one another."""
        self._joins += 1

    def lanes_since(self, shape: tuple[int, ...], lanes: np.ndarray) -> tuple[int, np.ndarray]:
        """The lowest number of a lane since the last join, and those of lanes in a block of this shape.

        Blocks of one shape, but for axes of length 1, have the same lanes. The lowest bits tell places apart: those of
        blocks of as many elements are the same, as tl.reshape keeps their order.
        """
        long = tuple(n for n in shape if n > 1)
        low = self._joins << 32
        known = self._shapes.setdefault(long, len(self._shapes)) % 128
        return low, low + (known << 25 | math.prod(long).bit_length() << 20) + lanes

    def begin(self, program: int, programs: int) -> None:
        """Run the next program; a single one races with no other."""
        self.join()
        if programs > 1:
            self.order = self.order or Order(programs)
            self.order.begin(program)


class Sanitizer:
    """Collects findings; with `stop` the first one raises SanitizerError. `launches` counts launches by kernel.

    `tell` is called at each launch and each access of a finding: another process may read it, see `processes`.
    """

    def __init__(self, stop: bool, tell: Callable[..., None] | None = None) -> None:
        self.stop, self._tell = stop, tell
        self.unwritten = Unwritten()
        self.launch: Launch | None = None
        self.launches: Counter[str] = Counter()
        self.other_given = False
        self.grid: tuple[tuple[int, int, int], tuple[int, int, int]] = ((0, 0, 0), (1, 1, 1))
        self._found: dict[tuple[str, str, Place, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """The bugs found so far, in order."""
        return list(self._found.values())

    def begin(self, kernel: str) -> None:
        """A kernel is launched."""
        self.launch = Launch(kernel, self.unwritten)
        self.launches[kernel] += 1
        if self._tell is not None:
            self._tell(launch=kernel)

    @property
    def running(self) -> Launch:
        """The launch that is being checked."""
        assert self.launch is not None
        return self.launch

    def raise_if_found(self) -> None:
        """Raises SanitizerError if anything was found."""
        if self._found:
            raise SanitizerError(self.findings)

    def access(
        self, pointers: np.ndarray, mask: np.ndarray, size: int, kind: str, values: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check the active lanes of a "load", "store" (of values), "atomic" or, within one program, "narrow atomic".

        Returns (addresses, lanes that may proceed).
        """
        addresses = pointers & ADDRESS
        flat = pointers.reshape(-1)
        lanes = np.flatnonzero(np.broadcast_to(mask, pointers.shape))
        safe = np.zeros(flat.shape, bool)
        for chosen, region, offsets in self._by_region(flat, lanes):
            if region is None:
                self._outside(kind, len(chosen), "an address in no live tensor", "memory that no argument names")
                continue
            inside = region.inside(offsets, size)
            if not inside.all():
                first = int(offsets[~inside][0])
                self._outside(kind, int((~inside).sum()), region.position(first), region.name)
                chosen, offsets = chosen[inside], offsets[inside]
            wrong = (offsets + (region.address % size)) % size != 0
            if wrong.any():
                at = int(offsets[wrong][0])
                what = f"{region.position(at)}: its address is no multiple of {size} bytes"
                self.report(findings.MISALIGNED, region.name, what, int(wrong.sum()), region.index(at))
            if len(chosen):
                stored = None if values is None else np.broadcast_to(values, pointers.shape).reshape(-1)[chosen]
                region.storage.use_unit(size)
                safe[chosen] = self._check_uses(region, offsets, size, kind, stored)
                if not region.storage.large:
                    since = self.running.lanes_since(pointers.shape, chosen)
                    self._check_meetings(region, offsets, size, kind, stored, since)
        return addresses, safe.reshape(pointers.shape)

    def _by_region(self, flat: np.ndarray, lanes: np.ndarray) -> Iterator[tuple[np.ndarray, Region | None, np.ndarray]]:
        """The active lanes grouped by region, with their offsets from its start in bytes."""
        launch = self.running
        active = flat[lanes]
        numbers = active >> _NUMBER
        arguments = launch.regions.arguments
        first = int(numbers[0]) if len(numbers) else 0
        kinds = [first] if len(numbers) and (numbers == first).all() else np.unique(numbers).tolist()
        for number in kinds:
            chosen = numbers == number
            addresses = active[chosen] & ADDRESS
            if number == 0:
                found, regions = launch.regions.around(addresses)
                for i in np.unique(found).tolist():
                    here = found == i
                    region = regions[i] if i >= 0 else None
                    yield lanes[chosen][here], region, _from(region, addresses[here])
            else:
                region = arguments[number - 1] if number <= len(arguments) else None
                yield lanes[chosen], region, _from(region, addresses)

    def _outside(self, kind: str, count: int, position: str, tensor: str) -> None:
        found = findings.OUT_OF_BOUNDS_READ if kind == "load" else findings.OUT_OF_BOUNDS_WRITE
        self.report(found, tensor, f"{kind} of {position}", count)

    def _check_uses(
        self, region: Region, offsets: np.ndarray, size: int, kind: str, values: np.ndarray | None
    ) -> np.ndarray:
        """Record the accesses; returns the lanes whose memory is written (or is being written)."""
        storage, order = region.storage, self.running.order
        places = offsets + (region.address - storage.address)
        good = np.ones(len(places), bool)
        if storage.shadow is not None:
            good = self._check_unwritten(region, offsets, places, size, kind)
        if order is None:
            return good
        units = [places // storage.unit + i for i in range(size // storage.unit)]
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
            # A load of what the program itself stored is no race with others that store the same.
            last[unit] = np.where((written == order.stamp) & (kind == "load"), last[unit], order.join(last[unit]))
        return good

    def _check_unwritten(
        self, region: Region, offsets: np.ndarray, places: np.ndarray, size: int, kind: str
    ) -> np.ndarray:
        shadow = region.storage.shadow
        assert shadow is not None
        unwritten = shadow.unwritten.numpy()
        units = [places // shadow.unit + i for i in range(max(1, size // shadow.unit))]
        if kind == "store":
            for unit in units:
                unwritten[unit] = False
            return np.ones(len(places), bool)
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
        self, region: Region, offsets: np.ndarray, others: np.ndarray, kind: str, did: str,
        values: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Report lanes whose element another program accessed; not those that store the value which it wrote."""
        order = self.running.order
        assert order is not None
        foreign = order.unseen(others)
        if foreign.any() and values is not None:
            foreign[foreign] = ~_holds(region, offsets[foreign], values[foreign])
        if foreign.any():
            at, other = int(offsets[foreign][0]), order.program_of(int(others[foreign][0]))
            place = np.unravel_index((other or 1) - 1, self.grid[1][::-1])[::-1]
            who = "several programs" if other is None else f"program {tuple(map(int, place))}"
            what = f"{region.position(at)}, which {who} {did}"
            self.report(kind, region.name, what, int(foreign.sum()), region.index(at))

    def _check_meetings(
        self, region: Region, offsets: np.ndarray, size: int, kind: str, values: np.ndarray | None,
        since: tuple[int, np.ndarray],
    ) -> None:  # fmt: skip
        """Report lanes that load or change (to `values`) what other lanes of the program have touched since a join."""
        storage, (low, lanes) = region.storage, since
        places = (offsets + (region.address - storage.address)) // storage.unit
        stored, loaded = storage.last("store of a lane"), storage.last("load of a lane")
        for unit in (places + i for i in range(size // storage.unit)):
            met = (stored[unit] >= low) & (stored[unit] != lanes)
            if kind in ("load", "store") and storage.had("atomic of a lane"):
                changed = storage.last("atomic of a lane")[unit]
                race, did = _RACES[kind, "atomic"]
                self._report_meeting(race, region, offsets, (changed >= low) & (changed != lanes), did)
            if kind == "load":
                self._report_meeting(findings.READ_RACE, region, offsets, met, "stored")
            else:
                # What is stored under another shape depends on what was loaded at its place.
                read = (loaded[unit] >= low) & ((loaded[unit] ^ lanes) & _PLACE != 0)
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

    def check_lanes(self, pointers: np.ndarray, safe: np.ndarray, values: np.ndarray) -> None:
        """Report lanes of one store that write different values to one element."""
        flat, bits = pointers[safe], np.broadcast_to(values, pointers.shape)[safe]
        if len(flat) < 2:
            return
        order = np.argsort(flat, kind="stable")
        same = flat[order][1:] == flat[order][:-1]
        if not same.any():
            return
        raw = np.ascontiguousarray(bits[order]).view(f"u{bits.dtype.itemsize}")
        differ = same & (raw[1:] != raw[:-1])
        if differ.any():
            at = flat[order][1:][differ][0:1]
            self._report_at(findings.WRITE_RACE, at, "is written by two lanes with different values", differ)

    def check_hint(self, name: str, handle: Any, numbers: list[int]) -> None:
        """Report values that are not what tl.multiple_of or tl.max_contiguous says of them.

        Of a multiple only the first value along each axis is checked: the others depend on how far values are
        contiguous. Contiguous they must be along the axis of the largest number, by which accesses are widened: a
        number for another axis deals it out to threads.
        """
        pointers = hasattr(handle.dtype.scalar, "element_ty")
        step = max(1, handle.get_element_ty().primitive_bitwidth // 8) if pointers else 1
        data = np.atleast_1d(handle.data & ADDRESS if pointers else handle.data).astype(np.int64)
        widest = max(range(len(numbers)), key=lambda axis: (numbers[axis], axis))
        for axis, number in enumerate(numbers):
            wrong = 0
            if number < 1:
                wrong = data.size
            elif name == "multiple_of":
                wrong = int(np.count_nonzero(data.take([0], axis) % number))
            elif axis == widest:
                apart = np.diff(np.moveaxis(data, axis, -1)) != step
                apart[..., number - 1 :: number] = False  # where one group ends and the next begins
                wrong = int(np.count_nonzero(apart))
            if wrong:
                what = f"tl.{name} says {number}, but the values begin {data.reshape(-1)[:4].tolist()}"
                self.report(findings.WRONG_HINT, name, what, wrong)

    def stand_in(self, element: Any, dtype: np.dtype, masked: bool) -> Any:
        """The marker for lanes that were not read; `masked` if a mask without `other` excluded them."""
        return mark(element, dtype, self.running.lanes.number(self.place())) if masked else unread(element, dtype)

    def check_values(self, pointers: np.ndarray, safe: np.ndarray, values: np.ndarray, element: Any) -> None:
        """Report stored values that come from a lane masked off without `other`."""
        lanes = self.running.lanes
        loads = lanes.of(values, element)
        if loads is None:
            return
        loads = np.broadcast_to(loads, pointers.shape)
        bad = safe & (loads >= 0)
        if bad.any():
            what = f"gets a lane that the load at {lanes.masked[int(loads[bad][0])]} masks off without `other`"
            self._report_at(findings.MISSING_OTHER, pointers[bad], what, bad)

    def _report_at(self, kind: str, pointers: np.ndarray, what: str, lanes: np.ndarray) -> None:
        """Report a bug at the element of the first pointer."""
        for _, region, offsets in self._by_region(pointers[:1], np.array([0])):
            if region is not None:
                at = int(offsets[0])
                self.report(kind, region.name, f"{region.position(at)} {what}", int(lanes.sum()), region.index(at))

    def report(self, kind: str, tensor: str, what: str, count: int, index: tuple[int, ...] | None = None) -> None:
        """Record `count` accesses of a kind at the current line."""
        place = self.place()
        key = kind, self.running.kernel, place, tensor
        found = self._found.get(key)
        if found is None:
            found = Finding(kind, self.running.kernel, self.grid[0], place, tensor, what, index)
            self._found[key] = found
        found.elements += count
        found.programs.add(self.grid[0])
        if self._tell is not None:
            self._tell(
                kind=kind, kernel=found.kernel, program=self.grid[0], place=(place.file, place.line), tensor=tensor,
                what=what, index=index, elements=count,
            )  # fmt: skip
        if self.stop:
            raise SanitizerError([found])

    def place(self) -> Place:
        """The current line of the kernel."""
        for frame, line in traceback.walk_stack(sys._getframe(1)):
            if not frame.f_code.co_filename.startswith((*_OURS, "<")):
                return Place(frame.f_code.co_filename, line)
        return Place("unknown file", 0)

    @property
    def program_number(self) -> int:
        """The program that runs, counted from 1."""
        (x, y, z), (nx, ny, _) = self.grid
        return 1 + x + nx * (y + ny * z)


def _holds(region: Region, offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether the elements at byte offsets hold these values already."""
    size = values.dtype.itemsize
    addresses = (offsets + region.address).astype(np.uint64)
    there = interpreter._interpreter.load(addresses, np.ones(len(values), bool), np.zeros_like(values), values.dtype)
    same: np.ndarray = there.view(f"u{size}") == np.ascontiguousarray(values).view(f"u{size}")
    return same


def _from(region: Region | None, addresses: np.ndarray) -> np.ndarray:
    """Offsets of addresses from the start of a region; they may wrap below it."""
    start = 0 if region is None else region.address
    offsets: np.ndarray = (addresses - np.uint64(start)).view(np.int64)
    return offsets
