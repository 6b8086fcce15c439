"""The training loop: batches in an order set by the seed, validation after every epoch, the best state saved.

The best epoch is the last whose validation score lies within one standard error of the highest (Breiman et al.,
Classification and Regression Trees, 1984): a few hundred examples show no finer differences. Training stops early after
`patience` epochs in a row outside of that range.

No step waits for the device: losses stay there and are fetched in groups. On a GPU a step is one CUDA graph, with a
second graph for a smaller last batch. A checkpoint holds the complete state, so a run resumed at any step repeats the
uninterrupted one bit for bit (on the same device, with the same versions, tile tables and number of threads).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from minidl import nn
from minidl.compilation import rehearsal
from minidl.compilation.capture import capture
from minidl.errors import DivergedError, damaged
from minidl.training.loop.learner import Learner
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


class Trainer(BaseTrainer):
    """Train a learner for at most `epochs` epochs, see above for `patience`; `BaseTrainer` has the other parameters."""

    def __init__(
        self, learner: Learner, folder: Path, epochs: int, patience: int, display: Display, state: dict[str, Any],
        hint: str, captured: bool = False,
    ) -> None:  # fmt: skip
        figures = Figures(lambda: learner.optimizer.skipped, "a smaller --lr or --weight-decay")
        super().__init__(folder, epochs, display, state, hint, captured, figures)
        self.learner, self.patience, self.steps = learner, patience, len(learner.batches)
        self.progress = Progress()
        # By the number of inputs: in a small batch some shards may be empty.
        self._captured_steps: dict[int, Callable[..., torch.Tensor]] = {}

    @property
    def model(self) -> nn.Module:
        """Return the trained model, or its average; after `run` it has the best weights."""
        average = self.learner.average
        return self.learner.model if average is None else average.averaged

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self._best()

    def _load(self, checkpoint: Checkpoint, steps: int, parts: list[str]) -> None:
        state, learner = checkpoint.state, self.learner
        parts.append("optimizer")
        optimizer = {name: value for name, value in checkpoint.optimizer.items() if name != _AVERAGE}
        learner.optimizer.load_flat_state(optimizer)
        parts.append("schedule")
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
        """Train as `BaseTrainer.run` does, then load the best weights. Raises DamagedError if they are missing."""
        super().run()
        best = self._best() if self.group.leads else None
        if best is not None:
            weights.load(self.learner.model, best.weights, best.tensors)
            self._load_average(best)
        return self.progress

    def attempt(self, size: int) -> None:
        """Take a step as `BaseTrainer.attempt` does; this makes the weights useless."""
        batches = copy.copy(self.learner.batches)
        batches.batch_size = size
        self._figures.pending.clear()
        last = self.epochs - 1  # the epoch whose steps need the most memory
        self.learner.prepare(last)
        self.learner.step(*next(self.learner.inputs(batches, last, 0)))

    def rehearse(self) -> None:
        learner = self.learner
        for epoch in learner.stage_starts:
            if epoch < self.epochs:
                learner.prepare(epoch)
                for step in sorted({0, self.steps - 1}):
                    rehearsal.rehearse(self._new_step(), *next(learner.inputs(learner.batches, epoch, step)))
        learner.model.eval()
        rehearsal.rehearse(learner.rehearse or learner.validate)

    def _best(self) -> Checkpoint | None:
        """Return the state of the best epoch, None before the first. Raises DamagedError for another epoch."""
        best, best_epoch = self.checkpoints.best(), self.progress.best_epoch
        if best is None:
            if best_epoch == 0:
                return None
            path = self.checkpoints.folder / "best.json"
            raise damaged(path, f"it is missing, and epoch {best_epoch} is the best of the run")
        try:
            epoch = Progress.from_saved(best.state.get("progress")).epoch
        except ValueError as error:
            raise damaged(best.path, error) from None
        run, settings = self.state.get(OF_RUN), self.state["config"]
        if epoch != best_epoch or best.state.get(OF_RUN, run) != run or changed(best.state.get("config"), settings):
            raise damaged(best.path, f"it is of epoch {epoch}, or of another run; the best is epoch {best_epoch}")
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
            self._captured_steps.clear()  # frees the memory of their graphs

    def _new_step(self) -> Callable[..., torch.Tensor]:
        return capture(self.learner.step, shapes=2) if self.captured else self.learner.step

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

    def _steps(self) -> Iterator[torch.Tensor]:
        progress, learner = self.progress, self.learner
        if progress.epoch in learner.stage_starts:
            self._captured_steps.clear()
        learner.prepare(progress.epoch)
        for inputs in learner.inputs(learner.batches, progress.epoch, progress.step):
            if learner.average is not None:
                learner.average.prepare(progress.steps + 1)
            if len(inputs) not in self._captured_steps:
                self._captured_steps[len(inputs)] = self._new_step()
            loss = self._captured_steps[len(inputs)](*inputs)
            learner.schedule.step()
            yield loss

    def _end_epoch(self) -> Outcome:
        """Validate; return the loss and the scores. Raises DivergedError when one is not finite."""
        progress, learner = self.progress, self.learner
        learner.model.eval()
        if learner.average is not None:
            learner.average.update_model()
        epoch = progress.epoch + 1
        try:
            with out_of_memory.used_for("the validation", "less data or a smaller model"):
                validation = learner.validate()
        except DivergedError:
            raise DivergedError(f"the model's outputs after epoch {epoch} are not finite") from None
        figures = {**validation.scores, "score": validation.score, "margin": validation.margin}
        for name, value in figures.items():
            if not math.isfinite(value):
                raise DivergedError(f"the validation {name} after epoch {epoch} is {value}")
        loss = progress.loss_sum / progress.loss_count
        progress.loss_sum, progress.loss_count = 0.0, 0
        # Of epochs that do not differ the last is the best: its learning rate is the lowest.
        before = progress.best_score
        progress.best_score = validation.score if before is None else max(before, validation.score)
        best = validation.score >= progress.best_score - validation.margin
        if best:
            progress.best_epoch = epoch
        scores = "  ".join(
            f"{metrics.TITLES.get(name, name)} {metrics.format_score(name, value)}"
            for name, value in validation.scores.items()
        )
        record = {"loss": loss, "validation": validation.scores, "lr": learner.schedule.lr(progress.steps - 1)}
        text = f"loss {loss:.4f}  validation: {scores}"
        sizes = [(start, size) for start, size in learner.sizes if start <= progress.epoch]
        if sizes:
            start, size = sizes[-1]
            record["size"] = list(size)
            text = "size {} x {}  ".format(*size) + text if start == progress.epoch else text
        return Outcome(record, text, best, star=before is None or validation.score > before)

    def _fetch(self, always: bool) -> str | None:
        # Add one by one, so that the sum does not depend on the time of the transfer.
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
