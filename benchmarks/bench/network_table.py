"""The table, summary and chart of results of networks, and joined files of parts.

    python -m benchmarks.bench.network_table WHOLE.json PART.json...

joins parts from GPUs of one kind, and prints the table as Markdown.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.bench.network_clocks import PEERS
from benchmarks.bench.network_results import empty, load
from benchmarks.bench.network_rows import MEAN_GOAL, NETS, WORD
from benchmarks.bench.network_run import merged
from benchmarks.bench.parts import join_files
from minidl.common.console import echo
from minidl.errors import ConfigError
from minidl.tools.bench.chart import as_bytes
from minidl.tools.bench.goals import NOISE
from minidl.tools.bench.results import Results
from minidl.training.report.plot_processes import own_settings

TITLES = (
    "network", "ours, ms", "best torch, ms", "ratio", "goal", "of the floor", "images/s", "memory, MB", "torch's",
    "first step, s", "torch's", "launches", "without fusing", "copies",
)  # fmt: skip
_SAME = ("device", "driver", "cuda", "cudnn", "torch", "triton")


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row's figures as texts, by TITLES. torch's memory and first step are compiled, else eager; memory is
    that of a step, followed by that of its graph's pool."""
    name = row["row"].removeprefix(f"{WORD} ")
    if not row["error_ok"]:
        return [name, "wrong", *[""] * (len(TITLES) - 2)]
    compiled = next((PEERS[key] for key in ("autotune", "compile") if PEERS[key] in row["first_step_s"]), "torch")
    peaks, pools, first = row["peak_mb"], row["pool_mb"], row["first_step_s"]
    return [
        name, f"{row['ours_ms']:.3f}", f"{row['peer_ms']:.3f} ({row['peer']})", f"{row['ratio']:.2f}",
        f"{row['goal']:g}",
        f"{row['share_of_floor']:.2f}", f"{row['images_per_second']:,}",
        _memory(peaks, pools, "ours"), _memory(peaks, pools, compiled), _text(first.get("ours")),
        _text(first.get(compiled)), *(str(row.get(key, "-")) for key in ("launches", "launches_plain", "copies")),
    ]  # fmt: skip


def _memory(peaks: dict[str, float], pools: dict[str, float], side: str) -> str:
    if side not in peaks:
        return "-"
    return f"{peaks[side]:,.0f}" + (f" ({pools[side]:,.0f})" if side in pools else "")


def _text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def table(results: Results, names: Sequence[str]) -> Table:
    """Return a table of the measured rows of `names`: green at the goal, red if slower than the best peer or wrong."""
    result = Table(*TITLES[:1])
    for title in TITLES[1:]:
        result.add_column(title, justify="right")
    for row in (results.rows[name] for name in names if name in results.rows):
        ahead = row["error_ok"] and row["ratio"] >= 1.0
        style = "green" if row["at_goal"] else "yellow" if ahead else "red"
        result.add_row(*map(escape, cells(row)), style=style)
    return result


def markdown(results: Results) -> str:
    """Return the table of all rows."""
    lines = [TITLES, ("---",) * len(TITLES), *(cells(row) for row in _of_networks(results))]
    heading = "{device}, driver {driver}, torch {torch}, Triton {triton}, {date}.".format_map(results.machine)
    return "\n".join([heading, "", *(f"| {' | '.join(line)} |" for line in lines), "", summary(results)])


def _of_networks(results: Results) -> list[dict[str, Any]]:
    return [row for row in results.in_order if row["row"] in NETS]


def means(results: Results) -> dict[str, float]:
    """Return the geometric means of the ratios in inference and in training, if there are any."""
    result = {}
    for what in ("inference", "training"):
        ratios = [
            row["ratio"] for row in _of_networks(results)
            if row["error_ok"] and NETS[row["row"]].training == (what == "training")
        ]  # fmt: skip
        if ratios:
            result[what] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return result


def summary(results: Results) -> str:
    """Return a sentence with the number of rows at their goals and the geometric means."""
    rows = _of_networks(results)
    reached = sum(row["at_goal"] for row in rows)
    ahead = sum(row["error_ok"] and row["ratio"] >= 1.0 for row in rows)
    texts = []
    for what, mean in means(results).items():
        position = "at" if mean >= MEAN_GOAL - NOISE else "behind"
        texts.append(f"{what} {mean:.2f} in geometric mean ({position} its goal of {MEAN_GOAL})")
    counted = f"{reached} of {len(rows)} networks at their goal, {ahead} ahead of torch's best"
    return "; ".join([f"{counted} (bench has {len(NETS)})" if len(rows) < len(NETS) else counted, *texts])


@own_settings()
def picture(results: Results, kind: str = "svg") -> bytes:
    """Draw every network's ratio with its goal, in inference and training, as "svg" or "png". Needs the plots extra.

    Without colour: filled bars are at their goal, hatched ones below it, empty ones below torch.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in _of_networks(results) if row["error_ok"]]
    looks = {"at its goal": ("0.35", ""), "ahead of torch": ("0.85", "///"), "behind torch": ("white", "")}
    parts = [[row for row in rows if NETS[row["row"]].training == training][::-1] for training in (False, True)]
    figure = Figure(figsize=(9, 2.0 + 0.3 * len(rows)), layout="constrained")
    machine = "{device}, torch {torch}, {date}".format_map(results.machine)
    figure.suptitle(f"{machine}\ntime of torch's best / ours", fontsize=10, parse_math=False)
    plots = figure.subplots(2, 1, sharex=True, height_ratios=[max(1, len(part)) for part in parts])
    for plot, part, what in zip(plots, parts, ("inference", "training"), strict=True):
        for position, row in enumerate(part):
            look = "at its goal" if row["at_goal"] else "ahead of torch" if row["ratio"] >= 1 else "behind torch"
            colour, hatch = looks[look]
            plot.barh(position, row["ratio"], color=colour, hatch=hatch, edgecolor="black", height=0.7)
            plot.plot([row["goal"]] * 2, [position - 0.45, position + 0.45], color="black", linewidth=2.5)
            plot.text(
                row["ratio"] + 0.02,
                position,
                f"{row['ratio']:.2f}",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
        plot.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        names = [row["row"].removeprefix(f"{WORD} ").replace(f" {what}", "") for row in part]
        plot.set_yticks(range(len(part)), names, fontsize=8)
        plot.set_title(what, fontsize=9, loc="left")
    handles: list[Any] = [Patch(facecolor=c, hatch=h, edgecolor="black", label=name) for name, (c, h) in looks.items()]
    handles += plots[0].plot([], [], color="black", linewidth=2.5, label="goal")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return as_bytes(figure, kind)


def joined(parts: Sequence[Results]) -> Results:
    """Return the rows of all parts; a row in several parts has the peers of each. Raises ConfigError if the machines
    differ."""
    first = parts[0]
    total = empty(first.machine)
    for part in parts:
        differ = [key for key in _SAME if part.machine.get(key) != first.machine.get(key)]
        if differ:
            raise ConfigError(f"parts of different machines: their {', '.join(differ)} differ")
        for name, row in part.rows.items():
            total.add(name, merged(total.rows.get(name), row))
    return total


def main(arguments: list[str]) -> None:
    """Join parts, and print the table."""
    echo(markdown(join_files("network_table", arguments, load, joined)))


if __name__ == "__main__":
    main(sys.argv[1:])
