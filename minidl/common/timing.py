"""Time the phases of a command. One phase is timed at any moment, so that the phases add up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = (
    "import", "read", "split", "vectorise", "copy", "compile", "train", "evaluate", "baseline", "plots", "write",
    "other",
)  # fmt: skip


class Phases:
    """The phases of one command. The first command of a process starts with the process."""

    def __init__(self, age: float = 0.0) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._seconds["import"] = age
        self._open = ["other"]
        self._since = time.monotonic()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A context timed as this phase; a nested context counts only for its phase."""
        self._change()
        self._open.append(name)
        try:
            yield
        finally:
            self._change()
            self._open.pop()

    def moved(self, name: str, seconds: float) -> None:
        """Move some time of the current phase to another."""
        self._seconds[name] += seconds
        self._seconds[self._open[-1]] -= seconds

    def phases(self) -> dict[str, float]:
        """Return the seconds so far by phase, and in total."""
        self._change()
        return {
            **{name: round(max(0.0, seconds), 3) for name, seconds in self._seconds.items()},
            "total": round(sum(self._seconds.values()), 3),
        }

    def _change(self) -> None:
        now = time.monotonic()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


_commands: list[Phases] = []


def current() -> Phases:
    """Return the phases of the current command."""
    return _commands[-1] if _commands else begin()


def begin() -> Phases:
    """Start a command."""
    _commands[:] = [Phases(0.0 if _commands else age())]
    return _commands[-1]


def timed(name: str) -> Any:
    """Call `Phases.timed` of the current command."""
    return current().timed(name)


def table(seconds: dict[str, float]) -> str:
    """Return the phases that took time as lines of text, with their shares."""
    total = max(seconds["total"], 1e-9)
    lines = [f"{name:<10}{value:>9.2f} s{value / total:>7.0%}" for name, value in seconds.items() if value >= 0.005]
    return "\n".join([f"{'phase':<10}{'time':>11}{'share':>7}", *lines]) + "\n"


def age(process: int | str = "self") -> float:
    """Return the seconds since a process (default: this one) was started; 0 if the system does not tell."""
    try:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun(process) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def begun(process: int | str) -> int:
    """Return when a process was started, in ticks since boot. Raises OSError."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
