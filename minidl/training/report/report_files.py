"""report.json and report.txt: the training, and the scores of the model and of simple baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidl.common.console import one_line
from minidl.training.process import environment
from minidl.training.report import calibration, metrics
from minidl.training.report.baselines import LEFT_OUT
from minidl.training.run_folder.progress import Progress
from minidl.training.settings.command import Training

_METHODS = {"linear_all": "linear, with validation data"}
_MOST_CONFUSIONS = 100  # in report.json, with too many classes for a matrix
_MOST_ROWS = 50  # in report.txt, with as many classes


def training(config: Training, progress: Progress, device: str, parameters: int) -> dict[str, Any]:
    """Return the part of a report about the training."""
    unfreeze_lr = getattr(config, "unfreeze_lr", None)
    return {
        "data": config.data,
        "device": device,
        "seconds": round(progress.seconds, 2),
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "steps": progress.steps,
        "skipped": progress.skipped,
        "seed": config.seed,
        "parameters": parameters,
        "optimizer": {
            "name": config.optimizer,
            "variant": "lazy" if getattr(config, "lazy", False) else "dense",
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "schedule": config.schedule,
            **({} if unfreeze_lr is None else {"unfreeze_lr": unfreeze_lr}),
        },
        "precision": config.precision,
    }


def classification(truth: np.ndarray, predicted: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a classification: accuracy, macro_f1, per_class and the confusion matrix.

    With more than 256 classes, `confusions` has the most frequent confusions and their counts instead of the matrix.
    """
    counts = metrics.counts(truth, predicted, len(labels))
    scores = {
        "accuracy": metrics.accuracy(counts),
        "macro_f1": metrics.macro_f1(counts),
        "per_class": metrics.per_class(counts, labels),
    }
    if len(labels) <= metrics.MOST_CLASSES:
        return {**scores, "confusion": metrics.confusion_matrix(truth, predicted, len(labels)).tolist()}
    wrong = truth != predicted
    pairs = np.stack(metrics.confusions(truth[wrong], predicted[wrong]), 1)[:_MOST_CONFUSIONS].tolist()
    return {**scores, "confusions": [{"true": labels[i], "predicted": labels[j], "count": n} for i, j, n in pairs]}


def resumptions(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each time the run was resumed in another environment."""
    lines = []
    for entry in report.get("resumed", []):
        changes = ", ".join(
            f"{name} {environment.shown(now)} (was {environment.shown(was)})"
            for name, (was, now) in entry["changes"].items()
        )
        lines.append(("resumed", f"after {entry['after']} with {changes}: the last bits may differ"))
    return lines


def chosen_epoch(epoch: int) -> str:
    """Return the epoch whose weights a run keeps, and the reason."""
    return f"epoch {epoch}, the last within one standard error of the best validation score"


def device(report: dict[str, Any]) -> str:
    """Return the device of the kernels, and the number of processes if there were several."""
    name = "cpu (interpreted)" if report["device"] == "cpu" else str(report["device"])
    return name + (f", {report['processes']} processes" if report.get("processes", 1) > 1 else "")


def data_parallel(report: dict[str, Any]) -> str:
    """Return the number of shards of a batch, and the speed; "" for a run without shards."""
    if "shards" not in report:
        return ""
    shards = count(report["shards"], "shard")
    if "examples_per_second" not in report:  # the last process had no step to take
        return shards
    share = report["communication"]
    waiting = "time in communication not measured" if share is None else f"{share:.1%} of the time in communication"
    return f"{shards}; {report['examples_per_second']:,.1f} examples a second, {waiting}"


def columns(source: dict[str, Any]) -> str:
    """Return the columns of a data file that are used, marking guesses; "" for data without a choice of columns."""
    names = {"text_column": "text", "label_column": "label", "target": "target", "task": "task"}
    return ", ".join(
        f"{title} {source[name] if name == 'task' else repr(source[name])}"
        + (" (guessed)" if name in source.get("guessed", ()) else "")
        for name, title in names.items()
        if name in source
    )


def leakage(entries: Sequence[dict[str, Any]]) -> str:
    """Return how many examples of each file of a run are also in another file; "" for data in one file."""
    phrases = (
        f"{entry['examples']:,} of {count(entry['of'], 'example')} of {entry['file']} also in {entry['also_in']}"
        for entry in entries
    )
    return one_line("; ".join(phrases))


def notes(source: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each note on reading the data."""
    return [("note", note) for note in source.get("notes", ())]


def as_text(report: dict[str, Any]) -> str:
    """Return the report as plain text with aligned columns."""
    lines = [one_line(f"{report['task']} of {report['data']}"), ""]
    if "seconds" in report:
        optimizer = report["optimizer"]
        unfrozen = f", {optimizer['unfreeze_lr']:g} of all layers" if "unfreeze_lr" in optimizer else ""
        about = [
            ("source", _source(report["source"])),
            ("columns", columns(report["source"])),
            ("leakage", leakage(report.get("leakage", []))),
            *notes(report["source"]),
            ("device", device(report)),
            ("data parallel", data_parallel(report)),
            (
                "training",
                f"{count(report['epochs'], 'epoch')}, {count(report['steps'], 'step')}, {report['seconds']:.1f} s",
            ),
            ("kept", chosen_epoch(report["best_epoch"])),
            ("seed", str(report["seed"])),
            ("network", report.get("network", "")),
            ("parameters", f"{report['parameters']:,}"),
            ("optimizer", f"{optimizer['name']} ({optimizer['variant']}), rate {optimizer['lr']:g}{unfrozen}"),
            ("precision", report["precision"]),
            ("steps skipped", str(report["skipped"]) if report["skipped"] else ""),
            *resumptions(report),
        ]
    else:
        source = report["source"]
        about = [
            ("run", report["run"]),
            ("columns", columns(source)),
            ("examples", f"{source['examples']:,}" + (f", the {source['part']}" if "part" in source else "")),
            *notes(source),
        ]
    lines += [*pairs(about), ""]
    lines += _scores(report)
    if "calibration" in report:
        entry, rejected = report["calibration"], report.get("rejected")
        rows = map(calibration.row, entry["answered"] if rejected is None else [rejected])
        lines += ["", calibration.summary(entry), "", *table(["threshold", "answered", "accuracy"], list(rows))]
    if "per_class" in report:
        source_of_all = "report.json has" if "seconds" in report else "--json FILE writes"
        lines += ["", *_classes(report["per_class"], source_of_all)]
    return "\n".join(lines) + "\n"


def score(scores: Mapping[str, Any], name: str) -> str:
    """Return a score for display; a dash if there is none."""
    return metrics.format_score(name, scores[name]) if name in scores else "-"


def summary(report: Mapping[str, Any]) -> str:
    """Return the test scores of a report in one line; "" if it has none."""
    scores = ", ".join(f"{title} {score(report, name)}" for name, title in metrics.TITLES.items() if name in report)
    return scores and f"test: {scores}"


def scores_of(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows of the test scores: the model first, then the baselines."""
    names = [name for name in metrics.TITLES if name in report]
    rows = [["minidl", *(score(report, name) for name in names)]]
    for key, scores in report["baseline"].items():
        title = _METHODS.get(key, key)
        method = f"{title}: {scores['method']}" if "method" in scores else title
        rows.append([method, *(score(scores, name) for name in names)])
    return ["test", *(metrics.TITLES[name] for name in names)], rows


def _scores(report: dict[str, Any]) -> list[str]:
    """Return the lines of the test scores of the model and the baselines."""
    baseline = report["baseline"]
    lines = table(*scores_of(report))
    for key, scores in baseline.items():
        if LEFT_OUT in scores:
            lines += ["", f"{_METHODS.get(key, key)}: skipped because {scores[LEFT_OUT]}"]
    score, constant = ("accuracy", "majority") if "accuracy" in report else ("r2", "mean")
    if report[score] < baseline[constant][score]:
        answer = "majority class" if constant == "majority" else constant
        lines += [
            "",
            f"The model is worse than always predicting the {answer}: train longer (--epochs) or on more data.",
        ]
    return lines


def shortfall(report: Mapping[str, Any]) -> str:
    """Return which baseline the model is worse than, the linear or the constant one; "" if neither."""
    score, names = ("accuracy", ("majority", "linear")) if "accuracy" in report else ("r2", ("mean", "ridge"))
    scores = {name: report["baseline"].get(name, {}).get(score) for name in names}
    return next((f"worse than the {name} baseline" for name, of in scores.items() if of and report[score] < of), "")


def class_rows(entries: Sequence[dict[str, Any]], separator: str = "") -> list[list[str]]:
    """Return the titles and a row of scores for each class; `separator` is that of thousands."""
    names = ("precision", "recall", "f1")
    return [
        ["class", "precision", "recall", "F1", "examples"],
        *([e["label"], *(f"{e[name]:.3f}" for name in names), f"{e['support']:{separator}}"] for e in entries),
    ]


def _classes(classes: Sequence[dict[str, Any]], source_of_all: str) -> list[str]:
    """Return the lines of the table of classes; with many classes, the most frequent ones."""
    rest = []
    if len(classes) > metrics.MOST_CLASSES:
        rest = ["", f"the {_MOST_ROWS} most frequent of {len(classes):,} classes; {source_of_all} all of them"]
        classes = sorted(classes, key=lambda entry: -entry["support"])[:_MOST_ROWS]
    titles, *rows = class_rows(classes)
    return [*table(titles, rows), *rest]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column aligned left, the others right."""
    table = [[one_line(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return lines


def pairs(about: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each pair with a value."""
    width = max(len(name) for name, _ in about)
    return [f"{name.ljust(width)}  {one_line(value)}" for name, value in about if value]


def count(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _source(source: dict[str, Any]) -> str:
    parts = [str(source.get("about", source.get("name", "")))]
    if "python" in source:
        parts.append(str(source["python"]))
    sizes = source.get("sizes")
    if sizes:
        parts.append(f"{sizes['train']:,} + {sizes['validation']:,} + {sizes['test']:,} examples")
    return "; ".join(parts)
