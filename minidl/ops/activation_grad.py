"""Gradients of activations by recorded operations, for gradients of every order.

`kernels.bias_act.bias_act_grad` computes the first ones in one launch. Operations are methods of Tensor here, as most
modules of `minidl.ops` import this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minidl.kernels import activation, elementwise
from minidl.kernels.activation import Activation
from minidl.ops.shape import sum_to, to, wide
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


def _silu_slope(z: Tensor, s: Tensor) -> Tensor:
    return s * (1 + z * (1 - s))


# Derivatives of the activations whose input is saved, from it and the activation's number.
SLOPES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda z, _: _silu_slope(z, z.sigmoid()),
    "softplus": lambda z, beta: (beta * z).sigmoid(),
    "elu": lambda z, alpha: (z.masked_fill(z > 0, 0).exp() * alpha).masked_fill(z > 0, 1),
    "gelu": lambda z, _: ((z * math.sqrt(0.5)).erf() + 1) * 0.5 + z * (z * z * -0.5).exp() * math.sqrt(0.5 / math.pi),
}


def act_back(dy: Tensor, y: Tensor, act: Activation) -> Tensor:
    """Return the gradient before an activation of `FROM_OUTPUT`, from dy and its result."""
    name, _ = activation.parse(act)
    if name is None:
        return dy
    if name == "sigmoid":
        return dy * (y * (1 - y))
    if name == "tanh":
        return dy * (1 - y.square())
    return dy * Tensor(elementwise.act_grad(torch.ones_like(y.data), y.data, act, from_output=True))


def bias_act_grad(
    dy: Tensor, x: Tensor, b: Tensor | None, act: Activation, from_output: bool, *, want_x: bool, want_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of act(x + b) as `kernels.bias_act.bias_act_grad`.

    Raises RuntimeError for an activation without a derivative in operations.
    """
    name, number = activation.parse(act)
    if from_output or name is None:
        dz = act_back(dy, x, act)
    elif name in SLOPES:
        slope = SLOPES[name](wide(x if b is None else x + b), number)
        dz = to(wide(dy) * slope, dy.dtype)
    else:
        raise RuntimeError(
            f"create_graph=True needs a second derivative of {name}, which minidl does not have; use relu, leaky_relu, "
            f"sigmoid, tanh, relu6 or {', '.join(SLOPES)}"
        )
    return dz, sum_to(dz, dz.shape[-1:]) if want_bias else None


def epilogue_grad(ctx: Any, dy: Tensor, y: Tensor | None, want_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a product [N, C, ...] before bias and activation, and of the bias [C].

    Raises RuntimeError for an activation whose derivative needs the product, which the graph lacks.
    """
    name, _ = activation.parse(ctx.act)
    if not ctx.from_output:
        raise RuntimeError(
            f"create_graph=True needs a second derivative of {ctx.function.__name__} with fused {name}, which minidl "
            f"does not have; apply {name} by itself, in modules under minidl.fusion(False)"
        )
    dz = dy if y is None else act_back(dy, y, ctx.act)
    return dz, dz.sum((0, *range(2, dz.ndim))) if want_bias else None
