"""Supervised training: the experiment of the tasks text, table and images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from minidl import nn, random
from minidl.common import timing
from minidl.common.console import one_line
from minidl.compilation import rehearsal
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.data.workers import Workers, available
from minidl.distributed.parallel import DataParallel
from minidl.distributed.parts import shards
from minidl.distributed.zero import shard_optimizer
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.training.loop.averages import ModelAverage
from minidl.training.loop.epochs import Trainer
from minidl.training.loop.forward import outputs, rehearse
from minidl.training.loop.learner import Learner
from minidl.training.loop.optimizers import make_optimizer, make_schedule
from minidl.training.loop.targets import Classification, Predictions, Regression, Split
from minidl.training.prediction import terms
from minidl.training.process import helpers, out_of_memory
from minidl.training.process.display import Display
from minidl.training.report import calibration, metrics, plots, report_files
from minidl.training.run_folder import weights
from minidl.training.run_folder.manifest import RunFiles
from minidl.training.settings.command import Perceptron, Training
from minidl.training.task import Experiment

_MISTAKES, _TERMS = 20, 8  # mistakes on the page, and terms of each
FEW_STEPS = 100  # fewer steps seldom learn much
TrainingT = TypeVar("TrainingT", bound=Training)


class Stages(Protocol):
    """The stages of a training, see `Learner`."""

    @property
    def starts(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[tuple[int, tuple[int, int]], ...]: ...

    def enter(self, model: nn.Module, epoch: int) -> None: ...


@dataclass
class Supervised(Experiment[TrainingT]):
    """An `Experiment` with a training and a validation split as arrays; `test` returns the test split, at the end.

    `features` describes an example for display, and `more_steps` advises how to get more steps besides more epochs.
    `make_model` makes the model of settings on a device (None: the default one); `make_batches` replaces `Batches`.
    `draw(model, pictures, targets, predictions, title)` draws further plots of the test split.
    `initialize` changes the initial weights of a model, and `note` describes that.
    `network` names the network if there is a choice. `terms` are the names of the columns of texts.
    `texts` reads the test split's texts with these indices. `linear` are the splits as TF-IDF features, for baselines
    of a model with other features.
    """

    name: str
    config: TrainingT
    source: dict[str, Any]
    features: str
    targets: Classification | Regression
    train: Split
    validation: Split
    test: Callable[[], Split]
    make_model: Callable[[TrainingT, str | None], nn.Module]
    documents: dict[str, str]
    model: dict[str, Any] | None = None
    more_steps: str = ""
    make_batches: Callable[[], ImageBatches] | None = None
    draw: Callable[[nn.Module, Any, np.ndarray, Predictions, str], None] | None = None
    initialize: Callable[[nn.Module], object] | None = None
    note: str | None = None
    network: str | None = None
    terms: Sequence[str] | None = None
    texts: Callable[[np.ndarray], list[str]] | None = None
    stages: Stages | None = None
    linear: tuple[Split, Split, Callable[[], Split]] | None = None
    batch_size: int = field(init=False)
    epochs: int = field(init=False)
    _test_results: tuple[Any, np.ndarray, Predictions] | None = field(default=None, init=False)
    _baselines: Callable[[Split], dict[str, Any]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.config.batch_size is not None
        assert self.config.epochs is not None
        self.batch_size, self.epochs = self.config.batch_size, self.config.epochs
        self.scaled_by = ("hidden",) if hasattr(self.config, "hidden") else ()

    @property
    def introduction(self) -> str:
        sizes, labels = self.source["sizes"], self.targets.labels
        classes = f", {len(labels)} classes" if labels else ""
        columns, leakage = report_files.columns(self.source), report_files.leakage(self.source.get("leakage", []))
        return (
            f"{one_line(self.config.data)}: {sizes['train']:,} training, {sizes['validation']:,} validation and "
            f"{sizes['test']:,} test examples, {self.features}{classes}"
            + (f"\ncolumns: {columns}" if columns else "")
            + (f"\nleakage: {leakage}" if leakage else "")
            + "".join(f"\nnote: {note}" for note in self.source.get("notes", ()))
            + (f"\n{self.note}" if self.note else "")
        )

    def networks(self, config: TrainingT) -> out_of_memory.Networks:
        model = self.make_model(config, "meta")
        trained = model, make_optimizer(config, model)
        return [trained] if getattr(config, "ema", None) is None else [trained, (model, None)]

    @functools.cached_property
    def batches(self) -> Batches | ImageBatches:
        """Return the batches of the training split, which is on the GPU if it fits there."""
        if self.make_batches is not None:
            return self.make_batches()
        device = default_device() if launch.is_gpu(default_device()) else None
        return Batches(*self.train, self.batch_size, self.config.seed, device=device)

    def load(self) -> None:
        _ = self.batches

    def learner(self) -> Learner:
        """Return the model, optimizer, schedule and batches; they depend only on the settings and the seed."""
        config = self.config
        random.manual_seed(config.seed)
        model = self.make_model(config, None)
        if self.initialize is not None:
            self.initialize(model)
        if getattr(config, "sync_batch_norm", None):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        stages, ema = self.stages, getattr(config, "ema", None)
        average = None if ema is None else ModelAverage(model, self.make_model(config, None), ema)
        validated = model if average is None else average.averaged
        optimizer = make_optimizer(config, model)
        if config.zero:
            shard_optimizer(optimizer)
        return Learner(
            model, optimizer, make_schedule(config, optimizer, len(self.batches)), self.batches,
            loss=self.targets.criterion(model, self.train[1], config),
            validate=lambda: self.targets.judge(validated, *self.validation),
            rehearse=lambda: self._rehearse(validated),
            stage_starts=(0,) if stages is None else stages.starts,
            enter=None if stages is None else functools.partial(stages.enter, model),
            average=average,
            sizes=() if stages is None else stages.sizes,
            parallel=None if config.shards is None else DataParallel(model, shards(config.shards)),
        )  # fmt: skip

    def _rehearse(self, model: nn.Module) -> None:
        features, truth = self.validation
        rehearse(model, features, self.targets.outputs)
        self.targets.rehearse(len(truth))
        if self.terms is not None:
            rehearsal.rehearse(lambda: terms.logits(model, features[:_MISTAKES]))

    def trainer(self, display: Display, state: dict[str, Any], hint: str) -> Trainer:
        config = self.config
        captured = config.capture and launch.is_gpu(default_device())
        return Trainer(self.learner(), config.out, self.epochs, config.patience, display, state, hint, captured)

    @contextmanager
    def background_work(self) -> Iterator[None]:
        """Fit the linear baselines while the GPU trains; on a CPU, training needs the processors."""
        if launch.ON_CPU or (count := self.config.workers or available()) == 1:
            yield
            return
        running = helpers.ready_processes()
        with Workers(min(2, count)) if running is None else nullcontext(running) as workers:
            self._baselines = self._fit_baselines(workers)
            yield

    def _fit_baselines(self, workers: Workers | None) -> Callable[[Split], dict[str, Any]]:
        return self.targets.baselines(*(self.linear or (self.train, self.validation))[:2], workers)

    def advice(self, trainer: Trainer, report: dict[str, Any]) -> str | None:
        shortfall, epochs = report_files.shortfall(report), math.ceil(FEW_STEPS / trainer.steps)
        if self.epochs >= epochs or not shortfall:
            return None
        steps = report_files.count(report["steps"], "training step")
        return f"the model is {shortfall} after {steps}: try --epochs {epochs}{self.more_steps}"

    def report(self, trainer: Trainer, device: str) -> dict[str, Any]:
        progress, model = trainer.progress, trainer.model
        trainer.display.note(f"kept: {report_files.chosen_epoch(progress.best_epoch)} (*: the best so far)")
        trainer.display.note("training is finished; testing the model and fitting the baselines")
        features, truth, predictions = self.test_results(model)  # calibrates the targets
        scores = self.targets.report(truth, predictions)
        with out_of_memory.used_for("the baselines", "less data"), timing.timed("baseline"):
            baselines = self._baselines or self._fit_baselines(None)
            scores["baseline"] = baselines((features, truth) if self.linear is None else self.linear[2]())
        for each in () if self.linear is None else scores["baseline"].values():
            each.update({"method": each["method"].replace("same", "TF-IDF")} if "method" in each else {})
        source = dict(self.source)
        leakage = {"leakage": source.pop("leakage")} if "leakage" in source else {}
        return {
            "task": self.targets.task,
            "kind": self.name,
            **report_files.training(self.config, progress, device, model.num_parameters()),
            **({} if self.network is None else {"network": self.network}),
            "source": source,
            **leakage,
            "validation": progress.history[progress.best_epoch - 1]["validation"],
            **scores,
        }

    def plot(self, trainer: Trainer, report: dict[str, Any]) -> None:
        """Draw the curves, and the plots of the targets."""
        config, progress = self.config, trainer.progress
        features, truth, predictions = self.test_results(trainer.model)
        targets = self.targets
        score = f"{metrics.TITLES[targets.score]} {report[targets.score]:.3f}"
        title = f"{plots.shorten(Path(config.data).name)}: test {score}"
        shares = {
            "dropout": config.dropout,
            "label smoothing": config.label_smoothing,
            "class weights": config.balance,
            "mixed pictures": getattr(config, "mixup", None) or getattr(config, "cutmix", None),
        }
        only_in_training = [name for name, share in shares.items() if share]
        plots.curves(config.out, progress.history, progress.best_epoch, title, targets.loss_name, only_in_training)
        targets.plot(config.out, truth, predictions, title)
        if self.draw is not None:
            self.draw(trainer.model, features, truth, predictions, title)

    def mistakes(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Return the most confident mistakes on the test split, with their texts and most important terms."""
        if self.terms is None:
            return []
        features, truth, (predicted, confidence, _) = self.test_results(trainer.model)
        assert confidence is not None
        wrong = np.flatnonzero(predicted != truth)
        wrong = wrong[np.argsort(-confidence[wrong], kind="stable")[:_MISTAKES]]
        if len(wrong) == 0:
            return []
        rows, labels, entries = features[wrong], self.targets.labels, []
        texts = self.texts(wrong) if self.texts is not None else []
        values = terms.values(trainer.model, rows, terms.logits(trainer.model, rows), predicted[wrong])
        for row, example in enumerate(wrong):
            columns = np.arange(rows.indptr[row], rows.indptr[row + 1])
            largest = columns[np.argsort(-np.abs(values[columns]), kind="stable")[:_TERMS]]
            entries.append({
                "true": labels[truth[example]], "predicted": labels[predicted[example]],
                "probability": float(confidence[example]),
                "terms": [(self.terms[rows.indices[i]], float(values[i])) for i in largest],
                **({"text": texts[row]} if texts else {}),
            })  # fmt: skip
        return entries

    def test_results(self, model: nn.Module) -> tuple[Any, np.ndarray, Predictions]:
        """Return (features, targets, predictions) of the test split, computed at the first call."""
        if self._test_results is None:
            with out_of_memory.used_for("the test split", "less data"), timing.timed("evaluate"):
                if isinstance(self.targets, Classification):
                    features, truth = self.validation
                    logits = outputs(model, features, self.targets.outputs)
                    self.targets = replace(self.targets, temperature=calibration.temperature(logits, truth))
                features, truth = self.test()
                parts = outputs(model, features, self.targets.outputs)
                self._test_results = features, truth, self.targets.predictions(parts, confidence=True)
        return self._test_results


def sizes(dataset: Any) -> dict[str, int]:
    """Return the number of examples in each split of a data set."""
    return {"train": len(dataset.train), "validation": len(dataset.validation), "test": len(dataset.test)}


def saved_perceptron(
    run: RunFiles, config: Perceptron, make: Callable[..., nn.Module], inputs: int, outputs: int
) -> nn.Module:  # fmt: skip
    """Return the perceptron of a finished run. Raises DamagedError for weights of another shape."""
    tensors = run.weights()
    weights.check_layers((inputs, *config.hidden, outputs), tensors, run.model)
    return weights.materialize(make(inputs, outputs, config.hidden, config.dropout, device="meta"), tensors, run.model)
