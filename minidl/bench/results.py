"""Results as a file: the machine they were taken on, and a row for each measurement."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl.bench.goals import GOALS, NOISE
from minidl.training import files
from minidl.training.errors import ConfigError
from minidl.training.progress import is_number

_NUMBERS = ("ours_ms", "peer_ms", "ratio", "share_of_floor")
_TEXTS = ("name", "dtype", "peer")
_MACHINE = ("device", "driver", "torch", "triton", "date")


@dataclass
class Results:
    """`machine` as `bench.machine.machine` describes it; rows by the names of GOALS."""

    machine: dict[str, str]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, row: str, measured: dict[str, Any]) -> None:
        """Take a row of `bench.measure.measure`, with its goal."""
        self.rows[row] = _judged({"row": row, **measured, "date": self.machine["date"]})

    @property
    def in_order(self) -> list[dict[str, Any]]:
        """The rows in the order of GOALS."""
        return [self.rows[name] for name in GOALS if name in self.rows]

    @property
    def right(self) -> bool:
        """Whether every row's result was right."""
        return all(row["error_ok"] for row in self.rows.values())

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        files.write_json(path, {**self.machine, "rows": self.in_order})


def load(path: Path) -> Results:
    """The results in a file, their rows judged by the goals of today. Raises ConfigError for a file that is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {row["row"]: _judged(row) for row in content.pop("rows")}
        for name, row in known.items():
            numbers = [row[key] for key in _NUMBERS] if row["error_ok"] else []
            if not all(is_number(value) and math.isfinite(value) for value in numbers) or any(
                not isinstance(row[key], str) for key in (_TEXTS if row["error_ok"] else _TEXTS[:2])
            ):
                raise ValueError(f"row {name!r}")
        if not all(isinstance(content[key], str) for key in _MACHINE):
            raise ValueError("no description of the machine")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no results of `minidl bench` ({error})") from None
    return Results(content, known)


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its goal, and whether it is at it. Raises KeyError for a row that there is not."""
    goal, ratio = GOALS[row["row"]], row["ratio"]
    return {**row, "goal": goal, "at_goal": ratio is not None and ratio >= goal - NOISE}
