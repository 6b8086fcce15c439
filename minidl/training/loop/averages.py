"""The moving average of a model in training, which is validated and saved: `--ema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from minidl import nn
from minidl.kernels.average import Averages
from minidl.tensors import default_device
from minidl.training.run_folder import weights


def averaging_rate(decay: float, step: int) -> float:
    """Return 1 - `decay`, or more in the first steps (from 1 on), so that the initial weights are soon forgotten."""
    return 1.0 - min(decay, (1.0 + step) / (10.0 + step))


class Average:
    """average += `averaging_rate` (value - average) after each step, of all parameters and batch norm statistics.

    The averages of half-precision parameters are float32. `model` is a second model of the same shapes, to which
    `update_model` copies the averages.
    """

    def __init__(self, trained: nn.Module, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model.requires_grad_(False).eval(), decay
        model.load_state_dict(trained.state_dict())
        self._values, tensors = ({name: tensor.data for name, tensor in m.named_tensors()} for m in (trained, model))
        self._floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        # A tensor of at least 32 bits is its own average.
        self._averages = {
            name: tensor if tensor.dtype.itemsize >= 4 else tensor.to(torch.float32)
            for name, tensor in self._floats.items()
        }
        self._counts = {name: tensor for name, tensor in tensors.items() if name not in self._floats}
        self._rate = torch.zeros((), dtype=torch.float64, device=default_device())
        self._update = Averages(list(self._averages.values()), [self._values[name] for name in self._averages])

    def prepare(self, step: int) -> None:
        """Set the rate of `update` before a step, counted from 1. Not part of a captured step."""
        self._rate.fill_(averaging_rate(self.decay, step))

    def update(self) -> None:
        """Move the averages after the optimizer's step."""
        self._update(self._rate)

    def update_model(self) -> nn.Module:
        """Copy the averages and the counts to `model`, and return it."""
        self._copy_averages()
        for name, tensor in self._counts.items():
            tensor.copy_(self._values[name])
        return self.model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages, and the counts at the last call of `update_model`."""
        return {**self._averages, **self._counts}

    def load(self, state: Mapping[str, torch.Tensor], path: Path) -> None:
        """Load a `state_dict`, also into `model`. Raises DamagedError, naming `path`, if it does not fit."""
        tensors = self.state_dict()
        weights.check(tensors, state, path)
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
        self._copy_averages()

    def _copy_averages(self) -> None:
        """Copy the averages that are not in the model's tensors to these."""
        for name, tensor in self._floats.items():
            if tensor is not self._averages[name]:
                tensor.copy_(self._averages[name])
