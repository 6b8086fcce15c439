"""Where training stands, as the checkpoints keep it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Progress:
    """Where training stands; plain JSON values. `step` counts within the epoch, `steps` from the beginning."""

    epoch: int = 0
    step: int = 0
    steps: int = 0
    finished: bool = False
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    skipped: int = 0
    best_epoch: int = 0
    best_score: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> str:
        """What is done, in words: "epoch 1 and 2 steps"."""
        return place(self.epoch, self.step)

    @classmethod
    def from_saved(cls, saved: object) -> Progress:
        """The progress in a checkpoint. Raises ValueError, naming the part, for values that training cannot have."""
        names = {entry.name for entry in fields(cls)}
        if not isinstance(saved, dict) or saved.keys() != names:
            raise ValueError(f"{_shown(saved)} is no object of {', '.join(sorted(names))}")
        for name in ("epoch", "step", "steps", "loss_count", "skipped", "best_epoch"):
            require(f"{name}", saved[name], is_count(saved[name]), "a whole number of at least 0")
        for name in ("seconds", "epoch_seconds", "loss_sum"):
            require(f"{name}", saved[name], is_number(saved[name]), "a number")
        require("finished", saved["finished"], type(saved["finished"]) is bool, "true or false")
        score, epoch = saved["best_score"], saved["epoch"]
        require("best_score", score, score is None or is_number(score), "a number or null")
        require("best_epoch", saved["best_epoch"], saved["best_epoch"] <= epoch, f"at most {epoch}")
        history = saved["history"]
        whole = isinstance(history, list) and len(history) == epoch
        require("history", history, whole, f"a list of {epoch} epochs")
        for i, record in enumerate(history):
            require(f"history[{i}]", record, _is_record(record, i + 1), f"the record of epoch {i + 1}")
        return cls(**saved)


def place(epoch: int, step: int) -> str:
    """So many epochs and steps of the next, in words."""
    steps = f"{step} step{'' if step == 1 else 's'}"
    if not epoch:
        return steps
    return f"epoch {epoch} and {steps}" if step else f"epoch {epoch}"


def _is_record(record: object, epoch: int) -> bool:
    """Whether this is what training notes of an epoch: counts, rates, and validation scores by name."""
    if not isinstance(record, dict) or record.keys() != {"epoch", "steps", "loss", "validation", "lr", "seconds"}:
        return False
    scores = record["validation"]
    return (
        record["epoch"] == epoch
        and is_count(record["steps"])
        and all(is_number(record[name]) for name in ("loss", "lr", "seconds"))
        and isinstance(scores, dict)
        and "loss" in scores
        and all(is_number(value) for value in scores.values())
    )


def require(name: str, value: object, good: bool, expected: str) -> None:
    """Raises ValueError, naming the part of a saved state, unless it is good."""
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
