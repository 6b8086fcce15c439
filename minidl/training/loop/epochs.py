"""The training loop: batches in an order set by the seed, validation after every epoch, the best state kept.

The best epoch is the last whose validation score lies within one standard error of the highest (Breiman et al.,
Classification and Regression Trees, 1984): a few hundred examples show no finer differences. Training stops early after
`patience` epochs in a row outside of that range.

No step waits for the device: losses stay there and are fetched in groups. On a GPU a step is one CUDA graph, with a
second graph for a smaller last batch: with few batches to an epoch, launching that one from Python would take as long
as many others. A checkpoint holds the complete state, so a run continued from any step repeats the uninterrupted one
bit for bit (on the same device, with the same versions, tile tables and number of threads).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minidl import nn
from minidl.compilation import rehearsal
from minidl.compilation.capture import capture
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.distributed.parallel import DataParallel
from minidl.errors import DivergedError, damaged
from minidl.optim import Optimizer, Schedule
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.training.loop.averages import Average
from minidl.training.loop.trainer import BaseTrainer, Figures, Interrupts, Outcome
from minidl.training.process import out_of_memory
from minidl.training.process.display import Display
from minidl.training.report import metrics
from minidl.training.run_folder import weights
from minidl.training.run_folder.checkpoints import Checkpoint
from minidl.training.run_folder.manifest import OF_RUN
from minidl.training.run_folder.progress import Progress
from minidl.training.settings.declaration import changed

_AVERAGE = "average"  # in the optimizer's state of a checkpoint


@dataclass(frozen=True)
class Judgement:
    """Validation scores by name, and the deciding one (greater is better) with its standard error `margin`.

    The margin is due to the choice of validation examples: scores that are closer do not differ.
    """

    scores: dict[str, float]
    score: float
    margin: float


@dataclass
class Learner:
    """What the loop trains and how it is judged. `loss(x, y)` is a scalar Tensor.

    `rehearse()` launches what `validate` does, see `rehearsal`; None: as far as that goes without values.
    `begins` are the epochs from which on a step is another one (0 is the first), and `enter(epoch)` readies the model
    for the steps of an epoch; None: in training mode. With an `average` that is what is judged and kept.
    `sizes` are those (height, width) of pictures from an epoch on, for people, where they change. With `parallel` a
    step is taken by shards.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    batches: Batches | ImageBatches
    loss: Callable[[CSR | Tensor, Tensor], Tensor]
    validate: Callable[[], Judgement]
    rehearse: Callable[[], object] | None = None
    begins: Sequence[int] = (0,)
    enter: Callable[[int], None] | None = None
    average: Average | None = None
    sizes: Sequence[tuple[int, tuple[int, int]]] = ()
    parallel: DataParallel | None = None

    def ready(self, epoch: int) -> None:
        """The model as the steps of an epoch have it."""
        if self.enter is None:
            self.model.train()
        else:
            self.enter(epoch)


class Trainer(BaseTrainer):
    """Trains a learner for a number of epochs at most, see `patience` above; the others as `BaseTrainer`."""

    def __init__(
        self,
        learner: Learner,
        folder: Path,
        epochs: int,
        patience: int,
        display: Display,
        state: dict[str, Any],
        hint: str,
        captured: bool = False,
    ) -> None:
        figures = Figures(lambda: learner.optimizer.skipped, "a smaller --lr or --weight-decay")
        super().__init__(folder, epochs, display, state, hint, captured, figures)
        self.learner, self.patience, self.steps = learner, patience, len(learner.batches)
        self.progress = Progress()
        # By the number of inputs: of few examples, some shards may have none.
        self._taken: dict[int, Callable[..., torch.Tensor]] = {}

    @property
    def model(self) -> nn.Module:
        """The model that is trained, or its average; after `run` with its best weights."""
        average = self.learner.average
        return self.learner.model if average is None else average.kept

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self._best()

    def _load(self, checkpoint: Checkpoint, steps: int, parts: list[str]) -> None:
        state, learner = checkpoint.state, self.learner
        parts.append("optimizer")
        optimizer = {name: value for name, value in checkpoint.optimizer.items() if name != _AVERAGE}
        learner.optimizer.load_flat_state(optimizer)
        parts.append("schedule")
        # A schedule has no memory but the number of steps.
        schedule = {**learner.schedule.state_dict(), "step": steps}
        if state["schedule"] != schedule:
            raise ValueError(f"it is {state['schedule']!r}, expected {schedule!r}")
        learner.schedule.load_state_dict(schedule)
        weights.load(learner.model, checkpoint.weights, checkpoint.tensors)
        self._load_average(checkpoint)

    def _load_average(self, checkpoint: Checkpoint) -> None:
        if self.learner.average is not None:
            self.learner.average.load(checkpoint.optimizer[_AVERAGE], checkpoint.tensors)

    def run(self) -> Progress:
        """As `BaseTrainer.run`; then the best weights are put into the model.

        Raises DamagedError when the best state is missing.
        """
        super().run()
        best = self._best() if self.group.leads else None
        if best is not None:
            weights.load(self.learner.model, best.weights, best.tensors)
            self._load_average(best)
        return self.progress

    def attempt(self, size: int) -> None:
        """As `BaseTrainer.attempt`; the weights are useless afterwards."""
        batches = copy.copy(self.learner.batches)
        batches.batch_size = size
        self._figures.pending.clear()
        # The last epoch has the largest step.
        self.learner.ready(self.epochs - 1)
        self._step(*next(self._inputs(batches, self.epochs - 1, 0)))

    def rehearse(self) -> None:
        learner = self.learner
        for epoch in learner.begins:
            if epoch < self.epochs:
                learner.ready(epoch)
                for place in sorted({0, self.steps - 1}):
                    rehearsal.rehearse(self._new_step(), *next(self._inputs(learner.batches, epoch, place)))
        learner.model.eval()
        rehearsal.rehearse(learner.rehearse or learner.validate)

    def _best(self) -> Checkpoint | None:
        """The state of the best epoch, None before there is one. Raises DamagedError when it is of another epoch."""
        best, of = self.checkpoints.best(), self.progress.best_epoch
        if best is None:
            if of == 0:
                return None
            path = self.checkpoints.folder / "best.json"
            raise damaged(path, f"it is missing, and epoch {of} is the best of the run")
        try:
            epoch = Progress.from_saved(best.state.get("progress")).epoch
        except ValueError as error:
            raise damaged(best.path, error) from None
        own = self.state.get(OF_RUN)
        if epoch != of or best.state.get(OF_RUN, own) != own or changed(best.state.get("config"), self.state["config"]):
            raise damaged(best.path, f"it is of epoch {epoch}, or of another run; the best is epoch {of}")
        return best

    @property
    def examples(self) -> int:
        return len(self.learner.batches.targets)

    @property
    def finished(self) -> bool:
        return self.progress.finished

    def _train(self, interrupts: Interrupts) -> None:
        try:
            super()._train(interrupts)
        finally:
            self._taken.clear()  # and the memory of the graphs with them

    def _new_step(self) -> Callable[..., torch.Tensor]:
        return capture(self._step, shapes=2) if self.captured else self._step

    def _epoch(self, interrupts: Interrupts) -> bool:
        best, progress = super()._epoch(interrupts), self.progress
        if progress.epoch == self.epochs:
            progress.finished = True
        elif self.patience and progress.epoch - progress.best_epoch >= self.patience:
            progress.finished = True
            self.display.note(
                "stopping early: the validation score was more than one standard error below the best for "
                f"{self.patience} epochs in a row"
            )
        return best

    def _step(self, *inputs: Any) -> torch.Tensor:
        """Train on a batch, as `_inputs` gives it; the loss."""
        learner, scale = self.learner, self.learner.optimizer.loss_scale
        if learner.parallel is None:
            learner.optimizer.zero_grad()
            loss = learner.loss(*inputs)
            loss.backward(scale)
        else:
            size, *flat = inputs
            works = [functools.partial(learner.loss, *flat[i : i + 2]) for i in range(0, len(flat), 2)]
            loss = learner.parallel.step(size.shape[1], works, scale)[0]
        learner.optimizer.step()
        if learner.average is not None:
            learner.average.update()
        return loss.data

    def _steps(self) -> Iterator[torch.Tensor]:
        progress, learner = self.progress, self.learner
        if progress.epoch in learner.begins:
            self._taken.clear()  # before others are made
        learner.ready(progress.epoch)
        for inputs in self._inputs(learner.batches, progress.epoch, progress.step):
            if learner.average is not None:
                learner.average.prepare(progress.steps + 1)
            if len(inputs) not in self._taken:
                self._taken[len(inputs)] = self._new_step()
            loss = self._taken[len(inputs)](*inputs)
            learner.schedule.step()
            yield loss

    def _inputs(self, batches: Batches | ImageBatches, epoch: int, step: int) -> Iterator[tuple[Any, ...]]:
        """What the steps of an epoch take: x and y; by shards, those of each, after an empty tensor that is as wide as
        the whole batch has rows: a graph of other rows is another one."""
        parallel = self.learner.parallel
        if parallel is None:
            yield from (_on_device(x, y) for x, y in batches.epoch(epoch, step))
            return
        for rows, parts in batches.sharded(epoch, step, parallel.shards.rows):
            size = torch.empty(0, rows, device=default_device())
            yield size, *(each for x, y in parts for each in _on_device(x, y))

    def _judge(self) -> Outcome:
        """Loss and validation. Raises DivergedError when the validation is not finite."""
        progress, learner = self.progress, self.learner
        learner.model.eval()
        if learner.average is not None:
            learner.average.settle()
        epoch = progress.epoch + 1
        try:
            with out_of_memory.used_for("the validation", "less data or a smaller model"):
                judged = learner.validate()
        except DivergedError:
            raise DivergedError(f"the model's outputs after epoch {epoch} are not finite") from None
        for name, value in (*judged.scores.items(), ("score", judged.score), ("margin", judged.margin)):
            if not math.isfinite(value):
                raise DivergedError(f"the validation {name} after epoch {epoch} is {value}")
        loss = progress.loss_sum / progress.loss_count
        progress.loss_sum, progress.loss_count = 0.0, 0
        # The last of epochs that do not differ: the learning rate has fallen and the weights have settled.
        before = progress.best_score
        progress.best_score = judged.score if before is None else max(before, judged.score)
        best = judged.score >= progress.best_score - judged.margin
        if best:
            progress.best_epoch = epoch
        scores = (
            f"{metrics.TITLES.get(name, name)} {metrics.shown(name, value)}" for name, value in judged.scores.items()
        )
        record = {"loss": loss, "validation": judged.scores, "lr": learner.schedule.lr(progress.steps - 1)}
        begun = [(since, size) for since, size in learner.sizes if since <= progress.epoch]
        if begun:
            record["size"] = list(begun[-1][1])
        grown = "size {} x {}  ".format(*begun[-1][1]) if begun and begun[-1][0] == progress.epoch else ""
        return Outcome(
            record,
            f"{grown}loss {loss:.4f}  validation: {'  '.join(scores)}",
            best,
            star=before is None or judged.score > before,
        )

    def _fetch(self, always: bool) -> str | None:
        # One by one, so that the time of the transfer changes nothing.
        progress = self.progress
        for (value,) in self._figures.fetch(progress, always):
            progress.loss_sum += value
            progress.loss_count += 1
        return f"loss {progress.loss_sum / progress.loss_count:.4f}" if progress.loss_count else None

    def _parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        learner = self.learner
        more = {"schedule": learner.schedule.state_dict()}
        optimizer = learner.optimizer.flat_state()
        if learner.average is not None:
            optimizer[_AVERAGE] = learner.average.state_dict()
        return learner.model.state_dict(), optimizer, more


def _on_device(x: CSR | torch.Tensor, y: torch.Tensor) -> tuple[CSR | Tensor, Tensor]:
    device = default_device()
    return x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)), Tensor(y.to(device))
