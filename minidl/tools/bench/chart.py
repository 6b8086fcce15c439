"""The chart of results of `minidl bench`, which has a fingerprint of them, so that a test detects an outdated chart."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

from minidl.tools.bench.results import Results
from minidl.training.report.plot_processes import own_settings
from minidl.training.run_folder.provenance import DRAWN_BY


def right_rows(results: Results) -> list[dict[str, Any]]:
    """Return the rows whose results were right, in the order of their goals."""
    return [row for row in results.in_order if row["error_ok"]]


def fingerprint(results: Results) -> str:
    """Return a hash of the figures that a chart shows."""
    figures = [[row["row"], row["ratio"], row["goal"], row["share_of_floor"]] for row in right_rows(results)]
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:16]


@own_settings()
def picture(results: Results, kind: str = "svg") -> bytes:
    """Draw every row's ratio with its goal, and its share of the floor, as "svg" or "png". Needs the plots extra."""
    from matplotlib.figure import Figure

    rows = right_rows(results)[::-1]
    positions = range(len(rows))
    figure = Figure(figsize=(11, 1.2 + 0.21 * len(rows)), layout="constrained")
    figure.suptitle(f"{results.machine['device']}, {results.machine['date']}", fontsize=11, parse_math=False)
    ratios, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    draw_ratios(ratios, rows)
    ratios.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    ratios.set_yticks(positions, [row["row"] for row in rows], fontsize=7)
    ratios.set_ylim(-0.6, len(rows) - 0.4)
    ratios.set_xlabel("time of the best other / ours")
    ratios.legend(loc="lower right")
    shares.barh(positions, [row["share_of_floor"] for row in rows], color="tab:blue", height=0.75)
    shares.set_xlim(0.0, 1.0)
    shares.set_xlabel("share of the hardware floor")
    return as_bytes(figure, kind, Description=fingerprint(results))


def draw_ratios(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a bar from 1 to each row's ratio, on a logarithmic axis, and a tick at its goal."""
    colours = ["tab:green" if row["at_goal"] else "tab:red" if row["ratio"] < 1 else "tab:orange" for row in rows]
    axes.barh(range(len(rows)), [row["ratio"] - 1.0 for row in rows], left=1.0, color=colours, height=0.75)
    axes.scatter([row["goal"] for row in rows], range(len(rows)), marker="|", color="black", s=60, label="goal")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)


def as_bytes(figure: Any, kind: str, **metadata: str) -> bytes:
    """Return a figure of matplotlib as "svg" or "png", the same bytes for the same figure."""
    from matplotlib import rc_context

    defaults = {"Date": None, "Creator": DRAWN_BY} if kind == "svg" else {"Software": DRAWN_BY}
    file = io.BytesIO()
    # Text as text is a quarter of the bytes of its outlines.
    with rc_context({"svg.hashsalt": "minidl", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, dpi=120, metadata={**defaults, **metadata})
    return file.getvalue()
