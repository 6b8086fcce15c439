"""The checks of each launch, load, store and atomic operation of an interpreted kernel.

The highest 16 bits of a pointer hold the number of its argument. Pointer arithmetic keeps them, so that an access is
attributed to the intended tensor, however far out of bounds it is.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import triton

from minidl.interpreter import libdevice, memory, operators, patches
from minidl.testing.sanitizer import findings
from minidl.testing.sanitizer.checked_launch import Launch
from minidl.testing.sanitizer.findings import Finding, Place, SanitizerError
from minidl.testing.sanitizer.lanes import mark, unread
from minidl.testing.sanitizer.races import RaceChecks
from minidl.testing.sanitizer.regions import Region
from minidl.testing.sanitizer.unwritten import Unwritten

_NUMBER = np.uint64(48)
ADDRESS = np.uint64(2**48 - 1)
# Frames in these folders and files are not the kernel's.
_NOT_THE_KERNEL = (
    *(str(Path(str(module.__file__)).parent) for module in (triton, np)),
    str(Path(__file__).parent),
    *(str(module.__file__) for module in (patches, memory, libdevice, operators)),
)


class Sanitizer(RaceChecks):
    """Collects findings; with `stop` the first one raises SanitizerError. `launches` counts launches by kernel.

    `tell` is called at each launch and each access of a finding, for another process to read (see `processes`).
    """

    def __init__(self, stop: bool, tell: Callable[..., None] | None = None) -> None:
        self.stop, self._tell = stop, tell
        self.unwritten = Unwritten()
        self.launch: Launch | None = None
        self.launches: Counter[str] = Counter()
        self.other_given = False
        self.grid: tuple[tuple[int, int, int], tuple[int, int, int]] = ((0, 0, 0), (1, 1, 1))
        self._findings: dict[tuple[str, str, Place, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """Return the bugs found so far, in order."""
        return list(self._findings.values())

    def begin(self, kernel: str) -> None:
        """Start checking a launch of a kernel."""
        self.launch = Launch(kernel, self.unwritten)
        self.launches[kernel] += 1
        if self._tell is not None:
            self._tell(launch=kernel)

    @property
    def running(self) -> Launch:
        """Return the launch that is being checked."""
        assert self.launch is not None
        return self.launch

    def raise_if_found(self) -> None:
        """Raise SanitizerError if there are findings."""
        if self._findings:
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
                safe[chosen] = self._check_programs(region, offsets, size, kind, stored)
                if not region.storage.large:
                    since = self.running.lanes_since(pointers.shape, chosen)
                    self._check_other_lanes(region, offsets, size, kind, stored, since)
        return addresses, safe.reshape(pointers.shape)

    def _by_region(self, flat: np.ndarray, lanes: np.ndarray) -> Iterator[tuple[np.ndarray, Region | None, np.ndarray]]:
        """Yield the active lanes grouped by region, with their byte offsets from its start."""
        launch = self.running
        active = flat[lanes]
        numbers = active >> _NUMBER
        arguments = launch.regions.arguments
        first = int(numbers[0]) if len(numbers) else 0
        distinct = [first] if len(numbers) and (numbers == first).all() else np.unique(numbers).tolist()
        for number in distinct:
            chosen = numbers == number
            addresses = active[chosen] & ADDRESS
            if number == 0:
                indices, regions = launch.regions.around(addresses)
                for i in np.unique(indices).tolist():
                    in_region = indices == i
                    region = regions[i] if i >= 0 else None
                    yield lanes[chosen][in_region], region, _from(region, addresses[in_region])
            else:
                region = arguments[number - 1] if number <= len(arguments) else None
                yield lanes[chosen], region, _from(region, addresses)

    def _outside(self, kind: str, count: int, position: str, tensor: str) -> None:
        bug = findings.OUT_OF_BOUNDS_READ if kind == "load" else findings.OUT_OF_BOUNDS_WRITE
        self.report(bug, tensor, f"{kind} of {position}", count)

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
        """Report values that contradict tl.multiple_of or tl.max_contiguous.

        For multiple_of only the first value along each axis is checked; the others depend on how far values are
        contiguous. For max_contiguous only the axis of the largest number is checked, along which accesses are widened;
        numbers for other axes only distribute values to threads.
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
                breaks = np.diff(np.moveaxis(data, axis, -1)) != step
                breaks[..., number - 1 :: number] = False  # between groups
                wrong = int(np.count_nonzero(breaks))
            if wrong:
                what = f"tl.{name} says {number}, but the values begin {data.reshape(-1)[:4].tolist()}"
                self.report(findings.WRONG_HINT, name, what, wrong)

    def stand_in(self, element: Any, dtype: np.dtype, masked: bool) -> Any:
        """Return the marker of lanes that were not read; `masked` if a mask without `other` excluded them."""
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
        finding = self._findings.get(key)
        if finding is None:
            finding = Finding(kind, self.running.kernel, self.grid[0], place, tensor, what, index)
            self._findings[key] = finding
        finding.elements += count
        finding.programs.add(self.grid[0])
        if self._tell is not None:
            self._tell(
                kind=kind, kernel=finding.kernel, program=self.grid[0], place=(place.file, place.line), tensor=tensor,
                what=what, index=index, elements=count,
            )  # fmt: skip
        if self.stop:
            raise SanitizerError([finding])

    def place(self) -> Place:
        """Return the current line of the kernel."""
        for frame, line in traceback.walk_stack(sys._getframe(1)):
            if not frame.f_code.co_filename.startswith((*_NOT_THE_KERNEL, "<")):
                return Place(frame.f_code.co_filename, line)
        return Place("unknown file", 0)

    @property
    def program_number(self) -> int:
        """Return the number of the current program, counted from 1."""
        (x, y, z), (nx, ny, _) = self.grid
        return 1 + x + nx * (y + ny * z)


def _from(region: Region | None, addresses: np.ndarray) -> np.ndarray:
    """Return the offsets of addresses from the start of a region; they are negative below it."""
    start = 0 if region is None else region.address
    offsets: np.ndarray = (addresses - np.uint64(start)).view(np.int64)
    return offsets
