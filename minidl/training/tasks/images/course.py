"""What changes in the course of a training: which layers learn, and the size of its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidl.errors import ConfigError
from minidl.training.tasks.images.networks import last_layer
from minidl.training.tasks.images.settings import TrainImages

if TYPE_CHECKING:
    from minidl import nn


Size = tuple[int, int]
_SIZES = 4
_GROWING = 0.75  # of the epochs


@dataclass(frozen=True)
class Course:
    """All layers but the last one are frozen before the epoch `unfrozen`. `sizes` are pairs of an epoch and the size
    (height, width) of training pictures from there on; none: their own."""

    unfrozen: int = 0
    sizes: tuple[tuple[int, Size], ...] = ()

    @classmethod
    def of(cls, config: TrainImages, size: Size) -> Course:
        """That of the settings, for pictures of this size. Raises ConfigError for a first size that is no smaller."""
        unfrozen = config.epochs if config.unfreeze is None else config.unfreeze
        return cls(unfrozen if config.freeze else 0, _growing(config, size))

    @property
    def smallest(self) -> Size | None:
        """The size of the first epochs; None: that of the pictures."""
        return self.sizes[0][1] if self.sizes else None

    @property
    def said(self) -> str | None:
        """Which sizes the training pictures have, for people; None where they have their own throughout."""
        if not self.sizes:
            return None
        (_, (height, width)), *later = self.sizes
        grows = "".join(f", {h} x {w} from epoch {epoch + 1}" for epoch, (h, w) in later)
        return f"size of training pictures: {height} x {width}{grows or ' throughout: one epoch cannot grow them'}"

    @property
    def begins(self) -> tuple[int, ...]:
        """The epochs from which on a step is another one, the first of them 0."""
        return tuple(sorted({0, self.unfrozen, *(epoch for epoch, _ in self.sizes)}))

    def enter(self, model: nn.Module, epoch: int) -> None:
        """Ready the model for the steps of an epoch. Frozen layers keep their running statistics, and use them."""
        from minidl import nn

        frozen = epoch < self.unfrozen
        model.train().requires_grad_(not frozen)
        if frozen:
            last_layer(model)[1].requires_grad_(True)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
                    module.eval()


def _growing(config: TrainImages, size: Size) -> tuple[tuple[int, Size], ...]:
    """From the side that --progressive names to the full size, in equal steps."""
    if config.progressive is None:
        return ()
    shorter = min(size)
    if config.model == "ece408":
        raise ConfigError("--progressive requires a network that accepts pictures of any size; ece408 does not")
    if config.progressive >= shorter:
        raise ConfigError(
            f"--progressive {config.progressive} is no smaller than the pictures, {size[0]} x {size[1]}; give less"
        )
    if 4 * config.progressive < shorter:
        raise ConfigError(
            f"--progressive {config.progressive} is less than a quarter of the pictures, {size[0]} x {size[1]}; give "
            "more"
        )
    found: dict[int, Size] = {}
    for step in range(_SIZES):
        share = step / (_SIZES - 1)
        side = round(config.progressive + share * (shorter - config.progressive))
        # Of two sizes that would begin in the same epoch, as there are few, the larger.
        found[int(_GROWING * config.epochs * share)] = (
            round(size[0] * side / shorter),
            round(size[1] * side / shorter),
        )
    return tuple(sorted(found.items()))
