"""The training loop of a GAN: the seed decides everything, so a continued run repeats the uninterrupted one.

There is no best epoch: the losses of a GAN do not say how good its pictures are, so the moving average of the last
epoch is kept. No step waits for the device: figures stay there and are fetched in groups.
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
    """Where training stands; plain JSON values. `sums` are those of FIGURES in the epoch under way."""

    sums: Annotated[list[float], Field(min_length=4, max_length=4)] = field(default_factory=lambda: [0.0] * 4)
    count: Count = 0

    @property
    def means(self) -> dict[str, float]:
        """The means of FIGURES over what was fetched of the epoch under way."""
        return {name: total / self.count for name, total in zip(FIGURES, self.sums, strict=True)}

    @staticmethod
    def is_record(record: dict[str, Any]) -> bool:
        """See `Position`."""
        return record.keys() == {"epoch", "steps", *FIGURES, "seconds"} and all(map(is_number, record.values()))


class GanTrainer(BaseTrainer):
    """Trains for a number of epochs of `steps` whole batches, writing samples/ as well.

    `z` are the latents of the grids; the others as `BaseTrainer`.
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
        figures = Figures(lambda: networks.skipped, REMEDY)
        super().__init__(folder, epochs, display, state, hint, networks.captured, figures)
        self.networks, self.batches, self.steps, self.z = networks, batches, steps, z
        self.progress = GanProgress()

    @property
    def model(self) -> Generator:
        """The moving average, after `run` with its running statistics."""
        return self.networks.average

    @property
    def examples(self) -> int:
        return self.steps * self.networks.batch_size

    def _load(self, checkpoint: Checkpoint, steps: int, parts: list[str]) -> None:
        parts.append("weights")
        weights.check(self.networks.weights(), checkpoint.weights, checkpoint.tensors)
        self.networks.restore(checkpoint.weights, checkpoint.optimizer, steps)

    def run(self) -> GanProgress:
        """As `BaseTrainer.run`; then training.gif is written."""
        super().run()
        if self.group.leads:
            samples.write_film(self.folder, self.progress.epoch)
        return self.progress

    def attempt(self, size: int) -> None:
        """A step of other networks; those of the training are left alone."""
        others = self.networks.others(size)
        generator = others.generator
        others.step(Tensor(torch.zeros(size, generator.channels, *generator.size, device=default_device())))

    def rehearse(self) -> None:
        networks, generator = self.networks, self.networks.generator
        shape = (generator.channels, *generator.size)
        rows = map(len, networks.shards.rows(networks.batch_size))
        parts = [Tensor(torch.zeros(each, *shape, device=default_device())) for each in rows]
        rehearsal.rehearse(networks.step, *parts)
        rehearsal.rehearse(lambda: samples.draw(networks.statistics(), self.z))

    def _steps(self) -> Iterator[torch.Tensor]:
        left = self.steps - self.progress.step
        # The remaining pictures fill no batch; they take part in other epochs.
        split = self.networks.shards.rows
        batches = self.batches.sharded(self.progress.epoch, self.progress.step, split)
        for _, parts in itertools.islice(batches, left):
            yield torch.cat(self.networks.step(*(Tensor(x) for x, _ in parts)))

    def _judge(self) -> Outcome:
        """The means of the figures, and samples/."""
        progress = self.progress
        pixels = samples.draw(self.networks.statistics(), self.z)
        samples.write_grid(samples.path(self.folder, progress.epoch + 1), pixels)
        means = progress.means
        progress.sums, progress.count = [0.0] * len(FIGURES), 0
        return Outcome(means, shown(means, "  "))

    def _fetch(self, always: bool) -> str | None:
        progress = self.progress
        for half, *others in self._figures.fetch(progress, always):
            progress.sums = [total + value for total, value in zip(progress.sums, (2.0 * half, *others), strict=True)]
            progress.count += 1
        return shown(progress.means, "  ") if progress.count else None

    def _parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        return self.networks.weights(), self.networks.optimizers(), {}


def shown(figures: dict[str, Any], between: str) -> str:
    """The four figures for people."""
    return between.join(f"{TITLES[name]} {figures[name]:.3f}" for name in FIGURES)
