"""Element-wise arithmetic with broadcasting: y = f(a), f(a, b) or f(a, b, c), and its gradients.

    a, b, c   any shapes that broadcast, any strides; Python numbers may stand for operands
    y         the broadcast shape, in the operands' dtype and order in memory (`order`); torch.bool for comparisons

Floating values are computed in float32 (float64 for float64, and for powers) and rounded once at the end. Integers
are computed in their own type. A gradient is such a function, too, of dy and the kept values: `functions` has them all,
and one pair of kernels in `compute` evaluates them.
At ties and kinks the gradients follow torch: equal operands of maximum share the gradient, |x| has 0 at 0.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.elementwise import functions
from minidl.kernels.elementwise.compute import Operand, compute

F = TypeVar("F", bound=Callable[..., Any])


def _named(function: F, name: str, doc: str) -> F:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _of_one(name: str, doc: str, integers: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function f(x) that `functions` has under this name in capitals; the others make f(a, b) and gradients."""
    op = getattr(functions, name.upper())

    def function(x: torch.Tensor) -> torch.Tensor:
        return compute(name, op, x, integers=integers)

    return _named(function, name, doc)


def _of_two(name: str, doc: str, integers: bool = False) -> Callable[..., torch.Tensor]:
    op = getattr(functions, name.upper())

    def function(a: Operand, b: Operand, out: torch.Tensor | None = None) -> torch.Tensor:
        return compute(name, op, a, b, integers=integers, out=out)

    return _named(function, name, doc)


def _grad_of_one(name: str, doc: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    op = getattr(functions, name.upper())

    def function(dy: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return compute(name, op, dy, kept)

    return _named(function, name, doc)


def _grad_of_two(name: str, doc: str) -> Callable[[torch.Tensor, Operand, Operand], torch.Tensor]:
    op = getattr(functions, name.upper())

    def function(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        return compute(name, op, dy, a, b)

    return _named(function, name, doc)


neg = _of_one("neg", "-x.", integers=True)
abs = _of_one("abs", "|x|.", integers=True)
abs_grad = _grad_of_one("abs_grad", "dy sign(x).")
sign = _of_one("sign", "-1, 0 or 1; 0 for NaN.", integers=True)
exp = _of_one("exp", "e to the power x. Its gradient is dy y.")
log = _of_one("log", "The natural logarithm. Its gradient is dy / x.")
sqrt = _of_one("sqrt", "The square root.")
sqrt_grad = _grad_of_one("sqrt_grad", "dy / (2 y) for y = sqrt(x).")
square = _of_one("square", "x x.", integers=True)
square_grad = _grad_of_one("square_grad", "2 dy x.")
reciprocal = _of_one("reciprocal", "1 / x.")
reciprocal_grad = _grad_of_one("reciprocal_grad", "-dy y y for y = 1 / x.")
floor = _of_one("floor", "The largest whole number that x is not below.")
ceil = _of_one("ceil", "The smallest whole number that x is not above.")
trunc = _of_one("trunc", "x without its fraction.")
round = _of_one("round", "The nearest whole number, the even one of two.")
sin = _of_one("sin", "The sine.")
sin_grad = _grad_of_one("sin_grad", "dy cos(x).")
cos = _of_one("cos", "The cosine.")
cos_grad = _grad_of_one("cos_grad", "-dy sin(x).")
log1p = _of_one("log1p", "log(1 + x), exact near 0, too.")
log1p_grad = _grad_of_one("log1p_grad", "dy / (1 + x).")
expm1 = _of_one("expm1", "e^x - 1, exact near 0, too.")
expm1_grad = _grad_of_one("expm1_grad", "dy e^x.")
erf = _of_one("erf", "The error function.")
erf_grad = _grad_of_one("erf_grad", "2 dy e^(-x x) / sqrt(pi).")
log2 = _of_one("log2", "The logarithm to the base 2.")
log2_grad = _grad_of_one("log2_grad", "dy / (x log(2)).")


def act(x: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(x) for an activation of `activation.py`."""
    return compute("act", functions.ACTIVATE, x, act=act)


def act_grad(dy: torch.Tensor, x: torch.Tensor, act: Activation, from_output: bool = False) -> torch.Tensor:
    """dy act'(x); with `from_output`, x is act(z) and this is dy act'(z), for the activations in FROM_OUTPUT.

    Raises ValueError for an activation whose derivative does not follow from its output.
    """
    if not from_output:
        return compute("act_grad", functions.ACTIVATE_GRAD, dy, x, act=act)
    if activation.parse(act)[0] not in activation.FROM_OUTPUT:
        raise ValueError(f"act_grad: the derivative of {act} does not follow from its output; give its input")
    return compute("act_grad", functions.ACTIVATE_GRAD_FROM_OUTPUT, dy, x, act=act)


def add_act(a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(a + b)."""
    return compute("add", functions.ADD_ACTIVATE, a, b, act=act)


add = _of_two("add", "a + b.", integers=True)


def add_scaled(a: torch.Tensor, b: Operand, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """a + factor b, rounded once at the end."""
    return compute("add", functions.ADD_SCALED, a, b, factor, integers=True, out=out)


sub = _of_two("sub", "a - b.", integers=True)
mul = _of_two("mul", "a b.", integers=True)
div = _of_two("div", "a / b. Its gradient in a is dy / b.")
div_grad_b = _grad_of_two("div_grad_b", "-dy (a / b) / b.")
div_trunc = _of_two("div_trunc", "a / b, rounded, then without its fraction.")
div_floor = _of_two("div_floor", "The largest whole number that a / b is not below.")
fmod = _of_two("fmod", "a - trunc(a / b) b, exactly, with a's sign; NaN where a / b overflows float64.")
fmod_grad_b = _grad_of_two("fmod_grad_b", "-dy trunc(a / b).")
remainder = _of_two("remainder", "a - floor(a / b) b, rounded once, with b's sign; NaN where `fmod` is.")
remainder_grad_b = _grad_of_two("remainder_grad_b", "-dy floor(a / b).")
pow = _of_two("pow", "a to the power b, computed in float64 throughout.")
pow_grad_a = _grad_of_two("pow_grad_a", "dy b a^(b - 1); 0 where b is 0.")
pow_grad_b = _grad_of_two("pow_grad_b", "dy a^b log(a); 0 where a is 0 and b is not negative.")
maximum = _of_two("maximum", "The larger of a and b; NaN where one is.", integers=True)
maximum_grad = _grad_of_two(
    "maximum_grad",
    "The gradient in a: dy where a is larger, half of it where they are equal. For that in b, exchange a and b.",
)
minimum = _of_two("minimum", "The smaller of a and b; NaN where one is.", integers=True)
minimum_grad = _grad_of_two(
    "minimum_grad",
    "The gradient in a: dy where a is smaller, half of it where they are equal. For that in b, exchange a and b.",
)
eq = _of_two("eq", "a == b, as torch.bool.", integers=True)
ne = _of_two("ne", "a != b, as torch.bool.", integers=True)
lt = _of_two("lt", "a < b, as torch.bool.", integers=True)
le = _of_two("le", "a <= b, as torch.bool.", integers=True)
gt = _of_two("gt", "a > b, as torch.bool.", integers=True)
ge = _of_two("ge", "a >= b, as torch.bool.", integers=True)


prelu = _of_two("prelu", "a where it is above 0, else a b.")
prelu_grad_a = _grad_of_two("prelu_grad_a", "The gradient of a in prelu(a, b): dy where a is above 0, else dy b.")


def where(condition: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """a where the torch.bool tensor `condition` is true, else b. Its gradient in a is where(condition, dy, 0)."""
    return compute("where", functions.WHERE, condition, a, b, integers=True, condition=True)


def clamp(x: torch.Tensor, low: float | None, high: float | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x moved into [low, high], and to high where low is above it; None leaves that side open.

    NaN stays, and limits of NaN make all of it NaN. Raises ValueError where both sides are open.
    """
    if low is None and high is None:
        raise ValueError("clamp: got neither min nor max, expected at least one")
    if low is None:
        return compute("clamp", functions.MINIMUM, x, high, integers=True, out=out)
    if high is None:
        return compute("clamp", functions.MAXIMUM, x, low, integers=True, out=out)
    if low != low or high != high:
        return compute("clamp", functions.MAXIMUM, x, math.nan, integers=True, out=out)
    return compute("clamp", functions.CLAMP, x, low, high, integers=True, out=out)


def clamp_grad(dy: torch.Tensor, x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """dy where low <= x <= high, else 0."""
    dx = dy if low is None else compute("clamp_grad", functions.PASS_GE, dy, x, low)
    return dx if high is None else compute("clamp_grad", functions.PASS_LE, dx, x, high)


def hardtanh_grad(dy: torch.Tensor, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """dy where low < x < high, or x is NaN; else 0."""
    dx = compute("hardtanh_grad", functions.PASS_GT, dy, x, low)
    return compute("hardtanh_grad", functions.PASS_LT, dx, x, high)


def prelu_grad_b(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """The gradient of b in prelu(a, b): dy a where a is not above 0."""
    return compute("prelu_grad_b", functions.PRELU_GRAD_B, dy, a)


def norm_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dy x / y for y = |x|_2 (of size 1, as dy, along what was reduced); 0 where y is 0."""
    return compute("norm_grad", functions.NORM_GRAD, dy, x, y, like=x)


def amax_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """dy / count where x equals its maximum y (of size 1, as dy and count, along what was reduced), else 0; NaN where y
    is."""
    share = compute("amax_grad", functions.DIV, dy, count, wide=True)
    return compute("amax_grad", functions.AMAX_GRAD, share, x, y, like=x)


def max_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """`amax_grad`, where NaN equals NaN."""
    share = compute("max_grad", functions.DIV, dy, count, wide=True)
    return compute("max_grad", functions.MAX_GRAD, share, x, y, like=x)
