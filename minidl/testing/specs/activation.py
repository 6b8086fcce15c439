"""Records of activations, by themselves and with a bias.

`evaluation` is the error of act(z) at exactly z, as the functions of `kernels/activation.py` promise it: exponentials
are off by a unit for each unit of their argument, which a result feels in full only where it is small itself. float64
has no fitted polynomials: there tanh and erf are good to units of 1. An error of z, by adding the bias, enters times
the steepest slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels import activation, bias_act
from minidl.kernels.activation import Activation
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import WANTS_FLOATING, Case, OpSpec, integers, of, one, records, refuses, tensors
from minidl.testing.specs.elementwise import kept, times
from minidl.testing.specs.make import Make

# The largest |act'|.
STEEPEST = {
    "sigmoid": 0.25, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "mish": 1.1, "hardswish": 1.5, "hardsigmoid": 0.17,
}  # fmt: skip
# How many units act' is off where it is computed from z, of which a relative error of z makes less than one.
DERIVATIVE_UNITS = {
    "gelu": 24, "gelu_tanh": 48, "silu": 24, "elu": 8, "softplus": 16, "mish": 48, "hardswish": 8, "hardsigmoid": 4,
}  # fmt: skip


def apply(z: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(z) by torch."""
    name, slope = activation.parse(act)
    if name is None:
        return z + 0
    if name == "leaky_relu":
        return F.leaky_relu(z, slope)
    # Where torch's own gelu adds 1 to nearly -1, even its float64 is off by more than these kernels.
    if name == "gelu":
        return 0.5 * z * torch.erfc(-math.sqrt(0.5) * z)
    if name == "gelu_tanh":
        return z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    if name in ("elu", "softplus"):
        return getattr(F, name)(z, slope)
    # torch's hardsigmoid has a float32 for 1/6 on the way back.
    if name == "hardswish":
        return torch.where(z <= -3, z * 0, torch.where(z >= 3, z, z * (z + 3) / 6))
    if name == "hardsigmoid":
        return torch.where(z <= -3, z.clamp(0, 0), torch.where(z >= 3, z.clamp(1, 1), (z + 3) / 6))
    return getattr(F if name in ("silu", "relu6", "mish") else torch, name)(z)


def derivative(z: torch.Tensor, act: Activation) -> torch.Tensor:
    """act'(z) by torch."""
    z = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(apply(z, act).sum(), z)[0]


def evaluation(z: torch.Tensor, act: Activation, dtype: torch.dtype) -> torch.Tensor:
    """The error of act(z), computed in the accumulate type of `dtype` at exactly z, before it is rounded."""
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
    # Above 0, Phi is 1 less a number of that error.
    above = z.abs() * (16 + 2 * y.clamp(max=1))
    return u * torch.minimum(y * (32 + 2 * below * below), above) + tiny * z.abs()


def output_error(z: torch.Tensor, z_error: torch.Tensor | float, act: Activation, dtype: torch.dtype) -> torch.Tensor:
    """The error of act(z) before it is rounded, for a z that is itself off by z_error."""
    name, slope = activation.parse(act)
    steepest = max(1.0, abs(slope)) if name in ("leaky_relu", "elu") else STEEPEST.get(name or "", 1.0)
    return evaluation(z, act, dtype) + steepest * z_error


def gradient_error(
    dy: torch.Tensor, z: torch.Tensor, z_error: torch.Tensor | float, act: Activation, dtype: torch.dtype
) -> torch.Tensor:
    """The error of dy act'(z) before it is rounded, from the rounded output or from z, as the operation keeps it."""
    name, slope = activation.parse(act)
    u = bounds.acc_unit(dtype)
    if name in (None, "relu"):
        return torch.zeros_like(dy)
    if name == "leaky_relu":
        return 2 * u * dy.abs() * max(1.0, slope)
    if name == "relu6":
        # The sign of a sum is certain, but not the side of 6, which what is kept may be rounded to.
        near = (z - 6).abs() <= z_error + (6 * torch.finfo(dtype).eps if isinstance(z_error, torch.Tensor) else 0)
        return torch.where(near & (z != 6), dy.abs(), 0.0)
    if name not in ("sigmoid", "tanh"):
        steep = max(1.0, abs(slope)) if name == "elu" else 1.0
        return u * (DERIVATIVE_UNITS[name] * steep + 2) * dy.abs()
    y = apply(z, act)
    off = kept(y, output_error(z, z_error, act, dtype), dtype)
    if name == "sigmoid":
        return times(dy, (1 - 2 * y).abs() * off + off * off + 4 * u * y * (1 - y))
    return times(dy, 2 * y.abs() * off + off * off + 3 * u)


_activation = records(
    inputs=one(),
    differentiable=(0,),
    families=("elementwise",),
    examples={"one run": tensors((3, 700)), "every second": lambda make: Case((make.tensor(37, 66)[:, ::2],))},
    bad=(WANTS_FLOATING,),
)


def _record(name: str, act: Callable[..., Activation] | None = None, **fields: Any) -> OpSpec:
    """The record of an activation, which `act` makes from the arguments after x where there are any."""

    def given(case: Case) -> Activation:
        return act(*case.args[1:], **case.kwargs) if act else name

    def grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        return (bounds.rounded(grads[0], gradient_error(dy, case.args[0], 0.0, given(case), dtype), dtype),)

    return _activation(
        name,
        reference=lambda *args, **named: apply(args[0], given(Case(args, named))),
        bound=bounds.off_by(lambda case, _, dtype: output_error(case.args[0], 0.0, given(case), dtype)),
        grad_bound=grad_bound,
        **fields,
    )


def _with_argument(*choices: tuple[Any, ...]) -> Callable[[Make], Case]:
    """A tensor, then one of these arguments."""
    return lambda make: Case((make.tensor(*make.shape(0, 4)), *make.choice(choices)))


_ACTS: tuple[Activation, ...] = (None, ("leaky_relu", 0.25), *activation.NAMES)


def _bias_act_inputs(make: Make) -> Case:
    shape = make.shape(1, 3)
    bias = None if make.integer(0, 4) == 0 else make.tensor(shape[-1])
    return Case((make.tensor(*shape), bias, make.choice(_ACTS)))


def _z(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, b = case.args[:2]
    z = x if b is None else x + b
    return z, torch.zeros_like(z) if b is None else bounds.acc_unit(dtype) * z.abs()


def _bias_act_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    z, z_error = _z(case, dtype)
    # Where x + b overflows, so may what follows from it.
    return bounds.known(output_error(z, z_error, case.arguments(ops.bias_act)[2], dtype), z.abs(), dtype)


def _bias_act_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    z, z_error = _z(case, dtype)
    each = bounds.known(gradient_error(dy, z, z_error, case.arguments(ops.bias_act)[2], dtype), z.abs(), dtype)
    dx, db = grads
    for_x = bounds.rounded(dx, each, dtype)
    if db is None:
        return for_x, None
    # The bias sums dx before it is rounded.
    N = dx.shape[-1]
    rows = dx.numel() // max(N, 1)
    total = (dx.abs() + each).reshape(rows, N).sum(0)
    chain = max(bias_act.depth(rows, N, dtype), 1)
    error = each.reshape(rows, N).sum(0) + bounds.gamma(chain, bounds.acc_unit(dtype)) * total
    return for_x, bounds.rounded(db, bounds.known(error, total, dtype), dtype)


def _prelu_inputs(make: Make) -> Case:
    shape = make.shape(1, 4)
    channels = shape[1] if len(shape) > 1 else 1
    return Case((make.tensor(*shape), make.tensor(make.choice([1, channels]) if channels else 1)))


def _prelu_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The terms of dw are rounded before they are added."""
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
    _record("mish"),
    _record("hardswish"),
    _record("hardsigmoid"),
    _record(
        "elu",
        lambda alpha=1.0: ("elu", alpha),
        inputs=_with_argument((), (0.25,), (2.0,)),
    ),
    _record(
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
    _record("relu", exact=True),
    _record("relu6", exact=True),
    *map(_record, ("sigmoid", "tanh", "silu")),
    _record(
        "leaky_relu",
        lambda negative_slope=activation.NEGATIVE_SLOPE: ("leaky_relu", negative_slope),
        inputs=_with_argument((), (0.25,), (1e-3,), (2.0,)),
        bad=(WANTS_FLOATING, refuses(ValueError, "needs a slope above 0, got -1.0", (3,), extra=(-1.0,))),
    ),
    _record(
        "gelu",
        lambda approximate="none": "gelu_tanh" if approximate == "tanh" else "gelu",
        inputs=_with_argument((), ("none",), ("tanh",)),
        examples={"exact": tensors((3, 700)), "by tanh": tensors((3, 700), extra=("tanh",))},
        bad=(
            WANTS_FLOATING,
            refuses(ValueError, 'approximate is \'erf\', expected "none" or "tanh"', (3,), extra=("erf",)),
        ),
    ),
    records()(
        "bias_act",
        reference=lambda x, b, act="relu": apply(x if b is None else x + b, act),
        inputs=_bias_act_inputs,
        bound=bounds.off_by(_bias_act_error),
        grad_bound=_bias_act_grad,
        differentiable=(0, 1),
        families=("bias_act", "bias_act_grad"),
        examples={
            "relu": tensors((37, 70), (70,), extra=("relu",)),
            "gelu": tensors((70, 5), (5,), extra=("gelu",)),
            "no activation": tensors((2, 7, 40), (40,), extra=(None,)),
            "wide": tensors((3, 1030), (1030,), extra=("tanh",)),
            "rows apart": lambda make: Case((make.tensor(37, 40)[:, :33], make.tensor(33), "silu")),
            "turned": lambda make: Case((make.tensor(33, 37).t(), make.tensor(33), "sigmoid")),
            "one bias": lambda make: Case((make.tensor(37, 40), make.tensor(1).expand(40), "gelu_tanh")),
        },
        bad=(
            refuses(ValueError, r"bias has shape \[3\], expected \[4\], the last size of x \[2, 4\]", (2, 4), (3,)),
            refuses(ValueError, "'swish'; known: relu, leaky_relu", (2, 4), (4,), extra=("swish",)),
            refuses(ValueError, "activation 'tanh' takes no slope", (2, 4), (4,), extra=(("tanh", 0.5),)),
            refuses(
                TypeError,
                "x is torch.float32 and b is torch.float64; convert one of them",
                (2, 4),
                of(torch.float64, 4),
            ),
            refuses(TypeError, "x has dtype torch.int64", integers(3), None),
        ),
    ),
]
