"""The moving average of a model in training, which is validated and saved in place of the model: `--ema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from minidl import nn
from minidl.kernels.average import Averages
from minidl.tensors import default_device
from minidl.training.run_folder import weights


def averaging_rate(decay: float, step: int) -> float:
    """Return 1 - `decay`, or a higher rate in the first steps (counted from 1) to forget the initial weights sooner."""
    return 1.0 - min(decay, (1.0 + step) / (10.0 + step))


class ModelAverage:
    """The moving average of all parameters and batch norm statistics of the model `trained`.

    Each step computes average += rate * (value - average) with the rate of `averaging_rate`. The averages of
    half-precision parameters are float32. `averaged` is a second model of the same shapes. Its floating
    tensors of 32 bits or more are the averages themselves; `update_model` sets the others: half-precision ones from the
    averages, integers from the trained model.
    """

    def __init__(self, trained: nn.Module, averaged: nn.Module, decay: float) -> None:
        self.averaged, self.decay = averaged.requires_grad_(False).eval(), decay
        averaged.load_state_dict(trained.state_dict())
        self._values, tensors = _tensors_of(trained), _tensors_of(averaged)
        self._floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        # Half-precision tensors have an average in float32. A shared tensor has one average under several names.
        averages = {
            id(tensor): tensor if tensor.dtype.itemsize >= 4 else tensor.to(torch.float32)
            for tensor in self._floats.values()
        }
        self._averages = {name: averages[id(tensor)] for name, tensor in self._floats.items()}
        self._integers = {name: tensor for name, tensor in tensors.items() if name not in self._floats}
        self._rate = torch.zeros((), dtype=torch.float64, device=default_device())
        values = {id(average): self._values[name] for name, average in self._averages.items()}
        self._kernel = Averages(list(averages.values()), [values[id(average)] for average in averages.values()])

    def prepare(self, step: int) -> None:
        """Set the rate of `update` for a step, counted from 1. Call it outside the captured step."""
        self._rate.fill_(averaging_rate(self.decay, step))

    def update(self) -> None:
        """Update the averages. Call it after the optimizer's step."""
        self._kernel(self._rate)

    def update_model(self) -> nn.Module:
        """Copy the averages, and the trained model's integer tensors, to `averaged`, and return it."""
        self._copy_averages()
        for name, tensor in self._integers.items():
            tensor.copy_(self._values[name])
        return self.averaged

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages, and the integer tensors as of the last `update_model`, by name."""
        return {**self._averages, **self._integers}

    def load(self, state: Mapping[str, torch.Tensor], path: Path) -> None:
        """Load a `state_dict`, also into `averaged`. Raises DamagedError, naming `path`, if it does not fit."""
        tensors = self.state_dict()
        weights.check(tensors, state, path)
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
        self._copy_averages()

    def _copy_averages(self) -> None:
        """Copy float32 averages to the half-precision tensors of `averaged`."""
        for name, tensor in self._floats.items():
            if tensor is not self._averages[name]:
                tensor.copy_(self._averages[name])


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the saved tensors of a model; a shared tensor has several names."""
    return {name: tensor.data for name, tensor in model.named_tensors()}
