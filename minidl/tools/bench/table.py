"""The table and the charts of the committed results.

    python -m minidl.tools.bench.table RESULTS PAGE CHART SHORT_CHART

writes the table between the markers in PAGE, the chart of all rows, and the chart of the rows of SHORT. A chart has a
fingerprint of the results it was drawn from, so that a test can detect an outdated one.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError
from minidl.tools.bench.results import Results, load
from minidl.training.report.plot_processes import own_settings
from minidl.training.run_folder import files
from minidl.training.run_folder.provenance import DRAWN_BY

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# The bars of the README: each kind of work, including rows in which minidl is slower.
SHORT = (
    "gemm 8192x8192x8192",
    "gemm tf32 8192 AB",
    "softmax 4096x65536",
    "cross-entropy forward+backward 8192x32000",
    "conv 3x3 64@56",
    "conv 3x3 256@56",
    "cnn training step batch 512 tf32",
    "dcgan generation 1000 images float16",
)


def markdown(results: Results) -> str:
    """Return the heading and a line per row: both times, their ratio, its goal and the share of the floor."""
    titles = ("ours, ms", "best other, ms", "ratio", "goal", "share of the floor")
    lines = [("work", "dtype", *titles), ("---",) * (2 + len(titles))]
    for row in _right(results):
        times = f"{row['ours_ms']:.4f}", f"{row['peer_ms']:.4f} ({row['peer']})"
        figures = f"{row['ratio']:.2f}", f"{row['goal']:g}", f"{row['share_of_floor']:.2f}"
        lines.append((_work(row), row["dtype"], *times, *figures))
    return "\n".join([*_heading(results), *(f"| {' | '.join(cells)} |" for cells in lines)])


def _heading(results: Results) -> list[str]:
    """What was measured where, and what a ratio says."""
    others = sorted({name for row in results.in_order for name in row.get("others", ())})
    *most, last = "torch (eager or compiled)", *others
    fastest = f"{', '.join(most)} and {last}" if most else last
    return [
        "{device}, driver {driver}, torch {torch}, Triton {triton}, {date}.".format_map(results.machine),
        f"The ratio is the time of the fastest of {fastest}, divided by minidl's: above 1, minidl is faster.",
        "",
    ]


def _work(row: dict[str, Any]) -> str:
    """The row as `minidl bench` names it, and behind it what ours includes, where the measured name says that."""
    name: str = row["name"]
    return name if name.startswith(row["row"]) else row["row"]


def inserted(text: str, table: str) -> str:
    """The text with the table between its marks. Raises ConfigError for a text without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"the text has no lines {BEGIN} and {END} to put the table between")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _right(results: Results) -> list[dict[str, Any]]:
    return [row for row in results.in_order if row["error_ok"]]


def fingerprint(results: Results) -> str:
    """Return a hash of the figures that a chart shows."""
    shown = [[row["row"], row["ratio"], row["goal"], row["share_of_floor"]] for row in _right(results)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


@own_settings()
def picture(results: Results, kind: str = "svg") -> bytes:
    """An SVG or PNG: every row's ratio with its goal, and its share of the hardware floor. Needs the plots extra."""
    from matplotlib.figure import Figure

    rows = _right(results)[::-1]
    places = range(len(rows))
    figure = Figure(figsize=(11, 1.2 + 0.21 * len(rows)), layout="constrained")
    figure.suptitle(f"{results.machine['device']}, {results.machine['date']}", fontsize=11, parse_math=False)
    ratios, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_ratios(ratios, rows)
    ratios.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    ratios.set_yticks(places, [row["row"] for row in rows], fontsize=7)
    ratios.set_ylim(-0.6, len(rows) - 0.4)
    ratios.set_xlabel("time of the best other / ours")
    ratios.legend(loc="lower right")
    shares.barh(places, [row["share_of_floor"] for row in rows], color="tab:blue", height=0.75)
    shares.set_xlim(0.0, 1.0)
    shares.set_xlabel("share of the hardware floor")
    return as_bytes(figure, kind, Description=fingerprint(results))


@own_settings()
def short_picture(results: Results) -> bytes:
    """Return an SVG with the ratio of each row of SHORT and its goal. Needs the plots extra."""
    from matplotlib.figure import Figure

    rows = [row for row in _right(results) if row["row"] in SHORT][::-1]
    figure = Figure(figsize=(8, 0.9 + 0.33 * len(rows)), layout="constrained")
    axes = figure.subplots()
    _draw_ratios(axes, rows)
    axes.set_xlim(0.9, 4.5)
    axes.set_xticks([1, 2, 3, 4], ["1", "2", "3", "4"])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows])
    for place, row in enumerate(rows):
        words = f"{row['ratio']:.2f}   ({row['peer'].partition(',')[0]})"
        axes.annotate(words, (max(row["ratio"], row["goal"]), place), (8, 0), textcoords="offset points", va="center")
    axes.set_xlabel(f"speedup over the fastest alternative ({results.machine['device']}, {results.machine['date']})")
    axes.spines[["top", "right"]].set_visible(False)
    return as_bytes(figure, "svg", Description=fingerprint(results))


def _draw_ratios(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a bar from 1 to each row's ratio, on a logarithmic axis, and a tick at its goal."""
    colours = ["tab:green" if row["at_goal"] else "tab:red" if row["ratio"] < 1 else "tab:orange" for row in rows]
    axes.barh(range(len(rows)), [row["ratio"] - 1.0 for row in rows], left=1.0, color=colours, height=0.75)
    axes.scatter([row["goal"] for row in rows], range(len(rows)), marker="|", color="black", s=60, label="goal")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)


def as_bytes(figure: Any, kind: str, **metadata: str) -> bytes:
    """A figure of matplotlib as "svg" or "png", the same bytes for the same figure."""
    from matplotlib import rc_context

    usual = {"Date": None, "Creator": DRAWN_BY} if kind == "svg" else {"Software": DRAWN_BY}
    file = io.BytesIO()
    # Text as text is a quarter of the bytes of its outlines.
    with rc_context({"svg.hashsalt": "minidl", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, dpi=120, metadata={**usual, **metadata})
    return file.getvalue()


def main(arguments: list[str]) -> None:
    """Write the table and the charts."""
    if len(arguments) != 4:
        sys.exit("usage: python -m minidl.tools.bench.table RESULTS PAGE CHART SHORT_CHART")
    path, page, chart, short_chart = map(Path, arguments)
    results = load(path)
    files.write_text(page, inserted(files.read_text(page), markdown(results)))
    files.write_bytes(chart, picture(results))
    files.write_bytes(short_chart, short_picture(results))


if __name__ == "__main__":
    main(sys.argv[1:])
