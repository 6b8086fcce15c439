"""The table and the charts of the committed results of `minidl bench`.

    python -m benchmarks.bench.results_page RESULTS PAGE CHART SHORT_CHART

writes the table between the markers in PAGE, the chart of all rows, and the chart of the rows of SHORT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError
from minidl.tools.bench.chart import as_bytes, draw_ratios, fingerprint, picture, right_rows
from minidl.tools.bench.results import Results, load
from minidl.training.report.plot_processes import own_settings
from minidl.training.run_folder import files

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
    for row in right_rows(results):
        times = f"{row['ours_ms']:.4f}", f"{row['peer_ms']:.4f} ({row['peer']})"
        figures = f"{row['ratio']:.2f}", f"{row['goal']:g}", f"{row['share_of_floor']:.2f}"
        lines.append((_title(row), row["dtype"], *times, *figures))
    return "\n".join([*_heading(results), *(f"| {' | '.join(cells)} |" for cells in lines)])


def _heading(results: Results) -> list[str]:
    """Return lines on the machine and the meaning of a ratio."""
    others = sorted({name for row in results.in_order for name in row.get("others", ())})
    *most, last = "torch (eager or compiled)", *others
    fastest = f"{', '.join(most)} and {last}" if most else last
    return [
        "{device}, driver {driver}, torch {torch}, Triton {triton}, {date}.".format_map(results.machine),
        f"The ratio is the time of the fastest of {fastest}, divided by minidl's: above 1, minidl is faster.",
        "",
    ]


def _title(row: dict[str, Any]) -> str:
    """Return the row's name in `minidl bench`, with what minidl's time includes if the measured name says so."""
    name: str = row["name"]
    return name if name.startswith(row["row"]) else row["row"]


def inserted(text: str, table: str) -> str:
    """Return the text with the table between its markers. Raises ConfigError for a text without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"the text has no lines {BEGIN} and {END} to put the table between")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


@own_settings()
def short_picture(results: Results) -> bytes:
    """Return an SVG with the ratio of each row of SHORT and its goal. Needs the plots extra."""
    from matplotlib.figure import Figure

    rows = [row for row in right_rows(results) if row["row"] in SHORT][::-1]
    figure = Figure(figsize=(8, 0.9 + 0.33 * len(rows)), layout="constrained")
    axes = figure.subplots()
    draw_ratios(axes, rows)
    axes.set_xlim(0.9, 4.5)
    axes.set_xticks([1, 2, 3, 4], ["1", "2", "3", "4"])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows])
    for index, row in enumerate(rows):
        words = f"{row['ratio']:.2f}   ({row['peer'].partition(',')[0]})"
        axes.annotate(words, (max(row["ratio"], row["goal"]), index), (8, 0), textcoords="offset points", va="center")
    axes.set_xlabel(f"speedup over the fastest alternative ({results.machine['device']}, {results.machine['date']})")
    axes.spines[["top", "right"]].set_visible(False)
    return as_bytes(figure, "svg", Description=fingerprint(results))


def main(arguments: list[str]) -> None:
    """Write the table and the charts."""
    if len(arguments) != 4:
        sys.exit("usage: python -m benchmarks.bench.results_page RESULTS PAGE CHART SHORT_CHART")
    path, page, chart, short_chart = map(Path, arguments)
    results = load(path)
    files.write_text(page, inserted(files.read_text(page), markdown(results)))
    files.write_bytes(chart, picture(results))
    files.write_bytes(short_chart, short_picture(results))


if __name__ == "__main__":
    main(sys.argv[1:])
