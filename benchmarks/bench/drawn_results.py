"""Results files of drawn shapes, and their summary.

drawn   the settings: of (an operation or all), seed, dtype
the machine's entries, as in `machine.machine`
rows    in the order of operations and shapes: index, direction, name, of, group, shape, dtype, and
        measured  error_ok true, plan and estimated_ms (convolutions), ours_ms, peer, peer_ms, peers_ms, ratio,
                  floor_ms, share_of_floor, goal, and of --regret: regret, best_form, forms_ms; left_out and
                  unsearched: peers, with the reason; seconds, and seconds_of its phases (drawn_run.measured)
        wrong or failed  error_ok false, failed: the reason
        skipped   error_ok null, skipped: why torch cannot run it
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.parts import join_files
from minidl.common import read_files
from minidl.common.console import cut, echo
from minidl.data.parsing import parse_json
from minidl.errors import ConfigError
from minidl.training.run_folder import files
from minidl.training.run_folder.progress import is_number

Key = tuple[str, int, str]  # of, index, direction
EVERY = "all"  # operations
CLIFF, BEHIND = 0.8, 0.9
WORST = 10
# Entries of the machine that are equal for all rows of a file.
_SAME = ("device", "driver", "cuda", "cudnn", "torch", "triton", "tile_tables", "estimates")
_DRAWN = {"of": str, "seed": int, "dtype": str}


@dataclass
class Drawn:
    """The settings, the machine, and the rows by operation, index and direction."""

    about: dict[str, Any]
    machine: dict[str, str]
    rows: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @property
    def in_order(self) -> list[dict[str, Any]]:
        """Return the rows by operation and index, directions in the order of measurement."""
        return sorted(self.rows.values(), key=lambda row: (row["of"], row["index"]))

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Return the rows that have a ratio."""
        return [row for row in self.in_order if row["error_ok"]]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Return the rows that are wrong or failed."""
        return [row for row in self.in_order if row["error_ok"] is False]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """Return the rows that torch cannot run."""
        return [row for row in self.in_order if row["error_ok"] is None]

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        files.write_json(path, {"drawn": self.about, **self.machine, "rows": self.in_order})


def is_drawn(path: Path) -> bool:
    """Return whether a file has results of drawn shapes; False for a missing file."""
    try:
        content = parse_json(read_files.read_bytes(path))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "drawn" in content


def load(path: Path) -> Drawn:
    """Return the results in a file. Raises ConfigError for any other file."""
    try:
        content = parse_json(read_files.read_bytes(path))
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError("expected an object with a list of rows")
        about, rows = content.pop("drawn", None), content.pop("rows")
        if not isinstance(about, dict) or any(type(about.get(key)) is not kind for key, kind in _DRAWN.items()):
            raise ValueError("expected the settings of, seed and dtype")
        if not all(_is_text(value) for value in content.values()) or "device" not in content:
            raise ValueError("expected the machine")
        for row in rows:
            _check(row)
        by_key = {(row["of"], row["index"], row["direction"]): row for row in rows}
    except OSError as error:
        why = error.strerror
    except ValueError as error:
        why = cut(error)
    else:
        return Drawn(about, content, by_key)
    raise ConfigError(
        f"{path} has no results of `python -m benchmarks.bench --drawn` ({why}); give a file that its --json wrote"
    )


def joined(parts: Sequence[Drawn]) -> Drawn:
    """Return the rows of all parts, of any operations. Raises ConfigError if their seed, dtype or machine differ."""
    first = parts[0]
    of = first.about["of"] if all(part.about["of"] == first.about["of"] for part in parts) else EVERY
    total = Drawn({**first.about, "of": of}, first.machine)
    for part in parts:
        differ = [name for name in ("seed", "dtype") if part.about[name] != first.about[name]]
        differ += [name for name in _SAME if part.machine.get(name) != first.machine.get(name)]
        if differ:
            raise ConfigError(f"parts of different runs: their {', '.join(differ)} differ")
        total.rows |= part.rows
    return total


def continued(path: Path, about: dict[str, Any], machine: dict[str, str]) -> Drawn:
    """Return the rows in a file, to add more to them. Raises ConfigError for other settings or another machine."""
    stored = load(path)
    pairs = [(name, stored.about.get(name), value) for name, value in about.items()]
    pairs += [(name, stored.machine.get(name), machine.get(name)) for name in _SAME]
    for name, before, now in pairs:
        if before != now:
            raise ConfigError(f"--json {path} has rows of {name} {before}; this is {now}: give another file")
    return Drawn(about, machine, stored.rows)


def _check(row: Any) -> None:
    """Raise ValueError for an invalid row."""
    if not isinstance(row, dict) or type(row.get("index")) is not int:
        raise ValueError("expected rows with an index")
    if not all(_is_text(row.get(key)) for key in ("direction", "of", "group", "shape", "name")):
        raise ValueError(f"the row {row['index']} does not say what it is")
    if "error_ok" not in row or type(row["error_ok"]) not in (bool, type(None)):
        raise ValueError(f"the row {row['index']} does not say whether its result was right")
    if row["error_ok"]:
        keys = ["ours_ms", "peer_ms", "ratio", *["regret"] * ("regret" in row)]
        if not all(is_number(row.get(key)) and row[key] > 0 for key in keys) or not _is_text(row.get("peer")):
            raise ValueError(f"the row {row['index']} has no times")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of a group of measured rows: of the ratios, and of the regrets if there are any."""
    ratios = [row["ratio"] for row in rows]
    regrets = [row["regret"] for row in rows if "regret" in row]
    result = {
        "rows": len(ratios), "worst": min(ratios), "5 %": float(np.percentile(ratios, 5)),
        "median": statistics.median(ratios), "mean": statistics.geometric_mean(ratios),
        f"< {CLIFF}": sum(ratio < CLIFF for ratio in ratios), f"< {BEHIND}": sum(ratio < BEHIND for ratio in ratios),
    }  # fmt: skip
    return result | ({"regret": statistics.geometric_mean(regrets), "worst regret": max(regrets)} if regrets else {})


def summary(results: Drawn) -> Iterator[str]:
    """Yield lines: a table of the groups, the worst rows, and the failed and skipped rows."""
    about, rows = results.about, results.measured
    yield f"{about['of']}, seed {about['seed']}, {about['dtype']}, {results.machine['device']}"
    if rows:
        yield from _table(results)
        yield ""
        yield f"the worst of {len(rows)} rows, ratio = the time of the best of torch divided by ours:"
        for row in sorted(rows, key=_ratio)[:WORST]:
            plan = f"; {row['plan']}" if row.get("plan") else ""
            regret = f", regret {row['regret']:.2f} ({row['best_form']})" if "regret" in row else ""
            times = f"{row['ours_ms']:.4f} ms, {row['peer']} {row['peer_ms']:.4f} ms"
            yield f"  {row['ratio']:.2f}  {row['name']}: {row['shape']}; {times}{plan}{regret}"
    failed, skipped = results.failed, results.skipped
    yield f"{len(rows)} rows measured, {len(failed)} wrong or failed, {len(skipped)} that torch cannot run"
    for row in (*failed, *skipped):
        yield f"  {row['name']}: {row['shape']}: {row.get('failed') or row.get('skipped')}"


def _ratio(row: dict[str, Any]) -> float:
    return float(row["ratio"])


def _table(results: Drawn) -> Iterator[str]:
    """Yield columns of figures: of each operation and direction, then of its groups of shapes."""
    rows = results.measured
    lines: list[tuple[str, dict[str, float]]] = []
    several = len({row["of"] for row in rows}) > 1
    for of, direction in dict.fromkeys((row["of"], row["direction"]) for row in rows):
        same = [row for row in rows if (row["of"], row["direction"]) == (of, direction)]
        lines.append((f"{of}, {direction}" if several else direction, figures(same)))
        groups = sorted({row["group"] for row in same})
        if len(groups) > 1:
            lines += [(f"  {group}", figures([row for row in same if row["group"] == group])) for group in groups]
    titles = max((list(line) for _, line in lines), key=len)
    wide = max(len(name) for name, _ in lines)
    yield f"{'':{wide}}" + "".join(f"{title:>14}" for title in titles)
    for name, line in lines:
        yield f"{name:{wide}}" + "".join(f"{_cell(line.get(title)):>14}" for title in titles)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def main(arguments: list[str]) -> None:
    """Join parts, and print the summary."""
    echo("\n".join(summary(join_files("drawn_results", arguments, load, joined))))


if __name__ == "__main__":
    main(sys.argv[1:])
