"""What the programs of `tutorials` import: torch in float64 or float32, or minidl under the same names."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

import minidl
from minidl import nn, ops, optim
from minidl.tensors import Tensor, default_device


@dataclass(frozen=True)
class Framework:
    """`torch`, `nn`, `optim` and `F` as a program imports them; `device` and `dtype` of its tensors."""

    torch: ModuleType
    nn: ModuleType
    optim: ModuleType
    F: ModuleType
    device: torch.device
    dtype: torch.dtype

    def tensor(self, data: torch.Tensor) -> Any:
        """Numbers that every framework begins with."""
        data = data.to(self.device, self.dtype if data.is_floating_point() else data.dtype)
        return Tensor(data) if self.torch is minidl else data

    def begun(self, model: Any) -> Any:
        """The model with the same weights in every framework: drawn, smaller in larger layers."""
        for index, (name, value) in enumerate(model.state_dict().items()):
            if value.is_floating_point() and "running" not in name:
                drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
                scale = max(1, value[0].numel()) ** -0.5 if value.ndim > 1 else 0.1
                drawn = scale * drawn + ("weight" in name and value.ndim == 1)
                model.load_state_dict({**model.state_dict(), name: drawn})
        return model if self.torch is minidl else model.to(self.dtype)


EXACT, PEER = (
    Framework(torch, torch.nn, torch.optim, torch.nn.functional, torch.device("cpu"), dtype)
    for dtype in (torch.float64, torch.float32)
)


def ours() -> Framework:
    return Framework(minidl, nn, optim, ops, default_device(), torch.float32)
