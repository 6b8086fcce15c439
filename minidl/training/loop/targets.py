"""Classification and regression: the loss, scores, baselines, answers and plots of each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field

from minidl import nn, ops
from minidl.autograd import no_grad
from minidl.compilation import rehearsal
from minidl.data.saved import Checked, Names, validate
from minidl.data.workers import Workers
from minidl.errors import DamagedError, damaged
from minidl.tensors import Tensor, default_device
from minidl.training.loop.forward import outputs
from minidl.training.loop.learner import Judgement
from minidl.training.prediction import json_lines
from minidl.training.report import baselines, calibration, metrics, plots, report_files
from minidl.training.run_folder import files
from minidl.training.run_folder.manifest import RunFiles
from minidl.training.settings.command import Training

Split = tuple[Any, np.ndarray]  # features (scipy CSR, float32 array [N, F] or Pictures) and targets [N]


class Predictions(NamedTuple):
    """The predictions for a split: classes int64 [N] and, if requested, their probabilities; or numbers.

    `before` are the probabilities of the temperature 1.
    """

    values: np.ndarray
    confidence: np.ndarray | None = None
    before: np.ndarray | None = None


@dataclass(frozen=True)
class Classification(Checked):
    """A classification by `labels`: targets are class indices int64 [N], outputs logits [N, classes].

    Logits are divided by `temperature`. Below the probability `reject` an answer has no label.
    """

    labels: Annotated[Names, Field(min_length=2)]
    temperature: float = 1.0
    reject: float = 0.0
    task: ClassVar[str] = "classification"
    score: ClassVar[str] = "accuracy"
    loss_name: ClassVar[str] = "cross-entropy"

    @classmethod
    def of_run(cls, run: RunFiles) -> Classification:
        """Return the classification of a finished run. Raises DamagedError."""
        path = run.folder / "labels.json"
        try:
            targets = validate(cls, files.as_json(run.text(path.name).encode(), path), ("temperature", "reject"))
        except ValueError as error:
            raise damaged(path, error) from None
        return targets.calibrated(run)

    def calibrated(self, run: RunFiles) -> Classification:
        """Return the classification with the temperature of a finished run. Raises DamagedError."""
        return replace(self, temperature=calibration.of_run(run))

    @property
    def outputs(self) -> int:
        """Return the number of outputs of the model."""
        return len(self.labels)

    @property
    def documents(self) -> dict[str, str]:
        """Return labels.json."""
        return {"labels.json": json.dumps({"labels": self.labels}, ensure_ascii=False, indent=1) + "\n"}

    def criterion(self, model: nn.Module, train_y: np.ndarray, config: Training) -> Callable[[Any, Tensor], Tensor]:
        """Return loss(x, y) for training: cross-entropy with the settings' label smoothing and class weights."""
        weight = class_weights(train_y, len(self.labels), config.balance)

        def logits(x: Any) -> Tensor:
            y = model(x)
            return y if y.dtype == torch.float32 else y.to(torch.float32)

        return lambda x, y: ops.cross_entropy(logits(x), y, weight, label_smoothing=config.label_smoothing or 0.0)

    def rehearse(self, count: int) -> None:
        """Rehearse the launches that the validation and test of `count` examples add to the model's."""
        logits = np.zeros((count, self.outputs), dtype=np.float32)
        rehearsal.rehearse(lambda: ops.cross_entropy(_tensor(logits), _tensor(np.zeros(count, dtype=np.int64))))
        rehearsal.rehearse(lambda: probabilities(logits))

    def judge(self, model: nn.Module, features: Any, truth: np.ndarray) -> Judgement:
        """Score a model by its accuracy a on N examples; the standard error is sqrt(a (1 - a) / N)."""
        loss, predicted = 0.0, np.zeros(0, dtype=np.int64)
        for logits in outputs(model, features, self.outputs):
            part = truth[len(predicted) :][: len(logits)]
            with no_grad():
                loss += len(part) / len(truth) * ops.cross_entropy(_tensor(logits), _tensor(part)).item()
            predicted = np.concatenate([predicted, logits.argmax(1)])
        scores = metrics.classification(truth, predicted, len(self.labels))
        accuracy = scores["accuracy"]
        return Judgement({"loss": loss, **scores}, accuracy, math.sqrt(accuracy * (1 - accuracy) / len(truth)))

    def predictions(self, parts: Iterable[np.ndarray], confidence: bool = False) -> Predictions:
        """Return the most probable class of each row of the outputs, with `confidence` also its probability."""
        values, shares, before = [], [], []
        for part in parts:
            values.append(part.argmax(1))
            if confidence:
                rows = np.arange(len(part)), values[-1]
                shares.append(self.probabilities(part)[rows])
                before.append(probabilities(part)[rows])
        shown = (np.concatenate(shares), np.concatenate(before)) if confidence else (None, None)
        return Predictions(np.concatenate(values), *shown)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities [N, classes] of logits."""
        return probabilities(logits, self.temperature)

    def baselines(self, train: Split, validation: Split, workers: Workers | None) -> Callable[[Split], dict[str, Any]]:
        """Return a function that scores baselines on a test split; the processes of `workers` fit them meanwhile."""
        return baselines.Linear(train, validation, len(self.labels), workers).scores

    def report(self, truth: np.ndarray, predictions: Predictions) -> dict[str, Any]:
        """Return the scores of predictions for the test split."""
        scores = report_files.classification(truth, predictions.values, self.labels)
        if predictions.confidence is None or predictions.before is None or not len(truth):
            return scores
        right = predictions.values == truth
        of_probabilities = calibration.scores(predictions.confidence, predictions.before, right, self.temperature)
        if self.reject:
            scores["rejected"] = calibration.answered(predictions.confidence, right, self.reject)
        return {**scores, "calibration": of_probabilities}

    def evaluation(self, truth: np.ndarray, predictions: Predictions) -> dict[str, Any]:
        """Return the scores of predictions for other data, and of always predicting its most frequent label."""
        majority = baselines.majority(truth, truth, len(self.labels))
        return {**self.report(truth, predictions), "baseline": {"majority": majority}}

    def answers(self, parts: Iterable[np.ndarray], top: int) -> list[dict[str, Any]]:
        """Return label, probability and the `top` best labels of each row of the outputs."""
        answers = []
        for shares in (self.probabilities(part) for part in parts if len(part)):
            for best in json_lines.best(shares, top):
                ranked = [{"label": self.labels[i], "probability": number} for i, number in best]
                answer: dict[str, Any] = {**ranked[0], "top": ranked}
                answers.append(answer if best[0][1] >= self.reject else {**answer, "label": None})
        return answers

    def lines(self, parts: Iterable[np.ndarray], top: int, known_terms: np.ndarray, workers: Workers) -> Iterator[str]:
        """Yield `answers` as lines of JSON, with the number of known terms of each text, int64 [N]."""
        start = 0
        for shares in (self.probabilities(part) for part in parts if len(part)):
            end = start + len(shares)
            yield from json_lines.by_workers(shares, known_terms[start:end], self.labels, top, self.reject, workers)
            start = end

    def plot(self, folder: Path, truth: np.ndarray, predictions: Predictions, title: str) -> None:
        """Draw confusion.png and reliability.png."""
        plots.confusion(folder, truth, predictions.values, self.labels, title)
        if predictions.confidence is not None and predictions.before is not None:
            right = predictions.values == truth
            parts = {"temperature 1": predictions.before, f"temperature {self.temperature:.3f}": predictions.confidence}
            plots.reliability(folder, {name: calibration.bins(each, right) for name, each in parts.items()}, title)


@dataclass(frozen=True)
class Regression:
    """A regression of the column `target`: targets and outputs are standardized by `mean` and `scale`."""

    target: str
    mean: float
    scale: float
    task: ClassVar[str] = "regression"
    score: ClassVar[str] = "r2"
    labels: ClassVar[list[str]] = []
    outputs: ClassVar[int] = 1
    documents: ClassVar[dict[str, str]] = {}

    @property
    def loss_name(self) -> str:
        """Return the label of an axis."""
        return f"mean squared error of standardised {plots.shorten(self.target)}"

    def criterion(self, model: nn.Module, train_y: np.ndarray, config: Training) -> Callable[[Any, Tensor], Tensor]:
        """Return loss(x, y) for training: the mean squared error."""
        return lambda x, y: ops.mse_loss(ops.flatten(model(x), 0), y)

    def rehearse(self, count: int) -> None:
        """Rehearse the launches of `judge`, see `Classification`."""
        zeros = np.zeros(count, dtype=np.float32)
        rehearsal.rehearse(lambda: ops.mse_loss(_tensor(zeros), _tensor(zeros)))

    def judge(self, model: nn.Module, features: Any, truth: np.ndarray) -> Judgement:
        """Score a model by its mean squared error on standardized values; the scores are in the target's units."""
        raw = self.predictions(outputs(model, features)).values
        with no_grad():
            loss = float(ops.mse_loss(_tensor(raw), _tensor(truth)).item())
        squares = np.square(raw.astype(np.float64) - truth)
        scores = metrics.regression(self.in_units(truth), self.in_units(raw))
        return Judgement({"loss": loss, **scores}, -loss, float(squares.std() / math.sqrt(len(truth))))

    def predictions(self, parts: Iterable[np.ndarray], confidence: bool = False) -> Predictions:
        """Return the standardized outputs of a split."""
        return Predictions(np.concatenate(list(parts)).reshape(-1), None)

    def baselines(self, train: Split, validation: Split, workers: Workers | None) -> Callable[[Split], dict[str, Any]]:
        """Return a function that fits the baselines and scores them on a test split."""
        return lambda test: baselines.regression(*train, *test, self.mean, self.scale)

    def report(self, truth: np.ndarray, predictions: Predictions) -> dict[str, Any]:
        """Return the scores of predictions for the test split in the target's units."""
        return {"target": self.target, **metrics.regression(self.in_units(truth), self.in_units(predictions.values))}

    def evaluation(self, truth: np.ndarray, predictions: Predictions) -> dict[str, Any]:
        """Return the scores of predictions for other data, and of always predicting the mean of the training split.

        Raises DamagedError for a prediction that is not finite.
        """
        units = self._finite(truth)
        constant = metrics.regression(units, np.full(len(units), self.mean))
        return {**metrics.regression(units, self._finite(predictions.values)), "baseline": {"mean": constant}}

    def answers(self, parts: Iterable[np.ndarray], top: int) -> list[dict[str, Any]]:
        """Return the predictions in the target's units. Raises DamagedError for one that is not finite."""
        # Nine digits identify a float32 number.
        return [{"prediction": float(f"{value:.9g}")} for value in self._finite(self.predictions(parts).values)]

    def plot(self, folder: Path, truth: np.ndarray, predictions: Predictions, title: str) -> None:
        """Draw predictions.png."""
        plots.predictions(folder, self.in_units(truth), self.in_units(predictions.values), self.target, title)

    def in_units(self, standardized: np.ndarray) -> np.ndarray:
        """Return standardized targets or outputs in the target's units, float64 [N]."""
        with np.errstate(over="ignore"):
            return standardized.reshape(-1).astype(np.float64) * self.scale + self.mean

    def _finite(self, standardized: np.ndarray) -> np.ndarray:
        values = self.in_units(standardized)
        if not np.isfinite(values).all():
            raise DamagedError(f"the model's answers, {self.scale:g} times its outputs, are not finite; train it again")
        return values


def class_weights(targets: np.ndarray, classes: int, balance: float) -> Tensor | None:
    """Return float32 [classes], (N / (C n_c))^balance for a class with n_c of N targets; None for balance 0."""
    if balance == 0:
        return None
    counts = np.maximum(1, np.bincount(targets, minlength=classes))
    weights = (len(targets) / (classes * counts)) ** balance
    return _tensor(weights.astype(np.float32))


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the softmax of logits [N, classes] / temperature."""
    z = _tensor(logits)
    return ops.softmax(z if temperature == 1 else ops.div(z, temperature), -1).data.cpu().numpy()


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(torch.from_numpy(array).to(default_device()))
