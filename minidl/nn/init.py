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
from minidl.kernels import elementwise
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
        drawn = kernels.uniform(tensor.shape, low, high, *random.key(seed), dtype=torch.float64, device=tensor.device)
        quantiles = _inverse_erf(drawn)
        values = elementwise.add(elementwise.mul(quantiles, std * math.sqrt(2)), mean)
        with no_grad():
            tensor.copy_(elementwise.clamp(values, a, b))
    return tensor


# Giles, Approximating the erfinv function, 2011: polynomials in w = -log(1 - x^2), less 2.5, and in its root, less 3.
CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _inverse_erf(x: torch.Tensor) -> torch.Tensor:
    """Return y with erf(y) = x in float64: the approximation of float32, then a step of Newton's method."""
    x = elementwise.clamp(x, -1 + 2.0**-53, 1 - 2.0**-53)
    w = elementwise.neg(elementwise.log1p(elementwise.neg(elementwise.mul(x, x))))

    def polynomial(coefficients: Sequence[float], t: torch.Tensor) -> torch.Tensor:
        total = elementwise.mul(t, 0.0)
        for coefficient in coefficients:
            total = elementwise.add(elementwise.mul(total, t), coefficient)
        return total

    tail = polynomial(TAIL, elementwise.sub(elementwise.sqrt(w), 3.0))
    central = polynomial(CENTRAL, elementwise.sub(w, 2.5))
    y = elementwise.mul(elementwise.where(elementwise.lt(w, 5.0), central, tail), x)
    off = elementwise.sub(elementwise.erf(y), x)
    slope = elementwise.mul(elementwise.exp(elementwise.neg(elementwise.mul(y, y))), 2 / math.sqrt(math.pi))
    return elementwise.sub(y, elementwise.div(off, slope))


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
