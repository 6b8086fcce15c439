"""Measure drawn shapes one after another, minidl against the best of torch, for a file of results."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bench import drawn_ahead, drawn_conv, drawn_other, drawn_peers, drawn_volume
from benchmarks.bench.drawn_results import EVERY, Drawn, Key
from minidl.tools.bench.measure import MakeClock, Replay, Work, make_room, measure
from minidl.tools.first_line import first_line
from minidl.tools.tuning.drawn import KINDS, draw
from minidl.tools.tuning.drawn_conv import DIRECTIONS
from minidl.tools.tuning.shapes import Conv, Images, Shape

# A row is short: many shapes tell more than many rounds of one.
TARGET_MS = 4.0
# The calls of a graph, see `Replay`.
CALLS = 128
# A row has two rounds if they differ by at most this fraction, else five.
ROUNDS = 5
AGREE = 0.01
GOAL = 1.0
LEAST = 0.001  # a ratio is rounded to this, and one of 0 has no logarithm
LONGEST = 60.0  # seconds of a row
NO_END, UNSEARCHED = "no end within ", ", also without cuDNN's search"


class LostError(RuntimeError):
    """A kernel broke the device, which only a new process can use again."""


def directions(shape: Shape, of: str) -> tuple[str, ...]:
    """Return the directions to measure for a shape."""
    if isinstance(shape, Conv):
        return DIRECTIONS
    if isinstance(shape, Images) or of == "softmax":
        return drawn_other.FORWARD, drawn_other.BOTH
    return (drawn_other.FORWARD,)


@dataclass(frozen=True)
class Row:
    """A row to measure on a device; without `search` cuDNN does not search."""

    of: str
    seed: int
    index: int
    direction: str
    dtype: torch.dtype
    device: str
    search: bool = True

    @property
    def name(self) -> str:
        return f"{self.of} {self.index} {self.direction}"

    @property
    def shape(self) -> Any:
        return draw(self.of, self.seed, self.index, self.dtype.itemsize)

    def inputs(self, values: bool = True) -> tuple[Work, drawn_conv.Layer | None]:
        """Return the work, with inputs on the device (uninitialised without `values`), and a convolution's layer."""
        seed = f"{self.seed}:{self.name}"
        if isinstance(self.shape, Conv):
            kind = drawn_volume.Layer if len(self.shape.size) == 3 else drawn_conv.Layer
            layer = kind(self.shape, self.dtype, self.device, seed, values)
            return drawn_conv.work(layer, self.direction, self.name), layer
        return drawn_other.work(self.shape, self.direction, self.name, self.dtype, self.device, seed, values), None


def remaining(results: Drawn, indices: Iterable[int], device: str, regret: bool) -> list[Row]:
    """Return the rows of these shapes to measure; rows that did not end are repeated without cuDNN's search."""
    seed, dtype = results.about["seed"], drawn_peers.dtype_of(results.about["dtype"])
    operations = KINDS if results.about["of"] == EVERY else (results.about["of"],)
    rows = []
    for index, of in itertools.product(indices, operations):
        for direction in directions(draw(of, seed, index, dtype.itemsize), of):
            stored = results.rows.get((of, index, direction))
            needs_regret = regret and of.startswith("conv") and stored is not None and stored["error_ok"]
            skipped = (stored or {}).get("skipped", "")
            endless = skipped.startswith(NO_END) and not skipped.endswith(UNSEARCHED)
            if stored is None or endless or (needs_regret and "regret" not in stored):
                rows.append(Row(of, seed, index, direction, dtype, device, search=not endless))
    return rows


def run(
    results: Drawn, rows: list[Row], console: Console, keep: Callable[[], None], minutes: float | None = None,
    regret: bool = False, make_clock: MakeClock | None = None, parts: int = 1,
) -> int:  # fmt: skip
    """Measure the rows into `found` for at most `minutes`, calling `keep` after each; return the number of other rows.

    `parts` is the number of processes like this one that measure at the same time.

    Raises LostError if a kernel broke the device; earlier rows are kept.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    clock = make_clock or partial(Replay, target_ms=TARGET_MS, longest=CALLS)
    left = len(rows)
    with contextlib.ExitStack() as ending:
        ending.enter_context(drawn_peers.in_precision(results.about["dtype"]))
        ending.enter_context(drawn_peers.torch_at_its_best())
        progress = ending.enter_context(_progress(console))
        task = progress.add_task("", total=len(rows))
        compiled = drawn_ahead.Compiled(rows, regret, parts)
        ending.callback(compiled.end)
        for number, row in enumerate(rows):
            if deadline is not None and time.monotonic() >= deadline:
                break
            phases = Phases()
            progress.update(task, description=row.name)
            if row.device == "cuda":
                compiled.wait(number)
                phases.done("waited")
            with _no_longer_than(LONGEST, results, row, keep):
                results.rows[_key(row)] = measured(row, clock, regret, phases=phases)
            left -= 1
            keep()
            progress.advance(task)
            if results.rows[_key(row)]["error_ok"] is False and row.device == "cuda":
                _check_device(row)
    return left


@contextlib.contextmanager
def _no_longer_than(seconds: float, results: Drawn, row: Row, keep: Callable[[], None]) -> Iterator[None]:
    """A context that ends this process if its block takes longer on a GPU; the next run continues with the next row.

    cuDNN's search for the gradient of 14x14 patches of 411 images did not end, and cannot be interrupted.
    """
    if row.device != "cuda":
        yield
        return
    why = f"{NO_END}{seconds:g} s{'' if row.search else UNSEARCHED}"
    results.rows[_key(row)] = {**_labels(row), "error_ok": None, "skipped": why}
    keep()
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Phases:
    """The seconds of the phases of a row, one after another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """End a phase and begin the next."""
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 3), now


def measured(
    row: Row, make_clock: MakeClock, regret: bool = False, rounds: int = ROUNDS, phases: Phases | None = None
) -> dict[str, Any]:
    """Return a row of the results file, also after a failure, with the seconds of its phases: "waited" for kernels,
    "made", "peers" (cuDNN's search), "called" (ours, once), "checked", "captured", "timed", "regret"."""
    labels, phases = _labels(row), phases or Phases()
    if row.device == "cuda":
        make_room()
    try:
        work, layer = row.inputs()
        plan = {} if layer is None else layer.choice(row.direction)
        phases.done("made")
        left_out, unsearched = drawn_peers.chosen(work, layer, row.direction, row.search)
        phases.done("peers")
        if not work.peers:
            return {**labels, **plan, "error_ok": None, "skipped": "; ".join(left_out.values())}
        figures = {**plan, **measure(work, make_clock=make_clock, rounds=rounds, agree=AGREE, done=phases.done)}
        if not figures["error_ok"]:
            figures["failed"] = "the result is not within its error bound"
            return {**labels, **figures}
        figures["ratio"] = max(figures["ratio"], LEAST)
        if regret and layer is not None:
            figures |= drawn_conv.regret(layer, row.direction, make_clock, rounds, AGREE)
            phases.done("regret")
    except Exception as error:  # noqa: BLE001 (the row reports any error)
        return {**labels, "error_ok": False, "failed": first_line(error)}
    for name, why in ("left_out", left_out), ("unsearched", unsearched):
        if why:
            figures[name] = why
    return {**labels, **figures, "seconds": round(sum(phases.seconds.values()), 2), "seconds_of": phases.seconds}


def _labels(row: Row) -> dict[str, Any]:
    """Return the entries that describe a row."""
    shape = row.shape
    return {
        "index": row.index, "direction": row.direction, "name": row.name, "of": row.of, "group": shape.group,
        "shape": str(shape), "sizes": shape._asdict(), "dtype": str(row.dtype).removeprefix("torch."), "goal": GOAL,
    }  # fmt: skip


def _check_device(row: Row) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LostError(f"the device is lost after {row.name}: {first_line(error)}; run again to continue") from None


def _key(row: Row) -> Key:
    return row.of, row.index, row.direction


def _progress(console: Console) -> Progress:
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)
