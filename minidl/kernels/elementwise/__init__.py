"""Element-wise arithmetic with broadcasting: y = f(a), f(a, b) or f(a, b, c), and its gradients.

    a, b, c   any shapes that broadcast, any strides; an operand may be a Python number
    y         the broadcast shape, the operands' dtype and memory layout (`memory_layout`); torch.bool for comparisons

Floating values are computed in float32 (float64 for float64, and for powers) and rounded once at the end. Integers
are computed in their own type. A gradient is also an element-wise function, of dy and the saved values. Read
`functions` first (the formulas on the device), then `compute` (the kernels).
At ties and kinks the gradients follow torch: equal operands of maximum share the gradient, and |x| has gradient 0 at 0.
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


def _set_name(function: F, name: str, doc: str) -> F:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _unary(name: str, doc: str, integers: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return f(x) for the number in `functions` with this name in capitals; the next three likewise."""
    op = getattr(functions, name.upper())

    def function(x: torch.Tensor) -> torch.Tensor:
        return compute(name, op, x, integers=integers)

    return _set_name(function, name, doc)


def _binary(name: str, doc: str, integers: bool = False) -> Callable[..., torch.Tensor]:
    op = getattr(functions, name.upper())

    def function(a: Operand, b: Operand, out: torch.Tensor | None = None) -> torch.Tensor:
        return compute(name, op, a, b, integers=integers, out=out)

    return _set_name(function, name, doc)


def _unary_grad(name: str, doc: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    op = getattr(functions, name.upper())

    def function(dy: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        return compute(name, op, dy, saved)

    return _set_name(function, name, doc)


def _binary_grad(name: str, doc: str) -> Callable[[torch.Tensor, Operand, Operand], torch.Tensor]:
    op = getattr(functions, name.upper())

    def function(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
        return compute(name, op, dy, a, b)

    return _set_name(function, name, doc)


neg = _unary("neg", "Return -x.", integers=True)
abs = _unary("abs", "Return |x|.", integers=True)
abs_grad = _unary_grad("abs_grad", "Return dy sign(x).")
sign = _unary("sign", "Return -1, 0 or 1; 0 for NaN.", integers=True)
exp = _unary("exp", "Return e^x. The gradient is dy y.")
log = _unary("log", "Return the natural logarithm. The gradient is dy / x.")
sqrt = _unary("sqrt", "Return the square root.")
sqrt_grad = _unary_grad("sqrt_grad", "Return dy / (2 y) for y = sqrt(x).")
square = _unary("square", "Return x x.", integers=True)
square_grad = _unary_grad("square_grad", "Return 2 dy x.")
reciprocal = _unary("reciprocal", "Return 1 / x.")
reciprocal_grad = _unary_grad("reciprocal_grad", "Return -dy y y for y = 1 / x.")
floor = _unary("floor", "Return the largest integer that is at most x.")
ceil = _unary("ceil", "Return the smallest integer that is at least x.")
trunc = _unary("trunc", "Return x without its fraction.")
round = _unary("round", "Return the nearest integer, the even one of two.")
sin = _unary("sin", "Return the sine.")
sin_grad = _unary_grad("sin_grad", "Return dy cos(x).")
cos = _unary("cos", "Return the cosine.")
cos_grad = _unary_grad("cos_grad", "Return -dy sin(x).")
log1p = _unary("log1p", "Return log(1 + x), accurate also near 0.")
log1p_grad = _unary_grad("log1p_grad", "Return dy / (1 + x).")
expm1 = _unary("expm1", "Return e^x - 1, accurate also near 0.")
expm1_grad = _unary_grad("expm1_grad", "Return dy e^x.")
erf = _unary("erf", "Return the error function of x.")
erf_grad = _unary_grad("erf_grad", "Return 2 dy e^(-x x) / sqrt(pi).")
log2 = _unary("log2", "Return the logarithm to base 2.")
rsqrt = _unary("rsqrt", "Return 1 / sqrt(x).")
rsqrt_grad = _unary_grad("rsqrt_grad", "Return -dy / (2 x sqrt(x)).")
log2_grad = _unary_grad("log2_grad", "Return dy / (x log(2)).")


def act(x: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return act(x) for an activation of `activation.py`."""
    return compute("act", functions.ACTIVATE, x, act=act)


def act_grad(dy: torch.Tensor, x: torch.Tensor, act: Activation, from_output: bool = False) -> torch.Tensor:
    """Return dy act'(x); with `from_output` x is act(z), and dy act'(z) is returned for activations in FROM_OUTPUT.

    Raises ValueError for an activation whose derivative does not follow from its output.
    """
    if not from_output:
        return compute("act_grad", functions.ACTIVATE_GRAD, dy, x, act=act)
    if activation.parse(act)[0] not in activation.FROM_OUTPUT:
        raise ValueError(f"act_grad: the derivative of {act} does not follow from its output; give its input")
    return compute("act_grad", functions.ACTIVATE_GRAD_FROM_OUTPUT, dy, x, act=act)


def add_act(a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return act(a + b)."""
    return compute("add", functions.ADD_ACTIVATE, a, b, act=act)


def act_mul(a: torch.Tensor, b: torch.Tensor, act: Activation, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return act(a) b. The gradient in b is act_mul(a, dy)."""
    return compute("act_mul", functions.ACTIVATE_MUL, a, b, act=act, out=out)


def act_mul_grad(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, act: Activation, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient in a of `act_mul`: dy act'(a) b."""
    return compute("act_mul_grad", functions.ACTIVATE_MUL_GRAD, dy, a, b, act=act, out=out)


add = _binary("add", "Return a + b.", integers=True)


def add_scaled(a: torch.Tensor, b: Operand, factor: Operand, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a + factor b, rounded once at the end."""
    return compute("add", functions.ADD_SCALED, a, b, factor, integers=True, out=out)


sub = _binary("sub", "Return a - b.", integers=True)
mul = _binary("mul", "Return a b.", integers=True)
div = _binary("div", "Return a / b. The gradient in a is dy / b.")
div_grad_b = _binary_grad("div_grad_b", "Return -dy (a / b) / b.")
div_trunc = _binary("div_trunc", "Return a / b, rounded, then without its fraction.")
div_floor = _binary("div_floor", "Return the largest integer that is at most a / b.")
fmod = _binary("fmod", "Return exact a - trunc(a / b) b, with a's sign; NaN where a / b overflows float64.")
fmod_grad_b = _binary_grad("fmod_grad_b", "Return -dy trunc(a / b).")
remainder = _binary("remainder", "Return a - floor(a / b) b, rounded once, with b's sign; NaN where `fmod` is NaN.")
remainder_grad_b = _binary_grad("remainder_grad_b", "Return -dy floor(a / b).")
pow = _binary("pow", "Return a to the power b, computed in float64.")
pow_grad_a = _binary_grad("pow_grad_a", "Return dy b a^(b - 1); 0 where b is 0.")
pow_grad_b = _binary_grad("pow_grad_b", "Return dy a^b log(a); 0 where a is 0 and b is not negative.")
maximum = _binary("maximum", "Return the larger of a and b; NaN if either is NaN.", integers=True)
maximum_grad = _binary_grad(
    "maximum_grad",
    "Return the gradient in a: dy where a is larger, dy / 2 where they are equal. Exchange a and b for that in b.",
)
minimum = _binary("minimum", "Return the smaller of a and b; NaN if either is NaN.", integers=True)
minimum_grad = _binary_grad(
    "minimum_grad",
    "Return the gradient in a: dy where a is smaller, dy / 2 where they are equal. Exchange a and b for that in b.",
)
eq = _binary("eq", "Return a == b, as torch.bool.", integers=True)
ne = _binary("ne", "Return a != b, as torch.bool.", integers=True)
lt = _binary("lt", "Return a < b, as torch.bool.", integers=True)
le = _binary("le", "Return a <= b, as torch.bool.", integers=True)
gt = _binary("gt", "Return a > b, as torch.bool.", integers=True)
ge = _binary("ge", "Return a >= b, as torch.bool.", integers=True)


prelu = _binary("prelu", "Return a where a > 0, else a b.")
prelu_grad_a = _binary_grad("prelu_grad_a", "Return the gradient of a in prelu(a, b): dy where a > 0, else dy b.")


def where(condition: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """Return a where `condition` (torch.bool) is true, else b. The gradient in a is where(condition, dy, 0)."""
    return compute("where", functions.WHERE, condition, a, b, integers=True, condition=True)


def clamp(x: torch.Tensor, low: float | None, high: float | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x clamped to [low, high], and high if low > high; None is no limit on that side.

    NaN stays NaN, and a NaN limit makes every element NaN. Raises ValueError if both limits are None.
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
    """Return dy where low <= x <= high, else 0."""
    dx = dy if low is None else compute("clamp_grad", functions.PASS_GE, dy, x, low)
    return dx if high is None else compute("clamp_grad", functions.PASS_LE, dx, x, high)


def hardtanh_grad(dy: torch.Tensor, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return dy where low < x < high or x is NaN, else 0."""
    dx = compute("hardtanh_grad", functions.PASS_GT, dy, x, low)
    return compute("hardtanh_grad", functions.PASS_LT, dx, x, high)


def prelu_grad_b(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """Return the gradient of b in prelu(a, b): dy a where a <= 0, else 0."""
    return compute("prelu_grad_b", functions.PRELU_GRAD_B, dy, a)


def norm_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return dy x / y for y = |x|_2 (y and dy have size 1 along reduced dimensions); 0 where y is 0."""
    return compute("norm_grad", functions.NORM_GRAD, dy, x, y, like=x)


def amax_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return dy / count where x equals its maximum y, else 0; NaN where y is. y, dy and count have size 1 along reduced
    dimensions."""
    share = compute("amax_grad", functions.DIV, dy, count, wide=True)
    return compute("amax_grad", functions.AMAX_GRAD, share, x, y, like=x)


def max_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return `amax_grad` with NaN equal to NaN."""
    share = compute("max_grad", functions.DIV, dy, count, wide=True)
    return compute("max_grad", functions.MAX_GRAD, share, x, y, like=x)
