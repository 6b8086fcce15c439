"""The files that tuning writes: tile tables in the package's format, and a record of every measurement."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
import torch

from minidl.errors import ConfigError
from minidl.runtime import launch, tile_tables
from minidl.runtime.tile_tables import Table
from minidl.tools.tuning import kind
from minidl.tools.tuning.search import TIMED, SearchResult, Trial
from minidl.tools.tuning.space import describe
from minidl.training.run_folder import files


def usual_folder() -> Path:
    """Return the default folder of tables: one for this device in the user's configuration.

    Raises ConfigError for a user without a home.
    """
    try:
        folder = platformdirs.user_config_dir("minidl", appauthor=False)
    except RuntimeError:
        raise ConfigError("this user has no home folder for the tables: give a folder with --out") from None
    return Path(folder) / "tiles" / slug(device_name())


def slug(name: str) -> str:
    """Return a folder name from a device name: nvidia-h200 for "NVIDIA H200"."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def device_name() -> str:
    """Return the name of the GPU, or of the CPU for the interpreter."""
    return f"cpu {platform.machine()}" if launch.ON_CPU else torch.cuda.get_device_name()


def start_from(folder: Path, family: str) -> Table:
    """Return the table from which tuning into this folder starts: the folder's table, else the table in use.

    Raises TableError for a file that is no tile table.
    """
    path = folder / f"{family}.json"
    if path.exists() and folder.resolve() != tile_tables.FOLDER.resolve():
        return tile_tables.load(path)
    return launch.table(family)


def write_table(folder: Path, family: str, table: Table) -> Path:
    """Write the table atomically, and return its path. Creates a missing folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{family}.json"
    files.write_text(path, as_text(table))
    return path


def as_text(table: Table) -> str:
    """Return a table as JSON with one line per rule, so that a diff shows single rules."""
    targets = []
    for target, rules in table.items():
        lines = ",\n".join(f"    {json.dumps(rule)}" for rule in rules)
        targets.append(f"  {json.dumps(target)}: [\n{lines}\n  ]" if rules else f"  {json.dumps(target)}: []")
    return "{\n" + ",\n".join(targets) + "\n}\n"


def record(results: Sequence[SearchResult]) -> dict[str, Any]:
    """Return every measurement for `--json`, without dates, so that equal results give equal files."""
    return {
        "device": device_name(),
        "target": kind.target(),
        **{name: metadata.version(name) for name in ("torch", "triton")},
        "classes": [_class(each) for each in results],
    }


def _class(result: SearchResult) -> dict[str, Any]:
    shape_class = result.shape_class
    return {
        "family": shape_class.family,
        "rule": shape_class.index,
        "when": shape_class.when,
        "problems": [problem.name for problem in shape_class.problems],
        "present": describe(shape_class.tile),
        "candidates": result.candidates,
        **({"error": result.error} if result.error else {}),
        "dropped": dict(result.dropped),
        "chosen": describe(result.chosen) if result.chosen else None,
        "confirmed": _trial(result.confirmed) if result.confirmed else None,
        "trials": [_trial(trial) for trial in result.trials],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    timed = {"ms": trial.ms, "ratios": trial.ratios, "ratio": round(trial.ratio, 4)} if trial.outcome == TIMED else {}
    why = {"why": trial.why} if trial.why else {}
    return {"tile": describe(trial.tile), "outcome": trial.outcome, **why, **timed}
