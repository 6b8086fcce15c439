"""Pictures of one command that several processes make in one folder, also on several hosts that share it.

The first process holds the folder's lock and writes plan.json into the folder of new pictures: the settings of the
pictures (`about`) and the numbers of the missing ones. Each process makes a contiguous part of these, and logs in
made-RANK.txt the pictures that are on disk, with their checksums; the first process waits for all. A picture's bits
depend only on its seed, so the processes exchange nothing else. The files stay when the command fails: a restarted
process, or the same command later, makes only pictures that are missing or changed.
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
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minidl.common import read_files, write_files
from minidl.common.console import cut
from minidl.data.records import DataError
from minidl.data.saved import Checked, validate
from minidl.distributed import started, workers
from minidl.distributed.workers import Ranks
from minidl.errors import DamagedError, RunError
from minidl.generation.config import MAX_COUNT
from minidl.generation.output import RowFile, runs
from minidl.training.run_folder import files

PLAN = "plan.json"
_LOG = re.compile(r"made-[0-9]+\.txt")
_LINE = re.compile(rb"([0-9]{1,9}) ([0-9a-f]{32})")  # of a log: a picture's number, and the checksum of its file or row
_MAX_PROCESSES = 4096
_SECONDS, POLL = 300, 0.02  # until the first process has written the plan; between two polls
ALONE = Ranks(0, 1, 0, 1)


@dataclass(frozen=True)
class Plan(Checked):
    """The content of plan.json: `run` identifies the start of `world` processes, `missing` are ranges of numbers."""

    run: str
    about: dict[str, Any]
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    world: Annotated[int, Field(ge=1, le=_MAX_PROCESSES)]
    missing: list[tuple[int, int]]

    def __post_init__(self) -> None:
        if self.about.get("pictures") != self.count or not all(0 <= a < b <= self.count for a, b in self.missing):
            raise ValueError("the missing pictures are not among the pictures of the plan")


class Part:
    """The pictures that this process makes: `numbers` of all `count`."""

    def __init__(self, staged: Path, ranks: Ranks, plan: Plan) -> None:
        self.staged, self.ranks, self.count = staged, ranks, plan.count
        self._logs = _Logs(staged, ranks.world, self.count)
        missing = np.concatenate([np.arange(*ends) for ends in plan.missing] or [np.arange(0)])
        share = missing[_nth(len(missing), ranks) : _nth(len(missing), ranks._replace(rank=ranks.rank + 1))]
        self.numbers = share[~self._logs.read()[share]]
        self._log = write_files.handle_of(staged / f"made-{ranks.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._read_at, self._finished = -math.inf, 0

    def clear(self, names: Sequence[str]) -> None:
        """Delete this part's unlogged files, left by a killed process; `names` are the files of all pictures."""
        existing = {path.name for path in self.staged.iterdir()}
        for name in {names[i] for i in self.numbers.tolist()} & existing:
            write_files.remove(self.staged / name)

    def log(self, numbers: np.ndarray, checksums: Sequence[str]) -> None:
        """Log that the pictures with these numbers are on disk, with their checksums."""
        os.write(self._log, _lines(numbers, checksums))

    def finished(self) -> int:
        """Return how many pictures all processes have finished; the logs are read ten times a second."""
        if time.monotonic() > self._read_at + 0.1:
            self._read_at, self._finished = time.monotonic(), int(self._logs.read().sum())
        return self._finished

    def close(self) -> None:
        os.close(self._log)

    def is_complete(self) -> bool:
        """Return whether all processes have started and all pictures are finished."""
        return bool(self._logs.read().all()) and len(self._logs.offsets) == self.ranks.world

    def wait(self, report: Callable[[int], object]) -> None:
        """Wait until all are finished, and report their number. Raises RunError if none is finished for a long time."""
        before, end = -1, 0.0
        while not self.is_complete():
            if self.finished() != before:
                before, end = self.finished(), time.monotonic() + started.TIMEOUT
                report(before)
            if time.monotonic() > end:
                raise RunError(
                    f"{before:,} of {self.count:,} images are finished, but for {started.TIMEOUT:g} s no "
                    "process has finished another: one has stopped; run the same command again to "
                    "generate the rest"
                )
            time.sleep(POLL)


class _Logs:
    """The logs of all processes, read as they grow."""

    def __init__(self, staged: Path, world: int, count: int) -> None:
        self.offsets: dict[Path, int] = {}  # bytes read
        self.checksums: dict[int, str] = {}
        self._paths = [staged / f"made-{rank}.txt" for rank in range(world)]
        self._finished = np.zeros(count, bool)

    def read(self) -> np.ndarray:
        """Return a flag [count] for each finished picture."""
        for path in self._paths:
            try:
                with read_files.opened(path) as file:
                    file.seek(self.offsets.get(path, 0))
                    text = file.read()
            except FileNotFoundError:
                continue
            complete = text[: text.rfind(b"\n") + 1]
            self.offsets[path] = self.offsets.get(path, 0) + len(complete)
            for line in map(_LINE.fullmatch, complete.splitlines()):
                # A killed process may have written part of a line.
                if line is not None and int(line[1]) < len(self._finished):
                    self._finished[int(line[1])] = True
                    self.checksums[int(line[1])] = line[2].decode()
        return self._finished


def begin(
    staged: Path, ranks: Ranks, run: str, about: dict[str, Any], names: Sequence[str], rows: RowFile | None
) -> Part:
    """Write the plan in the first process, and keep intact pictures of an earlier command; `names` are the files of
    the pictures if each has one, `rows` is the file with all of them."""
    plan, count = read(staged), int(about["pictures"])
    if plan is None or plan.run != run:
        logs = {path for path in staged.iterdir() if _LOG.fullmatch(path.name)}
        intact = {} if plan is None else _intact(staged, plan, names, rows)
        if rows is not None and (not intact or rows.path.stat().st_size != rows.offset(rows.total)):
            rows.create()
            intact = {}
        first, numbers = staged / "made-0.txt", np.fromiter(intact, np.int64, len(intact))
        files.write_bytes(first, _lines(numbers, [*intact.values()]))
        for path in logs - {first}:
            write_files.remove(path)
        missing = runs(np.setdiff1d(np.arange(count), numbers))
        plan = Plan(run, about, count, ranks.world, missing)
        files.write_json(staged / PLAN, asdict(plan))
    return Part(staged, ranks, plan)


def _intact(staged: Path, plan: Plan, names: Sequence[str], rows: RowFile | None) -> dict[int, str]:
    """Return the logged pictures whose files and rows still match their checksums, by number."""
    logs = _Logs(staged, plan.world, plan.count)
    numbers = np.flatnonzero(logs.read())
    existing = {path.name for path in staged.iterdir() if path.is_file()}

    def of_file(i: int) -> str:
        if not names:
            return ""
        return write_files.brief_sum((staged / names[i]).read_bytes()) if names[i] in existing else "none"

    of_rows = [""] * len(numbers) if rows is None else rows.checksums(numbers)
    checksums = {i: joined(row, of_file(i)) for i, row in zip(numbers.tolist(), of_rows, strict=True)}
    return {i: checksum for i, checksum in checksums.items() if checksum == logs.checksums[i]}


def joined(row: str, file: str) -> str:
    """Return the checksum of a picture from those of its row and its file; "" for one that it does not have."""
    return write_files.brief_sum((row + file).encode()) if row and file else row or file


def join(staged: Path, ranks: Ranks, run: str, about: dict[str, Any]) -> Part:
    """Wait for the plan of the first process. Raises RunError for no plan, or one with different pictures."""
    end = time.monotonic() + _SECONDS
    while (plan := read(staged)) is None or plan.run != run:
        if time.monotonic() > end:
            raise RunError(f"process 0 has not begun in {staged} for {_SECONDS} s: all hosts need the same folder")
        time.sleep(POLL)
    different = [name for name in about if about[name] != plan.about.get(name)]
    if different:
        raise RunError(
            f"process {ranks.rank} would make other pictures than process 0: they differ in {', '.join(different)}"
        )
    return Part(staged, ranks, plan)


def read(staged: Path) -> Plan | None:
    """Return the plan, None without a complete and valid one."""
    try:
        return validate(Plan, files.read_json(staged / PLAN))
    except (OSError, DamagedError, ValueError):
        return None


def left(staged: Path, seeds: Sequence[int]) -> str:
    """Return a sentence on the finished and the missing pictures, "" without a plan; `seeds` is empty for latents."""
    plan = read(staged)
    if plan is None:
        return ""
    missing = np.flatnonzero(~_Logs(staged, plan.world, plan.count).read())
    what = f"seeds {ranges(np.asarray(seeds)[missing])}" if seeds else f"latents {ranges(missing)}"
    return f"{plan.count - len(missing):,} of {plan.count:,} images are finished; the same command makes {cut(what)}"


def ranges(numbers: Sequence[int] | np.ndarray) -> str:
    """Return numbers in the form of --seeds."""
    ends = runs(np.asarray(numbers, np.int64))
    return ",".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in ends)


def run_of(ranks: Ranks) -> tuple[str, Any]:
    """Return an identifier that only the processes of this start share, and an object to keep alive until all have it.

    Raises DistributedError if they cannot meet, DataError without an address.
    """
    run = os.environ.get(workers.RUN)
    if run or ranks.world == 1:
        return run or secrets.token_hex(8), None
    if message := workers.missing_address():
        raise DataError(message)
    from minidl.distributed.rendezvous import join_store

    store, _, _ = join_store(_SECONDS)
    if ranks.rank == 0:
        store.set("minidl/run", secrets.token_hex(8))
    return store.get("minidl/run").decode(), store


def processes(rest: int, each: float, waiting: float, start: float, most: int) -> int:
    """Return the number of processes, at most `most`, that makes `rest` pictures soonest, or the smallest number that
    takes at most 5 % longer.

    A picture takes this process `each` seconds, including `waiting` seconds for its GPU. Only these are divided,
    because processes of one host share its processors. A start takes `start` seconds, in which no picture is made.
    """
    seconds = {1: rest * each}
    seconds |= {count: start + rest * (each - waiting + waiting / count) for count in range(2, most + 1)}
    return next(count for count, total in seconds.items() if total <= 1.05 * min(seconds.values()))


def _nth(count: int, ranks: Ranks) -> int:
    return ranks.rank * count // ranks.world


def _lines(numbers: np.ndarray, checksums: Sequence[str]) -> bytes:
    return "".join(f"{i} {checksum}\n" for i, checksum in zip(numbers.tolist(), checksums, strict=True)).encode()
