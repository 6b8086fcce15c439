"""Results files: the machine and one row per measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl.common import read_files
from minidl.common.console import cut
from minidl.data.parsing import parse_json
from minidl.errors import ConfigError
from minidl.tools.bench.goals import GOALS, NOISE
from minidl.training.run_folder import files
from minidl.training.run_folder.progress import is_number

_NUMBERS = ("ours_ms", "peer_ms", "ratio", "share_of_floor")
_LARGEST = 1e9  # larger numbers are rejected
_TEXTS = ("name", "dtype", "peer")
_MACHINE = ("device", "driver", "torch", "triton", "date")


@dataclass
class Results:
    """`machine` as `bench.machine.machine` returns it; rows by their names in `goals`."""

    machine: dict[str, str]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    goals: Mapping[str, float] = field(default_factory=lambda: GOALS)

    def add(self, row: str, measured: dict[str, Any]) -> None:
        """Add a row of `bench.measure.measure` with its goal."""
        self.rows[row] = _judged({"row": row, **measured, "date": self.machine["date"]}, self.goals)

    @property
    def in_order(self) -> list[dict[str, Any]]:
        """Return the rows in the order of their goals."""
        return [self.rows[name] for name in self.goals if name in self.rows]

    @property
    def right(self) -> bool:
        """Return whether the result of every row was right."""
        return all(row["error_ok"] for row in self.rows.values())

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        files.write_json(path, {**self.machine, "rows": self.in_order})


def load(path: Path, goals: Mapping[str, float] = GOALS, command: str = "minidl bench") -> Results:
    """Return the results in a file of `command`, judged by these goals. Raises ConfigError for any other file."""
    try:
        content = parse_json(read_files.read_bytes(path))
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError("expected an object with a list of rows")
        rows: dict[str, dict[str, Any]] = {}
        for row in content.pop("rows"):
            _check(row, goals, command)
            if row["row"] in rows:
                raise ValueError(f"the row {row['row']!r} is listed twice")
            rows[row["row"]] = _judged(row, goals)
        if not all(_is_text(content.get(key)) for key in _MACHINE):
            raise ValueError(f"expected the machine's {', '.join(_MACHINE)}")
    except OSError as error:
        why = error.strerror
    except ValueError as error:
        why = cut(error)
    else:
        return Results(content, rows, goals)
    raise ConfigError(f"{path} has no results of `{command}` ({why}); give a file that its --json wrote")


def _check(row: Any, goals: Mapping[str, float], command: str) -> None:
    """Raise ValueError for an invalid row."""
    name = row.get("row") if isinstance(row, dict) else None
    if not isinstance(name, str):
        raise ValueError("expected rows with names")
    if name not in goals:
        raise ValueError(f"unknown row {name!r}; `{command} --list` shows all rows")
    is_right = row.get("error_ok")
    if type(is_right) is not bool:
        raise ValueError(f"the row {name!r} does not say whether its result was right")
    for key in _TEXTS if is_right else _TEXTS[:2]:
        if not _is_text(row.get(key)):
            raise ValueError(f"the row {name!r} has no {key}")
    for key in _NUMBERS if is_right else ():
        if not (is_number(row.get(key)) and 0 < row[key] < _LARGEST):
            raise ValueError(f"the row {name!r} has no {key} above 0")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _judged(row: dict[str, Any], goals: Mapping[str, float]) -> dict[str, Any]:
    """Return the row with its goal and whether it reaches the goal."""
    goal = goals[row["row"]]
    return {**row, "goal": goal, "at_goal": row["error_ok"] and row["ratio"] >= goal - NOISE}
