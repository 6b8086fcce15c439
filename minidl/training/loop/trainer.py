"""The base of training loops: epochs of steps, checkpoints, metrics.jsonl, and stopping after a signal."""

from __future__ import annotations

import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from minidl import nn, random
from minidl.distributed.group import current
from minidl.errors import DivergedError, Interrupted, damaged
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.training.process.display import Display
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import FOLDER, Checkpoint, Checkpoints
from minidl.training.run_folder.progress import Position, restoring

MOST_SKIPPED = 20  # consecutive skipped updates, after which training stops
_FETCH_SECONDS = 0.5
_MOST_PENDING = 1000
_STOP_INTERVAL = 16  # steps between two exchanges of stop requests of several processes with GPUs
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handle Ctrl-C and SIGTERM: the first signal sets `requested`; the second raises KeyboardInterrupt.

    Has no effect outside the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Figures:
    """Losses and other figures of training steps: they stay on the device and are fetched in groups.

    `pending` has the figures that are still on the device. `skipped()` returns the number of updates skipped for a
    gradient with NaN or infinity; `remedy` names the flags to change.
    """

    def __init__(self, skipped: Callable[[], int], remedy: str) -> None:
        self._skipped, self.remedy = skipped, remedy
        self.pending: list[torch.Tensor] = []
        self._fetched = time.monotonic()
        self._skipped_in_a_row = 0

    def fetch(self, progress: Position, always: bool) -> list[list[float]]:
        """Return the finite figures of each step, in order, and update `progress.skipped`, in one transfer.

        Returns [] within half a second of the last transfer, unless `always`. Raises DivergedError after many
        consecutive steps with gradients that are not finite.
        """
        is_due = time.monotonic() - self._fetched > _FETCH_SECONDS or len(self.pending) >= _MOST_PENDING
        if not (always or is_due) or not self.pending:
            return []
        figures = torch.stack(self.pending).reshape(len(self.pending), -1).tolist()
        skipped = self._skipped()
        all_skipped = skipped - progress.skipped >= len(self.pending)
        self._skipped_in_a_row = self._skipped_in_a_row + len(self.pending) if all_skipped else 0
        progress.skipped = skipped
        self.pending.clear()
        self._fetched = time.monotonic()
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise DivergedError(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row (epoch {progress.epoch + 1}, "
                f"step {progress.step})",
                self.remedy,
            )
        return [values for values in figures if all(map(math.isfinite, values))]


@dataclass(frozen=True)
class Outcome:
    """The result of an epoch: its entries in metrics.jsonl, a text for display, and whether it is the `best` state to
    save. `star` marks a record score."""

    record: dict[str, Any]
    text: str
    best: bool = False
    star: bool = False


class BaseTrainer(ABC):
    """Train for a number of epochs of `steps` steps; write `folder`/checkpoints and `folder`/metrics.jsonl.

    `state` is stored with every checkpoint (settings and versions); `hint` is the command that continues the run.
    With `captured` a step on a GPU is one CUDA graph.
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
        self.group = current()
        self._figures = figures
        self._started = time.monotonic()
        self._totals = 0, 0.0, 0.0  # steps of this process, their seconds, and the seconds of their exchanges

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """Return the network that the run saves."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises DamagedError when its parts do not fit each other or the networks."""
        path, state = checkpoint.path, checkpoint.state
        with restoring(path) as parts:
            progress = type(self.progress).from_saved(state["progress"])
            self._load(checkpoint, progress.steps, parts)
            parts.append("generator")
            random.set_state(state["generator"])
        expected = progress.epoch * self.steps + progress.step
        if progress.epoch > self.epochs or progress.step >= self.steps or progress.steps != expected:
            position = f"epoch {progress.epoch}, step {progress.step} and {progress.steps} in all"
            raise damaged(path, f"{position}; an epoch has {self.steps} steps, training {self.epochs}")
        self.progress = progress
        if progress.history:
            # The file may be damaged, and a run without remaining epochs would not rewrite it.
            files.write_json_lines(self.folder / "metrics.jsonl", progress.history)

    @abstractmethod
    def _load(self, checkpoint: Checkpoint, steps: int, parts: list[str]) -> None:
        """Load the weights and optimizers of step `steps`; append the name of each part to `parts` before loading."""

    @abstractmethod
    def attempt(self, size: int) -> None:
        """Take a step with another batch size, to see whether memory suffices. May make the weights useless."""

    @abstractmethod
    def rehearse(self) -> None:
        """Rehearse every kind of launch of the training. Makes the trainer useless."""

    def run(self) -> Position:
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
        progress: Position = self.progress
        return progress

    @property
    def finished(self) -> bool:
        """Return whether no epoch remains."""
        return bool(self.progress.epoch == self.epochs)

    @property
    @abstractmethod
    def examples(self) -> int:
        """Return the number of examples in an epoch."""

    def throughput(self) -> dict[str, Any]:
        """Return the examples per second of this process, and the share of its time spent waiting for others."""
        steps, seconds, waited = self._totals
        if not steps:
            return {}
        # On a GPU the host does not wait: the exchange is part of the step's graph.
        share = None if launch.is_gpu(default_device()) else round(waited / seconds, 4)
        return {
            "examples_per_second": round(steps / self.steps * self.examples / seconds, 1), "communication": share
        }  # fmt: skip

    @abstractmethod
    def _steps(self) -> Iterator[torch.Tensor]:
        """Take the remaining steps of an epoch; yield the figures of each, on the device."""

    @abstractmethod
    def _end_epoch(self) -> Outcome:
        """Validate after the last step of an epoch. Raises DivergedError."""

    @abstractmethod
    def _fetch(self, always: bool) -> str | None:
        """Add the figures on the device to the progress, see `Figures`; return the epoch's as text, None if none."""

    @abstractmethod
    def _parts(self) -> tuple[Mapping[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        """Return (weights, optimizer, more), the states for a checkpoint; the last are JSON values."""

    def _train(self, interrupts: Interrupts) -> None:
        """Train for the remaining epochs. Raises Interrupted."""
        while not self.finished:
            best = self._epoch(interrupts)
            self._save(best)
            if self._should_stop(interrupts):
                raise self._interruption()

    def _epoch(self, interrupts: Interrupts) -> bool:
        """Take the remaining steps of an epoch and write its line in metrics.jsonl; return whether it is the best."""
        progress = self.progress
        resumed = time.monotonic()
        started = resumed - progress.epoch_seconds
        first, waited = progress.step, self.group.waited
        self.display.begin(progress.epoch + 1, self.epochs, progress.step, self.steps)
        for figures in self._steps():
            self._figures.pending.append(figures)
            progress.step += 1
            progress.steps += 1
            with self.group.waiting(f"step {progress.steps}"):  # a captured step includes its exchanges
                fetched = self._fetch(always=False)
            self.display.step(progress.step, fetched)
            may_stop = self.group.size == 1 or not self.captured or progress.step % _STOP_INTERVAL == 0
            if may_stop and self._should_stop(interrupts) and progress.step < self.steps:
                with self.group.waiting("the last step"):
                    self._fetch(always=True)
                progress.epoch_seconds = time.monotonic() - started
                self._save()
                raise self._interruption()
        with self.group.waiting(f"the end of epoch {progress.epoch + 1}"):
            fetched = self._fetch(always=True)
        if fetched is None:
            raise DivergedError(f"no loss in epoch {progress.epoch + 1} is finite", self._figures.remedy)
        steps, seconds, waiting = self._totals
        seconds += time.monotonic() - resumed
        self._totals = steps + progress.step - first, seconds, waiting + (self.group.waited - waited)
        if not self.group.leads:
            saved, state = self.group.from_leader(None, "the end of an epoch")
            self.progress = type(progress).from_saved(saved)
            random.set_state(state)
            return False
        outcome = self._end_epoch()
        seconds = round(time.monotonic() - started, 3)
        progress.epoch += 1
        progress.step = 0
        progress.epoch_seconds = 0.0
        progress.history.append(
            {"epoch": progress.epoch, "steps": progress.steps, **outcome.record, "seconds": seconds}
        )  # fmt: skip
        files.write_json_lines(self.folder / "metrics.jsonl", progress.history)
        self.display.epoch(progress.epoch, self.epochs, outcome.text, seconds, outcome.star)
        self.group.from_leader([asdict(progress), random.get_state()], "the end of an epoch")
        return outcome.best

    def _should_stop(self, interrupts: Interrupts) -> bool:
        """Return whether this process or another received a signal: all stop after the same step."""
        return any(self.group.gathered(interrupts.requested, f"step {self.progress.steps}"))

    def _save(self, best: bool = False) -> None:
        weights, optimizer, more = self._parts()  # on all processes: a sharded state is gathered
        if not self.group.leads:
            return
        self.progress.seconds = time.monotonic() - self._started
        state = {**self.state, "progress": asdict(self.progress), **more, "generator": random.get_state()}
        self.checkpoints.save(self.progress.steps, weights, optimizer, state, best)

    def _interruption(self) -> Interrupted:
        """Wait for the checkpoint; return the exception to raise after a signal."""
        self.checkpoints.wait()
        return Interrupted(f"interrupted after {self.progress.text}; everything is saved. To continue:\n  {self.hint}")
