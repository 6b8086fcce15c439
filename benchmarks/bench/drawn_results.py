"""Results files of drawn shapes, and what they say together.

drawn   what was drawn: of (an operation or all), seed, dtype
the machine's entries, as `machine.machine` has them
rows    in the order of operations and shapes: index, direction, name, of, group, shape, dtype, and
        measured  error_ok true, plan and estimated_ms (convolutions), ours_ms, peer, peer_ms, peers_ms, ratio,
                  floor_ms, share_of_floor, goal, and of --regret: regret, best_form, forms_ms; left_out and
                  unsearched: peers, with the reason; seconds, and seconds_of its phases (drawn_run.measured)
        wrong or failed  error_ok false, failed: what happened
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
# What rows of one file have in common, of the machine.
_SAME = ("device", "driver", "cuda", "cudnn", "torch", "triton", "tile_tables", "estimates")
_DRAWN = {"of": str, "seed": int, "dtype": str}


@dataclass
class Drawn:
    """What was drawn, on which machine, and the rows by their operation, index and direction."""

    about: dict[str, Any]
    machine: dict[str, str]
    rows: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @property
    def in_order(self) -> list[dict[str, Any]]:
        """The rows by their operation and index, directions as they were measured."""
        return sorted(self.rows.values(), key=lambda row: (row["of"], row["index"]))

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The rows that have a ratio."""
        return [row for row in self.in_order if row["error_ok"]]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The rows that are wrong or failed."""
        return [row for row in self.in_order if row["error_ok"] is False]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The rows that torch cannot run."""
        return [row for row in self.in_order if row["error_ok"] is None]

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        files.write_json(path, {"drawn": self.about, **self.machine, "rows": self.in_order})


def is_drawn(path: Path) -> bool:
    """Whether a file is one of drawn shapes; False for any other, also for none."""
    try:
        content = parse_json(read_files.read_bytes(path))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "drawn" in content


def load(path: Path) -> Drawn:
    """The results in a file. Raises ConfigError for any other file."""
    try:
        content = parse_json(read_files.read_bytes(path))
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError("expected an object with a list of rows")
        about, rows = content.pop("drawn", None), content.pop("rows")
        if not isinstance(about, dict) or any(type(about.get(key)) is not kind for key, kind in _DRAWN.items()):
            raise ValueError("expected what was drawn: of, seed and dtype")
        if not all(_is_text(value) for value in content.values()) or "device" not in content:
            raise ValueError("expected the machine")
        for row in rows:
            _check(row)
        known = {(row["of"], row["index"], row["direction"]): row for row in rows}
    except OSError as error:
        why = error.strerror
    except ValueError as error:
        why = cut(error)
    else:
        return Drawn(about, content, known)
    raise ConfigError(
        f"{path} has no results of `python -m benchmarks.bench --drawn` ({why}); give a file that its --json wrote"
    )


def joined(parts: Sequence[Drawn]) -> Drawn:
    """The rows of all parts, of any operations. Raises ConfigError for parts whose seed, dtype or machine differ."""
    first = parts[0]
    of = first.about["of"] if all(part.about["of"] == first.about["of"] for part in parts) else EVERY
    whole = Drawn({**first.about, "of": of}, first.machine)
    for part in parts:
        differ = [name for name in ("seed", "dtype") if part.about[name] != first.about[name]]
        differ += [name for name in _SAME if part.machine.get(name) != first.machine.get(name)]
        if differ:
            raise ConfigError(f"parts of different runs: their {', '.join(differ)} differ")
        whole.rows |= part.rows
    return whole


def continued(path: Path, about: dict[str, Any], machine: dict[str, str]) -> Drawn:
    """The rows in a file, to which more are to be added. Raises ConfigError where they are of something else."""
    found = load(path)
    pairs = [(name, found.about.get(name), value) for name, value in about.items()]
    pairs += [(name, found.machine.get(name), machine.get(name)) for name in _SAME]
    for name, before, now in pairs:
        if before != now:
            raise ConfigError(f"--json {path} has rows of {name} {before}; this is {now}: give another file")
    return Drawn(about, machine, found.rows)


def _check(row: Any) -> None:
    """Raise ValueError for an invalid row."""
    if not isinstance(row, dict) or type(row.get("index")) is not int:
        raise ValueError("expected rows with their index")
    if not all(_is_text(row.get(key)) for key in ("direction", "of", "group", "shape", "name")):
        raise ValueError(f"the row {row['index']} does not say what it is")
    if "error_ok" not in row or type(row["error_ok"]) not in (bool, type(None)):
        raise ValueError(f"the row {row['index']} does not say whether its result was right")
    if row["error_ok"]:
        wanted = ["ours_ms", "peer_ms", "ratio", *["regret"] * ("regret" in row)]
        if not all(is_number(row.get(key)) and row[key] > 0 for key in wanted) or not _is_text(row.get("peer")):
            raise ValueError(f"the row {row['index']} has no times")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a group of measured rows says: of the ratios, and of the regrets if there are any."""
    ratios = [row["ratio"] for row in rows]
    regrets = [row["regret"] for row in rows if "regret" in row]
    found = {
        "rows": len(ratios), "worst": min(ratios), "5 %": float(np.percentile(ratios, 5)),
        "median": statistics.median(ratios), "mean": statistics.geometric_mean(ratios),
        f"< {CLIFF}": sum(ratio < CLIFF for ratio in ratios), f"< {BEHIND}": sum(ratio < BEHIND for ratio in ratios),
    }  # fmt: skip
    return found | ({"regret": statistics.geometric_mean(regrets), "worst regret": max(regrets)} if regrets else {})


def summary(found: Drawn) -> Iterator[str]:
    """Lines: a table of the groups, the worst rows, and what failed or was skipped."""
    about, rows = found.about, found.measured
    yield f"{about['of']}, seed {about['seed']}, {about['dtype']}, {found.machine['device']}"
    if rows:
        yield from _table(found)
        yield ""
        yield f"the worst of {len(rows)} rows, ratio = the time of the best of torch divided by ours:"
        for row in sorted(rows, key=_ratio)[:WORST]:
            plan = f"; {row['plan']}" if row.get("plan") else ""
            regret = f", regret {row['regret']:.2f} ({row['best_form']})" if "regret" in row else ""
            times = f"{row['ours_ms']:.4f} ms, {row['peer']} {row['peer_ms']:.4f} ms"
            yield f"  {row['ratio']:.2f}  {row['name']}: {row['shape']}; {times}{plan}{regret}"
    yield f"{len(rows)} rows measured, {len(found.failed)} wrong or failed, {len(found.skipped)} that torch cannot run"
    for row in (*found.failed, *found.skipped):
        yield f"  {row['name']}: {row['shape']}: {row.get('failed') or row.get('skipped')}"


def _ratio(row: dict[str, Any]) -> float:
    return float(row["ratio"])


def _table(found: Drawn) -> Iterator[str]:
    """Columns of figures: of each operation and direction, then of the groups of shapes in it."""
    rows = found.measured
    lines: list[tuple[str, dict[str, float]]] = []
    several = len({row["of"] for row in rows}) > 1
    for of, direction in dict.fromkeys((row["of"], row["direction"]) for row in rows):
        of_it = [row for row in rows if (row["of"], row["direction"]) == (of, direction)]
        lines.append((f"{of}, {direction}" if several else direction, figures(of_it)))
        groups = sorted({row["group"] for row in of_it})
        if len(groups) > 1:
            lines += [(f"  {group}", figures([row for row in of_it if row["group"] == group])) for group in groups]
    titles = max((list(line) for _, line in lines), key=len)
    wide = max(len(name) for name, _ in lines)
    yield f"{'':{wide}}" + "".join(f"{title:>14}" for title in titles)
    for name, line in lines:
        yield f"{name:{wide}}" + "".join(f"{_said(line.get(title)):>14}" for title in titles)


def _said(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def main(arguments: list[str]) -> None:
    """Join parts, and print the summary."""
    if len(arguments) < 2:
        sys.exit("usage: python -m benchmarks.bench.drawn_results WHOLE.json PART.json...")
    whole, *parts = map(Path, arguments)
    found = joined([load(part) for part in parts])
    found.save(whole)
    echo("\n".join(summary(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
