"""Arithmetic element by element, with broadcasting: y = f(a), f(a, b) or f(a, b, c), and the gradients.

    a, b, c   any shapes that broadcast, any strides; Python numbers may stand for operands
    y         the broadcast shape, contiguous, in the operands' dtype; torch.bool for comparisons

Floating values are computed in float32 (float64 for float64, and for powers) and rounded once at the end. Integers
are computed in their own type. The gradient of f is one more such function of dy and what was kept: `functions` has
them all, and one pair of kernels in `compute` serves them.
At ties and kinks the gradients follow torch: equal operands of maximum share the gradient, |x| has 0 at 0.
"""

import torch

from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.elementwise import functions
from minidl.kernels.elementwise.compute import Operand, compute


def neg(x: torch.Tensor) -> torch.Tensor:
    """-x."""
    return compute("neg", functions.NEG, x, integers=True)


def abs(x: torch.Tensor) -> torch.Tensor:
    """|x|."""
    return compute("abs", functions.ABS, x, integers=True)


def abs_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy sign(x)."""
    return compute("abs_grad", functions.ABS_GRAD, dy, x)


def sign(x: torch.Tensor) -> torch.Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return compute("sign", functions.SIGN, x, integers=True)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the power x. Its gradient is dy y."""
    return compute("exp", functions.EXP, x)


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm. Its gradient is dy / x."""
    return compute("log", functions.LOG, x)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root."""
    return compute("sqrt", functions.SQRT, x)


def sqrt_grad(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dy / (2 y) for y = sqrt(x)."""
    return compute("sqrt_grad", functions.SQRT_GRAD, dy, y)


def square(x: torch.Tensor) -> torch.Tensor:
    """x x."""
    return compute("square", functions.SQUARE, x, integers=True)


def square_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """2 dy x."""
    return compute("square_grad", functions.SQUARE_GRAD, dy, x)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x."""
    return compute("reciprocal", functions.RECIPROCAL, x)


def reciprocal_grad(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """-dy y y for y = 1 / x."""
    return compute("reciprocal_grad", functions.RECIPROCAL_GRAD, dy, y)


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


def add(a: Operand, b: Operand) -> torch.Tensor:
    """a + b."""
    return compute("add", functions.ADD, a, b, integers=True)


def sub(a: Operand, b: Operand) -> torch.Tensor:
    """a - b."""
    return compute("sub", functions.SUB, a, b, integers=True)


def mul(a: Operand, b: Operand) -> torch.Tensor:
    """a b."""
    return compute("mul", functions.MUL, a, b, integers=True)


def div(a: Operand, b: Operand) -> torch.Tensor:
    """a / b. Its gradient in a is dy / b."""
    return compute("div", functions.DIV, a, b)


def div_grad_b(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """-dy (a / b) / b."""
    return compute("div_grad_b", functions.DIV_GRAD_B, dy, a, b)


def pow(a: Operand, b: Operand) -> torch.Tensor:
    """a to the power b, computed in float64 throughout."""
    return compute("pow", functions.POW, a, b)


def pow_grad_a(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """dy b a^(b - 1); 0 where b is 0."""
    return compute("pow_grad_a", functions.POW_GRAD_A, dy, a, b)


def pow_grad_b(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """dy a^b log(a); 0 where a is 0 and b is not negative."""
    return compute("pow_grad_b", functions.POW_GRAD_B, dy, a, b)


def maximum(a: Operand, b: Operand) -> torch.Tensor:
    """The larger of a and b; NaN where one is."""
    return compute("maximum", functions.MAXIMUM, a, b, integers=True)


def maximum_grad(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """The gradient in a: dy where a is larger, half of it where they are equal. For that in b, exchange a and b."""
    return compute("maximum_grad", functions.MAXIMUM_GRAD, dy, a, b)


def minimum(a: Operand, b: Operand) -> torch.Tensor:
    """The smaller of a and b; NaN where one is."""
    return compute("minimum", functions.MINIMUM, a, b, integers=True)


def minimum_grad(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """The gradient in a: dy where a is smaller, half of it where they are equal. For that in b, exchange a and b."""
    return compute("minimum_grad", functions.MINIMUM_GRAD, dy, a, b)


def eq(a: Operand, b: Operand) -> torch.Tensor:
    """a == b, as torch.bool."""
    return compute("eq", functions.EQ, a, b, integers=True)


def ne(a: Operand, b: Operand) -> torch.Tensor:
    """a != b, as torch.bool."""
    return compute("ne", functions.NE, a, b, integers=True)


def lt(a: Operand, b: Operand) -> torch.Tensor:
    """a < b, as torch.bool."""
    return compute("lt", functions.LT, a, b, integers=True)


def le(a: Operand, b: Operand) -> torch.Tensor:
    """a <= b, as torch.bool."""
    return compute("le", functions.LE, a, b, integers=True)


def gt(a: Operand, b: Operand) -> torch.Tensor:
    """a > b, as torch.bool."""
    return compute("gt", functions.GT, a, b, integers=True)


def ge(a: Operand, b: Operand) -> torch.Tensor:
    """a >= b, as torch.bool."""
    return compute("ge", functions.GE, a, b, integers=True)


def where(condition: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """a where the torch.bool tensor `condition` is true, else b. Its gradient in a is where(condition, dy, 0)."""
    return compute("where", functions.WHERE, condition, a, b, integers=True, condition=True)


def clamp(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """x moved into [low, high]; None leaves that side open. NaN stays. Raises ValueError unless low <= high."""
    if low is None and high is None:
        raise ValueError("clamp: got neither min nor max, expected at least one")
    if low is None:
        return compute("clamp", functions.MINIMUM, x, high, integers=True)
    if high is None:
        return compute("clamp", functions.MAXIMUM, x, low, integers=True)
    if not low <= high:
        raise ValueError(f"clamp: min {low} is above max {high}")
    return compute("clamp", functions.CLAMP, x, low, high, integers=True)


def clamp_grad(dy: torch.Tensor, x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """dy where low <= x <= high, else 0."""
    dx = dy if low is None else compute("clamp_grad", functions.PASS_GE, dy, x, low)
    return dx if high is None else compute("clamp_grad", functions.PASS_LE, dx, x, high)


def norm_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dy x / y for y = |x|_2 (of size 1, as dy, along what was reduced); 0 where y is 0."""
    return compute("norm_grad", functions.NORM_GRAD, dy, x, y)


def amax_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """dy / count where x equals its maximum y (of size 1, as dy and count, along what was reduced), else 0."""
    return compute("amax_grad", functions.AMAX_GRAD, compute("amax_grad", functions.DIV, dy, count, wide=True), x, y)
