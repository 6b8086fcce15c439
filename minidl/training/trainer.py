"""What training loops share: epochs of steps, checkpoints, metrics.jsonl, and stopping after a signal."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minidl import nn, random
from minidl.training import files
from minidl.training.checkpoints import FOLDER, Checkpoint, Checkpoints
from minidl.training.display import Display
from minidl.training.errors import Interrupted
from minidl.training.figures import Figures
from minidl.training.interrupts import Interrupts
from minidl.training.progress import Place


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

    @abstractmethod
    def _train(self, interrupts: Interrupts) -> None:
        """All epochs that are left."""

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

    def _stepped(self, started: float, interrupts: Interrupts) -> None:
        """After a step of the epoch that `started` then. Raises Interrupted."""
        progress = self.progress
        progress.step += 1
        progress.steps += 1
        self.display.step(progress.step, self._fetch(always=False))
        if interrupts.requested and progress.step < self.steps:
            self._fetch(always=True)
            progress.epoch_seconds = time.monotonic() - started
            self._save()
            raise self._interruption()

    def _ended(self, record: dict[str, Any]) -> None:
        """After an epoch, with its record for metrics.jsonl."""
        progress = self.progress
        progress.epoch += 1
        progress.step = 0
        progress.epoch_seconds = 0.0
        progress.history.append(record)
        files.write_json_lines(self.folder / "metrics.jsonl", progress.history)

    def _save(self, best: bool = False) -> None:
        self.progress.seconds = time.monotonic() - self._started
        weights, optimizer, more = self._parts()
        state = {**self.state, "progress": asdict(self.progress), **more, "generator": random.get_state()}
        self.checkpoints.save(self.progress.steps, weights, optimizer, state, best)

    def _interruption(self) -> Interrupted:
        """The exception to raise after a signal, once everything is saved."""
        self.checkpoints.wait()
        return Interrupted(f"interrupted after {self.progress.place}; everything is saved. To continue:\n  {self.hint}")
