"""report.json and report.txt: what was trained, what it reaches, and what simple methods reach beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.training import metrics
from minidl.training.config import TrainImages, TrainTable, TrainText
from minidl.training.progress import Progress


def training(config: TrainText | TrainTable | TrainImages, progress: Progress, device: str, parameters: int) -> dict[str, Any]:
    """The part of a report that says how the model was trained."""
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
        },
        "precision": config.precision,
    }


def classification(truth: np.ndarray, predicted: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
    """Scores of a classification: accuracy, macro_f1, per_class and the confusion matrix."""
    confusion = metrics.confusion_matrix(truth, predicted, len(labels))
    return {
        "accuracy": metrics.accuracy(confusion),
        "macro_f1": metrics.macro_f1(confusion),
        "per_class": metrics.per_class(confusion, labels),
        "confusion": confusion.tolist(),
    }


def as_text(report: dict[str, Any]) -> str:
    """The report as plain text with aligned columns."""
    lines = [f"{report['task']} of {report['data']}", ""]
    if "seconds" in report:
        optimizer = report["optimizer"]
        lines += _pairs(
            [
                ("source", _source(report["source"])),
                ("device", report["device"]),
                ("training", f"{report['epochs']} epochs (best: {report['best_epoch']}), {report['seconds']:.1f} s"),
                ("seed", str(report["seed"])),
                ("parameters", f"{report['parameters']:,}"),
                ("optimizer", f"{optimizer['name']} ({optimizer['variant']}), rate {optimizer['lr']:g}"),
                ("precision", report["precision"]),
                ("steps skipped", str(report["skipped"])),
            ]
        )
        lines.append("")
    lines += _scores(report)
    if "per_class" in report:
        lines += ["", *_classes(report["per_class"])]
    return "\n".join(lines) + "\n"


def _scores(report: dict[str, Any]) -> list[str]:
    """The model's test scores, with those of the baselines below."""
    if "accuracy" in report:
        titles = {"accuracy": "accuracy", "macro_f1": "macro-F1"}
    else:
        titles = {"rmse": "RMSE", "mae": "MAE", "r2": "R2"}
    rows = [["minidl", *(f"{report[name]:.4f}" for name in titles)]]
    for key, scores in report.get("baseline", {}).items():
        method = f"{key}: {scores['method']}" if "method" in scores else key
        rows.append([method, *(f"{scores[name]:.4f}" for name in titles)])
    return _table(["test", *titles.values()], rows)


def _classes(classes: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [entry["label"], *(f"{entry[name]:.3f}" for name in ("precision", "recall", "f1")), str(entry["support"])]
        for entry in classes
    ]
    return _table(["class", "precision", "recall", "F1", "examples"], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right."""
    table = [titles, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return lines


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in pairs)
    return [f"{name.ljust(width)}  {value}" for name, value in pairs]


def _source(source: dict[str, Any]) -> str:
    parts = [str(source.get("about", source.get("name", "")))]
    if "python" in source:
        parts.append(str(source["python"]))
    sizes = source.get("sizes")
    if sizes:
        parts.append(f"{sizes['train']:,} + {sizes['validation']:,} + {sizes['test']:,} examples")
    return "; ".join(parts)
