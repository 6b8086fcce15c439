"""Initial values, filled in place by counter-based random kernels: a seed gives the same weights everywhere.

A tensor on torch's device "meta" has no memory and stays unfilled: a module there shows its memory use.

Kaiming: He et al., arXiv 1502.01852. Xavier: Glorot and Bengio, AISTATS 2010.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from minidl import random
from minidl.autograd import no_grad
from minidl.common import suggestions
from minidl.kernels import random as kernels
from minidl.tensors import Tensor

GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": math.sqrt(2.0)}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor for weights before a nonlinearity that preserves the variance of the values.

    Raises ValueError for names other than linear, sigmoid, tanh, relu and leaky_relu (param: its slope, 0.01).
    """
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else param
        return math.sqrt(2.0 / (1.0 + slope**2))
    if nonlinearity not in GAINS:
        raise ValueError(f"unknown nonlinearity {nonlinearity!r}; known: {', '.join(GAINS)}, leaky_relu")
    return GAINS[nonlinearity]


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a weight [out, in, ...]. Raises ValueError for fewer than two dimensions."""
    if len(shape) < 2:
        raise ValueError(f"fan in and out need at least two dimensions, got shape {list(shape)}")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0, seed: int | None = None) -> Tensor:
    """Fill with values from the uniform distribution on [low, high)."""
    if not tensor.data.is_meta:
        kernels.uniform_(tensor.data, low, high, *random.key(seed))
    return tensor


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, seed: int | None = None) -> Tensor:
    """Fill with normally distributed values."""
    if not tensor.data.is_meta:
        kernels.normal_(tensor.data, mean, std, *random.key(seed))
    return tensor


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, seed: int | None = None
) -> Tensor:
    """Fill with normally distributed values from [a, b]. Raises ValueError unless a < b."""
    if not a < b:
        raise ValueError(f"trunc_normal_: a is {a} and b is {b}, expected a < b")
    if not tensor.data.is_meta:
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
        drawn = Tensor(
            kernels.uniform(tensor.shape, low, high, *random.key(seed), dtype=torch.float64, device=tensor.device)
        )
        with no_grad():
            tensor.copy_((_inverse_erf(drawn) * (std * math.sqrt(2)) + mean).clamp(a, b))
    return tensor


def _inverse_erf(x: Tensor) -> Tensor:
    """Return y with erf(y) = x, float64: Winitzki's approximation (2008), then two steps of Halley's method."""
    x = x.clamp(-1 + 2.0**-53, 1 - 2.0**-53)
    logarithm = (-x * x).log1p()
    half = logarithm / 2 + 2 / (math.pi * 0.147)
    y = x.sign() * ((half * half - logarithm / 0.147).sqrt() - half).sqrt()
    for _ in range(2):
        off = (y.erf() - x) * (y * y).exp() * (math.sqrt(math.pi) / 2)
        y = y - off / (y * off + 1)
    return y


def constant_(tensor: Tensor, value: float) -> Tensor:
    """Fill with one value."""
    tensor.data.fill_(value)
    return tensor


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with zeros."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with ones."""
    return constant_(tensor, 1.0)


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", seed: int | None = None
) -> Tensor:
    """Uniform in +-gain sqrt(3 / fan): keeps the variance of values through layers with relu-like activations."""
    bound = calculate_gain(nonlinearity, a) * math.sqrt(3.0 / max(1, _fan(tensor, mode)))
    return uniform_(tensor, -bound, bound, seed)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", seed: int | None = None
) -> Tensor:
    """Normal with standard deviation gain / sqrt(fan)."""
    return normal_(tensor, 0.0, calculate_gain(nonlinearity, a) / math.sqrt(max(1, _fan(tensor, mode))), seed)


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, seed: int | None = None) -> Tensor:
    """Uniform in +-gain sqrt(6 / (fan_in + fan_out)): balances the variances of values and gradients."""
    bound = gain * math.sqrt(6.0 / max(1, sum(fans(tensor.shape))))
    return uniform_(tensor, -bound, bound, seed)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, seed: int | None = None) -> Tensor:
    """Normal with standard deviation gain sqrt(2 / (fan_in + fan_out))."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / max(1, sum(fans(tensor.shape)))), seed)


def _fan(tensor: Tensor, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"unknown mode {mode!r}; known: fan_in, fan_out")
    return fans(tensor.shape)[mode == "fan_out"]


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.nn.init", name, globals())
