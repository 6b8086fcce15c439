"""The stages of a training on pictures: which layers learn, and the size of the training pictures."""

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
_GROWING = 0.75  # share of the epochs with smaller pictures


@dataclass(frozen=True)
class Stages:
    """The stages of a training: all layers but the last are frozen before the epoch `unfrozen`.

    `sizes` are pairs of an epoch and the size (height, width) of training pictures from that epoch on.
    """

    unfrozen: int = 0
    sizes: tuple[tuple[int, Size], ...] = ()

    @classmethod
    def from_settings(cls, config: TrainImages, size: Size) -> Stages:
        """Return the stages for pictures of this size. Raises ConfigError for a first size that is not smaller."""
        unfrozen = config.epochs if config.unfreeze is None else config.unfreeze
        return cls(unfrozen if config.freeze else 0, _growing(config, size))

    @property
    def smallest(self) -> Size | None:
        """Return the size of the first epochs; None: the size of the pictures."""
        return self.sizes[0][1] if self.sizes else None

    @property
    def description(self) -> str | None:
        """Return the sizes of the training pictures for display; None if they do not change."""
        if not self.sizes:
            return None
        (_, (height, width)), *others = self.sizes
        growth = "".join(f", {h} x {w} from epoch {epoch + 1}" for epoch, (h, w) in others)
        return f"size of training pictures: {height} x {width}{growth or ' throughout: one epoch cannot grow them'}"

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first epoch of each stage; the first is 0."""
        return tuple(sorted({0, self.unfrozen, *(epoch for epoch, _ in self.sizes)}))

    def enter(self, model: nn.Module, epoch: int) -> None:
        """Prepare the model for the steps of an epoch. Frozen layers use their running statistics unchanged."""
        from minidl import nn

        frozen = epoch < self.unfrozen
        model.train().requires_grad_(not frozen)
        if frozen:
            last_layer(model)[1].requires_grad_(True)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
                    module.eval()


def _growing(config: TrainImages, size: Size) -> tuple[tuple[int, Size], ...]:
    """Return the sizes from the side that --progressive names to the full size, in equal steps."""
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
    sizes: dict[int, Size] = {}  # of two sizes that start in the same epoch, the larger
    for step in range(_SIZES):
        share = step / (_SIZES - 1)
        side = round(config.progressive + share * (shorter - config.progressive))
        height, width = round(size[0] * side / shorter), round(size[1] * side / shorter)
        sizes[int(_GROWING * config.epochs * share)] = height, width
    return tuple(sorted(sizes.items()))
