"""Activations as modules, with torch's arguments: each calls the function of its name in `minidl.ops`."""

from __future__ import annotations

import torch

from minidl import ops
from minidl.nn.module import Module, Parameter
from minidl.tensors import Tensor, device_of


class _InPlace(Module):
    """An activation whose input takes its result, too, with `inplace`."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown + (", " if shown else "") + "inplace=True" if self.inplace else shown


class ReLU(_InPlace):
    """max(x, 0)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.relu(input, self.inplace)


class ReLU6(_InPlace):
    """min(max(x, 0), 6)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.relu6(input, self.inplace)


class LeakyReLU(_InPlace):
    """x where it is above 0, else negative_slope * x."""

    _shown = ("negative_slope",)

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.negative_slope = negative_slope

    def forward(self, input: Tensor) -> Tensor:
        return ops.leaky_relu(input, self.negative_slope, self.inplace)


class ELU(_InPlace):
    """x where it is above 0, else alpha (exp(x) - 1)."""

    _shown = ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.alpha = alpha

    def forward(self, input: Tensor) -> Tensor:
        return ops.elu(input, self.alpha, self.inplace)


class SiLU(_InPlace):
    """x * sigmoid(x)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.silu(input, self.inplace)


class Mish(_InPlace):
    """x * tanh(softplus(x))."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.mish(input, self.inplace)


class Hardswish(_InPlace):
    """x * min(max(x + 3, 0), 6) / 6."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.hardswish(input, self.inplace)


class Hardsigmoid(_InPlace):
    """min(max(x + 3, 0), 6) / 6."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.hardsigmoid(input, self.inplace)


class Hardtanh(_InPlace):
    """x limited to [min_val, max_val]."""

    _shown = ("min_val", "max_val")

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        if min_val >= max_val:
            raise ValueError(f"Hardtanh: min_val is {min_val}, expected less than max_val, {max_val}")
        self.min_val, self.max_val = min_val, max_val

    def forward(self, input: Tensor) -> Tensor:
        return ops.hardtanh(input, self.min_val, self.max_val, self.inplace)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.sigmoid(input)


class Tanh(Module):
    """tanh(x)."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.tanh(input)


class GELU(Module):
    """Gaussian error linear unit; approximate "none" or "tanh"."""

    _shown = ("approximate",)

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, self.approximate)


class Softplus(Module):
    """log(1 + exp(beta x)) / beta."""

    _shown = ("beta", "threshold")

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__()
        self.beta, self.threshold = beta, threshold

    def forward(self, input: Tensor) -> Tensor:
        return ops.softplus(input, self.beta, self.threshold)


class LogSigmoid(Module):
    """log(sigmoid(x)), exact where that is small or near 1."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.logsigmoid(input)


class PReLU(Module):
    """x where it is above 0, else weight * x; `weight` [num_parameters] is one number, or one for each channel."""

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = Parameter(torch.full((num_parameters,), init, device=device_of(device), dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        return ops.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={len(self.weight)}"


class Softmax(Module):
    """exp(x) over its sum along `dim`, which must be named for more than two dimensions."""

    _shown = ("dim",)

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        return ops.softmax(input, self.dim)


class LogSoftmax(Softmax):
    """The logarithm of `Softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.log_softmax(input, self.dim)
