"""Activations, by themselves and together with a bias; softmax and log-softmax."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.deferred import fuse
from minidl.autograd.function import recordable
from minidl.kernels import activation, check, elementwise
from minidl.kernels import bias_act as kernels
from minidl.kernels import softmax as softmax_kernels
from minidl.kernels.activation import Activation
from minidl.ops import unary
from minidl.ops.activation_grad import bias_act_grad
from minidl.ops.binary import binary_function, piecewise_linear
from minidl.ops.conditional import Clamp, where
from minidl.ops.elementwise import minimum, sub
from minidl.ops.inplace import apply_in_place
from minidl.ops.shape import reshape, to
from minidl.tensors import Tensor

__all__ = [
    "bias_act", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_softmax", "logsigmoid",
    "mish", "prelu", "relu", "relu6", "sigmoid", "silu", "softmax", "softmin", "softplus", "tanh",
]  # fmt: skip


@recordable(gradient=bias_act_grad)
class BiasAct(Function):
    gradient = staticmethod(kernels.bias_act_grad)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, b: torch.Tensor | None, act: Activation) -> torch.Tensor:
        y = kernels.bias_act(x, b, act)
        ctx.act, ctx.from_output = act, activation.parse(act)[0] in activation.FROM_OUTPUT
        ctx.save(*(y, None) if ctx.from_output else (x, b))
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        saved, b = ctx.saved
        want_x, want_bias, _ = ctx.needs
        dx, db = cls.gradient(dy, saved, b, ctx.act, ctx.from_output, want_x=want_x, want_bias=want_bias)
        return dx, db, None


def activated(x: Tensor, act: Activation) -> Tensor:
    """Return act(x), fused with the operation that computes x if possible."""
    activation.parse(act)
    fused = fuse(x, "with_act", act) if type(x) is Tensor else None  # BiasAct refuses other types
    return BiasAct.apply(x, None, act) if fused is None else Tensor._of_deferred(fused)


def bias_act(x: Tensor, b: Tensor | None, act: Activation = "relu") -> Tensor:
    """Return act(x + b), adding b to each row.

    Shapes: x [..., N], b [N] or None -> [..., N], in its dtype.
    act: None, "relu", "leaky_relu", ("leaky_relu", slope), "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "relu6",
    or "elu", "softplus", "mish", "hardswish", "hardsigmoid".
    Raises ValueError for an unknown activation or a bias whose length is not x's last size, TypeError for integers or
    different dtypes.
    """
    return BiasAct.apply(x, b, act)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Return max(input, 0); NaN stays NaN. The gradient at 0 is 0."""
    return apply_in_place(lambda x: activated(x, "relu"), input, inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """Return min(max(input, 0), 6); NaN stays NaN. The gradient at 0 and at 6 is 0."""
    return apply_in_place(lambda x: activated(x, "relu6"), input, inplace)


def leaky_relu(input: Tensor, negative_slope: float = activation.NEGATIVE_SLOPE, inplace: bool = False) -> Tensor:
    """Return input where it is above 0, else negative_slope * input. Raises ValueError for a negative_slope below 0."""
    act: Activation = "relu" if negative_slope == 0 else ("leaky_relu", negative_slope)
    return apply_in_place(lambda x: activated(x, act), input, inplace)


def sigmoid(input: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-input))."""
    return activated(input, "sigmoid")


def logsigmoid(input: Tensor) -> Tensor:
    """Return log(1 / (1 + e^-input)), exact where it is small or large. Raises TypeError for integers."""
    soft = unary.log1p(unary.exp(unary.neg(unary.abs(input))))
    return sub(minimum(input, 0), soft)


def tanh(input: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return activated(input, "tanh")


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Return input times its standard normal distribution function; approximate="tanh" approximates it by tanh.

    Raises ValueError for another `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is {approximate!r}, expected "none" or "tanh"')
    return activated(input, "gelu_tanh" if approximate == "tanh" else "gelu")


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Return input * sigmoid(input)."""
    return apply_in_place(lambda x: activated(x, "silu"), input, inplace)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """Return input where it is above 0, else alpha (exp(input) - 1)."""
    return apply_in_place(lambda x: activated(x, ("elu", alpha)), input, inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + exp(beta input)) / beta, and input where beta input is above the threshold.

    Raises ValueError unless beta is above 0, and for a threshold above 20, where float32 shows no difference.
    """
    if not threshold <= 20:
        raise ValueError(f"softplus: threshold is {threshold}, which is not supported; use 20, or less")
    y = activated(input, ("softplus", beta))
    return y if threshold == 20 else where(Tensor(elementwise.gt(input.data, threshold / beta)), input, y)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """Return input * tanh(softplus(input))."""
    return apply_in_place(lambda x: activated(x, "mish"), input, inplace)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """Return input * min(max(input + 3, 0), 6) / 6. The gradient at -3 is 0, at 3 it is 1."""
    return apply_in_place(lambda x: activated(x, "hardswish"), input, inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Return min(max(input + 3, 0), 6) / 6. The gradient at -3 and at 3 is 0."""
    return apply_in_place(lambda x: activated(x, "hardsigmoid"), input, inplace)


@recordable(gradient=piecewise_linear(elementwise.hardtanh_grad))
class Hardtanh(Clamp):
    gradient = staticmethod(elementwise.hardtanh_grad)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
        check.floating("hardtanh", x=x)
        if low > high:
            raise ValueError(f"hardtanh: min_val {low} is above max_val {high}")
        return Clamp.forward(ctx, x, low, high)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """Return input limited to [min_val, max_val]. The gradient is 0 at both and outside.

    Raises ValueError for a min_val above max_val.
    """
    least, most = float(min_val), float(max_val)
    return apply_in_place(lambda x: Hardtanh.apply(x, least, most), input, inplace)


PReLU = binary_function(
    "PReLU", elementwise.prelu, elementwise.prelu_grad_a, elementwise.prelu_grad_b,
    (lambda dy, a, b: dy * where(a > 0, 1, b), lambda dy, a, b: dy * where(a > 0, 0, a)),
)  # fmt: skip


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Return input where it is above 0, else weight * input: one weight, or one for each channel (dimension 1).

    Raises TypeError for dtypes, ValueError for another number of weights.
    """
    check.floating("prelu", input=input.data)
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.numel() not in (1, channels) or weight.ndim > 1:
        raise ValueError(f"prelu: weight has shape {list(weight.shape)}, expected [1] or [{channels}]")
    per_channel = [1, -1, *(1 for _ in input.shape[2:])] if input.ndim > 1 else [1] * input.ndim
    return PReLU.apply(input, reshape(weight, *per_channel))


def _softmax_gradient(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    weighted = dy * y
    return weighted - y * weighted.sum(dim, keepdim=True)


def _log_softmax_gradient(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    return dy - y.exp() * dy.sum(dim, keepdim=True)


@recordable(gradient=_softmax_gradient)
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
    def backward(cls, ctx: Any, dy: Any) -> Any:
        (y,) = ctx.saved
        return cls.gradient(dy, y, ctx.dim), None


@recordable(gradient=_log_softmax_gradient)
class LogSoftmax(Softmax):
    compute = staticmethod(softmax_kernels.log_softmax)
    gradient = staticmethod(softmax_kernels.log_softmax_grad)


def softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return exp(input) divided by its sum along `dim`, in its shape and dtype; `dtype` converts input
    first.

    `dim` is the last one by default, and required for more than two dimensions. A row is NaN if it
    contains NaN or +inf, or if all its values are -inf. Raises TypeError for an integer tensor, ValueError without a
    required dim, IndexError for a dimension out of range.
    """
    return Softmax.apply(input if dtype is None else to(input, dtype), _last("softmax", input, dim))


def softmin(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return `softmax` of -input."""
    return softmax(unary.neg(input), dim, dtype=dtype)


def log_softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the logarithm of `softmax(input, dim, dtype)`, accurate also where softmax underflows. Raises as
    `softmax`."""
    return LogSoftmax.apply(input if dtype is None else to(input, dtype), _last("log_softmax", input, dim))


def _last(op: str, input: Tensor, dim: int | None) -> int:
    """Return the axis, the last by default. Raises ValueError without one for three dimensions or more, as torch's
    default differs."""
    if dim is None and input.ndim > 2:
        raise ValueError(f"{op}: name dim for a tensor of shape {list(input.shape)}; the last one is dim=-1")
    return -1 if dim is None else dim
