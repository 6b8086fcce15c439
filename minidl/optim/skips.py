"""A warning for the first skipped step, without waiting for the device."""

from __future__ import annotations

import ctypes
import warnings

import torch

from minidl.kernels.update import Update
from minidl.kernels.update.device_list import capturing

# On a GPU the count of skipped steps is fetched after 4 steps (not in the first call of a captured step, whose launches
# wait for their kernels), then after 8, 16, 32 and every 64.
_FIRST, _EACH = 4, 64


class NotFiniteWarning(UserWarning):
    """A step was skipped: a gradient had an infinity or NaN."""


class Skips:
    """The skipped steps of an optimiser's update, as far as the host knows; `reported` of them need no warning."""

    def __init__(self, of: Update) -> None:
        self._of, self._calls, self.reported = of, 0, 0
        on_gpu = of.device.type == "cuda"
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=True) if on_gpu else of.skipped

    def warn(self, name: str) -> bool:
        """Warn about steps not yet reported, and return whether there were any. On a GPU the count may be steps old."""
        if ctypes.c_int64.from_address(self._seen.data_ptr()).value > self.reported:
            warnings.warn(
                f"{name}: a step was skipped because its gradient has NaN or infinity. Weights and state "
                "are unchanged; `skipped` counts such steps without warning. skip_nonfinite=False updates anyway",
                NotFiniteWarning,
                stacklevel=4,
            )
            return True
        if self._seen is not self._of.skipped:
            self._calls += 1
            due = self._calls % _EACH == 0 or (_FIRST <= self._calls < _EACH and self._calls.bit_count() == 1)
            if due and not capturing(self._of.device):
                self._seen.copy_(self._of.skipped, non_blocking=True)
        return False
