"""Probabilities that agree with what happens: temperature scaling, its error, and answers above a threshold.

The probabilities of logits z are softmax(z / T). The temperature T has the least cross-entropy on the validation split
(Guo et al., On Calibration of Modern Neural Networks, 2017); no number T > 0 changes which label is the most probable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minidl.data.records import DataError
from minidl.data.saved import Record
from minidl.errors import damaged
from minidl.training.run_folder.manifest import RunFiles

FILE = "calibration.json"
BINS = 15  # of the probability of the predicted label, of equal width
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_LARGEST = 3.0  # |log T|


@dataclass(frozen=True)
class Temperature(Record):
    """The content of calibration.json."""

    format = "minidl-calibration"
    temperature: Annotated[float, Field(gt=0)]


def of_run(run: RunFiles) -> float:
    """Return the temperature of a finished run, 1 for one of an earlier version. Raises DamagedError."""
    path = run.folder / FILE
    if not (path.exists() if run.checksums is None else FILE in run.checksums):
        return 1.0
    try:
        return Temperature.from_json(run.text(FILE), FILE).temperature
    except DataError as error:
        raise damaged(path, error) from None


def temperature(parts: Iterable[np.ndarray], truth: np.ndarray) -> float:
    """Return the temperature for logits, parts of [N, C], of examples of the classes `truth` [N]."""
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    logits = np.concatenate([part.astype(np.float64) for part in parts])
    right = np.take_along_axis(logits, truth[:, None], axis=1)[:, 0]

    def loss(log_temperature: float) -> float:
        scale = np.exp(-log_temperature)
        return float((logsumexp(logits * scale, axis=1) - right * scale).mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-_LARGEST, _LARGEST), method="bounded").x))


def bins(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, float]]:
    """Return the mean probability, the accuracy and the number of predictions of each bin that has some."""
    index = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    return [
        {
            "probability": float(confidence[index == i].mean()), "accuracy": float(right[index == i].mean()),
            "count": int((index == i).sum()),
        }
        for i in np.unique(index)
    ]  # fmt: skip


def error(entries: Sequence[dict[str, float]]) -> float:
    """Return the expected calibration error: the mean of |accuracy - probability| over all predictions."""
    total = sum(entry["count"] for entry in entries)
    return sum(entry["count"] * abs(entry["accuracy"] - entry["probability"]) for entry in entries) / max(total, 1)


def answered(confidence: np.ndarray, right: np.ndarray, threshold: float) -> dict[str, Any]:
    """Return the share of predictions at or above a threshold, and the accuracy of these, None if there are none."""
    answers = np.round(confidence, 6) >= threshold  # rounded as in `json_lines.best`
    accuracy = float(right[answers].mean()) if answers.any() else None
    return {"threshold": threshold, "coverage": float(answers.mean()), "accuracy": accuracy}


def scores(confidence: np.ndarray, before: np.ndarray, right: np.ndarray, temperature: float) -> dict[str, Any]:
    """Return the part of a report about probabilities; `before` are those of the temperature 1."""
    entries, entries_before = bins(confidence, right), bins(before, right)
    return {
        "temperature": temperature, "error": error(entries), "error_before": error(entries_before), "bins": entries,
        "bins_before": entries_before, "answered": [answered(confidence, right, each) for each in THRESHOLDS],
    }  # fmt: skip


def summary(entry: dict[str, Any]) -> str:
    """Return the temperature and the errors in one line."""
    errors = f"expected calibration error {entry['error']:.4f}, at temperature 1 {entry['error_before']:.4f}"
    return f"probabilities: temperature {entry['temperature']:.3f}, {errors}"


def row(entry: dict[str, Any]) -> list[str]:
    """Return the threshold, the share of answers and their accuracy of `answered`, for display."""
    accuracy = "-" if entry["accuracy"] is None else f"{entry['accuracy']:.4f}"
    return [f"--reject {entry['threshold']:g}", f"{entry['coverage']:.1%}", accuracy]
