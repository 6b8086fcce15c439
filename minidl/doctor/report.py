"""The offline compile as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from minidl import __version__
from minidl.doctor.compile import Verdict
from minidl.doctor.jobs import Figures, Job, accepted_spills, problems

_ORDER = ("kernel", "arch", "dtype", "precision", "tile")


def rows(verdict: Verdict) -> list[dict[str, Any]]:
    """One row per kernel, architecture, dtype, precision and tile, with the largest figures among its launches."""
    groups: dict[tuple[Any, ...], list[tuple[Job, Figures]]] = {}
    for job, figures in verdict.figures.values():
        groups.setdefault((job.name, job.arch, job.dtype, job.precision, job.tile), []).append((job, figures))
    return [dict(zip(_ORDER, group, strict=True)) | _summary(groups[group]) for group in sorted(groups)]


def _summary(found: list[tuple[Job, Figures]]) -> dict[str, Any]:
    names = ("registers", "spill", "stack", "shared", "wgmma", "mma", "tcgen05", "tma")
    largest = {name: max(getattr(figures, name) for _, figures in found) for name in names}
    wrong = dict.fromkeys(line for job, figures in found for line in problems(job, figures))
    reasons = dict.fromkeys(
        entry.reason
        for job, figures in found
        if figures.spill
        for entry in accepted_spills()
        if entry.covers(job, figures)
    )
    return {"launches": len(found), **largest, "problems": list(wrong), "accepted": list(reasons)}


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "minidl": __version__,
        **verdict.versions,
        "seconds": round(verdict.seconds, 1),
        "compiled": len(verdict.figures),
        "fine": verdict.fine,
        "failures": verdict.failures,
        "rows": rows(verdict),
    }


def show(verdict: Verdict, console: Console) -> None:
    """The table, then what is wrong in full, then one line with the result."""
    table = Table(title="Kernels compiled offline", title_justify="left")
    for name in ("kernel", "sm", "dtype", "precision", "tile"):
        table.add_column(name, no_wrap=name != "tile")
    for name in ("launches", "registers", "spilled", "shared", "matrix", "TMA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    summary = rows(verdict)
    before = None
    for row in summary:
        if before is not None and row["kernel"] != before:
            table.add_section()
        before = row["kernel"]
        mark = "[red]wrong[/]" if row["problems"] else "[yellow]accepted[/]" if row["accepted"] else "[green]ok[/]"
        table.add_row(
            row["kernel"].removesuffix("_kernel"), str(row["arch"]), row["dtype"], row["precision"], row["tile"],
            str(row["launches"]), str(row["registers"]), str(row["spill"]), str(row["shared"]), _matrix(row),
            str(row["tma"] or "-"), mark,
        )  # fmt: skip
    console.print(table)
    for row in summary:
        what = f"{row['kernel']} \\[{row['tile']}] {row['dtype']} {row['precision']} sm_{row['arch']}"
        for line in row["problems"]:
            console.print(f"[red]wrong[/] {what}: ", end="", highlight=False)
            console.print(line, markup=False, highlight=False)
        for line in row["accepted"]:
            console.print(f"[yellow]accepted[/] {what}: {row['spill']} bytes spilled: {line}", highlight=False)
    for name, error in verdict.failures.items():
        console.print("[red]failed[/] ", end="")
        console.print(f"{name}: {error}", markup=False, highlight=False)
    kernels = len({row["kernel"] for row in summary})
    bad = sum(bool(row["problems"]) for row in summary) + len(verdict.failures)
    console.print(
        f"{len(verdict.figures)} launches of {kernels} kernels compiled with Triton {verdict.versions['triton']} in "
        f"{verdict.seconds:.0f} s: " + (f"[red]{bad} wrong[/]" if bad else "[green]no problem[/]"),
        highlight=False,
    )


def _matrix(row: dict[str, Any]) -> str:
    return _join(f"{name} {row[name]}" for name in ("wgmma", "mma", "tcgen05") if row[name]) or "-"


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts)
