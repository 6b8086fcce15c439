"""Second derivatives of activations whose input is saved; see `linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.modes import no_grad
from minidl.kernels import activation, elementwise
from minidl.kernels.activation import Activation
from minidl.ops import activation as acts
from minidl.ops.binary import act_back
from minidl.ops.conditional import where
from minidl.ops.double_backward.linear import second
from minidl.ops.shape import sum_to
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


# Second derivatives of the activations whose input is saved, by name.
CURVES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda z, _: _silu_curve(acts.sigmoid(z), z),
    "softplus": lambda z, beta: beta * acts.sigmoid(beta * z) * acts.sigmoid(-beta * z),
    "elu": lambda z, alpha: where(z > 0, 0, alpha * where(z > 0, 0, z).exp()),
    "gelu": lambda z, _: (2 - z * z) * (z * z * -0.5).exp() * 0.3989422804014327,
}


def _silu_curve(s: Tensor, z: Tensor) -> Tensor:
    return s * (1 - s) * (2 + z * (1 - 2 * s))


class Slope(Function):
    """The derivative of an activation at z."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, act: Activation) -> torch.Tensor:
        ctx.save(z)
        ctx.act = act
        return elementwise.act_grad(torch.ones_like(z), z, act)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        with no_grad():
            return Slope.recorded_backward(ctx, Tensor(dy))[0].data, None

    @staticmethod
    def recorded_backward(ctx: Any, dy: Tensor) -> Any:
        (z,), (name, slope) = ctx.saved, activation.parse(ctx.act)
        return dy * CURVES[name or ""](z if isinstance(z, Tensor) else Tensor(z), slope), None


def activated_back(dy: Tensor, z: Tensor, act: Activation) -> Tensor:
    """Return the gradient before an activation, from its input. Raises RuntimeError if it has no second derivative."""
    name, _ = activation.parse(act)
    if name in activation.FROM_OUTPUT:
        return act_back(dy, z if name is None else acts.activated(z, act), act)
    if name not in CURVES:
        raise RuntimeError(
            f"create_graph=True needs a second derivative of {name}, which minidl does not have; use relu, leaky_relu, "
            f"sigmoid, tanh, relu6 or {', '.join(CURVES)}"
        )
    return dy * Slope.apply(z, act)


@second(acts.BiasAct)
def _bias_act(ctx: Any, dy: Tensor) -> Any:
    saved, b = ctx.saved
    if ctx.from_output:
        dz = act_back(dy, saved, ctx.act)
    else:
        dz = activated_back(dy, saved if b is None else saved + b, ctx.act)
    return dz, sum_to(dz, dz.shape[-1:]) if ctx.needs[1] else None, None
