"""Classification and regression: the loss, scores, baselines, answers and plots of each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from minidl.training.loop.epochs import Judgement
from minidl.training.loop.forward import outputs
from minidl.training.prediction import json_lines
from minidl.training.report import baselines, metrics, plots, report_files
from minidl.training.run_folder import files
from minidl.training.run_folder.manifest import RunFiles
from minidl.training.settings.command import Training

Split = tuple[Any, np.ndarray]  # features (scipy CSR, float32 array [N, F] or Pictures) and targets [N]


class Found(NamedTuple):
    """What a model says of each example of a split: its class int64 [N] with the probability, or its number."""

    values: np.ndarray
    sure: np.ndarray | None


@dataclass(frozen=True)
class Classification(Checked):
    """One of `labels`: targets are class indices int64 [N], outputs logits [N, classes]."""

    labels: Annotated[Names, Field(min_length=2)]
    task: ClassVar[str] = "classification"
    score: ClassVar[str] = "accuracy"
    loss_name: ClassVar[str] = "cross-entropy"

    @classmethod
    def of_run(cls, own: RunFiles) -> Classification:
        """The classification of a finished run, with its labels. Raises DamagedError."""
        path = own.folder / "labels.json"
        try:
            return validate(cls, files.as_json(own.text(path.name).encode(), path))
        except ValueError as error:
            raise damaged(path, error) from None

    @property
    def outputs(self) -> int:
        """The number of outputs of the model."""
        return len(self.labels)

    @property
    def documents(self) -> dict[str, str]:
        """labels.json."""
        return {"labels.json": json.dumps({"labels": self.labels}, ensure_ascii=False, indent=1) + "\n"}

    def criterion(self, model: nn.Module, train_y: np.ndarray, config: Training) -> Callable[[Any, Tensor], Tensor]:
        """loss(x, y) in training: cross-entropy with the settings' label smoothing and weights of classes."""
        weight = class_weights(train_y, len(self.labels), config.balance)

        def logits(x: Any) -> Tensor:
            y = model(x)
            return y if y.dtype == torch.float32 else y.to(torch.float32)

        return lambda x, y: ops.cross_entropy(logits(x), y, weight, label_smoothing=config.label_smoothing or 0.0)

    def rehearse(self, count: int) -> None:
        """In a rehearsal, what judging and answering `count` examples launches beside the model."""
        logits = np.zeros((count, self.outputs), dtype=np.float32)
        rehearsal.rehearse(lambda: ops.cross_entropy(_tensor(logits), _tensor(np.zeros(count, dtype=np.int64))))
        rehearsal.rehearse(lambda: probabilities(logits))

    def judge(self, model: nn.Module, features: Any, truth: np.ndarray) -> Judgement:
        """The accuracy a of N examples decides; its standard error is sqrt(a (1 - a) / N)."""
        loss, predicted = 0.0, np.zeros(0, dtype=np.int64)
        for logits in outputs(model, features, self.outputs):
            part = truth[len(predicted) :][: len(logits)]
            with no_grad():
                loss += len(part) / len(truth) * ops.cross_entropy(_tensor(logits), _tensor(part)).item()
            predicted = np.concatenate([predicted, logits.argmax(1)])
        scores = metrics.classification(truth, predicted, len(self.labels))
        accuracy = scores["accuracy"]
        return Judgement({"loss": loss, **scores}, accuracy, math.sqrt(accuracy * (1 - accuracy) / len(truth)))

    def found(self, parts: Iterable[np.ndarray], sure: bool = False) -> Found:
        """What the outputs of a split mean: the most probable class of each example, and if asked its probability."""
        values, its = [], []
        for part in parts:
            values.append(part.argmax(1))
            if sure:
                its.append(probabilities(part)[np.arange(len(part)), values[-1]])
        return Found(np.concatenate(values), np.concatenate(its) if sure else None)

    def baselines(self, train: Split, validation: Split, workers: Workers | None) -> Callable[[Split], dict[str, Any]]:
        """The scores of simple methods on a test split; they begin to learn where `workers` has processes."""
        return baselines.Linear(train, validation, len(self.labels), workers).scores

    def report(self, truth: np.ndarray, found: Found) -> dict[str, Any]:
        """Scores of what was found for the test split."""
        return report_files.classification(truth, found.values, self.labels)

    def evaluation(self, truth: np.ndarray, found: Found) -> dict[str, Any]:
        """Scores of what was found for other data, with those of always answering its most frequent label."""
        majority = baselines.majority(truth, truth, len(self.labels))
        return {**report_files.classification(truth, found.values, self.labels), "baseline": {"majority": majority}}

    def answers(self, parts: Iterable[np.ndarray], top: int) -> list[dict[str, Any]]:
        """Label, probability and the `top` best labels of each row of the outputs."""
        answers = []
        for shares in (probabilities(part) for part in parts if len(part)):
            for best in json_lines.best(shares, top):
                ranked = [{"label": self.labels[i], "probability": number} for i, number in best]
                answers.append({**ranked[0], "top": ranked})
        return answers

    def lines(self, parts: Iterable[np.ndarray], top: int, known: np.ndarray, workers: Workers) -> Iterator[str]:
        """`answers` as lines of JSON, with how many terms of each text are known, int64 [N]."""
        done = 0
        for shares in (probabilities(part) for part in parts if len(part)):
            yield from json_lines.by_workers(shares, known[done : done + len(shares)], self.labels, top, workers)
            done += len(shares)

    def plot(self, folder: Path, truth: np.ndarray, found: Found, title: str) -> None:
        """confusion.png."""
        plots.confusion(folder, truth, found.values, self.labels, title)


@dataclass(frozen=True)
class Regression:
    """A number, the column `target`: targets and outputs are standardised by `mean` and `scale`."""

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
        """The label of an axis."""
        return f"mean squared error of standardised {plots.shorten(self.target)}"

    def criterion(self, model: nn.Module, train_y: np.ndarray, config: Training) -> Callable[[Any, Tensor], Tensor]:
        """loss(x, y) in training: the mean squared error."""
        return lambda x, y: ops.mse_loss(ops.flatten(model(x), 0), y)

    def rehearse(self, count: int) -> None:
        """As of a classification."""
        zeros = np.zeros(count, dtype=np.float32)
        rehearsal.rehearse(lambda: ops.mse_loss(_tensor(zeros), _tensor(zeros)))

    def judge(self, model: nn.Module, features: Any, truth: np.ndarray) -> Judgement:
        """The mean square error decides, of standardised values as in training; the scores are in the target's
        units."""
        raw = self.found(outputs(model, features)).values
        with no_grad():
            loss = float(ops.mse_loss(_tensor(raw), _tensor(truth)).item())
        squares = np.square(raw.astype(np.float64) - truth)
        scores = metrics.regression(self.in_units(truth), self.in_units(raw))
        return Judgement({"loss": loss, **scores}, -loss, float(squares.std() / math.sqrt(len(truth))))

    def found(self, parts: Iterable[np.ndarray], sure: bool = False) -> Found:
        """The outputs of a split."""
        return Found(np.concatenate(list(parts)).reshape(-1), None)

    def baselines(self, train: Split, validation: Split, workers: Workers | None) -> Callable[[Split], dict[str, Any]]:
        """The scores of simple methods on a test split."""
        return lambda test: baselines.regression(*train, *test, self.mean, self.scale)

    def report(self, truth: np.ndarray, found: Found) -> dict[str, Any]:
        """Scores of the outputs for the test split in the target's units."""
        return {"target": self.target, **metrics.regression(self.in_units(truth), self.in_units(found.values))}

    def evaluation(self, truth: np.ndarray, found: Found) -> dict[str, Any]:
        """Scores of the outputs for other data, with those of always answering the mean of the training split.

        Raises DamagedError for an answer that is not finite.
        """
        units = self._finite(truth)
        constant = metrics.regression(units, np.full(len(units), self.mean))
        return {**metrics.regression(units, self._finite(found.values)), "baseline": {"mean": constant}}

    def answers(self, parts: Iterable[np.ndarray], top: int) -> list[dict[str, Any]]:
        """The prediction in the target's units. Raises DamagedError for one that is not finite."""
        # Nine digits identify a float32 number.
        return [{"prediction": float(f"{value:.9g}")} for value in self._finite(self.found(parts).values)]

    def plot(self, folder: Path, truth: np.ndarray, found: Found, title: str) -> None:
        """predictions.png."""
        plots.predictions(folder, self.in_units(truth), self.in_units(found.values), self.target, title)

    def in_units(self, standardised: np.ndarray) -> np.ndarray:
        """Standardised targets or outputs in the target's units, float64 [N]."""
        with np.errstate(over="ignore"):
            return standardised.reshape(-1).astype(np.float64) * self.scale + self.mean

    def _finite(self, standardised: np.ndarray) -> np.ndarray:
        values = self.in_units(standardised)
        if not np.isfinite(values).all():
            raise DamagedError(f"the model's answers, {self.scale:g} times its outputs, are not finite; train it again")
        return values


def class_weights(targets: np.ndarray, classes: int, balance: float) -> Tensor | None:
    """float32 [classes]: (N / (C n_c))^balance for a class with n_c of the N targets; None for balance 0."""
    if balance == 0:
        return None
    counts = np.maximum(1, np.bincount(targets, minlength=classes))
    weights = (len(targets) / (classes * counts)) ** balance
    return _tensor(weights.astype(np.float32))


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of logits [N, classes]."""
    return ops.softmax(_tensor(logits), -1).data.cpu().numpy()


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(torch.from_numpy(array).to(default_device()))
