"""The moving average of a model in training, which is what is judged and kept: `--ema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from minidl import nn
from minidl.kernels.average import Averages
from minidl.tensors import default_device
from minidl.training.run_folder import weights


class Average:
    """average += (1 - d) (value - average) after each step, of all parameters and batch norm statistics.

    d is `decay`, and less in the first steps, (1 + step) / (10 + step), so that the first weights are soon forgotten.
    The averages of half-precision parameters are float32. `kept` is a second model of the same form, which `settle`
    gives the averages.
    """

    def __init__(self, model: nn.Module, kept: nn.Module, decay: float) -> None:
        self.kept, self.decay = kept.requires_grad_(False).eval(), decay
        kept.load_state_dict(model.state_dict())
        self._values, own = ({name: tensor.data for name, tensor in m.named_tensors()} for m in (model, kept))
        self._own = {name: tensor for name, tensor in own.items() if tensor.is_floating_point()}
        # In the tensor itself where it is wide enough.
        self._averages = {
            name: tensor if tensor.dtype.itemsize >= 4 else tensor.to(torch.float32)
            for name, tensor in self._own.items()
        }
        self._counts = {name: tensor for name, tensor in own.items() if name not in self._own}
        self._share = torch.zeros((), dtype=torch.float64, device=default_device())
        self._update = Averages(list(self._averages.values()), [self._values[name] for name in self._averages])

    def prepare(self, step: int) -> None:
        """Before the step of this number, from 1 on: what `update` moves by. Not part of a captured step."""
        self._share.fill_(1.0 - min(self.decay, (1.0 + step) / (10.0 + step)))

    def update(self) -> None:
        """After the optimizer's step."""
        self._update(self._share)

    def settle(self) -> nn.Module:
        """`kept` as the averages are now."""
        self._give()
        for name, tensor in self._counts.items():
            tensor.copy_(self._values[name])
        return self.kept

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages, and counts as they were when `settle` was called."""
        return {**self._averages, **self._counts}

    def load(self, state: Mapping[str, torch.Tensor], path: Path) -> None:
        """Continue from what `state_dict` returned, and settle. Raises DamagedError, naming `path`, for another one."""
        own = self.state_dict()
        weights.check(own, state, path)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._give()

    def _give(self) -> None:
        """Give `kept` the averages that are not in its own tensors."""
        for name, tensor in self._own.items():
            if tensor is not self._averages[name]:
                tensor.copy_(self._averages[name])
