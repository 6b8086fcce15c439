"""What training loops share: epochs of steps, checkpoints, metrics.jsonl, and stopping after a signal."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minidl import nn, random
from minidl.training import files
from minidl.training.checkpoints import FOLDER, Checkpoint, Checkpoints
from minidl.training.display import Display
from minidl.training.errors import DivergedError, Interrupted
from minidl.training.figures import Figures
from minidl.training.interrupts import Interrupts
from minidl.training.progress import Place


@dataclass(frozen=True)
class Judged:
    """An epoch: its entries in metrics.jsonl, the same for people, whether to keep it, and a star for a record."""

    record: dict[str, Any]
    text: str
    best: bool = False
    star: bool = False


class BaseTrainer(ABC):
    """Trains for a number of epochs of `steps` steps; writes `folder`/checkpoints and `folder`/metrics.jsonl.

    `state` is stored with every checkpoint (settings and versions); `hint` is the command that continues the run.
    `captured` tells whether a step on a GPU is one CUDA graph.
    """

    steps: int
    progress: Any

    def __init__(
        self, folder: Path, epochs: int, display: Display, state: dict[str, Any], hint: str, captured: bool,
        figures: Figures,
    ) -> None:  # fmt: skip
        self.folder, self.epochs, self.display = folder, epochs, display
        self.state, self.hint, self.captured = state, hint, captured
        self.checkpoints = Checkpoints(folder / FOLDER)
        self._figures = figures
        self._started = time.monotonic()

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The network that the run keeps."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises DamagedError when its parts do not fit each other or the networks."""

    @abstractmethod
    def attempt(self, size: int) -> None:
        """A step with another batch size, to see whether memory suffices. The weights may be useless afterwards."""

    def run(self) -> Place:
        """Train to the end.

        Raises Interrupted after Ctrl-C or SIGTERM, with everything saved; DivergedError when figures or gradients are
        not finite.
        """
        try:
            with Interrupts() as interrupts, self.display:
                self._started = time.monotonic() - self.progress.seconds
                self._train(interrupts)
        finally:
            self.checkpoints.wait()
        progress: Place = self.progress
        return progress

    @property
    def finished(self) -> bool:
        """Whether no epoch is left."""
        return bool(self.progress.epoch == self.epochs)

    @abstractmethod
    def _steps(self) -> Iterator[torch.Tensor]:
        """Takes the steps left of an epoch; the figures of each, on the device."""

    @abstractmethod
    def _judge(self) -> Judged:
        """The end of an epoch: how it went. Raises DivergedError."""

    @abstractmethod
    def _fetch(self, always: bool) -> str | None:
        """Add the figures on the device to the progress, see `Figures`; the epoch's so far, None if there are none."""

    @abstractmethod
    def _parts(self) -> tuple[Mapping[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        """(weights, optimizer, more): the states for a checkpoint; the last are JSON values."""

    def _go_on(self, progress: Place, checkpoint: Checkpoint) -> None:
        """Take over the progress of a checkpoint. Raises DamagedError for an impossible position."""
        progress.check_steps(checkpoint.path, self.epochs, self.steps)
        self.progress = progress
        if progress.history:
            # The file may be damaged, and a run whose epochs are all done would not rewrite it.
            files.write_json_lines(self.folder / "metrics.jsonl", progress.history)

    def _train(self, interrupts: Interrupts) -> None:
        """All epochs that are left. Raises Interrupted."""
        while not self.finished:
            best = self._epoch(interrupts)
            self._save(best)
            if interrupts.requested:
                raise self._interruption()

    def _epoch(self, interrupts: Interrupts) -> bool:
        """The steps left of an epoch, and its line in metrics.jsonl; whether it is the best so far."""
        progress = self.progress
        started = time.monotonic() - progress.epoch_seconds
        self.display.begin(progress.epoch + 1, self.epochs, progress.step, self.steps)
        for figures in self._steps():
            self._figures.add(figures)
            progress.step += 1
            progress.steps += 1
            self.display.step(progress.step, self._fetch(always=False))
            if interrupts.requested and progress.step < self.steps:
                self._fetch(always=True)
                progress.epoch_seconds = time.monotonic() - started
                self._save()
                raise self._interruption()
        if self._fetch(always=True) is None:
            raise DivergedError(f"no loss in epoch {progress.epoch + 1} is finite", self._figures.remedy)
        judged = self._judge()
        seconds = round(time.monotonic() - started, 3)
        progress.epoch += 1
        progress.step = 0
        progress.epoch_seconds = 0.0
        progress.history.append(
            {"epoch": progress.epoch, "steps": progress.steps, **judged.record, "seconds": seconds}
        )  # fmt: skip
        files.write_json_lines(self.folder / "metrics.jsonl", progress.history)
        self.display.epoch(progress.epoch, self.epochs, judged.text, seconds, judged.star)
        return judged.best

    def _save(self, best: bool = False) -> None:
        self.progress.seconds = time.monotonic() - self._started
        weights, optimizer, more = self._parts()
        state = {**self.state, "progress": asdict(self.progress), **more, "generator": random.get_state()}
        self.checkpoints.save(self.progress.steps, weights, optimizer, state, best)

    def _interruption(self) -> Interrupted:
        """The exception to raise after a signal, once everything is saved."""
        self.checkpoints.wait()
        return Interrupted(f"interrupted after {self.progress.place}; everything is saved. To continue:\n  {self.hint}")
