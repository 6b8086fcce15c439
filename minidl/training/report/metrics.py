"""Scores of predictions, in numpy: they follow scikit-learn's definitions.

A class has tp right predictions, is predicted tp + fp times and occurs tp + fn times.

    precision = tp / (tp + fp)     recall = tp / (tp + fn)     f1 = 2 tp / (2 tp + fp + fn)     0 where 0 / 0
    macro-F1  = the mean f1 of the classes that occur in the truth or in the predictions

Scores need these counts only. A table of C x C counts is made of few classes: that of 6,072 takes 295 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_CLASSES = 256  # of a confusion matrix, which then takes 0.6 MB of JSON
TITLES = {"accuracy": "accuracy", "macro_f1": "macro-F1", "rmse": "RMSE", "mae": "MAE", "r2": "R2"}


def shown(name: str, value: float | None) -> str:
    """A score for display: four decimals, or six digits for one in the target's units; None is a value not finite."""
    if value is None:
        return "not finite"
    if name not in ("rmse", "mae"):
        return f"{round(value, 4) + 0.0:.4f}"  # no minus before a zero
    rounded = float(f"{value:.6g}")
    return f"{rounded:.0f}" if 1e6 <= abs(rounded) < 1e15 else f"{rounded:.6g}"


class Counts(NamedTuple):
    """int64 [C] each: right predictions, predictions, and examples of each class."""

    hits: np.ndarray
    predicted: np.ndarray
    support: np.ndarray


def counts(truth: np.ndarray, predicted: np.ndarray, classes: int) -> Counts:
    """Of two whole-number vectors of one length. Raises ValueError for another shape or class."""
    if truth.shape != predicted.shape or truth.ndim != 1:
        raise ValueError(f"expected two vectors of one length, got shapes {truth.shape} and {predicted.shape}")
    for values in (truth, predicted):
        if len(values) and not 0 <= values.min() <= values.max() < classes:
            raise ValueError(f"classes must lie in 0 .. {classes - 1}, got {values.min()} .. {values.max()}")
    return Counts(*(np.bincount(part, minlength=classes) for part in (truth[truth == predicted], predicted, truth)))


def confusions(truth: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(true class, predicted class, count) of the pairs that occur, the most frequent first, equal ones by class."""
    base = int(max(truth.max(initial=0), predicted.max(initial=0))) + 1
    pairs, found = np.unique(truth.astype(np.int64) * base + predicted, return_counts=True)
    order = np.argsort(-found, kind="stable")
    return pairs[order] // base, pairs[order] % base, found[order]


def confusion_matrix(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [C, C]: [i, j] is the number of examples of class i that were predicted as class j."""
    return np.bincount(truth.astype(np.int64) * classes + predicted, minlength=classes**2).reshape(classes, classes)


def accuracy(found: Counts) -> float:
    """Share of right predictions; 0 of none."""
    return float(found.hits.sum() / max(1, found.support.sum()))


def macro_f1(found: Counts) -> float:
    """Mean f1 of the classes that occur in the truth or in the predictions; 0 of none."""
    total = found.predicted + found.support
    occurs = total > 0
    return float((2 * found.hits[occurs] / total[occurs]).mean()) if occurs.any() else 0.0


def per_class(found: Counts, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall, f1 and support of each class."""
    return [
        {
            "label": label,
            "precision": hits / max(1, predicted),
            "recall": hits / max(1, support),
            "f1": 2 * hits / max(1, predicted + support),
            "support": support,
        }
        for label, hits, predicted, support in zip(labels, *(part.tolist() for part in found), strict=True)
    ]


def classification(truth: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    """{"accuracy", "macro_f1"} of two whole-number vectors."""
    found = counts(truth, predicted, classes)
    return {"accuracy": accuracy(found), "macro_f1": macro_f1(found)}


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
