"""The training loop of a GAN. A resumed run repeats the uninterrupted one.

There is no best epoch: the losses of a GAN do not measure the quality of its pictures, so the run saves the moving
average of the last epoch. No step waits for the device: figures stay there and are fetched in groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from minidl.compilation import rehearsal
from minidl.data.image_batches import ImageBatches
from minidl.data.saved import Count
from minidl.models import Generator
from minidl.tensors import Tensor, default_device
from minidl.training.loop.adversaries import Adversaries
from minidl.training.loop.trainer import BaseTrainer, Figures, Outcome
from minidl.training.process.display import Display
from minidl.training.report import samples
from minidl.training.run_folder import weights
from minidl.training.run_folder.checkpoints import Checkpoint
from minidl.training.run_folder.progress import Position, is_number

FIGURES = ("loss_d", "loss_g", "d_real", "d_fake")
TITLES = {"loss_d": "loss D", "loss_g": "loss G", "d_real": "D(x)", "d_fake": "D(G(z))"}
REMEDY = "a smaller --lr"


@dataclass
class GanProgress(Position):
    """The progress of a training as plain JSON values. `sums` are the sums of FIGURES in the current epoch."""

    sums: Annotated[list[float], Field(min_length=4, max_length=4)] = field(default_factory=lambda: [0.0] * 4)
    count: Count = 0

    @property
    def means(self) -> dict[str, float]:
        """Return the means of FIGURES over the fetched steps of the current epoch."""
        return {name: total / self.count for name, total in zip(FIGURES, self.sums, strict=True)}

    @staticmethod
    def is_record(record: dict[str, Any]) -> bool:
        """Return whether a record has the keys and numbers of an epoch, see `Position`."""
        return record.keys() == {"epoch", "steps", *FIGURES, "seconds"} and all(map(is_number, record.values()))


class GanTrainer(BaseTrainer):
    """Train for a number of epochs of `steps` full batches, and write samples/.

    `z` are the latents of the grids; `BaseTrainer` has the other parameters.
    """

    def __init__(
        self, networks: Adversaries, batches: ImageBatches, steps: int, epochs: int, z: Tensor, folder: Path,
        display: Display, state: dict[str, Any], hint: str,
    ) -> None:  # fmt: skip
        figures = Figures(lambda: networks.skipped, REMEDY)
        super().__init__(folder, epochs, display, state, hint, networks.captured, figures)
        self.networks, self.batches, self.steps, self.z = networks, batches, steps, z
        self.progress = GanProgress()

    @property
    def model(self) -> Generator:
        """Return the moving average; after `run` it has its running statistics."""
        return self.networks.average

    @property
    def examples(self) -> int:
        return self.steps * self.networks.batch_size

    def _load(self, checkpoint: Checkpoint, steps: int, parts: list[str]) -> None:
        parts.append("weights")
        weights.check(self.networks.weights(), checkpoint.weights, checkpoint.tensors)
        self.networks.restore(checkpoint.weights, checkpoint.optimizer, steps)

    def run(self) -> GanProgress:
        """Train as `BaseTrainer.run` does, then write training.gif."""
        super().run()
        if self.group.leads:
            samples.write_film(self.folder, self.progress.epoch)
        return self.progress

    def attempt(self, size: int) -> None:
        """Take a step with new networks; the trained ones do not change."""
        networks = self.networks.with_batch_size(size)
        generator = networks.generator
        networks.step(Tensor(torch.zeros(size, generator.channels, *generator.size, device=default_device())))

    def rehearse(self) -> None:
        networks, generator = self.networks, self.networks.generator
        shape = (generator.channels, *generator.size)
        counts = map(len, networks.shards.rows(networks.batch_size))
        parts = [Tensor(torch.zeros(count, *shape, device=default_device())) for count in counts]
        rehearsal.rehearse(networks.step, *parts)
        rehearsal.rehearse(lambda: samples.draw(networks.calibrate(), self.z))

    def _steps(self) -> Iterator[torch.Tensor]:
        batches = self.batches.sharded(self.progress.epoch, self.progress.step, self.networks.shards.rows)
        # The last pictures do not fill a batch; other epochs use them.
        for _, parts in itertools.islice(batches, self.steps - self.progress.step):
            yield torch.cat(self.networks.step(*(Tensor(x) for x, _ in parts)))

    def _end_epoch(self) -> Outcome:
        """Return the means of the figures; write samples/."""
        progress = self.progress
        pixels = samples.draw(self.networks.calibrate(), self.z)
        samples.write_grid(samples.path(self.folder, progress.epoch + 1), pixels)
        means = progress.means
        progress.sums, progress.count = [0.0] * len(FIGURES), 0
        return Outcome(means, format_figures(means, "  "))

    def _fetch(self, always: bool) -> str | None:
        progress = self.progress
        for half_loss, *others in self._figures.fetch(progress, always):
            values = (2.0 * half_loss, *others)
            progress.sums = [total + value for total, value in zip(progress.sums, values, strict=True)]
            progress.count += 1
        return format_figures(progress.means, "  ") if progress.count else None

    def _parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        return self.networks.weights(), self.networks.optimizers(), {}


def format_figures(figures: dict[str, Any], separator: str) -> str:
    """Return the four figures with their titles."""
    return separator.join(f"{TITLES[name]} {figures[name]:.3f}" for name in FIGURES)
