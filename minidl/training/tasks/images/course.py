"""What changes in the course of a training: which layers learn, and the size of its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidl.training.tasks.images.networks import last_layer
from minidl.training.tasks.images.settings import TrainImages

if TYPE_CHECKING:
    from minidl import nn


@dataclass(frozen=True)
class Course:
    """All layers but the last one are frozen before the epoch `unfrozen`."""

    unfrozen: int = 0

    @classmethod
    def of(cls, config: TrainImages) -> Course:
        """That of the settings."""
        if not config.freeze:
            return cls()
        return cls(config.epochs if config.unfreeze is None else config.unfreeze)

    @property
    def begins(self) -> tuple[int, ...]:
        """The epochs from which on a step is another one, the first of them 0."""
        return tuple(sorted({0, self.unfrozen}))

    def enter(self, model: nn.Module, epoch: int) -> None:
        """Ready the model for the steps of an epoch. Frozen layers keep their running statistics, and use them."""
        from minidl import nn

        frozen = epoch < self.unfrozen
        model.train().requires_grad_(not frozen)
        if frozen:
            last_layer(model)[1].requires_grad_(True)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
