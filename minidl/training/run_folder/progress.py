"""The position of training, as checkpoints store it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from minidl.common.console import cut
from minidl.data.saved import Checked, Count, validate
from minidl.errors import damaged


@dataclass
class Position(Checked):
    """The position of training; plain JSON values. `step` counts within the epoch, `steps` from the beginning."""

    epoch: Count = 0
    step: Count = 0
    steps: Count = 0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    skipped: Count = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The position as text: "epoch 1 and 2 steps"."""
        steps = f"{self.step} step{'' if self.step == 1 else 's'}"
        if not self.epoch:
            return steps
        return f"epoch {self.epoch} and {steps}" if self.step else f"epoch {self.epoch}"

    @classmethod
    def from_saved(cls, saved: object) -> Self:
        """Return the progress in a checkpoint. Raises ValueError, naming the field, for invalid values."""
        progress = validate(cls, saved)
        if len(progress.history) != progress.epoch:
            raise ValueError(f"history is {cut(progress.history, 60)}, expected a list of {progress.epoch} epochs")
        for i, record in enumerate(progress.history):
            if record.get("epoch") != i + 1 or not cls.is_record(record):
                raise ValueError(f"history.{i} is {cut(record, 60)}, expected the record of epoch {i + 1}")
        return progress

    @staticmethod
    def is_record(record: dict[str, Any]) -> bool:
        """Return whether the record of an epoch is valid; its number is not checked."""
        raise NotImplementedError


@dataclass
class Progress(Position):
    """The position of a training with validation."""

    finished: bool = False
    loss_sum: float = 0.0
    loss_count: Count = 0
    best_epoch: Count = 0
    best_score: float | None = None

    def __post_init__(self) -> None:
        if self.best_epoch > self.epoch:
            raise ValueError(f"best_epoch is {self.best_epoch}, expected at most {self.epoch}")

    @staticmethod
    def is_record(record: dict[str, Any]) -> bool:
        """Return whether the record has the counts, rates and validation scores of an epoch."""
        if record.keys() - {"size"} != {"epoch", "steps", "loss", "validation", "lr", "seconds"}:
            return False
        numbers, scores = (record[name] for name in ("steps", "loss", "lr", "seconds")), record["validation"]
        return (
            all(map(is_number, numbers))
            and isinstance(scores, dict)
            and "loss" in scores
            and all(map(is_number, scores.values()))
        )


@contextmanager
def restoring(path: Path) -> Iterator[list[str]]:
    """A context that turns errors of loading a checkpoint into DamagedError; append each part's name before loading
    it."""
    parts = ["progress"]
    try:
        yield parts
    except KeyError as error:
        raise damaged(path, f"{error} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(path, f"{parts[-1]}: {error}") from None


def is_number(value: object) -> bool:
    """Return whether a value parsed from JSON is a number."""
    return type(value) in (int, float)
