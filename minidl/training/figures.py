"""Losses and other figures of training steps: they stay on the device and are fetched in groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from minidl.training.errors import DivergedError
from minidl.training.progress import Place

MOST_SKIPPED = 20  # consecutive skipped updates: the weights are intact, but nothing is learnt
_FETCH_SECONDS = 0.5
_MOST_PENDING = 1000


class Figures:
    """`skipped()` counts updates skipped for a gradient with NaN or infinity; `remedy` names the flags to change."""

    def __init__(self, skipped: Callable[[], int], remedy: str) -> None:
        self._skipped, self.remedy = skipped, remedy
        self._pending: list[torch.Tensor] = []
        self._fetched = time.monotonic()
        self._skipped_in_a_row = 0

    def add(self, values: torch.Tensor) -> None:
        """Add the figures of one step, on the device."""
        self._pending.append(values)

    def clear(self) -> None:
        """Drop figures that were not fetched."""
        self._pending.clear()

    def fetch(self, progress: Place, always: bool) -> list[list[float]]:
        """The finite figures of each step, in order, in one transfer that also updates `progress.skipped`.

        Empty within half a second of the last transfer, unless `always`. Raises DivergedError after many consecutive
        steps with gradients that are not finite.
        """
        late = time.monotonic() - self._fetched > _FETCH_SECONDS or len(self._pending) >= _MOST_PENDING
        if not (always or late) or not self._pending:
            return []
        found = torch.stack(self._pending).reshape(len(self._pending), -1).tolist()
        skipped = self._skipped()
        every = skipped - progress.skipped >= len(self._pending)
        self._skipped_in_a_row = self._skipped_in_a_row + len(self._pending) if every else 0
        progress.skipped = skipped
        self._pending.clear()
        self._fetched = time.monotonic()
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise DivergedError(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row (epoch {progress.epoch + 1}, "
                f"step {progress.step})",
                self.remedy,
            )
        return [values for values in found if all(map(math.isfinite, values))]
