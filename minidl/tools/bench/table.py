"""The tables and the picture of the committed results.

    python -m minidl.tools.bench.table RESULTS PAGE README PICTURE

writes the whole table between the marks in PAGE, the rows of SHORT between those in README, and the picture, which
names the results that it was drawn from, so that a test can tell an old one.
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
# The README's rows: one or two for each kind of work, among them those in which minidl is behind.
SHORT = (
    "gemm 8192x8192x8192",
    "gemm tf32 8192 AB",
    "gemm float32 4096",
    "softmax 4096x65536",
    "cross-entropy forward+backward 8192x32000",
    "conv 1->12 7x7 72x72",
    "conv 3x3 64@56",
    "conv 3x3 256@56",
    "conv 3x3 64@56 gradient of the weight",
    "text training step 1024x65 of 32754, 128 hidden",
    "cnn inference 10000 images",
    "cnn training step batch 512 tf32",
    "dcgan generation 1000 images float16",
)


def markdown(results: Results) -> str:
    """A line per row: ours, the best of the others, the ratio theirs / ours, its goal, and the share of the floor."""
    titles = ("ours, ms", "best other, ms", "ratio", "goal", "share of the floor")
    return _table(results, titles, [row for row in results.in_order if row["error_ok"]])


def short(results: Results) -> str:
    """The rows of SHORT without goal and floor."""
    rows = [row for row in results.in_order if row["row"] in SHORT and row["error_ok"]]
    return _table(results, ("minidl, ms", "best other, ms", "ratio"), rows)


def _table(results: Results, titles: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """The heading, and a line per row with as many figures as there are titles."""
    lines = [("work", "dtype", *titles), ("---",) * (2 + len(titles))]
    for row in rows:
        times = f"{row['ours_ms']:.4f}", f"{row['peer_ms']:.4f} ({row['peer']})"
        figures = *times, f"{row['ratio']:.2f}", f"{row['goal']:g}", f"{row['share_of_floor']:.2f}"
        lines.append((_work(row), row["dtype"], *figures[: len(titles)]))
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


def fingerprint(results: Results) -> str:
    """Of the figures that a picture shows."""
    rows = [row for row in results.in_order if row["error_ok"]]
    shown = [[row["row"], row["ratio"], row["goal"], row["share_of_floor"]] for row in rows]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


@own_settings()
def picture(results: Results, kind: str = "svg") -> bytes:
    """An SVG or PNG: every row's ratio with its goal, and its share of the hardware floor. Needs the plots extra."""
    from matplotlib.figure import Figure

    rows = [row for row in results.in_order if row["error_ok"]][::-1]
    places = range(len(rows))
    figure = Figure(figsize=(11, 1.2 + 0.21 * len(rows)), layout="constrained")
    figure.suptitle(f"{results.machine['device']}, {results.machine['date']}", fontsize=11, parse_math=False)
    ratios, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    colours = ["tab:green" if row["at_goal"] else "tab:red" if row["ratio"] < 1 else "tab:orange" for row in rows]
    ratios.barh(places, [row["ratio"] - 1.0 for row in rows], left=1.0, color=colours, height=0.75)
    ratios.scatter([row["goal"] for row in rows], places, marker="|", color="black", s=60, label="goal")
    ratios.axvline(1.0, color="grey", linewidth=0.8)
    ratios.set_xscale("log", base=2)
    ratios.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    ratios.set_yticks(places, [row["row"] for row in rows], fontsize=7)
    ratios.set_ylim(-0.6, len(rows) - 0.4)
    ratios.set_xlabel("time of the best other / ours")
    ratios.legend(loc="lower right")
    shares.barh(places, [row["share_of_floor"] for row in rows], color="tab:blue", height=0.75)
    shares.set_xlim(0.0, 1.0)
    shares.set_xlabel("share of the hardware floor")
    return as_bytes(figure, kind, Description=fingerprint(results))


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
    """Write the tables and the picture."""
    if len(arguments) != 4:
        sys.exit("usage: python -m minidl.tools.bench.table RESULTS PAGE README PICTURE")
    path, page, readme, drawn = map(Path, arguments)
    results = load(path)
    for text, rows in ((page, markdown(results)), (readme, short(results))):
        files.write_text(text, inserted(files.read_text(text), rows))
    files.write_bytes(drawn, picture(results))


if __name__ == "__main__":
    main(sys.argv[1:])
