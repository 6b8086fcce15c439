"""Compare this version's estimates and choices with measured times of drawn convolutions.

    python -m benchmarks.bench.drawn_choices RESULTS.json...

RESULTS are files of `python -m benchmarks.bench --drawn`. For each plan the script prints how many rows used it and
their times relative to its estimate; for rows timed in every form (`--regret`), the regret of the form that would be
chosen now. Needs no GPU.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table

from benchmarks.bench import drawn_peers, drawn_results
from benchmarks.bench.drawn_results import Drawn
from minidl.common.console import rich_console
from minidl.errors import ConfigError
from minidl.kernels.conv import plan
from minidl.runtime.cost_model import devices, selection
from minidl.tools.tuning import drawn, drawn_conv

TARGET = "sm_90"
KINDS = "conv", "conv1d", "conv_transpose"
NOISE = 1.03  # forms whose times differ by less count as equal
FEWEST = 5  # rows of a plan in the table
WORST, SHOWN = 10, 1.1  # the number of listed regrets, and their lower limit


class Comparison(NamedTuple):
    """A row, this version's estimate of the measured plan in us (None if it is no candidate now), the plan chosen now,
    and the regret of its form if every form was timed."""

    row: dict[str, Any]
    estimated: float | None
    choice: str
    regret: float | None


def comparisons(results: Drawn) -> Iterator[Comparison]:
    """Yield the convolutions of a file. Raises ConfigError for a device without constants."""
    device, dtype = results.machine["device"], results.about["dtype"]
    entry = devices.of_name(device)
    if entry is None:
        raise ConfigError(f"rows on {device}: expected a device that has constants")
    constants, figures = entry
    itemsize = drawn_peers.dtype_of(dtype).itemsize
    for row in results.measured:
        if row["of"] in KINDS and isinstance(row.get("plan"), str):
            shape = drawn.draw(row["of"], results.about["seed"], row["index"], itemsize)
            if str(shape) != row["shape"] or row["direction"] not in drawn_conv.DIRECTIONS:
                raise ConfigError(f"the row {row['name']} has the shape {row['shape']}, but its seed draws {shape}")
            with drawn_peers.in_precision(dtype):
                compared = _comparison(row, shape, drawn_peers.dtype_of(dtype), constants, int(figures.processors))
            yield compared


def _comparison(row: dict[str, Any], shape: Any, dtype: torch.dtype, constants: Any, processors: int) -> Comparison:
    problem = drawn_conv.problem(shape, row["direction"], dtype, TARGET, processors)
    with selection.use(constants):
        candidates = [(each, name) for each, name in plan.candidates(problem) if each is not None]
    best, choice = min(candidates, key=lambda pair: pair[0].microseconds)
    times = row.get("forms_ms", {})
    regret = None
    if best.name in times and "regret" in row:
        ratio = times[best.name] / min(times.values())
        regret = ratio if ratio > NOISE else 1.0
    by_name = {name: each.microseconds for each, name in candidates}
    return Comparison(row, by_name.get(row["plan"]), choice, regret)


def table(rows: list[Comparison]) -> Table:
    """Return a table by plan and direction of measured times relative to the plan's estimates."""
    result = Table("measured / estimated", "rows", "5 %", "median", "95 %", "chosen now")
    by_plan: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in rows:
        by_plan[re.sub(r"\d+ (walks|phases)", "phases", one.row["plan"]), one.row["direction"]].append(one)
    for (name, direction), every in sorted(by_plan.items(), key=lambda item: -len(item[1])):
        off = [1e3 * one.row["ours_ms"] / one.estimated for one in every if one.estimated]
        if len(off) >= FEWEST:
            low, middle, high = np.quantile(off, (0.05, 0.5, 0.95))
            repeated = sum(one.choice == one.row["plan"] for one in every)
            cells = (str(len(every)), f"{low:.2f}", f"{middle:.2f}", f"{high:.2f}", str(repeated))
            result.add_row(f"{direction}, {name}", *cells)
    return result


def regret_lines(rows: list[Comparison]) -> Iterator[str]:
    """Yield lines on the regret, as measured and now, and on its largest rows."""
    timed = [(one.regret, one) for one in rows if one.regret is not None]
    if not timed:
        return
    before, now = [one.row["regret"] for _, one in timed], [regret for regret, _ in timed]
    for name, values in (("as measured", before), ("chosen now", now)):
        yield f"regret {name}: {statistics.geometric_mean(values):.3f}, at worst {max(values):.2f} ({len(values)} rows)"
    for regret, one in sorted(timed, key=lambda pair: -pair[0])[:WORST]:
        if regret > SHOWN:
            yield f"  {regret:.2f}  {one.row['name']}: {one.row['shape']}; {one.choice}, best {one.row['best_form']}"


def main(arguments: list[str]) -> None:
    """Print the tables."""
    if not arguments:
        sys.exit("usage: python -m benchmarks.bench.drawn_choices RESULTS.json...")
    console = rich_console()
    for path in map(Path, arguments):
        try:
            rows = list(comparisons(drawn_results.load(path)))
        except ConfigError as error:
            sys.exit(f"error: {error}")
        console.print(
            f"{path}: {len(rows)} convolutions", table(rows), *regret_lines(rows),
            sep="\n", highlight=False, soft_wrap=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
