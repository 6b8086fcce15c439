"""The training loop: batches in an order that the seed decides, validation after every epoch, the best state kept.

The best epoch is the last whose validation score lies within one standard error of the highest (Breiman et al.,
Classification and Regression Trees, 1984): a few hundred examples tell no finer differences. Training stops early when
no epoch has come that close for `patience` epochs.

Nothing in a step waits for the device: losses stay on it and are fetched together from time to time. On a GPU a step is
one CUDA graph, and another one for the last batch of an epoch where that is smaller: small data has few batches to an
epoch, and one launched from Python would take as long as many others. The state that
goes into a checkpoint is complete, so a run continued from any step repeats the uninterrupted one bit for bit (on
the same device, with the same versions, tile tables and number of threads).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minidl import nn, random
from minidl.captured import capture
from minidl.csr import CSR
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.optim import Optimizer, Schedule
from minidl.tensor import Tensor, default_device
from minidl.training import files, memory, weights
from minidl.training.checkpoints import FOLDER, Checkpoint, Checkpoints
from minidl.training.display import Display
from minidl.training.errors import DivergedError, Interrupted, damaged
from minidl.training.interrupts import Interrupts
from minidl.training.progress import Progress

MOST_SKIPPED = 20  # steps in a row that the optimiser's guard skipped: the weights are whole, but nothing is learnt
_FETCH_SECONDS = 0.5
_MOST_PENDING = 1000


@dataclass(frozen=True)
class Judgement:
    """What validation found: scores by name, and the one that decides (the greater the better) with its standard error.

    An error of `margin` comes from the choice of the validation examples: scores that are closer do not differ.
    """

    scores: dict[str, float]
    score: float
    margin: float


@dataclass
class Task:
    """What the loop trains and how it is judged. `loss(x, y)` is a scalar Tensor."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    batches: Batches | ImageBatches
    loss: Callable[[CSR | Tensor, Tensor], Tensor]
    validate: Callable[[], Judgement]


class Trainer:
    """Trains a task for a number of epochs, keeping checkpoints in `folder`/checkpoints and `folder`/metrics.jsonl.

    `state` is stored with every checkpoint (settings and versions); `hint` is the command that continues the run.
    With `captured` a step on a GPU is one CUDA graph, which no batch may be too different for; the result is the same.
    """

    def __init__(
        self,
        task: Task,
        folder: Path,
        epochs: int,
        patience: int,
        display: Display,
        state: dict[str, Any],
        hint: str,
        captured: bool = False,
    ) -> None:
        self.task = task
        self.folder = folder
        self.checkpoints = Checkpoints(folder / FOLDER)
        self.epochs = epochs
        self.patience = patience
        self.display = display
        self.state = state
        self.hint = hint
        self.captured = captured
        self.progress = Progress()
        # Not part of the state: losses on the device that were not looked at yet.
        self._pending: list[torch.Tensor] = []
        self._fetched = time.monotonic()
        self._started = time.monotonic()
        self._skipped_in_a_row = 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. Raises DamagedError when its parts do not fit the task or each other."""
        state, task = checkpoint.state, self.task
        part = "progress"
        try:
            progress = Progress.from_saved(state["progress"])
            part = "optimizer"
            task.optimizer.load_state_dict(checkpoint.optimizer)
            part = "schedule"
            # A schedule has no memory but the number of steps.
            schedule = {**task.schedule.state_dict(), "step": progress.steps}
            if state["schedule"] != schedule:
                raise ValueError(f"it is {state['schedule']!r}, expected {schedule!r}")
            task.schedule.load_state_dict(schedule)
            part = "generator"
            random.set_state(state["generator"])
        except KeyError as error:
            raise damaged(checkpoint.path, f"{error} is missing") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged(checkpoint.path, f"{part}: {error}") from None
        steps = progress.epoch * len(task.batches) + progress.step
        if progress.epoch > self.epochs or progress.step >= len(task.batches) or progress.steps != steps:
            where = f"epoch {progress.epoch}, step {progress.step} and {progress.steps} steps in all"
            raise damaged(checkpoint.path, f"{where}; an epoch has {len(task.batches)} steps, training {self.epochs}")
        weights.load(task.model, checkpoint.weights, checkpoint.tensors)
        self.progress = progress
        if progress.history:
            # Whatever has become of it: a run whose epochs are all done would not write it again.
            files.write_json_lines(self.folder / "metrics.jsonl", progress.history)
        # A process that was killed between the two files has left the best state of an epoch that is to come.
        self._best(progress.best_epoch, later_than=progress.epoch)

    def run(self) -> Progress:
        """Train to the end, then put the best weights into the model.

        Raises Interrupted after Ctrl-C or SIGTERM, with everything saved; DivergedError when gradients stay not finite
        or validation is not finite; DamagedError when the best state is gone.
        """
        try:
            with Interrupts() as interrupts, self.display:
                if not self.progress.finished:
                    self._started = time.monotonic() - self.progress.seconds
                    self._train(interrupts)
        finally:
            self.checkpoints.wait()
        best = self._best(self.progress.best_epoch)
        if best is not None:
            weights.load(self.task.model, best.weights, best.tensors)
        return self.progress

    def attempt(self, size: int) -> None:
        """A step with a batch of another size, to see whether memory is enough. The weights are then spoilt."""
        batches = copy.copy(self.task.batches)
        batches.batch_size = size
        self._pending.clear()
        self.task.model.train()
        x, y = next(iter(batches.epoch(0)))
        device = default_device()
        self._step(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)), Tensor(y.to(device)))

    def _best(self, of: int, later_than: int | None = None) -> Checkpoint | None:
        """The state of the best epoch, None before there is one.

        Raises DamagedError unless it is that `of` this epoch, or of one `later_than` another.
        """
        best = self.checkpoints.best()
        if best is None:
            if self.progress.best_epoch == 0:
                return None
            path = self.checkpoints.folder / "best.json"
            raise damaged(path, f"it is gone, and epoch {self.progress.best_epoch} is the best of the run")
        try:
            epoch = Progress.from_saved(best.state.get("progress")).epoch
        except ValueError as error:
            raise damaged(best.path, error) from None
        fits = epoch == of or (later_than is not None and epoch > later_than)
        if not fits or best.state.get("config") != self.state["config"]:
            raise damaged(best.path, f"it is of epoch {epoch}, or of other settings; the best is epoch {of}")
        return best

    def _train(self, interrupts: Interrupts) -> None:
        progress = self.progress
        # Of this call alone: with it goes the memory of the graphs.
        step = capture(self._step, shapes=2) if self.captured else self._step
        while not progress.finished:
            self._epoch(step, interrupts)
            if progress.epoch == self.epochs:
                progress.finished = True
            elif self.patience and progress.epoch - progress.best_epoch >= self.patience:
                progress.finished = True
                self.display.note(
                    f"{self.patience} epochs in a row more than one standard error from the best validation score: "
                    "stopping early"
                )
            self._save(best=progress.best_epoch == progress.epoch)
            if interrupts.requested:
                raise self._interruption()

    def _step(self, x: CSR | Tensor, y: Tensor) -> torch.Tensor:
        """Train on a batch; the loss."""
        task = self.task
        task.optimizer.zero_grad()
        loss = task.loss(x, y)
        loss.backward(task.optimizer.loss_scale)
        task.optimizer.step()
        return loss.data

    def _epoch(self, step: Callable[[CSR | Tensor, Tensor], torch.Tensor], interrupts: Interrupts) -> None:
        progress, task = self.progress, self.task
        device = default_device()
        started = time.monotonic() - progress.epoch_seconds
        self.display.begin(progress.epoch + 1, self.epochs, progress.step, len(task.batches))
        task.model.train()
        for x, y in task.batches.epoch(progress.epoch, progress.step):
            features = x.to(device) if isinstance(x, CSR) else Tensor(x.to(device))
            self._pending.append(step(features, Tensor(y.to(device))))
            task.schedule.step()
            progress.step += 1
            progress.steps += 1
            self._fetch_losses(always=False)
            loss_so_far = f"loss {progress.loss_sum / progress.loss_count:.4f}" if progress.loss_count else None
            self.display.step(progress.step, loss_so_far)
            if interrupts.requested and progress.step < len(task.batches):
                self._fetch_losses(always=True)
                progress.epoch_seconds = time.monotonic() - started
                self._save(best=False)
                raise self._interruption()
        self._fetch_losses(always=True)
        task.model.eval()
        judged = self._judge()
        record = {
            "epoch": progress.epoch + 1,
            "steps": progress.steps,
            "loss": progress.loss_sum / progress.loss_count,
            "validation": judged.scores,
            "lr": task.schedule.lr(progress.steps - 1),
            "seconds": round(time.monotonic() - started, 3),
        }
        progress.epoch += 1
        progress.step = 0
        progress.epoch_seconds = progress.loss_sum = 0.0
        progress.loss_count = 0
        progress.history.append(record)
        # Of epochs that do not differ the last: the rate has fallen and the weights have settled.
        before = progress.best_score
        progress.best_score = judged.score if before is None else max(before, judged.score)
        if judged.score >= progress.best_score - judged.margin:
            progress.best_epoch = progress.epoch
        files.write_json_lines(self.folder / "metrics.jsonl", progress.history)
        self.display.epoch(progress.epoch, self.epochs, record, before is None or judged.score > before)

    def _judge(self) -> Judgement:
        """Validation after an epoch. Raises DivergedError when it, or every loss of the epoch, is not finite."""
        epoch = self.progress.epoch + 1
        if not self.progress.loss_count:
            raise DivergedError(f"no loss of epoch {epoch} is finite")
        try:
            # Its memory is no matter of the batch.
            judged = memory.guarded(self.task.validate, 1, None)
        except DivergedError:
            raise DivergedError(f"the model's outputs after epoch {epoch} are not finite") from None
        for name, value in (*judged.scores.items(), ("score", judged.score), ("margin", judged.margin)):
            if not math.isfinite(value):
                raise DivergedError(f"the validation {name} after epoch {epoch} is {value}")
        return judged

    def _fetch_losses(self, always: bool) -> None:
        """Add the losses that wait on the device to the sum: one transfer, at most twice a second.

        They are added one by one in order, so the sum does not depend on when they were fetched.
        """
        late = time.monotonic() - self._fetched > _FETCH_SECONDS or len(self._pending) >= _MOST_PENDING
        if not (always or late) or not self._pending:
            return
        for value in torch.stack(self._pending).tolist():
            if math.isfinite(value):
                self.progress.loss_sum += value
                self.progress.loss_count += 1
        skipped = self.task.optimizer.skipped
        every = skipped - self.progress.skipped == len(self._pending)
        self._skipped_in_a_row = self._skipped_in_a_row + len(self._pending) if every else 0
        self.progress.skipped = skipped
        self._pending.clear()
        self._fetched = time.monotonic()
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise DivergedError(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row (epoch "
                f"{self.progress.epoch + 1}, step {self.progress.step})"
            )

    def _save(self, best: bool) -> None:
        self.progress.seconds = time.monotonic() - self._started
        state = {
            **self.state,
            "progress": asdict(self.progress),
            "schedule": self.task.schedule.state_dict(),
            "generator": random.get_state(),
        }
        optimizer = self.task.optimizer.state_dict()
        self.checkpoints.save(self.progress.steps, self.task.model.state_dict(), optimizer, state, best)

    def _interruption(self) -> Interrupted:
        """What to raise after a signal, once everything is saved."""
        self.checkpoints.wait()
        return Interrupted(f"interrupted after {self.progress.place}; everything is saved. To continue:\n  {self.hint}")
