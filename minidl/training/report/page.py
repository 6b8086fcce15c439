"""Write report.html: a finished run as one page that needs no other file, no script and no network.

Curves are SVG drawings of the records of metrics.jsonl, the confusion matrix is a table, and the run's pictures are
embedded. All text of the run is escaped.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minidl.common import read_files
from minidl.training.report import metrics, report_files
from minidl.training.report.chart import chart, text_of

FILE = "report.html"
_MOST_CLASSES = 64  # of a table that fits a screen
_MOST_SCORES = 200  # classes in the table of scores
_MOST_BYTES = 4 * 2**20  # of a picture
_PICTURES = {
    "reliability.png": "Probabilities against accuracy",
    "predictions.png": "Predicted against true values", "mistakes.png": "Most confident mistakes",
    "activations.png": "Class activation maps of these mistakes", "filters.png": "Filters of the first layer",
    "training.gif": "Samples of the generator by epoch",
}  # fmt: skip
_TEXT = 400  # characters of a text on the page
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
img { max-width: 100%; } summary { cursor: pointer; font-size: 1.2rem; font-weight: bold; margin: 2rem 0 .5rem; }
 .soft { color: var(--soft); font-size: .9rem; }
.bar { background: #2a78d6; height: .7rem; min-width: 1px; border-radius: .2rem; } td.holds { width: 40%; }
.for { color: var(--for); } .against { color: var(--against); }
"""


def as_html(
    folder: Path, report: Mapping[str, Any], history: Sequence[Mapping[str, Any]], settings: Mapping[str, Any],
    environment: Mapping[str, Any], mistakes: Sequence[Mapping[str, Any]] = (),
) -> str:  # fmt: skip
    """Return the page of a run: its report, records of epochs, settings, environment and pictures.

    `mistakes` have the keys true, predicted, probability, terms ((term, value) pairs) and, if it is available, text.
    """
    title = f"{report['task']} of {report['data']}"
    parts = [f"<h1>{text_of(title)}</h1>", *_head(report), *_scores(report), *_curves(report, history)]
    parts += [*_matrix(report), *_classes(report), *_mistakes(mistakes), *_pictures(folder), *_phases(report)]
    parts += ["<h2>Settings</h2>", _pairs(settings)]
    parts += [f"<details><summary>Environment</summary>{_pairs(environment)}</details>"]
    return _page(title, parts, "train")


def as_comparison(table: Sequence[Sequence[str]], histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a page that compares runs: a table whose first row has their names, and the curves of their epochs."""
    series: dict[str, dict[str, list[Any]]] = {}
    for run, history in histories.items():
        for title, lines in _series(history).items():
            for line, values in lines.items():
                series.setdefault(f"{line} {title}" if len(lines) > 1 else title, {})[run] = values
    charts = "".join(chart(name, lines, None) for name, lines in series.items())
    title = f"{len(histories)} runs"
    return _page(
        title, [f"<h1>{title}</h1>", _table(table), f'<h2>Training</h2><div class="charts">{charts}</div>'], "compare"
    )


def parameters(report: Mapping[str, Any]) -> int:
    """Return the number of parameters of all networks of a report."""
    counts = report["parameters"]
    return int(sum(counts.values()) if isinstance(counts, Mapping) else counts)


def _page(title: str, parts: Sequence[str], command: str) -> str:
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="minidl {command}">\n'
        f"<title>{text_of(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    scores = {title: name for name, title in metrics.TITLES.items() if name in report}
    figures = [(title, metrics.format_score(name, report[name])) for title, name in scores.items()]
    figures += [("epochs", f"{report['epochs']:,}"), ("seconds of training", f"{report['seconds']:,.1f}")]
    figures += [("parameters", f"{parameters(report):,}"), ("device", report_files.device(dict(report)))]
    cards = "".join(f'<div class="card">{text_of(name)}<b>{text_of(value)}</b></div>' for name, value in figures)
    yield f'<div class="cards">{cards}</div>'
    source = report["source"]
    yield f'<p class="soft">{text_of(source.get("about", source.get("name", report["data"])))}</p>'


def _scores(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of test scores of the model and the baselines."""
    if "baseline" not in report:
        return
    titles, rows = report_files.scores_of(report)
    yield "<h2>Test scores</h2>"
    yield _table([titles, *rows])


def _curves(report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a chart for each figure of the epochs; training and validation loss share one."""
    series = _series(history)
    if series:
        yield "<h2>Training</h2>"
        charts = (chart(name, lines, report.get("best_epoch")) for name, lines in series.items())
        yield f'<div class="charts">{"".join(charts)}</div>'


def _series(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return the figures of the epochs by chart and line."""
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


def _matrix(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the confusion matrix, or the most frequent confusions of many classes."""
    labels = [entry["label"] for entry in report.get("per_class", ())]
    matrix = report.get("confusion")
    if matrix is not None and len(labels) <= _MOST_CLASSES:
        yield "<h2>Confusion matrix</h2>"
        yield '<p class="soft">Rows are true classes, columns are predictions; hover for percentages.</p>'
        head = "".join(f"<th>{text_of(label)}</th>" for label in labels)
        rows = []
        for label, counts in zip(labels, matrix, strict=True):
            support, cells = sum(counts), []
            for other, count in zip(labels, counts, strict=True):
                share = count / (support or 1)
                look = f"background:rgba(42,120,214,{0.6 * share:.2f})"  # text stays readable on it, light and dark
                hint = f"{count:,} of {support:,} {label} predicted as {other} ({share:.1%})"
                cells.append(f'<td style="{look}" title="{text_of(hint)}">{count or ""}</td>')
            rows.append(f"<tr><th>{text_of(label)}</th>{''.join(cells)}</tr>")
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
        yield "<h2>Most frequent confusions</h2>"
        yield _table([["true", "predicted", "count"], *([p["true"], p["predicted"], f"{p['count']:,}"] for p in most)])


def _classes(report: Mapping[str, Any]) -> Iterator[str]:
    if "per_class" not in report:
        return
    yield "<h2>Classes</h2>"
    entries = report["per_class"]
    if len(entries) > _MOST_SCORES:
        least = sorted(entry["support"] for entry in entries)[-_MOST_SCORES]
        entries = [entry for entry in entries if entry["support"] >= least][:_MOST_SCORES]
    yield _table(report_files.class_rows(entries, ","))
    if len(entries) < len(report["per_class"]):
        yield f'<p class="soft">The {len(entries)} most frequent of {len(report["per_class"]):,} classes.</p>'


def _mistakes(mistakes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not mistakes:
        return
    yield "<h2>Most confident mistakes</h2>"
    yield '<p class="soft">The terms that contributed most to <span class="for">(green)</span> and against '
    yield '<span class="against">(red)</span> the wrong prediction.</p>'
    rows = []
    for each in mistakes:
        terms = " ".join(
            f'<span class="{"for" if value > 0 else "against"}">{text_of(term)}&nbsp;{value:+.2f}</span>'
            for term, value in each["terms"]
        )
        text = each.get("text", "")
        text = text_of(" ".join(text.split())[:_TEXT]) + ("…" if len(text) > _TEXT else "")
        cells = (text_of(each["true"]), text_of(each["predicted"]), f"{each['probability']:.3f}", text, terms)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>true</th><th>predicted</th><th>probability</th><th>text</th><th>terms</th></tr>"
    yield f'<div class="wide"><table class="words">{head}{"".join(rows)}</table></div>'


def _pictures(folder: Path) -> Iterator[str]:
    """Yield the pictures of the run, and the last samples of a generator."""
    pictures = [(folder / name, title) for name, title in _PICTURES.items()]
    samples = sorted((folder / "samples").glob("epoch-*.png"))
    pictures += [(samples[-1], "Samples of the last epoch")] if samples else []
    for path, title in pictures:
        with contextlib.suppress(OSError):
            data = base64.b64encode(read_files.read_bytes(path, _MOST_BYTES)).decode()
            kind = path.suffix.removeprefix(".")
            yield f"<h2>{text_of(title)}</h2>"
            yield f'<figure><img src="data:image/{kind};base64,{data}" alt="{text_of(title)}"></figure>'


def _phases(report: Mapping[str, Any]) -> Iterator[str]:
    phases = {name: value for name, value in report.get("phases", {}).items() if name != "total" and value}
    if not phases:
        return
    yield f"<h2>Time: {report['phases']['total']:,.1f} seconds</h2>"
    longest = max(phases.values())
    rows = "".join(
        f'<tr><td>{text_of(name)}</td><td>{seconds:,.2f} s</td><td class="holds">'
        f'<div class="bar" style="width:{100 * seconds / longest:.1f}%"></div></td></tr>'
        for name, seconds in sorted(phases.items(), key=lambda phase: -phase[1])
    )
    yield f'<table style="width:100%">{rows}</table>'


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(
        [[name.replace("_", " "), str(value)] for name, value in values.items() if value is not None], head=False
    )


def _table(rows: Sequence[Sequence[str]], head: bool = True) -> str:
    lines = []
    for number, row in enumerate(rows):
        cell = "th" if head and number == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{text_of(value)}</{cell}>" for value in row) + "</tr>")
    return f'<div class="wide"><table class="{"numbers" if head else "words"}">{"".join(lines)}</table></div>'
