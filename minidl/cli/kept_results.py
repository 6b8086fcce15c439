"""Results files that a benchmark command shows or adds rows to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from minidl.errors import ConfigError

if TYPE_CHECKING:
    from minidl.tools.bench.results import Results

_SHOWN_NAMES = 3  # rows that an error names


def check_device() -> None:
    """Raise ConfigError if there is no GPU to measure on."""
    import torch

    from minidl.runtime import launch

    if launch.INTERPRETED or not torch.cuda.is_available():
        raise ConfigError("bench requires a CUDA device with compiled kernels; --list and --show FILE work without one")


def shown(path: Path, names: list[str], load: Callable[[Path], Results]) -> Results:
    """Return the rows of a file with these names. Raises ConfigError if it has none of them."""
    results = load(path)
    rows = {name: row for name, row in results.rows.items() if name in names}
    if not rows:
        others = list(results.rows)
        listed = ", ".join(others[:_SHOWN_NAMES]) or "none"
        listed += f" and {len(others) - _SHOWN_NAMES} more" if len(others) > _SHOWN_NAMES else ""
        raise ConfigError(f"--show {path} has none of these rows; it has: {listed}")
    return dataclasses.replace(results, rows=rows)


def earlier(json: Path | None, load: Callable[[Path], Results], empty: Results) -> Results:
    """Return the results of this machine in the file, else `empty`. Raises ConfigError for another device's file."""
    if json is None or not json.exists():
        return empty
    before = load(json)
    if before.machine["device"] != empty.machine["device"]:
        raise ConfigError(
            f"--json {json} has results of a {before.machine['device']}; this is a {empty.machine['device']}; "
            "use another file"
        )
    return dataclasses.replace(empty, rows=before.rows)
