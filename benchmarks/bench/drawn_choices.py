"""What the estimates of this version say of drawn convolutions that were measured: how far they are off, and choose.

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

from benchmarks.bench import drawn_results
from benchmarks.bench.drawn_results import Drawn
from minidl.common.console import rich_console
from minidl.errors import ConfigError
from minidl.kernels.conv import plan
from minidl.runtime.cost_model import devices, selection
from minidl.tools.tuning import drawn, drawn_conv

TARGET = "sm_90"
KINDS = "conv", "conv1d", "conv_transpose"
NOISE = 1.03  # of two timings; forms that are so near are the same
FEWEST = 5  # rows of a plan that is shown
WORST, SHOWN = 10, 1.1  # of the regrets that are shown: how many, and above what


class Judged(NamedTuple):
    """A row, and what this version estimates: us of the plan that was measured (None where it is no candidate any
    more), the plan taken now, and the regret of its form where every form was timed."""

    row: dict[str, Any]
    estimated: float | None
    taken: str
    regret: float | None


def judged(found: Drawn) -> Iterator[Judged]:
    """The convolutions of a file. Raises ConfigError for a device whose constants are not here, or another dtype."""
    device, dtype = found.machine["device"], found.about["dtype"]
    known = devices.of_name(device)
    if known is None or dtype not in ("float16", "bfloat16"):
        raise ConfigError(f"rows of {dtype} on {device}: expected float16 or bfloat16 on a device that has constants")
    constants, figures = known
    for row in found.measured:
        if row["of"] in KINDS and isinstance(row.get("plan"), str):
            shape = drawn.draw(row["of"], found.about["seed"], row["index"])
            if str(shape) != row["shape"] or row["direction"] not in drawn_conv.DIRECTIONS:
                raise ConfigError(f"the row {row['name']} is of {row['shape']}, and its seed draws {shape}")
            yield _judged(row, shape, getattr(torch, dtype), constants, int(figures.processors))


def _judged(row: dict[str, Any], shape: Any, dtype: torch.dtype, constants: Any, processors: int) -> Judged:
    problem = drawn_conv.problem(shape, row["direction"], dtype, TARGET, processors)
    with selection.use(constants):
        every = [(made, said) for made, said in plan.candidates(problem) if made is not None]
    best, taken = min(every, key=lambda one: one[0].microseconds)
    times = row.get("forms_ms", {})
    regret = None
    if best.name in times and "regret" in row:
        ratio = times[best.name] / min(times.values())
        regret = ratio if ratio > NOISE else 1.0
    by_name = {said: made.microseconds for made, said in every}
    return Judged(row, by_name.get(row["plan"]), taken, regret)


def table(rows: list[Judged]) -> Table:
    """By plan and direction: what rows took beside the estimate of their plan."""
    made = Table("measured / estimated", "rows", "5 %", "median", "95 %", "chosen now")
    by_plan: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in rows:
        by_plan[re.sub(r"\d+ (walks|phases)", "phases", one.row["plan"]), one.row["direction"]].append(one)
    for (name, direction), every in sorted(by_plan.items(), key=lambda item: -len(item[1])):
        off = [1e3 * one.row["ours_ms"] / one.estimated for one in every if one.estimated]
        if len(off) >= FEWEST:
            low, middle, high = np.quantile(off, (0.05, 0.5, 0.95))
            again = sum(one.taken == one.row["plan"] for one in every)
            cells = (str(len(every)), f"{low:.2f}", f"{middle:.2f}", f"{high:.2f}", str(again))
            made.add_row(f"{direction}, {name}", *cells)
    return made


def said(rows: list[Judged]) -> Iterator[str]:
    """The regret, before and now, and its largest rows."""
    timed = [(one.regret, one) for one in rows if one.regret is not None]
    if not timed:
        return
    before, now = [one.row["regret"] for _, one in timed], [regret for regret, _ in timed]
    for name, values in (("as measured", before), ("chosen now", now)):
        yield f"regret {name}: {statistics.geometric_mean(values):.3f}, at worst {max(values):.2f} ({len(values)} rows)"
    for regret, one in sorted(timed, key=lambda pair: -pair[0])[:WORST]:
        if regret > SHOWN:
            yield f"  {regret:.2f}  {one.row['name']}: {one.row['shape']}; {one.taken}, best {one.row['best_form']}"


def main(arguments: list[str]) -> None:
    """Print the tables."""
    if not arguments:
        sys.exit("usage: python -m benchmarks.bench.drawn_choices RESULTS.json...")
    console = rich_console()
    for path in map(Path, arguments):
        try:
            rows = list(judged(drawn_results.load(path)))
        except ConfigError as error:
            sys.exit(f"error: {error}")
        console.print(
            f"{path}: {len(rows)} convolutions", table(rows), *said(rows), sep="\n", highlight=False, soft_wrap=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
