"""The training loop of a GAN: the seed decides everything, so a continued run repeats the uninterrupted one.

There is no best epoch: losses of a GAN do not say how good the pictures are, and the moving average of the last is
kept. Nothing in a step waits for the device; figures stay there and are fetched together from time to time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from minidl import random
from minidl.data.image_batches import ImageBatches
from minidl.tensor import Tensor
from minidl.training import files, samples, weights
from minidl.training.adversaries import Adversaries
from minidl.training.checkpoints import FOLDER, Checkpoint, Checkpoints
from minidl.training.display import Display
from minidl.training.errors import DivergedError, Interrupted, damaged
from minidl.training.interrupts import Interrupts
from minidl.training.progress import is_count, is_number, place, require

FIGURES = ("loss_d", "loss_g", "d_real", "d_fake")
TITLES = {"loss_d": "loss D", "loss_g": "loss G", "d_real": "D(x)", "d_fake": "D(G(z))"}
REMEDY = "a smaller --lr"
MOST_SKIPPED = 20  # updates in a row that changed nothing because a gradient was not finite
_FETCH_SECONDS = 0.5
_MOST_PENDING = 1000


@dataclass
class GanProgress:
    """Where training stands; plain JSON values. `step` counts within the epoch, `sums` are those of FIGURES in it."""

    epoch: int = 0
    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(FIGURES))
    count: int = 0
    skipped: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> str:
        """What is done, in words."""
        return place(self.epoch, self.step)

    @property
    def means(self) -> dict[str, float]:
        """The means of FIGURES over what was fetched of the epoch under way."""
        return {name: total / self.count for name, total in zip(FIGURES, self.sums, strict=True)}

    @classmethod
    def from_saved(cls, saved: object) -> GanProgress:
        """The progress in a checkpoint. Raises ValueError, naming the part, for values that training cannot have."""
        names = {entry.name for entry in fields(cls)}
        if not isinstance(saved, dict) or saved.keys() != names:
            raise ValueError(f"expected an object of {', '.join(sorted(names))}")
        for name in ("epoch", "step", "steps", "count", "skipped"):
            require(name, saved[name], is_count(saved[name]), "a whole number of at least 0")
        for name in ("seconds", "epoch_seconds"):
            require(name, saved[name], is_number(saved[name]), "a number")
        sums, history = saved["sums"], saved["history"]
        numbers = isinstance(sums, list) and len(sums) == len(FIGURES) and all(map(is_number, sums))
        require("sums", sums, numbers, f"{len(FIGURES)} numbers")
        whole = isinstance(history, list) and len(history) == saved["epoch"]
        require("history", history, whole, f"a list of {saved['epoch']} epochs")
        for i, record in enumerate(history):
            known = isinstance(record, dict) and record.keys() == {"epoch", "steps", *FIGURES, "seconds"}
            good = known and record["epoch"] == i + 1 and all(map(is_number, record.values()))
            require(f"history[{i}]", record, good, f"the record of epoch {i + 1}")
        return cls(**saved)


class GanTrainer:
    """Trains for a number of epochs of `steps` whole batches, keeping checkpoints, metrics.jsonl and samples/.

    `z` are the latents of the grids. `state` is stored with every checkpoint; `hint` is the command that continues.
    """

    def __init__(
        self,
        networks: Adversaries,
        batches: ImageBatches,
        steps: int,
        epochs: int,
        z: Tensor,
        folder: Path,
        display: Display,
        state: dict[str, Any],
        hint: str,
    ) -> None:
        self.networks, self.batches, self.steps, self.epochs, self.z = networks, batches, steps, epochs, z
        self.folder, self.display, self.state, self.hint = folder, display, state, hint
        self.checkpoints = Checkpoints(folder / FOLDER)
        self.progress = GanProgress()
        # Not part of the state: figures on the device that were not looked at yet.
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fetched = self._started = time.monotonic()
        self._skipped_in_a_row = 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. Raises DamagedError when its parts do not fit each other."""
        part = "progress"
        try:
            progress = GanProgress.from_saved(checkpoint.state["progress"])
            part = "weights"
            weights.check(self.networks.weights(), checkpoint.weights, checkpoint.tensors)
            self.networks.restore(checkpoint.weights, checkpoint.optimizer, progress.steps)
            part = "generator"
            random.set_state(checkpoint.state["generator"])
        except KeyError as error:
            raise damaged(checkpoint.path, f"{error} is missing") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged(checkpoint.path, f"{part}: {error}") from None
        steps = progress.epoch * self.steps + progress.step
        if progress.epoch > self.epochs or progress.step >= self.steps or progress.steps != steps:
            where = f"epoch {progress.epoch}, step {progress.step} and {progress.steps} steps in all"
            raise damaged(checkpoint.path, f"{where}; an epoch has {self.steps} steps, training {self.epochs}")
        self.progress = progress
        if progress.history:
            # Whatever has become of it: a run whose epochs are all done would not write it again.
            files.write_json_lines(self.folder / "metrics.jsonl", progress.history)

    def run(self) -> GanProgress:
        """Train to the end.

        Raises Interrupted after Ctrl-C or SIGTERM, with everything saved; DivergedError when figures or gradients stay
        not finite.
        """
        try:
            with Interrupts() as interrupts, self.display:
                self._started = time.monotonic() - self.progress.seconds
                while self.progress.epoch < self.epochs:
                    self._epoch(lambda: interrupts.requested)
                    self._save()
                    if interrupts.requested:
                        raise self._interruption()
        finally:
            self.checkpoints.wait()
        return self.progress

    def _epoch(self, requested: Callable[[], bool]) -> None:
        progress = self.progress
        started = time.monotonic() - progress.epoch_seconds
        self.display.begin(progress.epoch + 1, self.epochs, progress.step, self.steps)
        for x, _ in self.batches.epoch(progress.epoch, progress.step):
            if progress.step == self.steps:
                break  # what is left over of the pictures is no whole batch; another epoch's order brings them
            self._pending.append(self.networks.step(Tensor(x)))
            progress.step += 1
            progress.steps += 1
            self._fetch(always=False)
            self.display.step(progress.step, shown(progress.means, "  ") if progress.count else None)
            if progress.step < self.steps and requested():
                self._fetch(always=True)
                progress.epoch_seconds = time.monotonic() - started
                self._save()
                raise self._interruption()
        self._fetch(always=True)
        if not progress.count:
            raise DivergedError(f"no loss of epoch {progress.epoch + 1} is finite", REMEDY)
        generator = self.networks.statistics()
        pixels = samples.draw(generator, self.z)
        samples.write_grid(samples.folder(self.folder) / samples.name(progress.epoch + 1), pixels)
        seconds = time.monotonic() - started
        record = {
            "epoch": progress.epoch + 1,
            "steps": progress.steps,
            **progress.means,
            "seconds": round(seconds, 3),
        }
        progress.epoch += 1
        progress.step = progress.count = 0
        progress.epoch_seconds = 0.0
        progress.sums = [0.0] * len(FIGURES)
        progress.history.append(record)
        files.write_json_lines(self.folder / "metrics.jsonl", progress.history)
        number = f"{progress.epoch:>{len(str(self.epochs))}}/{self.epochs}"
        self.display.note(f"epoch {number}  {shown(record, '  ')}  {seconds:.1f} s")

    def _fetch(self, always: bool) -> None:
        """Add the figures that wait on the device to the sums, one by one in order: one transfer, at most twice a
        second."""
        late = time.monotonic() - self._fetched > _FETCH_SECONDS or len(self._pending) >= _MOST_PENDING
        if not (always or late) or not self._pending:
            return
        progress = self.progress
        for half, opposed, real, made in torch.stack([torch.cat(pair) for pair in self._pending]).tolist():
            values = (2.0 * half, opposed, real, made)
            if all(map(math.isfinite, values)):
                progress.sums = [total + value for total, value in zip(progress.sums, values, strict=True)]
                progress.count += 1
        skipped = self.networks.skipped
        every = skipped - progress.skipped >= len(self._pending)
        self._skipped_in_a_row = self._skipped_in_a_row + len(self._pending) if every else 0
        progress.skipped = skipped
        self._pending.clear()
        self._fetched = time.monotonic()
        if self._skipped_in_a_row >= MOST_SKIPPED:
            where = f"epoch {progress.epoch + 1}, step {progress.step}"
            raise DivergedError(
                f"gradients were not finite in {self._skipped_in_a_row} steps in a row ({where})", REMEDY
            )

    def _save(self) -> None:
        self.progress.seconds = time.monotonic() - self._started
        state = {**self.state, "progress": asdict(self.progress), "generator": random.get_state()}
        self.checkpoints.save(
            self.progress.steps, self.networks.weights(), self.networks.optimizers(), state, best=False
        )

    def _interruption(self) -> Interrupted:
        """What to raise after a signal, once everything is saved."""
        self.checkpoints.wait()
        return Interrupted(f"interrupted after {self.progress.place}; everything is saved. To continue:\n  {self.hint}")


def shown(figures: dict[str, Any], between: str) -> str:
    """The four figures for people."""
    return between.join(f"{TITLES[name]} {figures[name]:.3f}" for name in FIGURES)
