"""report.html: a finished run as one page that needs no other file, no script and no network.

Curves are drawn as SVG, from the records of metrics.jsonl; the confusion matrix is a table whose cells tell their
counts; pictures that the run has are within the page. All text of the run is escaped.
"""

from __future__ import annotations

import base64
import contextlib
import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minidl.common import read_files
from minidl.common.console import one_line
from minidl.training.report import metrics, report_files

FILE = "report.html"
_MOST_CLASSES = 64  # of a table that fits a screen
_MOST_BYTES = 4 * 2**20  # of a picture
_PICTURES = {
    "predictions.png": "Predicted against true values", "mistakes.png": "The surest mistakes",
    "activations.png": "What the network looked at in them", "filters.png": "Filters of the first layer",
    "training.gif": "What the generator made, epoch by epoch",
}  # fmt: skip
_COLOURS = ("#2a78d6", "#c2541b", "#2f8f4e", "#8a4fbf", "#b8860b", "#1b9aaa", "#d1477a", "#7a7f87")
_STYLE = """
:root { color-scheme: light dark; --fg: #1c1e21; --bg: #fff; --soft: #666; --line: #ddd; --card: #f5f6f8;
  --for: #237a3f; --against: #a8420f; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e6e6e6; --bg: #16181c; --soft: #a0a4ab; --line: #3a3d44; --card: #20232a;
    --for: #5cc480; --against: #f08a52; } }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--fg);
  background: var(--bg); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: .5rem; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .words td { text-align: left; } .numbers { overflow-wrap: normal; }
.matrix { overflow-wrap: normal; }
.matrix td { padding: 0; min-width: 1.6rem; height: 1.6rem; text-align: center; font-size: .75rem; }
.matrix thead th { writing-mode: vertical-rl; text-align: left; padding: .2rem; font-weight: normal; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } .chart { width: 30rem; max-width: 100%; }
svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } figure { margin: 1rem 0; }
img { max-width: 100%; background: #fff; } .soft { color: var(--soft); font-size: .9rem; }
.bar { background: #2a78d6; height: .7rem; min-width: 1px; border-radius: .2rem; } td.holds { width: 40%; }
.for { color: var(--for); } .against { color: var(--against); }
"""


def as_html(
    folder: Path, report: Mapping[str, Any], history: Sequence[Mapping[str, Any]], settings: Mapping[str, Any],
    environment: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]] = (),
) -> str:  # fmt: skip
    """The page of a run: its report, the records of its epochs, its settings and environment, and its pictures.

    `mistakes` have the keys true, predicted, probability and terms: (term, value) pairs.
    """
    title = f"{report['task']} of {report['data']}"
    parts = [f"<h1>{_text(title)}</h1>", *_head(report), *_scores(report), *_curves(report, history)]
    parts += [*_matrix(report), *_classes(report), *_mistakes(mistakes), *_pictures(folder), *_phases(report)]
    parts += [*_table_of("Settings", settings), *_table_of("Environment", environment)]
    return _page(title, parts, "train")


def as_comparison(table: Sequence[Sequence[str]], histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A page of runs side by side: a table, its first row the names, and curves of the records of each run's epochs."""
    together: dict[str, dict[str, list[Any]]] = {}
    for run, history in histories.items():
        for chart, lines in _series(history).items():
            for line, values in lines.items():
                together.setdefault(f"{line} {chart}" if len(lines) > 1 else chart, {})[run] = values
    charts = "".join(_chart(name, lines, None) for name, lines in together.items())
    title = f"{len(histories)} runs"
    return _page(
        title, [f"<h1>{title}</h1>", _table(table), f'<h2>Training</h2><div class="charts">{charts}</div>'], "compare"
    )


def parameters(report: Mapping[str, Any]) -> int:
    """The parameters of all networks of a report."""
    found = report["parameters"]
    return int(sum(found.values()) if isinstance(found, Mapping) else found)


def _page(title: str, parts: Sequence[str], command: str) -> str:
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="minidl {command}">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _text(value: Any) -> str:
    """Any text, shown and never read as HTML, without control characters and what UTF-8 cannot hold."""
    return html.escape(one_line(str(value)))


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    shown = [(metrics.TITLES[name], metrics.shown(name, report[name])) for name in metrics.TITLES if name in report]
    shown += [("epochs", f"{report['epochs']:,}"), ("seconds of training", f"{report['seconds']:,.1f}")]
    shown += [("parameters", f"{parameters(report):,}"), ("device", report_files.device(dict(report)))]
    cards = "".join(f'<div class="card">{_text(name)}<b>{_text(value)}</b></div>' for name, value in shown)
    yield f'<div class="cards">{cards}</div>'
    source = report["source"]
    yield f'<p class="soft">{_text(source.get("about", source.get("name", report["data"])))}</p>'


def _scores(report: Mapping[str, Any]) -> Iterator[str]:
    """The model's scores beside those of the baselines."""
    if "baseline" not in report:
        return
    titles, rows = report_files.scores_of(report)
    yield "<h2>Test split, beside simpler models</h2>"
    yield _table([titles, *rows])


def _curves(report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A chart of each figure of the epochs; losses of training and validation share one."""
    series = _series(history)
    if series:
        yield "<h2>Training</h2>"
        charts = (_chart(name, lines, report.get("best_epoch")) for name, lines in series.items())
        yield f'<div class="charts">{"".join(charts)}</div>'


def _series(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """The figures of the epochs by chart and line."""
    series: dict[str, dict[str, list[Any]]] = {}
    for record in history:
        for name, value in record.items():
            if name == "loss":
                series.setdefault("loss", {}).setdefault("training", []).append(value)
            elif name == "validation":
                for score, figure in value.items():
                    chart = "loss" if score == "loss" else f"validation {metrics.TITLES.get(score, score)}"
                    series.setdefault(chart, {}).setdefault("validation", []).append(figure)
            elif name not in ("epoch", "steps", "seconds", "lr") and isinstance(value, int | float):
                series.setdefault(name.replace("_", " "), {}).setdefault("", []).append(value)
    return series


def _chart(name: str, lines: Mapping[str, Sequence[Any]], kept: int | None) -> str:
    """Lines over the epochs, with the epoch that is kept."""
    values = [v for line in lines.values() for v in line if v is not None and math.isfinite(v)]
    if not values:
        return ""
    low, high = min(values), max(values)
    span, count = (high - low) or abs(high) or 1.0, max(map(len, lines.values()))

    def place(epoch: int, value: float) -> str:
        return f"{50 + 380 * (epoch / max(1, count - 1)):.1f},{190 - 160 * (value - low) / span:.1f}"

    parts = [f'<text x="50" y="16">{_text(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = 190 - 160 * share
        parts.append(f'<path d="M50 {y:.0f}H430" stroke="var(--line)"/>')
        parts.append(f'<text x="44" y="{y + 4:.0f}" text-anchor="end">{low + share * span:.3g}</text>')
    parts.append('<text x="50" y="208">1</text>' + f'<text x="430" y="208" text-anchor="end">{count} epochs</text>')
    if kept:
        x = place(kept - 1, low).partition(",")[0]
        parts.append(f'<path d="M{x} 30V190" stroke="var(--soft)" stroke-dasharray="3"/>')
    for found, colour in zip(lines.values(), itertools.cycle(_COLOURS), strict=False):
        points = [(epoch, v) for epoch, v in enumerate(found) if v is not None and math.isfinite(v)]
        way = " ".join(place(*point) for point in points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for epoch, value in points if len(points) <= 60 else points[-1:]:
            across, down = place(epoch, value).split(",")
            said = f"<title>epoch {epoch + 1}: {value:.4g}</title>"
            parts.append(f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}">{said}</circle>')
    label = f"{name} over {count} epochs, last {', '.join(f'{line[-1]}' for line in lines.values())}"
    keys = "".join(
        f' <span style="color:{colour}">&#9632;</span>&nbsp;{_text(line)}'
        for line, colour in zip(lines, itertools.cycle(_COLOURS), strict=False)
        if line and len(lines) > 1
    )
    svg = f'<svg viewBox="0 0 440 215" role="img" aria-label="{_text(label)}">{"".join(parts)}</svg>'
    return f'<div class="chart">{svg}<div class="soft">{keys}</div></div>'


def _matrix(report: Mapping[str, Any]) -> Iterator[str]:
    """The confusion matrix, or the most frequent confusions of many classes."""
    labels = [entry["label"] for entry in report.get("per_class", ())]
    matrix = report.get("confusion")
    if matrix is not None and len(labels) <= _MOST_CLASSES:
        yield "<h2>What was taken for what</h2>"
        yield '<p class="soft">A row for each true class; point at a cell for its count.</p>'
        head = "".join(f"<th>{_text(label)}</th>" for label in labels)
        rows = []
        for label, counts in zip(labels, matrix, strict=True):
            whole, cells = sum(counts) or 1, []
            for other, count in zip(labels, counts, strict=True):
                share = count / whole
                look = f"background:rgba(42,120,214,{0.6 * share:.2f})"  # text stays readable on it, light and dark
                says = f"{count:,} of {sum(counts):,} {label} taken for {other}"
                cells.append(f'<td style="{look}" title="{_text(says)}">{count or ""}</td>')
            rows.append(f"<tr><th>{_text(label)}</th>{''.join(cells)}</tr>")
        yield (
            f'<div class="wide"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )
        return
    pairs = report.get("confusions") or [
        {"true": labels[i], "predicted": labels[j], "count": count}
        for i, row in enumerate(matrix or ())
        for j, count in enumerate(row)
        if i != j and count
    ]
    if pairs:
        most = sorted(pairs, key=lambda pair: -pair["count"])[:50]
        yield "<h2>What was taken for what most often</h2>"
        yield _table([["true", "predicted", "count"], *([p["true"], p["predicted"], f"{p['count']:,}"] for p in most)])


def _classes(report: Mapping[str, Any]) -> Iterator[str]:
    if "per_class" not in report:
        return
    yield "<h2>Classes</h2>"
    entries = sorted(report["per_class"], key=lambda entry: -entry["support"])[:200]
    rows = [
        [entry["label"], *(f"{entry[name]:.3f}" for name in ("precision", "recall", "f1")), f"{entry['support']:,}"]
        for entry in entries
    ]
    yield _table([["class", "precision", "recall", "F1", "examples"], *rows])
    if len(entries) < len(report["per_class"]):
        yield f'<p class="soft">The {len(entries)} most frequent of {len(report["per_class"]):,} classes.</p>'


def _mistakes(mistakes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not mistakes:
        return
    yield "<h2>The surest mistakes</h2>"
    yield '<p class="soft">With the terms that spoke most for the answer and against it.</p>'
    rows = []
    for each in mistakes:
        terms = " ".join(
            f'<span class="{"for" if value > 0 else "against"}">{_text(term)}&nbsp;{value:+.2f}</span>'
            for term, value in each["terms"]
        )
        cells = (_text(each["true"]), _text(each["predicted"]), f"{each['probability']:.3f}", terms)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>true</th><th>predicted</th><th>probability</th><th>terms</th></tr>"
    yield f'<div class="wide"><table class="words">{head}{"".join(rows)}</table></div>'


def _pictures(folder: Path) -> Iterator[str]:
    """The pictures of the run, and of a generator those of the last epoch."""
    found = [(folder / name, title) for name, title in _PICTURES.items()]
    samples = sorted((folder / "samples").glob("epoch-*.png"))
    found += [(samples[-1], "Pictures of the last epoch")] if samples else []
    for path, title in found:
        with contextlib.suppress(OSError):
            data = base64.b64encode(read_files.read_bytes(path, _MOST_BYTES)).decode()
            kind = path.suffix.removeprefix(".")
            yield f"<h2>{_text(title)}</h2>"
            yield f'<figure><img src="data:image/{kind};base64,{data}" alt="{_text(title)}"></figure>'


def _phases(report: Mapping[str, Any]) -> Iterator[str]:
    phases = {name: value for name, value in report.get("phases", {}).items() if name != "total" and value}
    if not phases:
        return
    yield f"<h2>Where {report['phases']['total']:,.1f} seconds went</h2>"
    longest = max(phases.values())
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td>{seconds:,.2f} s</td><td class="holds">'
        f'<div class="bar" style="width:{100 * seconds / longest:.1f}%"></div></td></tr>'
        for name, seconds in sorted(phases.items(), key=lambda phase: -phase[1])
    )
    yield f'<table style="width:100%">{rows}</table>'


def _table_of(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    yield _table(
        [[name.replace("_", " "), str(value)] for name, value in values.items() if value is not None], head=False
    )


def _table(rows: Sequence[Sequence[str]], head: bool = True) -> str:
    lines = []
    for place, row in enumerate(rows):
        cell = "th" if head and place == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{_text(value)}</{cell}>" for value in row) + "</tr>")
    return f'<div class="wide"><table class="{"numbers" if head else "words"}">{"".join(lines)}</table></div>'
