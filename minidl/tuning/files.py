"""What tuning leaves on disk: tile tables, written as the package's are, and a record of every measurement."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
import torch

from minidl.kernels import launch, tables
from minidl.kernels.tables import Table
from minidl.training import files
from minidl.tuning.search import TIMED, Found, Trial
from minidl.tuning.space import describe


def usual_folder() -> Path:
    """Where tables go unless told otherwise: a folder for this device in the user's configuration."""
    return Path(platformdirs.user_config_dir("minidl", appauthor=False)) / "tiles" / slug(device_name())


def slug(name: str) -> str:
    """A name of a device as that of a folder: "NVIDIA H200" is nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def device_name() -> str:
    """The GPU, or the processor that interprets."""
    return f"cpu {platform.machine()}" if launch.INTERPRETED else torch.cuda.get_device_name()


def start_from(folder: Path, family: str) -> Table:
    """The table that tuning into this folder begins with: the one that is there, else the one in use.

    Raises TableError for a file of something else.
    """
    path = folder / f"{family}.json"
    if path.exists() and folder.resolve() != tables.FOLDER.resolve():
        return tables.load(path)
    return launch.table(family)


def write_table(folder: Path, family: str, table: Table) -> Path:
    """Write the table, whole or not at all; the folder is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{family}.json"
    files.write_text(path, as_text(table))
    return path


def as_text(table: Table) -> str:
    """A table with a line for each rule, so that a difference shows one rule; equal tables give equal text."""
    targets = []
    for target, rules in table.items():
        lines = ",\n".join(f"    {json.dumps(rule)}" for rule in rules)
        targets.append(f"  {json.dumps(target)}: [\n{lines}\n  ]" if rules else f"  {json.dumps(target)}: []")
    return "{\n" + ",\n".join(targets) + "\n}\n"


def record(found: Sequence[Found]) -> dict[str, Any]:
    """Every measurement, for `--json`: no dates, so that it says what was found and not when."""
    return {
        "device": device_name(),
        "target": launch.target(),
        **{name: metadata.version(name) for name in ("torch", "triton")},
        "classes": [_class(each) for each in found],
    }


def _class(found: Found) -> dict[str, Any]:
    shapes = found.shapes
    return {
        "family": shapes.family,
        "rule": shapes.index,
        "when": shapes.when,
        "problems": [problem.name for problem in shapes.problems],
        "present": describe(shapes.tile),
        "candidates": found.candidates,
        **({"error": found.error} if found.error else {}),
        "dropped": dict(found.dropped),
        "chosen": describe(found.chosen) if found.chosen else None,
        "confirmed": _trial(found.confirmed) if found.confirmed else None,
        "trials": [_trial(trial) for trial in found.trials],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    timed = {"ms": trial.ms, "ratios": trial.ratios, "ratio": round(trial.ratio, 4)} if trial.outcome == TIMED else {}
    return {
        "tile": describe(trial.tile),
        "outcome": trial.outcome,
        **({"why": trial.why} if trial.why else {}),
        **timed,
    }
