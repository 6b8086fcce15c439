"""Scores of predictions, in numpy: they follow scikit-learn's definitions.

With C classes, confusion[i, j] is the number of examples of class i that were predicted as class j.

    precision = tp / (tp + fp)     recall = tp / (tp + fn)     f1 = 2 tp / (2 tp + fp + fn)     0 where 0 / 0
    macro-F1  = the mean f1 of the classes that occur in the truth or in the predictions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

TITLES = {"accuracy": "accuracy", "macro_f1": "macro-F1", "rmse": "RMSE", "mae": "MAE", "r2": "R2"}


def shown(name: str, value: float | None) -> str:
    """A score for display: four decimals, or six digits for one in the target's units; None is a value not finite."""
    if value is None:
        return "not finite"
    if name not in ("rmse", "mae"):
        return f"{round(value, 4) + 0.0:.4f}"  # no minus before a zero
    rounded = float(f"{value:.6g}")
    return f"{rounded:.0f}" if 1e6 <= abs(rounded) < 1e15 else f"{rounded:.6g}"


def confusion_matrix(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [C, C] of two whole-number vectors of one length. Raises ValueError for another shape or class."""
    if truth.shape != predicted.shape or truth.ndim != 1:
        raise ValueError(f"expected two vectors of one length, got shapes {truth.shape} and {predicted.shape}")
    for values in (truth, predicted):
        if len(values) and not 0 <= values.min() <= values.max() < classes:
            raise ValueError(f"classes must lie in 0 .. {classes - 1}, got {values.min()} .. {values.max()}")
    flat = np.bincount(truth.astype(np.int64) * classes + predicted, minlength=classes * classes)
    return flat.reshape(classes, classes)


def accuracy(confusion: np.ndarray) -> float:
    """Share of right predictions; 0 of none."""
    return float(confusion.trace() / max(1, confusion.sum()))


def macro_f1(confusion: np.ndarray) -> float:
    """Mean f1 of the classes that occur in the truth or in the predictions; 0 of none."""
    hits = confusion.diagonal()
    total = confusion.sum(0) + confusion.sum(1)
    occurs = total > 0
    return float((2 * hits[occurs] / total[occurs]).mean()) if occurs.any() else 0.0


def per_class(confusion: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall, f1 and support of each class."""
    hits, predicted, support = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    return [
        {
            "label": label,
            "precision": float(hits[i] / max(1, predicted[i])),
            "recall": float(hits[i] / max(1, support[i])),
            "f1": float(2 * hits[i] / max(1, predicted[i] + support[i])),
            "support": int(support[i]),
        }
        for i, label in enumerate(labels)
    ]


def classification(truth: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    """{"accuracy", "macro_f1"} of two whole-number vectors."""
    confusion = confusion_matrix(truth, predicted, classes)
    return {"accuracy": accuracy(confusion), "macro_f1": macro_f1(confusion)}


def regression(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """{"rmse", "mae", "r2"}: R2 = 1 - sum (y - p)^2 / sum (y - mean y)^2; 0 where all y are equal."""
    error = truth.astype(np.float64) - predicted
    spread = float(np.square(truth - truth.mean(dtype=np.float64)).sum())
    square = float(np.square(error).sum())
    return {
        "rmse": float(np.sqrt(np.square(error).mean())),
        "mae": float(np.abs(error).mean()),
        "r2": 1.0 - square / spread if spread > 0 else 0.0,
    }
