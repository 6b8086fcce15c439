"""The optimizer and the learning rate schedule that the settings name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minidl import nn, optim
from minidl.training.settings.command import Training

LOSS_SCALE = 2.0**16  # the initial loss scale of float16


def make_optimizer(config: Training, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer that the settings name."""
    parameters = list(model.parameters())
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "lazy": getattr(config, "lazy", False),
        "loss_scale": LOSS_SCALE if config.precision == "float16" else None,
    }
    makers: dict[str, Callable[..., optim.Optimizer]] = {
        "sgd": functools.partial(optim.SGD, momentum=config.momentum),
        "adamw": optim.AdamW, "adam": optim.Adam, "rmsprop": optim.RMSprop, "adagrad": optim.Adagrad,
    }  # fmt: skip
    optimizer = makers[config.optimizer](parameters, **options)
    optimizer.warns = False  # the report shows the number of skipped steps
    return optimizer


def make_schedule(config: Training, optimizer: optim.Optimizer, steps_per_epoch: int) -> optim.Schedule:
    """Return the schedule of the learning rate over all steps."""
    assert config.epochs is not None
    assert config.lr is not None
    steps = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup * steps_per_epoch), steps - 1)
    if config.schedule == "constant":
        schedule: optim.Schedule = optim.WarmupLR(optimizer, warmup=warmup)
    else:
        decays = {"cosine": optim.CosineLR, "linear": optim.LinearDecayLR}
        schedule = decays[config.schedule](optimizer, steps, warmup=warmup)
    unfreeze, unfreeze_lr = getattr(config, "unfreeze", None) or 0, getattr(config, "unfreeze_lr", None)
    return schedule if unfreeze_lr is None else Unfrozen(schedule, unfreeze * steps_per_epoch, unfreeze_lr / config.lr)


class Unfrozen(optim.Schedule):
    """The rates of another schedule, multiplied by `factor` from step `start` on."""

    def __init__(self, schedule: optim.Schedule, start: int, factor: float) -> None:
        self._schedule, self._start, self._factor = schedule, start, factor
        super().__init__(schedule.optimizer, schedule.warmup)
        self.base_lrs = schedule.base_lrs  # the optimizer already has the rates of step 0

    def _rates(self, step: int) -> list[float]:
        factor = self._factor if step >= self._start else 1.0
        return [rate * factor for rate in self._schedule._rates(step)]
