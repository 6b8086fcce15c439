"""Pictures of one command that several processes make in one folder, also on several hosts that share it.

The first process holds the folder's lock and writes plan.json in the folder of new pictures: what is made (`about`),
and which are missing. Each process makes its part of these, a contiguous one, and notes in made-RANK.txt what is on
disk, with its checksum; the first waits for all. A picture's bits depend on its seed alone, so nothing else is
exchange. What was made stays when the command fails: a process that is started anew, and the same command later, make
only what is missing, or is not what was made.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from minidl.common import read_files, write_files
from minidl.common.console import cut
from minidl.data.records import DataError
from minidl.data.saved import Checked, validate
from minidl.distributed import started, workers
from minidl.distributed.workers import Place
from minidl.errors import DamagedError, RunError
from minidl.generation.config import MAX_COUNT
from minidl.generation.output import write_at
from minidl.training.run_folder import files

PLAN = "plan.json"
_LOG = re.compile(r"made-[0-9]+\.txt")
_LINE = re.compile(rb"([0-9]{1,9}) ([0-9a-f]{32})")  # of such a file: a picture, and the checksum of its file or row
_MOST = 4096  # processes of one command
_SECONDS, POLL = 300, 0.02  # until the first process has made the plan; between two looks
ALONE = Place(0, 1, 0, 1)


class Rows(NamedTuple):
    """A file of `most` rows of `each` bytes after a head, into which several processes write."""

    path: Path
    head: bytes
    each: int
    most: int

    def create(self) -> None:
        """Make the file, full of zeros. Raises OSError."""
        with write_files.atomic(self.path) as file:
            file.write(self.head)
            file.truncate(len(self.head) + self.each * self.most)

    def sums(self, at: np.ndarray) -> list[str]:
        """The checksums of the rows of these numbers that are there; "" for all of a file that is no such one."""
        try:
            with read_files.opened(self.path) as file:
                if file.read(len(self.head)) != self.head:
                    return [""] * len(at)
                found = []
                for i in at.tolist():
                    file.seek(len(self.head) + i * self.each)
                    found.append(write_files.brief_sum(file.read(self.each)))
                return found
        except FileNotFoundError:
            return [""] * len(at)

    def put(self, at: np.ndarray, rows: np.ndarray) -> list[str]:
        """Write the rows [n, ...] of these numbers [n], which ascend, and give their checksums; they are on disk then.

        Raises OSError.
        """
        # Through to the disk: otherwise a client of NFS may write whole pages, with old rows of other hosts in them.
        handle = write_files.handle_of(self.path, os.O_WRONLY | os.O_DSYNC)
        try:
            for start, stop in _runs(at):
                first = int(np.searchsorted(at, start))
                write_at(handle, len(self.head) + start * self.each, rows[first : first + stop - start])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)
        return [write_files.brief_sum(np.ascontiguousarray(row)) for row in rows]


@dataclass(frozen=True)
class Plan(Checked):
    """What is made `about`, in which `run` of so many processes, and the ranges of numbers that are missing of all."""

    run: str
    about: dict[str, Any]
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    world: Annotated[int, Field(ge=1, le=_MOST)]
    missing: list[tuple[int, int]]

    def __post_init__(self) -> None:
        if self.about.get("pictures") != self.count or not all(0 <= a < b <= self.count for a, b in self.missing):
            raise ValueError("the missing pictures are not some of all")


class Part:
    """What this process makes: the numbers `mine` of all `count` pictures."""

    def __init__(self, staged: Path, place: Place, plan: Plan) -> None:
        self.staged, self.place, self.count = staged, place, plan.count
        self._record = _Record(staged, place.world, self.count)
        missing = np.concatenate([np.arange(*ends) for ends in plan.missing] or [np.arange(0)])
        share = missing[_nth(len(missing), place) : _nth(len(missing), place._replace(rank=place.rank + 1))]
        self.mine = share[~self._record.look()[share]]
        self._log = write_files.handle_of(staged / f"made-{place.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._looked, self._seen = -math.inf, 0

    def clear(self, names: Sequence[str]) -> None:
        """Delete what a killed process has left of this part; `names` are those of all files."""
        there = {path.name for path in self.staged.iterdir()}
        for name in {names[i] for i in self.mine.tolist()} & there:
            write_files.remove(self.staged / name)

    def made(self, at: np.ndarray, sums: Sequence[str]) -> None:
        """Note that pictures of these numbers are on disk, with their checksums."""
        os.write(self._log, _lines(at, sums))

    def done(self) -> int:
        """How many pictures all processes have made; looked up ten times a second."""
        if time.monotonic() > self._looked + 0.1:
            self._looked, self._seen = time.monotonic(), int(self._record.look().sum())
        return self._seen

    def close(self) -> None:
        os.close(self._log)

    def all_are_done(self) -> bool:
        """Whether all processes have come, and made everything."""
        return bool(self._record.look().all()) and len(self._record.read) == self.place.world

    def wait(self, tell: Callable[[int], object]) -> None:
        """Wait until all are done, and tell how many pictures are made. Raises RunError where none is made for long."""
        before, end = -1, 0.0
        while not self.all_are_done():
            if self.done() != before:
                before, end = self.done(), time.monotonic() + started.TIMEOUT
                tell(before)
            if time.monotonic() > end:
                raise RunError(
                    f"{before:,} of {self.count:,} images are finished, but for {started.TIMEOUT:g} s no "
                    "process has finished another: one has stopped; run the same command again to "
                    "generate the rest"
                )
            time.sleep(POLL)


class _Record:
    """Which pictures are made, by the processes' notes."""

    def __init__(self, staged: Path, world: int, count: int) -> None:
        self.read: dict[Path, int] = {}  # bytes
        self._paths = [staged / f"made-{rank}.txt" for rank in range(world)]
        self._made = np.zeros(count, bool)
        self.sums: dict[int, str] = {}

    def look(self) -> np.ndarray:
        """Flags [count]."""
        for path in self._paths:
            try:
                with read_files.opened(path) as file:
                    file.seek(self.read.get(path, 0))
                    text = file.read()
            except FileNotFoundError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self.read[path] = self.read.get(path, 0) + len(whole)
            for line in map(_LINE.fullmatch, whole.splitlines()):
                # Else a killed process has not written all of it.
                if line is not None and int(line[1]) < len(self._made):
                    self._made[int(line[1])] = True
                    self.sums[int(line[1])] = line[2].decode()
        return self._made


def begin(staged: Path, place: Place, run: str, about: dict[str, Any], names: Sequence[str], rows: Rows | None) -> Part:
    """Make the plan in the first process, from what an earlier command has left; `names` are the pictures' files where
    each has one, `rows` the file that has all."""
    plan, count = read(staged), int(about["pictures"])
    if plan is None or plan.run != run:
        logs = {path for path in staged.iterdir() if _LOG.fullmatch(path.name)}
        kept = {} if plan is None else _intact(staged, plan, names, rows)
        if rows is not None and (not kept or rows.path.stat().st_size != len(rows.head) + rows.each * rows.most):
            rows.create()
            kept = {}
        first, numbers = staged / "made-0.txt", np.fromiter(kept, np.int64, len(kept))
        files.write_bytes(first, _lines(numbers, [*kept.values()]))
        for path in logs - {first}:
            write_files.remove(path)
        missing = _runs(np.setdiff1d(np.arange(count), numbers))
        plan = Plan(run, about, count, place.world, missing)
        files.write_json(staged / PLAN, asdict(plan))
    return Part(staged, place, plan)


def _intact(staged: Path, plan: Plan, names: Sequence[str], rows: Rows | None) -> dict[int, str]:
    """The pictures of an earlier command, with their checksums, whose files and rows have these still."""
    record = _Record(staged, plan.world, plan.count)
    numbers = np.flatnonzero(record.look())
    inside = {path.name for path in staged.iterdir() if path.is_file()}

    def of_file(i: int) -> str:
        if not names:
            return ""
        return write_files.brief_sum((staged / names[i]).read_bytes()) if names[i] in inside else "none"

    of_rows = [""] * len(numbers) if rows is None else rows.sums(numbers)
    found = {i: joined(row, of_file(i)) for i, row in zip(numbers.tolist(), of_rows, strict=True)}
    return {i: each for i, each in found.items() if each == record.sums[i]}


def joined(row: str, file: str) -> str:
    """The checksum of a picture that has a row, or a file, or both."""
    return write_files.brief_sum((row + file).encode()) if row and file else row or file


def join(staged: Path, place: Place, run: str, about: dict[str, Any]) -> Part:
    """Wait for the plan of the first process. Raises RunError where none comes, and where it is of other pictures."""
    end = time.monotonic() + _SECONDS
    while (plan := read(staged)) is None or plan.run != run:
        if time.monotonic() > end:
            raise RunError(f"process 0 has not begun in {staged} for {_SECONDS} s: all hosts need the same folder")
        time.sleep(POLL)
    different = [name for name in about if about[name] != plan.about.get(name)]
    if different:
        raise RunError(
            f"process {place.rank} would make other pictures than process 0: they differ in {', '.join(different)}"
        )
    return Part(staged, place, plan)


def read(staged: Path) -> Plan | None:
    """The plan, if there is a whole one."""
    try:
        return validate(Plan, files.read_json(staged / PLAN))
    except (OSError, DamagedError, ValueError):
        return None


def left(staged: Path, seeds: Sequence[int]) -> str:
    """What is missing of the pictures that processes have begun: of these seeds, or of latents where there are none."""
    plan = read(staged)
    if plan is None:
        return ""
    missing = np.flatnonzero(~_Record(staged, plan.world, plan.count).look())
    what = f"seeds {ranges(np.asarray(seeds)[missing])}" if seeds else f"latents {ranges(missing)}"
    return f"{plan.count - len(missing):,} of {plan.count:,} images are kept, the same command makes {cut(what)}"


def ranges(numbers: Sequence[int] | np.ndarray) -> str:
    """Numbers as --seeds takes them."""
    runs = _runs(np.asarray(numbers, np.int64))
    return ",".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in runs)


def run_of(place: Place) -> tuple[str, Any]:
    """What all processes of this start know and no other start does, and what must be kept until they do.

    Raises DistributedError where they cannot meet, DataError where no place is set.
    """
    given = os.environ.get(workers.RUN)
    if given or place.world == 1:
        return given or secrets.token_hex(8), None
    if message := workers.missing_address():
        raise DataError(message)
    from minidl.distributed.rendezvous import join_store

    store, _, _ = join_store(_SECONDS)
    if place.rank == 0:
        store.set("minidl/run", secrets.token_hex(8))
    return store.get("minidl/run").decode(), store


def processes(rest: int, each: float, waited: float, start: float, most: int) -> int:
    """How many processes make the rest of the pictures soonest, or within a twentieth of that.

    A picture takes this process `each` seconds, in `waited` of which it waits for its GPU; only these are shared, as
    processes of one host share its processors. A start takes `start` seconds, in which none are made.
    """
    seconds = {1: rest * each}
    seconds |= {count: start + rest * (each - waited + waited / count) for count in range(2, most + 1)}
    return next(count for count, taken in seconds.items() if taken <= 1.05 * min(seconds.values()))


def _nth(count: int, place: Place) -> int:
    return place.rank * count // place.world


def _runs(at: np.ndarray) -> list[tuple[int, int]]:
    """Numbers in order as ranges (first, end)."""
    if len(at) == 0:
        return []
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    firsts, lasts = at[np.concatenate([[0], breaks])], at[np.concatenate([breaks - 1, [len(at) - 1]])]
    return [(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _lines(at: np.ndarray, sums: Sequence[str]) -> bytes:
    return "".join(f"{i} {each}\n" for i, each in zip(at.tolist(), sums, strict=True)).encode()
