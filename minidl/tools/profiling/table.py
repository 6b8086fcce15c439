"""The figures of a profile by kernel and tile, as rows and as a table."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from minidl.tools.bench.measure import MATRIX_FLOP_PER_MS, floor_ms
from minidl.tools.profiling.work import Work

MOST_ROWS = 30


class Event(NamedTuple):
    """One run of a kernel: its name, the kinds of launch it may come from with their numbers, times in microseconds.

    `duration` leaves out what the kernel before it on its stream still took.
    """

    kernel: str
    kinds: tuple[tuple[Work, int], ...]
    start: float
    duration: float


@dataclass
class Row:
    """All runs of a kernel with one tile. Sums over the runs; None where it is unknown of one of them.

    `tile` is empty for a kernel that is not of minidl, and names several where runs cannot be told apart.
    """

    kernel: str
    tile: str
    calls: int
    total_us: float
    share: float
    bytes: float | None
    flop: float | None
    floor_us: float | None

    @property
    def mean_us(self) -> float:
        """Microseconds of a run."""
        return self.total_us / self.calls

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of the bytes counted by `profiling.work`."""
        return None if self.bytes is None or not self.total_us else self.bytes / self.total_us / 1e3

    @property
    def teraflop_per_second(self) -> float | None:
        """Of the operations counted by `profiling.work`."""
        return None if self.flop is None or not self.total_us else self.flop / self.total_us / 1e6

    @property
    def share_of_floor(self) -> float | None:
        """The least time that the device could take, as a share of the time taken."""
        return None if self.floor_us is None or not self.total_us else self.floor_us / self.total_us

    def as_json(self) -> dict[str, Any]:
        """All figures, for a file."""
        derived = ("mean_us", "gigabytes_per_second", "teraflop_per_second", "share_of_floor")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def floor_us(work: Work, device: str | None) -> float | None:
    """The least time that a launch could take on a CUDA device; None where that is unknown.

    It is known for an H200, on which `minidl.tools.bench` measured the rates.
    """
    if device is None or "H200" not in device or work.bytes is None:
        return None
    if work.flop is None:
        return 1e3 * floor_ms(work.bytes)
    return 1e3 * floor_ms(work.bytes, work.flop, work.rate) if work.rate in MATRIX_FLOP_PER_MS else None


def rows_of(events: Iterable[Event], device: str | None) -> list[Row]:
    """The rows of events on a device, the most time first."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        tile = " or ".join(sorted({work.tile for work, _ in event.kinds}))
        groups.setdefault((event.kernel, tile), []).append(event)
    times = {key: sum(event.duration for event in runs) for key, runs in groups.items()}
    total = sum(times.values())
    rows = []
    for key, runs in groups.items():
        figures = (lambda work: work.bytes, lambda work: work.flop, lambda work: floor_us(work, device))
        share = times[key] / total if total else 0.0
        rows.append(Row(*key, len(runs), times[key], share, *(_sum(runs, figure) for figure in figures)))
    return sorted(rows, key=lambda row: (-row.total_us, row.kernel, row.tile))


def _sum(runs: Iterable[Event], figure: Callable[[Work], float | None]) -> float | None:
    """The sum of a figure, of each run the mean of what it may come from; None where it is unknown of one of these."""
    total = 0.0
    for run in runs:
        values = [value for work, _ in run.kinds if (value := figure(work)) is not None]
        if not values or len(values) < len(run.kinds):
            return None
        total += statistics.fmean(values, [count for _, count in run.kinds])
    return total


def as_text(rows: list[Row], device: str | None, launches_per_step: float | None, missing: int) -> str:
    """What ran on `device` (None: the CPU), in a line and a table of the kernels that took the most time."""
    if not rows:
        silent = f"{missing:,} kernels were launched, but the GPU's recorder (CUPTI) gave no times"
        return f"profile: {silent if missing else 'no kernel ran'}\n"
    total = sum(row.total_us for row in rows)
    where = device or "the CPU, interpreted: the host's time for each launch"
    said = f"profile: {sum(row.calls for row in rows):,} kernels ran in {_time(total)} on {where}"
    if launches_per_step is not None:
        said += f"; {launches_per_step:g} launches per training step"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    for title in ("calls", "total ms", "mean us", "share", "GB/s", "TFLOP/s", "of floor"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("tile", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row.kernel[:48], f"{row.calls:,}", f"{row.total_us / 1e3:.3f}", f"{row.mean_us:.1f}", f"{row.share:.1%}",
            _shown(row.gigabytes_per_second), _shown(row.teraflop_per_second), _percent(row.share_of_floor),
            row.tile or "-",
        )  # fmt: skip
    if missing:
        said += f"\n{missing:,} launches or more have no time: the GPU's recorder was full; profile a shorter run"
    rest = rows[MOST_ROWS:]
    if rest:
        spent = sum(row.total_us for row in rest)
        table.add_row(
            f"{len(rest)} more", f"{sum(row.calls for row in rest):,}", f"{spent / 1e3:.3f}", "", f"{spent / total:.1%}"
        )
    text = io.StringIO()
    Console(file=text, width=160).print(said, table, sep="\n", highlight=False, markup=False, soft_wrap=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1e6 else f"{microseconds / 1e3:.2f} ms"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
