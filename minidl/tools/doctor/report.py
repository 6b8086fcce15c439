"""The offline compile as a table and as JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from minidl.common.architecture import arch_name
from minidl.common.console import rich_console
from minidl.compilation.job import Job
from minidl.data.parsing import counted
from minidl.tools.doctor.compile import Verdict
from minidl.tools.doctor.jobs import MATRIX, SHARED_LIMITS, Figures, accepted_spills, problems
from minidl.version import __version__

SECONDS_BETWEEN_LINES = 30
_FIELDS = ("kernel", "arch", "dtype", "precision", "tile")


def console() -> Console:
    """Return the console for tables, wide enough for them without a terminal."""
    result: Console = rich_console()
    return result if result.is_terminal else rich_console(width=180)


def rows(verdict: Verdict, fields: Sequence[str] = _FIELDS) -> list[dict[str, Any]]:
    """Return a row per kernel, architecture, dtype, precision and tile, or per combination of some `fields` of these.

    A row has the number of launches and tiles, their largest figures and all their problems.
    """
    groups: dict[tuple[Any, ...], list[tuple[Job, Figures]]] = {}
    for job, figures in verdict.figures.values():
        group = tuple(job.name if name == "kernel" else getattr(job, name) for name in fields)
        groups.setdefault(group, []).append((job, figures))
    in_order = sorted(groups, key=lambda group: [(isinstance(value, str), value) for value in group])
    return [dict(zip(fields, group, strict=True)) | _summary(groups[group]) for group in in_order]


def _summary(jobs: list[tuple[Job, Figures]]) -> dict[str, Any]:
    names = ("registers", "spill", "stack", "shared", *MATRIX, "tma")
    largest = {name: max(getattr(figures, name) for _, figures in jobs) for name in names}
    loads = {name: sum(getattr(figures, name) for _, figures in jobs) for name in ("loads", "wide")}
    wrong = dict.fromkeys(line for job, figures in jobs for line in problems(job, figures))
    spilled = itertools.product([each for each in jobs if each[1].spill], accepted_spills())
    reasons = dict.fromkeys(entry.reason for each, entry in spilled if entry.covers(*each))
    tiles = len({job.tile for job, _ in jobs})
    counts = {"launches": len(jobs), "tiles": tiles, **largest, **loads}
    return {**counts, "problems": list(wrong), "accepted": list(reasons)}


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for JSON."""
    return {
        "minidl": __version__,
        **verdict.versions,
        "seconds": round(verdict.seconds, 1),
        "compiled": len(verdict.figures),
        "fine": verdict.fine,
        "failures": verdict.failures | verdict.scripts,
        "rows": rows(verdict),
    }


def show(verdict: Verdict, console: Console, every_tile: bool = False) -> None:
    """Print a table of kernels (of tiles with `every_tile`), all problems, and a summary line."""
    table = Table(title="Kernels compiled offline: the largest figures of their launches", title_justify="left")
    left = ("kernel", "GPU", "dtype", "precision", "tile", "")
    figures = ("launches", "registers", "spilled", "shared", "matrix", "TMA", "16-byte loads")
    for name in (*left[:4], "tile" if every_tile else "tiles", *figures, ""):
        table.add_column(name, no_wrap=True, justify="left" if name in left else "right")
    previous = None
    for row in rows(verdict, _FIELDS if every_tile else _FIELDS[:-1]):
        if previous is not None and row["kernel"] != previous:
            table.add_section()
        previous = row["kernel"]
        mark = "[red]wrong[/]" if row["problems"] else "[yellow]accepted[/]" if row["accepted"] else "[green]ok[/]"
        table.add_row(
            row["kernel"].removesuffix("_kernel"), arch_name(row["arch"]), row["dtype"], row["precision"],
            row["tile"] if every_tile else str(row["tiles"]), str(row["launches"]), str(row["registers"]),
            str(row["spill"]), f"{row['shared']}/{SHARED_LIMITS[row['arch']]}", _matrix(row), str(row["tma"] or "-"),
            f"{100 * row['wide'] // row['loads']}%" if row["loads"] else "-", mark,
        )  # fmt: skip
    console.print(table)
    summary = rows(verdict)
    for row in summary:
        what = f"{row['kernel']} \\[{row['tile']}] {row['dtype']} {row['precision']} {arch_name(row['arch'])}"
        for line in row["problems"]:
            console.print(f"[red]wrong[/] {what}: {escape(line)}", highlight=False, soft_wrap=True)
        for line in row["accepted"]:
            console.print(f"[yellow]accepted[/] {what}: {row['spill']} bytes spilled: {line}", highlight=False)
    for name, error in (verdict.failures | verdict.scripts).items():
        console.print(f"[red]failed[/] {escape(f'{name}: {error}')}", highlight=False, soft_wrap=True)
    compiled, kernels = len(verdict.figures), len({row["kernel"] for row in summary})
    bad = sum(bool(row["problems"]) for row in summary) + len(verdict.failures)
    outcomes = [f"{bad} wrong"] if bad else []
    outcomes += [f"{counted(len(verdict.scripts), 'script')} failed"] if verdict.scripts else []
    console.print(
        f"{counted(compiled, 'launch')} of {counted(kernels, 'kernel')} compiled with Triton "
        f"{verdict.versions['triton']} in {verdict.seconds:.0f} s: "
        + (f"[red]{', '.join(outcomes)}[/]" if outcomes else "[green]no problem[/]"),
        highlight=False,
    )


def _matrix(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in MATRIX if row[name]) or "-"


class Stages(Progress):
    """A progress bar per stage in a terminal, otherwise an occasional line."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._task_ids: dict[str, TaskID] = {}
        self._line_time = time.monotonic()

    def tell(self, stage: str, done: int, of: int) -> None:
        """Report that `done` of a stage's `of` jobs are done."""
        if stage not in self._task_ids:
            self._task_ids[stage] = self.add_task(stage, total=of)
            self._line(f"{stage}: {of} to do")
        elif time.monotonic() - self._line_time > SECONDS_BETWEEN_LINES:
            self._line(f"{stage}: {done} of {of}")
        self.update(self._task_ids[stage], completed=done, total=of)

    def _line(self, text: str) -> None:
        self._line_time = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(text, highlight=False)
