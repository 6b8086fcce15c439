"""Second derivatives of activations and softmax; see `second`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.modes import no_grad
from minidl.kernels import activation, elementwise
from minidl.kernels.activation import Activation
from minidl.ops import activation as acts
from minidl.ops import elementwise as e
from minidl.ops import powers
from minidl.ops.conditional import where
from minidl.ops.double_backward.elementwise import first, second, summed
from minidl.tensors import Tensor

__all__: list[str] = []  # used by the engine, no operations


def act_back(dy: Tensor, y: Tensor, act: Activation) -> Tensor:
    """Return the gradient before an activation of `FROM_OUTPUT`, from its result."""
    name, _ = activation.parse(act)
    if name is None:
        return dy
    if name == "sigmoid":
        return dy * (y * (1 - y))
    if name == "tanh":
        return dy * (1 - powers.square(y))
    return dy * Tensor(elementwise.act_grad(torch.ones_like(y.data), y.data, act, from_output=True))


# Second derivatives of activations that are kept by what goes in.
CURVES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda z, _: _bent(acts.sigmoid(z), z),
    "softplus": lambda z, beta: beta * acts.sigmoid(beta * z) * acts.sigmoid(-beta * z),
    "elu": lambda z, alpha: where(z > 0, 0, alpha * where(z > 0, 0, z).exp()),
    "gelu": lambda z, _: (2 - z * z) * (z * z * -0.5).exp() * 0.3989422804014327,
}


def _bent(s: Tensor, z: Tensor) -> Tensor:
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
        (z,) = ctx.saved
        name, slope = activation.parse(ctx.act)
        with no_grad():
            return elementwise.mul(dy, CURVES[name or ""](Tensor(z), slope).data), None


@second(Slope)
def _slope(ctx: Any, dy: Tensor) -> Any:
    (z,) = ctx.saved
    name, slope = activation.parse(ctx.act)
    return dy * CURVES[name or ""](z, slope), None


def activated_back(dy: Tensor, z: Tensor, act: Activation) -> Tensor:
    """Return the gradient before an activation, from what went in. Raises RuntimeError for one without a second
    derivative."""
    name, _ = activation.parse(act)
    if name in activation.FROM_OUTPUT:
        return act_back(dy, z if name is None else acts.activated(z, act), act)
    if name not in CURVES:
        raise RuntimeError(
            f"create_graph=True wants a second derivative of {name}, which minidl does not have; use relu, leaky_relu, "
            f"sigmoid, tanh, relu6 or {', '.join(CURVES)}"
        )
    return dy * Slope.apply(z, act)


@second(acts.BiasAct)
def _bias_act(ctx: Any, dy: Tensor) -> Any:
    kept, b = ctx.saved
    if ctx.from_output:
        dz = act_back(dy, kept, ctx.act)
    else:
        dz = activated_back(dy, kept if b is None else kept + b, ctx.act)
    return dz, summed(dz, dz.shape[-1:]) if ctx.needs[1] else None, None


@second(e.AddAct)
def _add_act(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    dz = act_back(dy, y, ctx.act)
    return dz, dz, None


@second(acts.Softmax)
def _softmax(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    weighed = dy * y
    return first(ctx, weighed - y * weighed.sum(ctx.dim, keepdim=True))


@second(acts.LogSoftmax)
def _log_softmax(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    return first(ctx, dy - y.exp() * dy.sum(ctx.dim, keepdim=True))
