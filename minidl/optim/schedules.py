"""The learning rates of the trainers: a rate as a function of the number of steps, warm-up included.

torch's schedules are in `optim.lr_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minidl.optim.base import Optimizer


class Schedule:
    """A learning rate as a function of the number of steps: the rate of each group times `factor(step)`.

    Creating one sets the rate of step 0. Call `step()` once after each optimizer step. During the first `warmup` steps
    the rate rises linearly, to the full rate at step warmup - 1. A rate that the user sets lasts until the next step.
    """

    _saved_as: str | None = None  # name in checkpoints, which may be older than the class's name

    def __init__(self, optimizer: Optimizer, warmup: int = 0) -> None:
        name = type(self).__name__
        if warmup < 0:
            raise ValueError(f"{name}: warmup is {warmup}, expected a number of steps of at least 0")
        self.optimizer, self.warmup = optimizer, warmup
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0
        self._apply()

    def factor(self, step: int) -> float:
        """Return the fraction of the full rate at a step after warm-up."""
        raise NotImplementedError

    def lr(self, step: int | None = None) -> float:
        """Return the rate of the first group at a step (default: the current one)."""
        return self._rates(self._step if step is None else step)[0]

    def get_last_lr(self) -> list[float]:
        """Return the current rate of every group."""
        return self._rates(self._step)

    def step(self) -> None:
        """Advance by one step and set the optimizer's rates."""
        self._step += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the rates that the schedule scales."""
        return {"schedule": self._saved_as or type(self).__name__, "step": self._step, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError for another schedule's state."""
        name = self._saved_as or type(self).__name__
        if state.get("schedule") != name or len(state.get("base_lrs", ())) != len(self.base_lrs):
            raise ValueError(
                f"{name}: the state is of {state.get('schedule')!r} with {len(state.get('base_lrs', ()))} groups, "
                f"expected {name!r} with {len(self.base_lrs)}"
            )
        self._step, self.base_lrs = int(state["step"]), [float(rate) for rate in state["base_lrs"]]
        self._apply()

    def _rates(self, step: int) -> list[float]:
        share = (step + 1) / self.warmup if step < self.warmup else self.factor(step)
        return [rate * share for rate in self.base_lrs]

    def _apply(self) -> None:
        self.optimizer._set_rates(self._rates(self._step))


class WarmupLR(Schedule):
    """A constant rate after warm-up."""

    _saved_as = "ConstantLR"

    def factor(self, step: int) -> float:
        return 1.0


class _Decay(Schedule):
    """A rate that falls from the full rate at the end of warm-up to `eta_min` at step T_max and stays there."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, warmup: int = 0) -> None:
        if T_max <= warmup:
            raise ValueError(
                f"{type(self).__name__}: T_max is {T_max}, expected more than the {warmup} steps of warmup"
            )
        if eta_min < 0.0:
            raise ValueError(f"{type(self).__name__}: eta_min is {eta_min}, expected at least 0")
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, warmup)

    def _progress(self, step: int) -> float:
        """Return the share of the fall that is over: 0 at the end of warm-up, 1 at T_max."""
        return min(1.0, (step - self.warmup) / (self.T_max - self.warmup))

    def _rates(self, step: int) -> list[float]:
        if step < self.warmup:
            return super()._rates(step)
        share = self.factor(step)
        return [self.eta_min + (rate - self.eta_min) * share for rate in self.base_lrs]


class CosineLR(_Decay):
    """Half a cosine from the full rate at the end of warm-up to `eta_min` at step T_max. Loshchilov and Hutter, 2017.

    As torch's CosineAnnealingLR, except for warm-up and after T_max, where it stays at eta_min.
    """

    def factor(self, step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self._progress(step)))


class LinearDecayLR(_Decay):
    """Linear from the full rate at the end of warm-up to `eta_min` at step T_max, and constant after that."""

    _saved_as = "LinearLR"

    def factor(self, step: int) -> float:
        return 1.0 - self._progress(step)
