"""Activations, by themselves and together with a bias; softmax and log-softmax."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import activation
from minidl.kernels import bias_act as kernels
from minidl.kernels import softmax as softmax_kernels
from minidl.kernels.activation import Activation
from minidl.later import take
from minidl.tensors import Tensor

__all__ = ["bias_act", "gelu", "leaky_relu", "log_softmax", "relu", "relu6", "sigmoid", "silu", "softmax", "tanh"]


class BiasAct(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, b: torch.Tensor | None, act: Activation) -> torch.Tensor:
        y = kernels.bias_act(x, b, act)
        ctx.act, ctx.from_output = act, activation.parse(act)[0] in activation.FROM_OUTPUT
        ctx.save(*(y, None) if ctx.from_output else (x, b))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        kept, b = ctx.saved
        want_x, want_bias, _ = ctx.needs
        dx, db = kernels.bias_act_grad(dy, kept, b, ctx.act, ctx.from_output, want_x=want_x, want_bias=want_bias)
        return dx, db, None


def activated(x: Tensor, act: Activation) -> Tensor:
    """act(x), by the operation that makes x where it can take the activation in."""
    activation.parse(act)
    taken = take(x, "with_act", act) if type(x) is Tensor else None  # what is no tensor is told by the operation
    return BiasAct.apply(x, None, act) if taken is None else Tensor._of_later(taken)


def bias_act(x: Tensor, b: Tensor | None, act: Activation = "relu") -> Tensor:
    """act(x + b), adding b to each row.

    Shapes: x [..., N], b [N] or None -> [..., N], in x's dtype.
    act: None, "relu", "leaky_relu", ("leaky_relu", slope), "sigmoid", "tanh", "gelu", "gelu_tanh", "silu" or "relu6".
    Raises ValueError for an unknown activation or a bias whose length is not x's last size, TypeError for integers or
    different dtypes.
    """
    return BiasAct.apply(x, b, act)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN. The gradient at 0 is 0."""
    return activated(x, "relu")


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6); NaN stays NaN. The gradient at 0 and at 6 is 0."""
    return activated(x, "relu6")


def leaky_relu(x: Tensor, negative_slope: float = activation.NEGATIVE_SLOPE) -> Tensor:
    """x where it is above 0, else negative_slope * x. Raises ValueError unless negative_slope is above 0."""
    return activated(x, ("leaky_relu", negative_slope))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return activated(x, "sigmoid")


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return activated(x, "tanh")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the standard normal distribution function of x; approximate="tanh" takes the approximation by tanh.

    Raises ValueError for another `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is {approximate!r}, expected "none" or "tanh"')
    return activated(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return activated(x, "silu")


class Softmax(Function):
    """Saves its output for the gradient, not its input."""

    compute = staticmethod(softmax_kernels.softmax)
    gradient = staticmethod(softmax_kernels.softmax_grad)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = cls.compute(x, dim)
        ctx.save(y)
        ctx.dim = dim
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        (y,) = ctx.saved
        return cls.gradient(dy, y, ctx.dim), None


class LogSoftmax(Softmax):
    compute = staticmethod(softmax_kernels.log_softmax)
    gradient = staticmethod(softmax_kernels.log_softmax_grad)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) divided by its sum along `dim`, in x's shape and dtype.

    A row is NaN if it contains NaN or +inf, or if all its values are -inf. Raises TypeError for an integer tensor,
    IndexError for a dimension out of range.
    """
    return Softmax.apply(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of `softmax(x, dim)`, accurate also where softmax underflows. Raises as `softmax`."""
    return LogSoftmax.apply(x, dim)
