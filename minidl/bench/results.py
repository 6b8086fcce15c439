"""Results as a file: the machine they were taken on, and a row for each measurement."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl.bench.goals import GOALS, NOISE
from minidl.training import files
from minidl.training.errors import ConfigError

_NUMBERS = ("ours_ms", "peer_ms", "ratio", "share_of_floor")


@dataclass
class Results:
    """`machine` as `bench.machine.machine` describes it; rows by the names of GOALS."""

    machine: dict[str, str]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, row: str, measured: dict[str, Any]) -> None:
        """Take a row of `bench.measure.measure`, with its goal."""
        goal, ratio = GOALS[row], measured["ratio"]
        reached = ratio is not None and ratio >= goal - NOISE
        self.rows[row] = {"row": row, **measured, "goal": goal, "at_goal": reached, "date": self.machine["date"]}

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
    """The results in a file. Raises ConfigError for a file that is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content.pop("rows")
        known = {row["row"]: row for row in rows}
        for name, row in known.items():
            if name not in GOALS or any(not isinstance(row[key], int | float) for key in _NUMBERS if row["error_ok"]):
                raise ValueError(f"row {name!r}")
        if not all(isinstance(value, str) for value in content.values()) or "device" not in content:
            raise ValueError("no description of the machine")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no results of `minidl bench` ({error})") from None
    return Results(content, known)
