"""Results files that `minidl bench` shows, or goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minidl.cli import drawn
from minidl.errors import ConfigError

if TYPE_CHECKING:
    from minidl.tools.bench.results import Results

_NAMED = 3  # rows that an error names


def shown(path: Path, wanted: list[str]) -> Results:
    """The wanted rows of those in the file. Raises ConfigError if it has none of them."""
    from minidl.tools.bench import results

    found = results.load(path)
    rows = {name: row for name, row in found.rows.items() if name in wanted}
    if not rows:
        names = list(found.rows)
        has = ", ".join(names[:_NAMED]) or "none"
        has += f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise ConfigError(f"--show {path} has none of these rows; it has: {has}")
    return results.Results(found.machine, rows)


def earlier(json: Path | None) -> Results:
    """Earlier results of this machine in the file, to be updated. Raises ConfigError for another device's."""
    from minidl.tools.bench import machine, results

    drawn.check_device()
    here = machine.machine()
    if json is None or not json.exists():
        return results.Results(here)
    before = results.load(json)
    if before.machine["device"] != here["device"]:
        raise ConfigError(
            f"--json {json} has results of a {before.machine['device']}; this is a {here['device']}; use another file"
        )
    return results.Results(here, before.rows)
