"""Functions of one tensor, element by element, from one kernel: powers and logarithms, sines, steps."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import elementwise
from minidl.ops.binary import piecewise_linear
from minidl.ops.elementwise import mul
from minidl.tensors import Tensor

__all__ = [
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "log2", "log10", "neg", "round", "rsqrt",
    "sign", "sin", "trunc",
]  # fmt: skip

Kernel = Callable[..., torch.Tensor]


class _Unary(Function):
    """A function of one operand, defined by two kernels; `gradient` takes dy and the values named by `keeps`."""

    compute: Kernel
    gradient: Kernel
    keeps: str

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = cls.compute(x)
        ctx.save(*({"x": x, "y": y}[name] for name in cls.keeps))
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return cls.gradient(dy, *ctx.saved)


def unary_function(
    name: str, compute: Kernel, gradient: Kernel, on_tensors: Callable[..., Tensor], keeps: str = "x"
) -> type[Function]:
    """Return the Function of one operand with these kernels; `on_tensors` is the gradient on Tensors."""
    kernels = {"compute": staticmethod(compute), "gradient": staticmethod(gradient)}
    return recordable(gradient=on_tensors)(type(name, (_Unary,), {"keeps": keeps, **kernels}))


def _step_function(name: str, compute: Kernel) -> type[Function]:
    return unary_function(name, compute, torch.zeros_like, lambda dy: dy * 0, keeps="")


def _erf_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy * (exp(-(x * x)) * (2 / math.sqrt(math.pi)))


Neg = unary_function("Neg", elementwise.neg, elementwise.neg, lambda dy: -dy, keeps="")
Abs = unary_function("Abs", elementwise.abs, elementwise.abs_grad, piecewise_linear(elementwise.abs_grad))
Exp = unary_function("Exp", elementwise.exp, elementwise.mul, lambda dy, y: dy * y, keeps="y")
Log = unary_function("Log", elementwise.log, elementwise.div, lambda dy, x: dy / x)
Sin = unary_function("Sin", elementwise.sin, elementwise.sin_grad, lambda dy, x: dy * cos(x))
Cos = unary_function("Cos", elementwise.cos, elementwise.cos_grad, lambda dy, x: -(dy * sin(x)))
Log1p = unary_function("Log1p", elementwise.log1p, elementwise.log1p_grad, lambda dy, x: dy / (x + 1))
Expm1 = unary_function("Expm1", elementwise.expm1, elementwise.expm1_grad, lambda dy, x: dy * exp(x))
Erf = unary_function("Erf", elementwise.erf, elementwise.erf_grad, _erf_gradient)
Log2 = unary_function("Log2", elementwise.log2, elementwise.log2_grad, lambda dy, x: dy / (x * math.log(2)))
Rsqrt = unary_function("Rsqrt", elementwise.rsqrt, elementwise.rsqrt_grad, lambda dy, x: dy / x * rsqrt(x) * -0.5)
Sign, Floor = _step_function("Sign", elementwise.sign), _step_function("Floor", elementwise.floor)
Ceil, Trunc = _step_function("Ceil", elementwise.ceil), _step_function("Trunc", elementwise.trunc)
Round = _step_function("Round", elementwise.round)


@recordable(zeros=lambda dy: dy * 0)
class RoundTo(Function):
    zeros = staticmethod(torch.zeros_like)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, decimals: int) -> torch.Tensor:
        scale_up, scale_down = elementwise.mul, elementwise.div
        if decimals < 0:
            scale_up, scale_down = scale_down, scale_up
        scale = 10.0 ** builtins.abs(decimals)
        values = x.float() if x.dtype.itemsize == 2 else x
        return scale_down(elementwise.round(scale_up(values, scale)), scale).to(x.dtype)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return cls.zeros(dy), None


def neg(input: Tensor) -> Tensor:
    """Return -input."""
    return Neg.apply(input)


def positive(input: Tensor) -> Tensor:
    """Return +input: the tensor itself. Raises TypeError for bools."""
    if input.dtype == torch.bool:
        raise TypeError("+x: got torch.bool, expected numbers; convert it with .to()")
    return input


def abs(input: Tensor) -> Tensor:
    """Return |input|. The gradient at 0 is 0."""
    return Abs.apply(input)


def sign(input: Tensor) -> Tensor:
    """Return -1, 0 or 1, as the sign of input (0 for NaN). The gradient is 0."""
    return Sign.apply(input)


def exp(input: Tensor) -> Tensor:
    """Return e to the power input. Raises TypeError for integers."""
    return Exp.apply(input)


def expm1(input: Tensor) -> Tensor:
    """Return e to the power input, less 1, as exact near 0 as elsewhere. Raises TypeError for integers."""
    return Expm1.apply(input)


def log(input: Tensor) -> Tensor:
    """Return the natural logarithm: -inf for 0, NaN below. Raises TypeError for integers."""
    return Log.apply(input)


def log1p(input: Tensor) -> Tensor:
    """Return log(1 + input), as exact near 0 as elsewhere. Raises TypeError for integers."""
    return Log1p.apply(input)


def log2(input: Tensor) -> Tensor:
    """Return the logarithm to the base 2. Raises TypeError for integers."""
    return Log2.apply(input)


def log10(input: Tensor) -> Tensor:
    """Return the logarithm to the base 10. Raises TypeError for integers."""
    return mul(log2(input), math.log10(2))


def rsqrt(input: Tensor) -> Tensor:
    """Return 1 / sqrt(input): infinity for 0, NaN below. Raises TypeError for integers."""
    return Rsqrt.apply(input)


def floor(input: Tensor) -> Tensor:
    """Return the largest whole number that input is not below. The gradient is 0."""
    return _apply_step(Floor, input)


def ceil(input: Tensor) -> Tensor:
    """Return the smallest whole number that input is not above. The gradient is 0."""
    return _apply_step(Ceil, input)


def trunc(input: Tensor) -> Tensor:
    """Return input without its fraction. The gradient is 0."""
    return _apply_step(Trunc, input)


def round(input: Tensor, *, decimals: int = 0) -> Tensor:
    """Return the nearest whole number, the even one of two, or number of as many `decimals`. The gradient is 0."""
    return _apply_step(Round, input) if decimals == 0 else RoundTo.apply(input, decimals)


def _apply_step(function: type[Function], x: Tensor) -> Tensor:
    """Return a function that leaves integers as they are."""
    integers = not x.dtype.is_floating_point and x.dtype != torch.bool
    return Tensor(x.data.clone()) if integers else function.apply(x)


def sin(input: Tensor) -> Tensor:
    """Return the sine of input in radians. Raises TypeError for integers."""
    return Sin.apply(input)


def cos(input: Tensor) -> Tensor:
    """Return the cosine of input in radians. Raises TypeError for integers."""
    return Cos.apply(input)


def erf(input: Tensor) -> Tensor:
    """Return the error function, 2 / sqrt(pi) times the integral of e^(-t t) from 0 to input. TypeError for
    integers."""
    return Erf.apply(input)
