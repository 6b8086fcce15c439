"""Compute scores of predictions with numpy, by scikit-learn's definitions.

A class has tp correct predictions, is predicted tp + fp times and occurs tp + fn times.

    precision = tp / (tp + fp)     recall = tp / (tp + fn)     f1 = 2 tp / (2 tp + fp + fn)     0 where 0 / 0
    macro-F1  = the mean f1 of the classes that occur in the truth or in the predictions

Scores need only these counts, not the matrix of C x C counts, which takes 295 MB for 6,072 classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_CLASSES = 256  # of a confusion matrix, which takes 0.6 MB of JSON
TITLES = {"accuracy": "accuracy", "macro_f1": "macro-F1", "rmse": "RMSE", "mae": "MAE", "r2": "R2"}


def format_score(name: str, value: float | None) -> str:
    """Return a score as text: four decimals, or six digits in the target's units. None: the value is not finite."""
    if value is None:
        return "not finite"
    if name not in ("rmse", "mae"):
        return f"{round(value, 4) + 0.0:.4f}"  # no minus before a zero
    rounded = float(f"{value:.6g}")
    return f"{rounded:.0f}" if 1e6 <= abs(rounded) < 1e15 else f"{rounded:.6g}"


class Counts(NamedTuple):
    """int64 [C] each: correct predictions, predictions, and examples of each class."""

    hits: np.ndarray
    predicted: np.ndarray
    support: np.ndarray


def counts(truth: np.ndarray, predicted: np.ndarray, classes: int) -> Counts:
    """Return the counts of two integer vectors of equal length. Raises ValueError for another shape or class."""
    if truth.shape != predicted.shape or truth.ndim != 1:
        raise ValueError(f"expected two vectors of one length, got shapes {truth.shape} and {predicted.shape}")
    for values in (truth, predicted):
        if len(values) and not 0 <= values.min() <= values.max() < classes:
            raise ValueError(f"classes must lie in 0 .. {classes - 1}, got {values.min()} .. {values.max()}")
    return Counts(*(np.bincount(part, minlength=classes) for part in (truth[truth == predicted], predicted, truth)))


def confusions(truth: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (true class, predicted class, count) of the pairs that occur, by descending count, then by class."""
    base = int(max(truth.max(initial=0), predicted.max(initial=0))) + 1
    pairs, numbers = np.unique(truth.astype(np.int64) * base + predicted, return_counts=True)
    order = np.argsort(-numbers, kind="stable")
    return pairs[order] // base, pairs[order] % base, numbers[order]


def confusion_matrix(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return int64 [C, C]: [i, j] is the number of examples of class i that were predicted as class j."""
    return np.bincount(truth.astype(np.int64) * classes + predicted, minlength=classes**2).reshape(classes, classes)


def accuracy(counts: Counts) -> float:
    """Return the share of correct predictions; 0 without predictions."""
    return float(counts.hits.sum() / max(1, counts.support.sum()))


def macro_f1(counts: Counts) -> float:
    """Return the mean f1 of the classes that occur in the truth or in the predictions; 0 without predictions."""
    total = counts.predicted + counts.support
    occurs = total > 0
    return float((2 * counts.hits[occurs] / total[occurs]).mean()) if occurs.any() else 0.0


def per_class(counts: Counts, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall, f1 and support of each class."""
    return [
        {
            "label": label,
            "precision": hits / max(1, predicted),
            "recall": hits / max(1, support),
            "f1": 2 * hits / max(1, predicted + support),
            "support": support,
        }
        for label, hits, predicted, support in zip(labels, *(part.tolist() for part in counts), strict=True)
    ]


def classification(truth: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    """Return {"accuracy", "macro_f1"} of two integer vectors."""
    by_class = counts(truth, predicted, classes)
    return {"accuracy": accuracy(by_class), "macro_f1": macro_f1(by_class)}


def regression(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return {"rmse", "mae", "r2"}: R2 = 1 - sum (y - p)^2 / sum (y - mean y)^2; 0 if all y are equal."""
    error = truth.astype(np.float64) - predicted
    total = float(np.square(truth - truth.mean(dtype=np.float64)).sum())
    residual = float(np.square(error).sum())
    return {
        "rmse": float(np.sqrt(np.square(error).mean())),
        "mae": float(np.abs(error).mean()),
        "r2": 1.0 - residual / total if total > 0 else 0.0,
    }
