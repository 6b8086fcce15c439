"""Training on examples with targets, judged by a validation split: what the tasks text, table and images share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from minidl import nn, optim, random
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
from minidl.training.loop.averages import Average
from minidl.training.loop.epochs import Learner, Trainer
from minidl.training.loop.forward import outputs, rehearse
from minidl.training.loop.targets import Classification, Found, Regression, Split
from minidl.training.prediction import terms
from minidl.training.process import helpers, out_of_memory
from minidl.training.process.display import Display
from minidl.training.report import metrics, plots, report_files
from minidl.training.run_folder import weights
from minidl.training.run_folder.manifest import RunFiles
from minidl.training.settings.command import Perceptron, Training
from minidl.training.task import Experiment

_SUREST, _TERMS = 20, 8  # mistakes on the page, and terms of each
FEW_STEPS = 100  # fewer seldom learn much
TrainingT = TypeVar("TrainingT", bound=Training)
LOSS_SCALE = 2.0**16  # of float16, to begin with


class Course(Protocol):
    """What changes in the course of a training, see `Learner`."""

    @property
    def begins(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[tuple[int, tuple[int, int]], ...]: ...

    def enter(self, model: nn.Module, epoch: int) -> None: ...


@dataclass
class Supervised(Experiment[TrainingT]):
    """An `Experiment` with a training and a validation split as arrays; `test` makes the test split when it is called,
    once, at the end.

    `features` says what an example is, for people, and `more_steps` what besides more epochs makes more steps.
    `make_model` makes the model that settings describe on a device (None: the usual one), `make_batches` the batches
    that `Batches` does not make.
    `draw(model, pictures, targets, found, title)` adds to the plots what the test split shows.
    `begin` changes the first weights of a model, `said` tells of it, and `course` is what changes during the training.
    `network` says which one it is, where there is a choice. `terms` are the names of the columns of texts.
    `texts` reads the test split's texts of some indices.
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
    draw: Callable[[nn.Module, Any, np.ndarray, Found, str], None] | None = None
    begin: Callable[[nn.Module], object] | None = None
    said: str | None = None
    network: str | None = None
    terms: Sequence[str] | None = None
    texts: Callable[[np.ndarray], list[str]] | None = None
    course: Course | None = None
    batch_size: int = field(init=False)
    epochs: int = field(init=False)
    _tested: tuple[Any, np.ndarray, Found] | None = field(default=None, init=False)
    _scores: Callable[[Split], dict[str, Any]] | None = field(default=None, init=False)

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
            + (f"\n{self.said}" if self.said else "")
        )

    def networks(self, config: TrainingT) -> out_of_memory.Networks:
        model = self.make_model(config, "meta")
        found: list[tuple[nn.Module, optim.Optimizer | None]] = [(model, make_optimizer(config, model))]
        return found if getattr(config, "ema", None) is None else [*found, (model, None)]

    @functools.cached_property
    def batches(self) -> Batches | ImageBatches:
        """The training split, on the GPU if it fits there."""
        if self.make_batches is not None:
            return self.make_batches()
        device = default_device() if launch.is_gpu(default_device()) else None
        return Batches(*self.train, self.batch_size, self.config.seed, device=device)

    def load(self) -> None:
        _ = self.batches

    def learner(self) -> Learner:
        """Model, optimiser, schedule and batches, all decided by the settings and the seed."""
        config = self.config
        random.manual_seed(config.seed)
        model = self.make_model(config, None)
        if self.begin is not None:
            self.begin(model)
        if getattr(config, "sync_batch_norm", None):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        course, ema = self.course, getattr(config, "ema", None)
        average = None if ema is None else Average(model, self.make_model(config, None), ema)
        judged = model if average is None else average.kept
        optimizer = make_optimizer(config, model)
        if config.zero:
            shard_optimizer(optimizer)
        return Learner(
            model, optimizer, make_schedule(config, optimizer, len(self.batches)), self.batches,
            loss=self.targets.criterion(model, self.train[1], config),
            validate=lambda: self.targets.judge(judged, *self.validation),
            rehearse=lambda: self._rehearse(judged),
            begins=(0,) if course is None else course.begins,
            enter=None if course is None else functools.partial(course.enter, model),
            average=average,
            sizes=() if course is None else course.sizes,
            parallel=None if config.shards is None else DataParallel(model, shards(config.shards)),
        )  # fmt: skip

    def _rehearse(self, model: nn.Module) -> None:
        features, truth = self.validation
        rehearse(model, features, self.targets.outputs)
        self.targets.rehearse(len(truth))
        if self.terms is not None:
            rehearsal.rehearse(lambda: terms.logits(model, features[:_SUREST]))

    def trainer(self, display: Display, state: dict[str, Any], hint: str) -> Trainer:
        config = self.config
        # On a CPU no batch is given room, and none needs it.
        captured = config.capture and launch.is_gpu(default_device())
        return Trainer(
            self.learner(), config.out, self.epochs, config.patience, display, state, hint, captured
        )  # fmt: skip

    @contextmanager
    def alongside(self) -> Iterator[None]:
        """The linear machines learn while the GPU trains. In the interpreter the network has the processors."""
        if launch.INTERPRETED or (count := self.config.workers or available()) == 1:
            yield
            return
        ready = helpers.at_hand()
        with Workers(min(2, count)) if ready is None else nullcontext(ready) as workers:
            self._scores = self.targets.baselines(self.train, self.validation, workers)
            yield

    def advice(self, trainer: Trainer, report: dict[str, Any]) -> str | None:
        shortfall, epochs = report_files.shortfall(report), math.ceil(FEW_STEPS / trainer.steps)
        if self.epochs >= epochs or not shortfall:
            return None
        steps = report_files.count(report["steps"], "training step")
        return f"the model is {shortfall} after {steps}: try --epochs {epochs}{self.more_steps}"

    def report(self, trainer: Trainer, device: str) -> dict[str, Any]:
        progress, model = trainer.progress, trainer.model
        trainer.display.note(f"kept: {report_files.kept(progress.best_epoch)} (*: the best so far)")
        trainer.display.note("training is finished; testing the model and fitting the baselines")
        features, truth, found = self.tested(model)
        tested = self.targets.report(truth, found)
        with out_of_memory.used_for("the baselines", "less data"), timing.timed("baseline"):
            scores = self._scores or self.targets.baselines(self.train, self.validation, None)
            tested["baseline"] = scores((features, truth))
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
            **tested,
        }

    def plot(self, trainer: Trainer, report: dict[str, Any]) -> None:
        """Curves, and what the targets have to show."""
        config, progress, targets = self.config, trainer.progress, self.targets
        score = f"{metrics.TITLES[targets.score]} {report[targets.score]:.3f}"
        title = f"{plots.shorten(Path(config.data).name)}: test {score}"
        shares = {
            "dropout": config.dropout,
            "label smoothing": config.label_smoothing,
            "class weights": config.balance,
            "mixed pictures": getattr(config, "mixup", None) or getattr(config, "cutmix", None),
        }
        only_in_training = [name for name, share in shares.items() if share]
        plots.curves(
            config.out, progress.history, progress.best_epoch, title, targets.loss_name, only_in_training
        )  # fmt: skip
        features, truth, found = self.tested(trainer.model)
        targets.plot(config.out, truth, found, title)
        if self.draw is not None:
            self.draw(trainer.model, features, truth, found, title)

    def mistakes(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Return the most confident mistakes on the test split, with their texts and most important terms."""
        if self.terms is None:
            return []
        features, truth, found = self.tested(trainer.model)
        assert found.sure is not None
        wrong = np.flatnonzero(found.values != truth)
        wrong = wrong[np.argsort(-found.sure[wrong], kind="stable")[:_SUREST]]
        if len(wrong) == 0:
            return []
        chosen, labels, entries = features[wrong], self.targets.labels, []
        texts = self.texts(wrong) if self.texts is not None else []
        given = terms.values(trainer.model, chosen, terms.logits(trainer.model, chosen), found.values[wrong])
        for row, place in enumerate(wrong):
            own = np.arange(chosen.indptr[row], chosen.indptr[row + 1])
            most = own[np.argsort(-np.abs(given[own]), kind="stable")[:_TERMS]]
            entries.append({
                "true": labels[truth[place]], "predicted": labels[found.values[place]],
                "probability": float(found.sure[place]),
                "terms": [(self.terms[chosen.indices[i]], float(given[i])) for i in most],
                **({"text": texts[row]} if texts else {}),
            })  # fmt: skip
        return entries

    def tested(self, model: nn.Module) -> tuple[Any, np.ndarray, Found]:
        """(features, targets, what the trained model finds) of the test split."""
        if self._tested is None:
            with out_of_memory.used_for("the test split", "less data"), timing.timed("evaluate"):
                features, truth = self.test()
                parts = outputs(model, features, self.targets.outputs)
                sure = self.draw is not None or self.terms is not None
                self._tested = features, truth, self.targets.found(parts, sure)
        return self._tested


def make_optimizer(config: Training, model: nn.Module) -> optim.Optimizer:
    """The optimiser named in the settings, with its usual constants."""
    parameters = list(model.parameters())
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "lazy": getattr(config, "lazy", False),
        "loss_scale": LOSS_SCALE if config.precision == "float16" else None,
    }
    makers: dict[str, Callable[..., optim.Optimizer]] = {
        "sgd": functools.partial(optim.SGD, momentum=0.9),
        "adamw": optim.AdamW, "adam": optim.Adam, "rmsprop": optim.RMSprop, "adagrad": optim.Adagrad,
    }  # fmt: skip
    optimizer = makers[config.optimizer](parameters, **options)
    optimizer.warns = False  # the loop counts skipped steps, and the report tells them
    return optimizer


def make_schedule(config: Training, optimizer: optim.Optimizer, steps_per_epoch: int) -> optim.Schedule:
    """The learning rate's course over all steps."""
    assert config.epochs is not None
    assert config.lr is not None
    steps = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup * steps_per_epoch), steps - 1)
    if config.schedule == "constant":
        found: optim.Schedule = optim.WarmupLR(optimizer, warmup=warmup)
    else:
        falling = {"cosine": optim.CosineLR, "linear": optim.LinearDecayLR}
        found = falling[config.schedule](optimizer, steps, warmup=warmup)
    unfrozen = getattr(config, "unfreeze_lr", None)
    since = getattr(config, "unfreeze", None) or 0
    return found if unfrozen is None else Unfrozen(found, since * steps_per_epoch, unfrozen / config.lr)


class Unfrozen(optim.Schedule):
    """The rates of another schedule, times `share` from a step on."""

    def __init__(self, schedule: optim.Schedule, since: int, share: float) -> None:
        self._schedule, self._since, self._share = schedule, since, share
        super().__init__(schedule.optimizer, schedule.warmup)
        self.base_lrs = schedule.base_lrs  # the optimizer's rates are by now those of step 0

    def _rates(self, step: int) -> list[float]:
        share = self._share if step >= self._since else 1.0
        return [rate * share for rate in self._schedule._rates(step)]


def sizes(dataset: Any) -> dict[str, int]:
    """Examples of each split of a data set."""
    return {"train": len(dataset.train), "validation": len(dataset.validation), "test": len(dataset.test)}


def saved_perceptron(
    own: RunFiles, config: Perceptron, make: Callable[..., nn.Module], inputs: int, outputs: int
) -> nn.Module:  # fmt: skip
    """The perceptron of a finished run with its weights. Raises DamagedError for weights of another one."""
    found = own.weights()
    weights.check_layers((inputs, *config.hidden, outputs), found, own.model)
    return weights.filled(make(inputs, outputs, config.hidden, config.dropout, device="meta"), found, own.model)
