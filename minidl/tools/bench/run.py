"""Measure rows one after another and show them in a live table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from minidl.tools.bench.goals import ROWS
from minidl.tools.bench.measure import measure
from minidl.tools.bench.results import Results

_FAILURES = (RuntimeError, TypeError, ValueError, KeyError)


def run(
    names: Sequence[str], results: Results, console: Console, keep: Callable[[], None], others: bool = False
) -> list[str]:
    """Measure the rows into `results` and call `keep` after each one. Returns a message for each row that failed.

    With `others`, kernels of other projects are also measured.
    """
    torch.backends.cudnn.benchmark = True
    makers, failures = {name: make for name, _, make in ROWS}, []
    progress = Progress(console=console, transient=True)
    task = progress.add_task("rows", total=len(names))
    with Live(console=console, auto_refresh=False) as live:
        for name in names:
            progress.update(task, description=name)
            live.update(Group(table(results, names), progress), refresh=True)
            started = time.perf_counter()
            torch.cuda.empty_cache()
            try:
                row = measure(makers[name](), others)
            except _FAILURES as error:
                failures.append(f"{name}: {type(error).__name__}: {error}")
            else:
                for other, why in row.get("left_out", {}).items():
                    live.console.print(f"{name}: {other} is left out: {why}", markup=False, highlight=False)
                results.add(name, {**row, "seconds": round(time.perf_counter() - started, 1)})
                keep()
            progress.advance(task)
        live.update(table(results, names), refresh=True)
    return failures


def table(results: Results, names: Sequence[str]) -> Table:
    """Return a table of the measured rows of `names`: green at the goal, red if slower than the best peer or wrong."""
    result = Table("row", "type")
    for title in ("ours, ms", "best other, ms", "ratio", "goal", "of the floor"):
        result.add_column(title, justify="right")
    for name in names:
        row = results.rows.get(name)
        if row is None:
            continue
        if not row["error_ok"]:
            result.add_row(name, escape(row["dtype"]), "wrong", "", "", f"{row['goal']:g}", "", style="bold red")
            continue
        style = "green" if row["at_goal"] else "red" if row["ratio"] < 1.0 else "yellow"
        result.add_row(
            name, escape(row["dtype"]), f"{row['ours_ms']:.4f}", f"{row['peer_ms']:.4f}",
            f"[{style}]{row['ratio']:.2f}[/{style}]", f"{row['goal']:g}", f"{row['share_of_floor']:.2f}",
        )  # fmt: skip
    return result


def summary(results: Results) -> str:
    """Return a sentence with the number of rows that reach their goals."""
    reached = sum(row["at_goal"] for row in results.rows.values())
    ahead = sum(row["error_ok"] and row["ratio"] >= 1.0 for row in results.rows.values())
    part = f" (bench has {len(ROWS)} rows)" if len(results.rows) < len(ROWS) else ""
    return f"{reached} of {len(results.rows)} rows at their goal, {ahead} ahead of the best other{part}"
