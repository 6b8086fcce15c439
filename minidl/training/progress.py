"""Where training stands, as the checkpoints keep it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from minidl.training.errors import damaged

P = TypeVar("P", bound="Place")


@dataclass
class Place:
    """Where training stands; plain JSON values. `step` counts within the epoch, `steps` from the beginning."""

    epoch: int = 0
    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    skipped: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The position as text: "epoch 1 and 2 steps"."""
        steps = f"{self.step} step{'' if self.step == 1 else 's'}"
        if not self.epoch:
            return steps
        return f"epoch {self.epoch} and {steps}" if self.step else f"epoch {self.epoch}"

    def check(self) -> None:
        """Raises ValueError, naming the field, for an invalid value of a field that is neither a count nor a number."""

    @staticmethod
    def is_record(record: dict[str, Any]) -> bool:
        """Whether this is a valid record of an epoch, leaving its number aside."""
        raise NotImplementedError

    @classmethod
    def from_saved(cls: type[P], saved: object) -> P:
        """The progress in a checkpoint. Raises ValueError, naming the field, for invalid values."""
        names = {entry.name for entry in fields(cls)}
        if not isinstance(saved, dict) or saved.keys() != names:
            raise ValueError(f"{_shown(saved)} is no object of {', '.join(sorted(names))}")
        for entry in fields(cls):
            value = saved[entry.name]
            if entry.type == "int":
                require(entry.name, value, is_count(value), "a whole number of at least 0")
            if entry.type == "float":
                require(entry.name, value, is_number(value), "a number")
        progress = cls(**saved)
        progress.check()
        epoch, history = saved["epoch"], saved["history"]
        require("history", history, isinstance(history, list) and len(history) == epoch, f"a list of {epoch} epochs")
        for i, record in enumerate(history):
            good = isinstance(record, dict) and record.get("epoch") == i + 1 and cls.is_record(record)
            require(f"history[{i}]", record, good, f"the record of epoch {i + 1}")
        return progress

    def check_steps(self, path: Path, epochs: int, steps: int) -> None:
        """Raises DamagedError for a position outside of `epochs` epochs of `steps` steps."""
        if self.epoch > epochs or self.step >= steps or self.steps != self.epoch * steps + self.step:
            where = f"epoch {self.epoch}, step {self.step} and {self.steps} steps in all"
            raise damaged(path, f"{where}; an epoch has {steps} steps, training {epochs}")


@dataclass
class Progress(Place):
    """Where a training with validation stands."""

    finished: bool = False
    loss_sum: float = 0.0
    loss_count: int = 0
    best_epoch: int = 0
    best_score: float | None = None

    def check(self) -> None:
        """See `Place`."""
        score = self.best_score
        require("finished", self.finished, type(self.finished) is bool, "true or false")
        require("best_score", score, score is None or is_number(score), "a number or null")
        require("best_epoch", self.best_epoch, self.best_epoch <= self.epoch, f"at most {self.epoch}")

    @staticmethod
    def is_record(record: dict[str, Any]) -> bool:
        """Counts, rates, and validation scores by name."""
        if record.keys() != {"epoch", "steps", "loss", "validation", "lr", "seconds"}:
            return False
        scores = record["validation"]
        return (
            is_count(record["steps"])
            and all(is_number(record[name]) for name in ("loss", "lr", "seconds"))
            and isinstance(scores, dict)
            and "loss" in scores
            and all(is_number(value) for value in scores.values())
        )


@contextmanager
def restoring(path: Path) -> Iterator[list[str]]:
    """Turns the errors of loading a checkpoint into DamagedError. Append the name of each part to the list before
    loading it."""
    parts = ["progress"]
    try:
        yield parts
    except KeyError as error:
        raise damaged(path, f"{error} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(path, f"{parts[-1]}: {error}") from None


def require(name: str, value: object, good: bool, expected: str) -> None:
    """Raises ValueError, naming the field of a saved state, unless it is good."""
    if not good:
        raise ValueError(f"{name} is {_shown(value)}, expected {expected}")


def is_count(value: object) -> bool:
    """Whether this is a whole number of at least 0."""
    return type(value) is int and value >= 0


def is_number(value: object) -> bool:
    """Whether this is a number of a JSON text."""
    return type(value) in (int, float)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
