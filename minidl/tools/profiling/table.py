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
    """One run of a kernel: its name, its possible kinds of launch with their counts, and times in microseconds.

    `duration` excludes the time in which the kernel before it on its stream still ran.
    """

    kernel: str
    kinds: tuple[tuple[Work, int], ...]
    start: float
    duration: float


@dataclass
class Row:
    """All runs of a kernel with one tile. Figures are sums over the runs, or None if one of them is unknown.

    `tile` is empty for kernels of other projects, and names several tiles if runs cannot be distinguished.
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
        """Return the mean microseconds of a run."""
        return self.total_us / self.calls

    @property
    def gigabytes_per_second(self) -> float | None:
        """Return the rate of the bytes counted by `profiling.work`."""
        return None if self.bytes is None or not self.total_us else self.bytes / self.total_us / 1e3

    @property
    def teraflop_per_second(self) -> float | None:
        """Return the rate of the operations counted by `profiling.work`."""
        return None if self.flop is None or not self.total_us else self.flop / self.total_us / 1e6

    @property
    def share_of_floor(self) -> float | None:
        """Return the floor as a share of the measured time."""
        return None if self.floor_us is None or not self.total_us else self.floor_us / self.total_us

    def as_json(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        derived = ("mean_us", "gigabytes_per_second", "teraflop_per_second", "share_of_floor")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def floor_us(work: Work, device: str | None) -> float | None:
    """Return the floor of a launch in microseconds, None if it is unknown.

    It is known for an H200, whose rates `minidl.tools.bench` has.
    """
    if device is None or "H200" not in device or work.bytes is None:
        return None
    if work.flop is None:
        return 1e3 * floor_ms(work.bytes)
    return 1e3 * floor_ms(work.bytes, work.flop, work.rate) if work.rate in MATRIX_FLOP_PER_MS else None


def rows_of(events: Iterable[Event], device: str | None) -> list[Row]:
    """Return the rows of events on a device, the most time first."""
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
    """Return the sum over runs of a figure, averaged over a run's possible launches; None if it is unknown for one."""
    total = 0.0
    for run in runs:
        values = [value for work, _ in run.kinds if (value := figure(work)) is not None]
        if not values or len(values) < len(run.kinds):
            return None
        total += statistics.fmean(values, [count for _, count in run.kinds])
    return total


def as_text(rows: list[Row], device: str | None, launches_per_step: float | None, missing: int) -> str:
    """Return a line on the kernels that ran on `device` (None: the CPU), and a table of the slowest."""
    if not rows:
        no_times = f"{missing:,} kernels were launched, but the GPU's recorder (CUPTI) gave no times"
        return f"profile: {no_times if missing else 'no kernel ran'}\n"
    total = sum(row.total_us for row in rows)
    location = device or "the CPU: the host's time for each launch"
    summary = f"profile: {sum(row.calls for row in rows):,} kernels ran in {_time(total)} on {location}"
    if launches_per_step is not None:
        summary += f"; {launches_per_step:g} launches per training step"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    for title in ("calls", "total ms", "mean us", "share", "GB/s", "TFLOP/s", "of floor"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("tile", overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row.kernel[:48], f"{row.calls:,}", f"{row.total_us / 1e3:.3f}", f"{row.mean_us:.1f}", f"{row.share:.1%}",
            _number(row.gigabytes_per_second), _number(row.teraflop_per_second), _percent(row.share_of_floor),
            row.tile or "-",
        )  # fmt: skip
    if missing:
        summary += f"\n{missing:,} launches or more have no time: the GPU's recorder was full; profile a shorter run"
    rest = rows[MOST_ROWS:]
    if rest:
        spent = sum(row.total_us for row in rest)
        table.add_row(
            f"{len(rest)} more", f"{sum(row.calls for row in rest):,}", f"{spent / 1e3:.3f}", "", f"{spent / total:.1%}"
        )
    text = io.StringIO()
    Console(file=text, width=160).print(summary, table, sep="\n", highlight=False, markup=False, soft_wrap=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1e6 else f"{microseconds / 1e3:.2f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
