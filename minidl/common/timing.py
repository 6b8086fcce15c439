"""Where the seconds of a command go: one phase is timed at any moment, so that the phases add up."""

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
    """The phases of one command. The first of a process has begun with the process."""

    def __init__(self, age: float = 0.0) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._seconds["import"] = age
        self._open = ["other"]
        self._since = time.monotonic()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The block belongs to this phase; a block of another phase inside it to that."""
        self._change()
        self._open.append(name)
        try:
            yield
        finally:
            self._change()
            self._open.pop()

    def moved(self, name: str, seconds: float) -> None:
        """Some of the time of the phase under way belonged to another."""
        self._seconds[name] += seconds
        self._seconds[self._open[-1]] -= seconds

    def taken(self) -> dict[str, float]:
        """Seconds so far by phase, and in all."""
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
    """Those of the command under way."""
    return _commands[-1] if _commands else begin()


def begin() -> Phases:
    """A command begins."""
    _commands[:] = [Phases(0.0 if _commands else age())]
    return _commands[-1]


def timed(name: str) -> Any:
    """`Phases.timed` of the command under way."""
    return current().timed(name)


def table(seconds: dict[str, float]) -> str:
    """The phases that took time as lines of text, with their shares."""
    total = max(seconds["total"], 1e-9)
    lines = [f"{name:<10}{taken:>9.2f} s{taken / total:>7.0%}" for name, taken in seconds.items() if taken >= 0.005]
    return "\n".join([f"{'phase':<10}{'time':>11}{'share':>7}", *lines]) + "\n"


def age(process: int | str = "self") -> float:
    """Seconds since this process, or that of a number, was started; 0 where the system does not say."""
    try:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun(process) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def begun(process: int | str) -> int:
    """When a process was started, in ticks since the system was. Raises OSError."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
