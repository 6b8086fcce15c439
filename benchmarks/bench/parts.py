"""Join the results files of several runs, for the command lines of `drawn_results` and `network_table`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def join_files(
    module: str, arguments: list[str], load: Callable[[Path], Any], joined: Callable[[Sequence[Any]], Any]
) -> Any:
    """Write the joined results of all parts to the first file, and return them. Exits if that file exists."""
    if len(arguments) < 2:
        sys.exit(f"usage: python -m benchmarks.bench.{module} WHOLE.json PART.json...")
    path, *parts = map(Path, arguments)
    if path.exists() and path not in parts:
        sys.exit(f"{path} exists: give a new file, or name it among the parts, too")
    results = joined([load(part) for part in parts])
    results.save(path)
    return results
