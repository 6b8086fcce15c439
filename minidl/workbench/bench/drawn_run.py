"""Measure drawn shapes one after another, ours beside torch at its best, for a file of results."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minidl.compilers import Compilers
from minidl.jobs import Job
from minidl.rehearsal import missing
from minidl.workbench.bench import drawn_conv, drawn_other, drawn_volume
from minidl.workbench.bench.drawn import draw
from minidl.workbench.bench.drawn_results import Drawn, Key
from minidl.workbench.bench.measure import MakeClock, Replay, Work, measure
from minidl.workbench.bench.shapes import Conv, Images, Shape
from minidl.workbench.first_line import first_line

# A row is short: many shapes say more than many rounds of one.
TARGET_MS = 4.0
ROUNDS = 3
GOAL = 1.0
LEAST = 0.001  # a ratio is rounded to this, and one of 0 has no logarithm
LONGEST = 120.0  # seconds of a row
# Rows whose kernels are compiled together before the first of them is measured.
AHEAD = 48


class LostError(RuntimeError):
    """The device answers no more: what it was given broke it, and only a new process gets it back."""


def directions(shape: Shape, of: str) -> tuple[str, ...]:
    """What is measured of a shape."""
    if isinstance(shape, Conv):
        return drawn_conv.DIRECTIONS
    if isinstance(shape, Images) or of == "softmax":
        return drawn_other.FORWARD, drawn_other.BOTH
    return (drawn_other.FORWARD,)


@dataclass(frozen=True)
class Row:
    """One row to measure, on a device."""

    of: str
    seed: int
    index: int
    direction: str
    dtype: torch.dtype
    device: str

    @property
    def name(self) -> str:
        return f"{self.of} {self.index} {self.direction}"

    @property
    def shape(self) -> Any:
        return draw(self.of, self.seed, self.index, self.dtype.itemsize)

    def made(self) -> tuple[Work, drawn_conv.Layer | None]:
        """Inputs on the device and the calls; of a convolution its layer, too."""
        seed = f"{self.seed}:{self.name}"
        if isinstance(self.shape, Conv):
            of_shape = drawn_volume.Layer if len(self.shape.size) == 3 else drawn_conv.Layer
            layer = of_shape(self.shape, self.dtype, self.device, seed)
            return drawn_conv.work(layer, self.direction, self.name), layer
        return drawn_other.work(self.shape, self.direction, self.name, self.dtype, self.device, seed), None


def wanted(found: Drawn, indices: Iterable[int], device: str, regret: bool) -> list[Row]:
    """The rows of these shapes that are not measured yet."""
    of, seed, dtype = found.about["of"], found.about["seed"], getattr(torch, found.about["dtype"])
    rows = []
    for index in indices:
        for direction in directions(draw(of, seed, index, dtype.itemsize), of):
            before = found.rows.get((index, direction))
            again = regret and of.startswith("conv") and before is not None and before["error_ok"]
            if before is None or (again and "regret" not in before):
                rows.append(Row(of, seed, index, direction, dtype, device))
    return rows


def run(
    found: Drawn, rows: list[Row], console: Console, keep: Callable[[], None], minutes: float | None = None,
    regret: bool = False, make_clock: MakeClock | None = None,
) -> int:  # fmt: skip
    """Measure the rows into `found`, calling `keep` after each; at most so many minutes. Returns how many are left.

    Raises LostError, with what was measured kept, where a kernel broke the device.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    clock = make_clock or partial(Replay, target_ms=TARGET_MS)
    left = len(rows)
    with torch_at_its_best(), _progress(console) as progress:
        task = progress.add_task("", total=len(rows))
        compiled = _Compiled(rows, regret)
        for number, row in enumerate(rows):
            if deadline is not None and time.monotonic() >= deadline:
                break
            if number % AHEAD == 0 and row.device == "cuda":
                progress.update(task, description="compiling")
                compiled.wait(number)
            progress.update(task, description=row.name)
            with _no_longer_than(LONGEST, found, row, keep):
                found.rows[_key(row)] = measured(row, clock, regret)
            left -= 1
            keep()
            progress.advance(task)
            if found.rows[_key(row)]["error_ok"] is False and row.device == "cuda":
                _check_device(row)
    return left


@contextlib.contextmanager
def _no_longer_than(seconds: float, found: Drawn, row: Row, keep: Callable[[], None]) -> Iterator[None]:
    """A block that ends this process where it takes longer on a GPU: the next one goes on with the next row.

    cuDNN's search did not come back from the gradient of 14x14 patches of 411 images, and cannot be interrupted.
    """
    if row.device != "cuda":
        yield
        return
    found.rows[_key(row)] = {**_said(row), "error_ok": None, "skipped": f"no end within {seconds:g} s"}
    keep()
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def measured(row: Row, make_clock: MakeClock, regret: bool = False, rounds: int = ROUNDS) -> dict[str, Any]:
    """A row of the results file, whatever happens to it."""
    said = _said(row)
    started = time.perf_counter()
    if row.device == "cuda":
        torch.cuda.empty_cache()
    try:
        work, layer = row.made()
        plan = {} if layer is None else layer.taken(row.direction)
        left_out = _without_failing(work)
        if not work.peers:
            return {**said, **plan, "error_ok": None, "skipped": "; ".join(left_out.values())}
        found = {**plan, **measure(work, make_clock=make_clock, rounds=rounds)}
        if not found["error_ok"]:
            found["failed"] = "the result is not within its error bound"
            return {**said, **found}
        found["ratio"] = max(found["ratio"], LEAST)
        if regret and layer is not None:
            found |= drawn_conv.regret(layer, row.direction, make_clock, rounds)
    except Exception as error:  # noqa: BLE001 (whatever a kernel raises is what its row says)
        return {**said, "error_ok": False, "failed": first_line(error)}
    if left_out:
        found["left_out"] = left_out
    return {**said, **found, "seconds": round(time.perf_counter() - started, 2)}


def _said(row: Row) -> dict[str, Any]:
    """What a row is of."""
    shape = row.shape
    return {
        "index": row.index, "direction": row.direction, "name": row.name, "of": row.of, "group": shape.group,
        "shape": str(shape), "sizes": shape._asdict(), "dtype": str(row.dtype).removeprefix("torch."), "goal": GOAL,
    }  # fmt: skip


class _Compiled:
    """Compiles the kernels of some rows in other processes while the rows before them are measured."""

    def __init__(self, rows: list[Row], regret: bool) -> None:
        self.rows, self.regret = rows, regret
        self.thread: threading.Thread | None = None

    def wait(self, number: int) -> None:
        """Return once the kernels of the rows from this number on are compiled; those of the next begin."""
        self._begin(number)
        assert self.thread is not None
        self.thread.join()
        self.thread = None
        self._begin(number + AHEAD)

    def _begin(self, number: int) -> None:
        if self.thread is None:
            jobs = missing(partial(rehearsed, self.rows[number : number + AHEAD], self.regret))
            self.thread = threading.Thread(target=_compile, args=(jobs,), daemon=True)
            self.thread.start()


def _compile(jobs: list[Job]) -> None:
    # A kernel that cannot be compiled is told where its row is measured.
    if jobs:
        with contextlib.suppress(Exception), Compilers() as compilers:
            compilers.compile(jobs, processes=max(1, len(os.sched_getaffinity(0)) - 1))


def rehearsed(rows: Iterable[Row], regret: bool = False) -> None:
    """Call ours of every row, and every form of it for the regret: to be compiled ahead."""
    for row in rows:
        # What fails here fails again where it is measured, and is told there.
        with contextlib.suppress(Exception):
            work, layer = row.made()
            work.ours[0]()
            if layer is None or not regret:
                continue
            for form in layer.forms(row.direction):
                with contextlib.suppress(Exception):
                    layer.ours(row.direction, form)[0]()


@contextlib.contextmanager
def torch_at_its_best() -> Iterator[None]:
    """cuDNN searches its fastest algorithm; float32 products are those of float32 on both sides."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        yield


def _without_failing(work: Work) -> dict[str, str]:
    """Leave out the peers that fail, or are far slower than another. Returns why, by their names."""
    left_out, once = {}, {}
    for name, calls in work.peers.items():
        try:
            calls[0]()  # cuDNN searches
            once[name] = min(drawn_conv.once(calls[0]) for _ in range(2))
        except Exception as error:  # noqa: BLE001 (whatever torch raises is why it is left out)
            left_out[name] = first_line(error)
    limit = drawn_conv.SLOW * min(once.values(), default=0.0) + drawn_conv.LAUNCH_MS
    left_out |= {name: f"{ms:.1f} ms, another takes less" for name, ms in once.items() if ms > limit}
    work.peers = {name: calls for name, calls in work.peers.items() if name not in left_out}
    return left_out


def _check_device(row: Row) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LostError(f"the device is lost after {row.name}: {first_line(error)}; run again to go on") from None


def _key(row: Row) -> Key:
    return row.index, row.direction


def _progress(console: Console) -> Progress:
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)
