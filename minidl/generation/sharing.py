"""Pictures of one command that several processes make in one folder, also on several hosts that share it.

The first process holds the folder's lock and writes plan.json in the folder of new pictures: what is made (`about`),
and which are missing. Each process makes its part of these, a contiguous one, and notes in made-RANK.txt what is on
disk; the first waits for all. A picture's bits depend on its seed alone, so nothing else is exchanged. What was made
stays when the command fails: a process that is started anew, and the same command later, make only what is missing.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from minidl import reading, storage
from minidl.data.parsing import cut
from minidl.data.records import DataError
from minidl.data.saved import Checked, Count, made
from minidl.distributed import started, workers
from minidl.distributed.workers import Place
from minidl.generation.config import MAX_COUNT
from minidl.generation.output import write_at
from minidl.training import files
from minidl.training.errors import DamagedError, RunError

PLAN = "plan.json"
_LOG = re.compile(r"made-[0-9]+\.txt")
_SECONDS, POLL = 300, 0.02  # until the first process has made the plan; between two looks
ALONE = Place(0, 1, 0, 1)


@dataclass
class _Plan(Checked):
    """What plan.json has. Its numbers decide on memory."""

    run: str
    about: dict[str, Any]
    count: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    world: Annotated[int, Field(ge=1, le=2**16)]
    missing: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]


class Rows(NamedTuple):
    """A file of `most` rows of `each` bytes after a head, into which several processes write."""

    path: Path
    head: bytes
    each: int
    most: int

    def create(self) -> None:
        """Make the file, full of zeros. Raises OSError."""
        with storage.whole(self.path) as file:
            file.write(self.head)
            file.truncate(len(self.head) + self.each * self.most)

    def put(self, at: np.ndarray, rows: np.ndarray) -> None:
        """Write the rows [n, ...] of these numbers [n], which ascend; they are on disk then. Raises OSError."""
        # Through to the disk: otherwise a client of NFS may write whole pages, with old rows of other hosts in them.
        handle = reading.handle(self.path, os.O_WRONLY | os.O_DSYNC)
        try:
            for start, stop in _runs(at):
                first = int(np.searchsorted(at, start))
                write_at(handle, len(self.head) + start * self.each, rows[first : first + stop - start])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)


class Part:
    """What this process makes: the numbers `mine` of all `count` pictures."""

    def __init__(self, staged: Path, place: Place, plan: dict[str, Any]) -> None:
        self.staged, self.place, self.count = staged, place, int(plan["count"])
        self._record = _Record(staged, place.world, self.count)
        missing = np.concatenate([np.arange(*ends) for ends in plan["missing"]] or [np.arange(0)])
        share = missing[_nth(len(missing), place) : _nth(len(missing), place._replace(rank=place.rank + 1))]
        self.mine = share[~self._record.look()[share]]
        self._log = reading.handle(staged / f"made-{place.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._looked, self._seen = -math.inf, 0

    def clear(self, names: Sequence[str]) -> None:
        """Delete what a killed process has left of this part; `names` are those of all files."""
        there = {path.name for path in self.staged.iterdir()}
        for name in {names[i] for i in self.mine.tolist()} & there:
            (self.staged / name).unlink(missing_ok=True)

    def made(self, at: np.ndarray) -> None:
        """Note that pictures of these numbers are on disk."""
        os.write(self._log, _lines(at))

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
                    f"{before:,} of {self.count:,} images are made, and for {started.TIMEOUT:g} s no process has made "
                    "another: one is gone or stopped; the same command makes the rest"
                )
            time.sleep(POLL)


class _Record:
    """Which pictures are made, by the processes' notes."""

    def __init__(self, staged: Path, world: int, count: int) -> None:
        self.read: dict[Path, int] = {}  # bytes
        self._paths = [staged / f"made-{rank}.txt" for rank in range(world)]
        self._made = np.zeros(count, bool)

    def look(self) -> np.ndarray:
        """Flags [count]."""
        for path in self._paths:
            try:
                with reading.opened(path) as file:
                    file.seek(self.read.get(path, 0))
                    text = file.read()
            except FileNotFoundError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self.read[path] = self.read.get(path, 0) + len(whole)
            for words in map(bytes.split, whole.splitlines()):
                # Else a killed process has not written all of it.
                if len(words) == 3 and all(word.isdigit() and len(word) < 10 for word in words[:2]):
                    self._made[int(words[0]) : int(words[1])] = True
        return self._made


def begin(staged: Path, place: Place, run: str, about: dict[str, Any], names: Sequence[str], rows: Rows | None) -> Part:
    """Make the plan in the first process, from what an earlier command has left; `names` are the pictures' files where
    each has one, `rows` the file that has all."""
    plan, count = read(staged), int(about["pictures"])
    if plan is None or plan["run"] != run:
        made = np.zeros(count, bool)
        there = {path.name for path in staged.iterdir()}
        logs = {staged / name for name in there if _LOG.fullmatch(name)}
        if rows is not None and not rows.path.exists():
            rows.create()
        elif plan is not None:
            made = _Record(staged, int(plan["world"]), count).look()
            made &= np.fromiter((name in there for name in names), bool, count) if names else True
        first = staged / "made-0.txt"
        files.write_bytes(first, _lines(np.flatnonzero(made)))
        for path in logs - {first}:
            path.unlink(missing_ok=True)
        missing = [list(ends) for ends in _runs(np.flatnonzero(~made))]
        plan = {"run": run, "about": about, "count": count, "world": place.world, "missing": missing}
        files.write_json(staged / PLAN, plan)
    return Part(staged, place, plan)


def join(staged: Path, place: Place, run: str, about: dict[str, Any]) -> Part:
    """Wait for the plan of the first process. Raises RunError where none comes, and where it is of other pictures."""
    end = time.monotonic() + _SECONDS
    while (plan := read(staged)) is None or plan["run"] != run:
        if time.monotonic() > end:
            raise RunError(f"process 0 has not begun in {staged} for {_SECONDS} s: all hosts need the same folder")
        time.sleep(POLL)
    different = [name for name in about if about[name] != plan["about"].get(name)]
    if different:
        raise RunError(
            f"process {place.rank} would make other pictures than process 0: they differ in {', '.join(different)}"
        )
    return Part(staged, place, plan)


def read(staged: Path) -> dict[str, Any] | None:
    """The plan, if there is a whole one."""
    try:
        plan = files.read_json(staged / PLAN)
        made(_Plan, plan)
    except (OSError, DamagedError, ValueError):
        return None
    return plan


def left(staged: Path, seeds: Sequence[int]) -> str:
    """What is missing of the pictures that processes have begun: of these seeds, or of latents where there are none."""
    plan = read(staged)
    if plan is None:
        return ""
    missing = np.flatnonzero(~_Record(staged, plan["world"], plan["count"]).look())
    what = f"seeds {ranges(np.asarray(seeds)[missing])}" if seeds else f"latents {ranges(missing)}"
    return f"{plan['count'] - len(missing):,} of {plan['count']:,} images are kept, the same command makes {cut(what)}"


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
    if lacking := workers.nowhere_to_meet():
        raise DataError(lacking)
    from minidl.distributed.meeting import met

    store, _, _ = met(_SECONDS)
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


def _lines(at: np.ndarray) -> bytes:
    return "".join(f"{first} {end} .\n" for first, end in _runs(at)).encode()
