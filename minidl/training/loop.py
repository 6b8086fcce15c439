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
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minidl import nn, random
from minidl.captured import capture
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.optim import Optimizer, Schedule
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.training import memory, weights
from minidl.training.checkpoints import Checkpoint
from minidl.training.display import Display
from minidl.training.errors import DivergedError, damaged
from minidl.training.figures import Figures
from minidl.training.interrupts import Interrupts
from minidl.training.progress import Progress, restoring
from minidl.training.settings import changed
from minidl.training.trainer import BaseTrainer


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
    """What the loop trains and how it is judged. `loss(x, y)` is a scalar Tensor."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    batches: Batches | ImageBatches
    loss: Callable[[CSR | Tensor, Tensor], Tensor]
    validate: Callable[[], Judgement]


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

    @property
    def model(self) -> nn.Module:
        """The model that is trained, after `run` with its best weights."""
        return self.learner.model

    def restore(self, checkpoint: Checkpoint) -> None:
        state, learner = checkpoint.state, self.learner
        with restoring(checkpoint.path) as parts:
            progress = Progress.from_saved(state["progress"])
            parts.append("optimizer")
            learner.optimizer.load_state_dict(checkpoint.optimizer)
            parts.append("schedule")
            # A schedule has no memory but the number of steps.
            schedule = {**learner.schedule.state_dict(), "step": progress.steps}
            if state["schedule"] != schedule:
                raise ValueError(f"it is {state['schedule']!r}, expected {schedule!r}")
            learner.schedule.load_state_dict(schedule)
            parts.append("generator")
            random.set_state(state["generator"])
        weights.load(learner.model, checkpoint.weights, checkpoint.tensors)
        self._go_on(progress, checkpoint)
        self._best()

    def run(self) -> Progress:
        """As `BaseTrainer.run`; then the best weights are put into the model.

        Raises DamagedError when the best state is missing.
        """
        super().run()
        best = self._best()
        if best is not None:
            weights.load(self.learner.model, best.weights, best.tensors)
        return self.progress

    def attempt(self, size: int) -> None:
        """As `BaseTrainer.attempt`; the weights are useless afterwards."""
        batches = copy.copy(self.learner.batches)
        batches.batch_size = size
        self._figures.clear()
        self.learner.model.train()
        x, y = next(iter(batches.epoch(0)))
        device = default_device()
        self._step(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)), Tensor(y.to(device)))

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
        if epoch != of or changed(best.state.get("config"), self.state["config"]):
            raise damaged(best.path, f"it is of epoch {epoch}, or of other settings; the best is epoch {of}")
        return best

    def _train(self, interrupts: Interrupts) -> None:
        progress = self.progress
        # Local to this call, so that the memory of the graphs is freed with it.
        step = capture(self._step, shapes=2) if self.captured else self._step
        while not progress.finished:
            self._epoch(step, interrupts)
            if progress.epoch == self.epochs:
                progress.finished = True
            elif self.patience and progress.epoch - progress.best_epoch >= self.patience:
                progress.finished = True
                self.display.note(
                    f"{self.patience} epochs in a row more than one standard error below the best validation score: "
                    "stopping early"
                )
            self._save(best=progress.best_epoch == progress.epoch)
            if interrupts.requested:
                raise self._interruption()

    def _step(self, x: CSR | Tensor, y: Tensor) -> torch.Tensor:
        """Train on a batch; the loss."""
        learner = self.learner
        learner.optimizer.zero_grad()
        loss = learner.loss(x, y)
        loss.backward(learner.optimizer.loss_scale)
        learner.optimizer.step()
        return loss.data

    def _epoch(self, step: Callable[[CSR | Tensor, Tensor], torch.Tensor], interrupts: Interrupts) -> None:
        progress, learner = self.progress, self.learner
        device = default_device()
        started = time.monotonic() - progress.epoch_seconds
        self.display.begin(progress.epoch + 1, self.epochs, progress.step, self.steps)
        learner.model.train()
        for x, y in learner.batches.epoch(progress.epoch, progress.step):
            features = x.to(device) if isinstance(x, CSR) else Tensor(x.to(device))
            self._figures.add(step(features, Tensor(y.to(device))))
            learner.schedule.step()
            self._stepped(started, interrupts)
        self._fetch(always=True)
        learner.model.eval()
        judged = self._judge()
        record = {
            "epoch": progress.epoch + 1,
            "steps": progress.steps,
            "loss": progress.loss_sum / progress.loss_count,
            "validation": judged.scores,
            "lr": learner.schedule.lr(progress.steps - 1),
            "seconds": round(time.monotonic() - started, 3),
        }
        progress.loss_sum, progress.loss_count = 0.0, 0
        # The last of epochs that do not differ: the learning rate has fallen and the weights have settled.
        before = progress.best_score
        progress.best_score = judged.score if before is None else max(before, judged.score)
        if judged.score >= progress.best_score - judged.margin:
            progress.best_epoch = progress.epoch + 1
        self._ended(record)
        self.display.epoch(progress.epoch, self.epochs, record, before is None or judged.score > before)

    def _judge(self) -> Judgement:
        """Validation after an epoch. Raises DivergedError when it, or every loss of the epoch, is not finite."""
        epoch = self.progress.epoch + 1
        if not self.progress.loss_count:
            raise DivergedError(f"no loss in epoch {epoch} is finite")
        try:
            # Its memory does not depend on the batch size.
            judged = memory.guarded(self.learner.validate, 1, None)
        except DivergedError:
            raise DivergedError(f"the model's outputs after epoch {epoch} are not finite") from None
        for name, value in (*judged.scores.items(), ("score", judged.score), ("margin", judged.margin)):
            if not math.isfinite(value):
                raise DivergedError(f"the validation {name} after epoch {epoch} is {value}")
        return judged

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
        return learner.model.state_dict(), learner.optimizer.state_dict(), more
