"""Results files of `python -m benchmarks.bench networks` and `in-torch`, whose rows may share a file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench import accelerated_rows, network_rows
from minidl.tools.bench import results
from minidl.tools.bench.results import Results

GOALS = {row: net.goal for row, net in {**network_rows.NETS, **accelerated_rows.NETS}.items()}


def empty(machine: dict[str, str]) -> Results:
    """Return results of this machine without rows."""
    return Results(machine, goals=GOALS)


def load(path: Path) -> Results:
    """Return the results in a file, judged by the present goals. Raises ConfigError for any other file."""
    return results.load(path, GOALS, f"python -m benchmarks.bench {network_rows.WORD}")
