"""Specs of activations, by themselves and with a bias.

`evaluation` is the error of act(z) at exactly z, as the functions of `kernels/activation.py` promise it: exponentials
have an error of a unit per unit of their argument, which matters in full only for small results. float64 has no fitted
polynomials: its tanh and erf have errors in units of 1. An error of z, from adding the bias, is multiplied by the
steepest slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import WANTS_FLOATING, Case, OpSpec, integers, one, refuses, spec_factory, tensors
from minidl.testing.specs.elementwise import stored_error, times
from minidl.testing.specs.make import Make

# The largest |act'|.
STEEPEST = {
    "sigmoid": 0.25, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "mish": 1.1, "hardswish": 1.5, "hardsigmoid": 0.17,
}  # fmt: skip
# The error of act' in units if it is computed from z; a relative error of z adds less than one unit.
DERIVATIVE_UNITS = {
    "gelu": 24, "gelu_tanh": 48, "silu": 24, "elu": 8, "softplus": 16, "mish": 48, "hardswish": 8, "hardsigmoid": 4,
}  # fmt: skip


def apply(z: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return act(z), computed by torch."""
    name, slope = activation.parse(act)
    if name is None:
        return z + 0
    if name == "leaky_relu":
        return F.leaky_relu(z, slope)
    # torch's gelu adds 1 to nearly -1, so even its float64 is less accurate than these kernels.
    if name == "gelu":
        return 0.5 * z * torch.erfc(-math.sqrt(0.5) * z)
    if name == "gelu_tanh":
        return z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    if name in ("elu", "softplus"):
        return getattr(F, name)(z, slope)
    # torch's hardsigmoid uses a float32 for 1/6 in its gradient.
    if name == "hardswish":
        return torch.where(z <= -3, z * 0, torch.where(z >= 3, z, z * (z + 3) / 6))
    if name == "hardsigmoid":
        return torch.where(z <= -3, z.clamp(0, 0), torch.where(z >= 3, z.clamp(1, 1), (z + 3) / 6))
    return getattr(F if name in ("silu", "relu6", "mish") else torch, name)(z)


def derivative(z: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return act'(z), computed by torch."""
    z = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(apply(z, act).sum(), z)[0]


def evaluation(z: torch.Tensor, act: Activation, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of act(z), computed in the accumulate type of `dtype` at exactly z, before it is rounded."""
    name, slope = activation.parse(act)
    u = bounds.acc_unit(dtype)
    y, below = apply(z, act).abs(), (-z).clamp(min=0)
    tiny = bounds.TINY[launch.acc_torch(dtype)]
    if name in (None, "relu", "relu6"):
        return torch.zeros_like(z)
    if name == "leaky_relu":
        return u * y
    if name == "sigmoid":
        return u * y * (12 + 2 * below) + tiny
    if name == "silu":
        return u * y * (14 + 2 * below) + tiny * z.abs()
    if name == "tanh":
        return torch.full_like(y, 8 * u) if dtype == torch.float64 else 16 * u * y
    if name == "elu":
        off = 40 * u * (torch.full_like(y, abs(slope)) if dtype == torch.float64 else y)
        return torch.where(z > 0, 0.0, off) + tiny * abs(slope)
    if name == "softplus":
        w = (z * slope).abs().clamp(max=700)
        e = torch.exp(-w)
        # Where slope z is 20, the linear part begins.
        return (
            u * (16 * y + (2 * w + 8) * e / slope) + tiny / slope + torch.where((w - 20).abs() < 80 * u, e / slope, 0)
        )
    if name == "mish":
        return u * y * (20 + 2 * below) + tiny * z.abs()
    if name in ("hardswish", "hardsigmoid"):
        return 8 * u * y + tiny * (1 + z.abs())
    if name == "gelu_tanh":
        inner = below * (1.6 + 0.0714 * z * z)
        return u * y * (16 + 6 * inner) + tiny * z.abs()
    if dtype == torch.float64:
        return u * (6 * z.abs() + 2 * y)
    # Above 0, Phi is 1 minus a number with that error.
    above = z.abs() * (16 + 2 * y.clamp(max=1))
    return u * torch.minimum(y * (32 + 2 * below * below), above) + tiny * z.abs()


def output_error(z: torch.Tensor, z_error: torch.Tensor | float, act: Activation, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of act(z) before it is rounded, for a z with an error of z_error."""
    name, slope = activation.parse(act)
    steepest = max(1.0, abs(slope)) if name in ("leaky_relu", "elu") else STEEPEST.get(name or "", 1.0)
    return evaluation(z, act, dtype) + steepest * z_error


def gradient_error(
    dy: torch.Tensor, z: torch.Tensor, z_error: torch.Tensor | float, act: Activation, dtype: torch.dtype
) -> torch.Tensor:
    """Return the error of dy act'(z) before it is rounded, from the stored output or the stored z."""
    name, slope = activation.parse(act)
    u = bounds.acc_unit(dtype)
    if name in (None, "relu"):
        return torch.zeros_like(dy)
    if name == "leaky_relu":
        return 2 * u * dy.abs() * max(1.0, slope)
    if name == "relu6":
        # The sign of a sum is certain, but the stored value may be rounded to 6.
        near = (z - 6).abs() <= z_error + (6 * torch.finfo(dtype).eps if isinstance(z_error, torch.Tensor) else 0)
        return torch.where(near & (z != 6), dy.abs(), 0.0)
    if name not in ("sigmoid", "tanh"):
        steep = max(1.0, abs(slope)) if name == "elu" else 1.0
        return u * (DERIVATIVE_UNITS[name] * steep + 2) * dy.abs()
    y = apply(z, act)
    off = stored_error(y, output_error(z, z_error, act, dtype), dtype)
    if name == "sigmoid":
        return times(dy, (1 - 2 * y).abs() * off + off * off + 4 * u * y * (1 - y))
    return times(dy, 2 * y.abs() * off + off * off + 3 * u)


_activation = spec_factory(
    inputs=one(),
    differentiable=(0,),
    families=("elementwise",),
    examples={"one run": tensors((3, 700)), "every second": lambda make: Case((make.tensor(37, 66)[:, ::2],))},
    bad=(WANTS_FLOATING,),
)


def _spec(name: str, act: Callable[..., Activation] | None = None, **fields: Any) -> OpSpec:
    """Return the spec of an activation, which `act` makes from the arguments after x, if it has any."""

    def activation_of(case: Case) -> Activation:
        return act(*case.args[1:], **case.kwargs) if act else name

    def grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        return (bounds.rounded(grads[0], gradient_error(dy, case.args[0], 0.0, activation_of(case), dtype), dtype),)

    return _activation(
        name,
        reference=lambda *args, **named: apply(args[0], activation_of(Case(args, named))),
        bound=bounds.off_by(lambda case, _, dtype: output_error(case.args[0], 0.0, activation_of(case), dtype)),
        grad_bound=grad_bound,
        **fields,
    )


def _with_argument(*choices: tuple[Any, ...]) -> Callable[[Make], Case]:
    """Return the function that draws a tensor and one of these arguments."""
    return lambda make: Case((make.tensor(*make.shape(0, 4)), *make.choice(choices)))


ACTS: tuple[Activation, ...] = (None, ("leaky_relu", 0.25), *activation.NAMES)


def _prelu_inputs(make: Make) -> Case:
    shape = make.shape(1, 4)
    channels = shape[1] if len(shape) > 1 else 1
    return Case((make.tensor(*shape), make.tensor(make.choice([1, channels]) if channels else 1)))


def _prelu_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds of dx and dw, whose terms are rounded before they are added."""
    x, weight = case.args
    dx, dw = grads
    u, tiny = bounds.acc_unit(dtype), bounds.TINY[dtype]
    terms = torch.where(x > 0, 0.0, dy * x).abs()
    dims = [d for d in range(x.dim()) if d != 1 or weight.numel() == 1] if x.dim() > 1 else [0]
    total = terms.sum(dims).reshape(dw.shape) if terms.numel() else torch.zeros_like(dw)
    count = max(x.numel(), 1)
    error = (bounds.UNIT[dtype] + u + bounds.gamma(count, u)) * total + 2 * count * tiny
    error = torch.where(total > torch.finfo(dtype).max / 2, math.inf, error)
    return bounds.rounded(dx, u * dx.abs(), dtype), bounds.rounded(dw, error, dtype)


_RANGE = refuses(ValueError, "min_val 2.0 is above max_val 1.0", (3,), extra=(2.0, 1.0))
INPUT_FLOATING = refuses(TypeError, "dtype torch.int64, expected a floating type", integers(3))

SPECS = [
    _spec("mish"),
    _spec("hardswish"),
    _spec("hardsigmoid"),
    _spec(
        "elu",
        lambda alpha=1.0: ("elu", alpha),
        inputs=_with_argument((), (0.25,), (2.0,)),
    ),
    _spec(
        "softplus",
        lambda beta=1.0: ("softplus", beta),
        inputs=_with_argument((), (0.25,), (3.0,)),
        bad=(
            refuses(ValueError, "softplus needs a slope above 0, got 0.0", (3,), extra=(0.0,)),
            refuses(ValueError, "threshold is 30.0, which is not supported", (3,), extra=(1.0, 30.0)),
        ),
    ),
    _activation(
        "hardtanh",
        reference=F.hardtanh,
        inputs=_with_argument((), (-0.5, 2.0), (0.0, 0.0)),
        bound=lambda case, y, dtype: torch.zeros_like(y),
        grad_bound=lambda case, dy, grads, dtype: (torch.zeros_like(grads[0]),),
        bad=(_RANGE, INPUT_FLOATING),
    ),
    _activation(
        "prelu",
        reference=F.prelu,
        inputs=_prelu_inputs,
        bound=bounds.off_by(lambda case, y, dtype: bounds.acc_unit(dtype) * y.abs()),
        grad_bound=_prelu_grad_bound,
        differentiable=(0, 1),
        families=("elementwise", "elementwise_tile"),
        examples={"one": tensors((3, 700), (1,)), "channels": tensors((3, 5, 7, 9), (5,))},
        bad=(refuses(ValueError, r"weight has shape \[4\], expected \[1\] or \[3\]", (2, 3), (4,)),),
    ),
    _spec("relu", exact=True),
    _spec("relu6", exact=True),
    *map(_spec, ("sigmoid", "tanh", "silu")),
    _spec(
        "leaky_relu",
        lambda negative_slope=activation.NEGATIVE_SLOPE: ("leaky_relu", negative_slope),
        inputs=_with_argument((), (0.25,), (1e-3,), (2.0,)),
        bad=(WANTS_FLOATING, refuses(ValueError, "needs a slope above 0, got -1.0", (3,), extra=(-1.0,))),
    ),
    _spec(
        "gelu",
        lambda approximate="none": "gelu_tanh" if approximate == "tanh" else "gelu",
        inputs=_with_argument((), ("none",), ("tanh",)),
        examples={"exact": tensors((3, 700)), "by tanh": tensors((3, 700), extra=("tanh",))},
        bad=(
            WANTS_FLOATING,
            refuses(ValueError, 'approximate is \'erf\', expected "none" or "tanh"', (3,), extra=("erf",)),
        ),
    ),
]
