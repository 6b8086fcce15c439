"""The device functions of one, two and three operands, which the kernels of `compute` select by number (OP)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels.activation import activate, activate_grad, activate_grad_from_output, log1p
from minidl.kernels.elementwise.rounding import floor_quotient, floor_remainder, remainder_of, round_half_even, truncate

# One operand.
NEG, ABS, EXP, LOG, SQRT, SQUARE, RECIPROCAL, SIGN, ACTIVATE = map(tl.constexpr, range(1, 10))
FLOOR, CEIL, TRUNC, ROUND, SIN, COS, LOG1P, EXPM1, ERF, LOG2, RSQRT = map(tl.constexpr, range(80, 91))
# Two.
ADD, SUB, MUL, DIV, POW, MAXIMUM, MINIMUM = map(tl.constexpr, range(20, 27))
ADD_ACTIVATE, ACTIVATE_MUL, ACTIVATE_MUL_GRAD = map(tl.constexpr, (33, 35, 76))
PRELU, PRELU_GRAD_B = map(tl.constexpr, (34, 46))
EQ, NE, LT, LE, GT, GE = map(tl.constexpr, range(27, 33))
DIV_TRUNC, DIV_FLOOR, FMOD, REMAINDER = map(tl.constexpr, range(100, 104))
# Gradients: dy and the saved value.
ABS_GRAD, SQRT_GRAD, SQUARE_GRAD, RECIPROCAL_GRAD, ACTIVATE_GRAD = map(tl.constexpr, range(40, 45))
ACTIVATE_GRAD_FROM_OUTPUT = tl.constexpr(45)
SIN_GRAD, COS_GRAD, LOG1P_GRAD, EXPM1_GRAD, ERF_GRAD, LOG2_GRAD, RSQRT_GRAD = map(tl.constexpr, range(110, 117))
# Three.
WHERE, CLAMP, DIV_GRAD_B, POW_GRAD_A, POW_GRAD_B = map(tl.constexpr, range(60, 65))
MAXIMUM_GRAD, MINIMUM_GRAD, PASS_GE, PASS_LE, NORM_GRAD, AMAX_GRAD = map(tl.constexpr, range(65, 71))
ADD_SCALED = tl.constexpr(71)
PRELU_GRAD_A, PASS_GT, PASS_LT, MAX_GRAD = map(tl.constexpr, range(72, 76))
FMOD_GRAD_B, REMAINDER_GRAD_B = map(tl.constexpr, (120, 121))

# Plain integers, which the host compares faster than constexpr.
COMPARISONS = frozenset(op.value for op in (EQ, NE, LT, LE, GT, GE))
# The result is an operand or a remainder of one, so a number operand must be rounded to the tensor's dtype first.
_PASSING = (PASS_GE, PASS_LE, PASS_GT, PASS_LT)
CHOICES = COMPARISONS | {
    op.value for op in (MAXIMUM, MINIMUM, CLAMP, MAXIMUM_GRAD, MINIMUM_GRAD, *_PASSING, FMOD, REMAINDER)
}


class Operation(NamedTuple):
    """The function, the types of the computation and of its first operand, an activation of `activation.parse`."""

    OP: int
    ACC: Any
    ACC_A: Any
    ACT: int
    SLOPE: float


@triton.jit
def divide(a, b):
    """Return a / b, correctly rounded also in float32 (a compiled `/` is off by up to 2 units in the last place)."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def square_root(x):
    """Return sqrt(x), correctly rounded."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def exponential(x):
    """Return exp(x), off by at most 5 units in the last place in float32, also for large x.

    x = n ln 2 + r with |r| <= ln(2)/2 (Cody and Waite: ln 2 in two parts, so that n times the first is exact), then
    exp(r) times 2^n in two exact steps. A compiled `tl.exp` alone is off by |x| units.
    """
    if x.dtype == tl.float32:
        x = tl.where(x > 90.0, 90.0, tl.where(x < -105.0, -105.0, x))
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        r = (x - n * 0.693145751953125) - n * 1.428606765330187e-06
        i = tl.where(x != x, 0.0, n).to(tl.int32)
        half = i >> 1
        first = ((half + 127) << 23).to(tl.float32, bitcast=True)
        second = ((i - half + 127) << 23).to(tl.float32, bitcast=True)
        return tl.exp2(r * 1.4426950408889634) * first * second
    else:
        return tl.exp(x)


@triton.jit
def power(a, b):
    """Return a to the power b in float64 as exp(b log|a|), with the signs and exceptions of C's pow."""
    a = a.to(tl.float64)
    b = b.to(tl.float64)
    size = tl.exp(b * tl.log(tl.abs(a)))
    half = b * 0.5
    is_integer = tl.floor(b) == b
    is_odd = is_integer & (tl.floor(half) != half)
    size = tl.where((a.to(tl.int64, bitcast=True) < 0) & is_odd, size * -1.0, size)  # -0 too
    size = tl.where((a < 0.0) & (a > float("-inf")) & (is_integer == 0), float("nan"), size)
    return tl.where((b == 0.0) | (a == 1.0) | ((a == -1.0) & (tl.abs(b) == float("inf"))), 1.0, size)


@triton.jit
def exp_minus_1(x):
    """Return e^x - 1, off by at most 16 units in the last place: for |x| < 1/2 by the power series."""
    TERMS: tl.constexpr = 17 if x.dtype == tl.float64 else 9
    near = tl.where(tl.abs(x) < 0.5, x, 0.0)
    series = tl.full(x.shape, 1.0, x.dtype)
    for k in tl.static_range(TERMS, 1, -1):
        series = series * (near * (1.0 / k)) + 1.0
    return tl.where(tl.abs(x) < 0.5, x * series, exponential(x) - 1.0)


@triton.jit
def log_1_plus(x):
    """Return log(1 + x), for |x| < 1/2 by the series."""
    near = tl.abs(x) < 0.5
    return tl.where(near, log1p(tl.where(near, x, 0.0)), tl.log(1.0 + x))


@triton.jit
def function_of_1(a, OP: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr):
    if OP == NEG:
        if a.dtype.is_floating():
            return a * -1  # a compiled minus is 0 - a, which loses the sign of 0
        else:
            return tl.zeros_like(a) - a
    elif OP == ABS:
        return tl.abs(a)
    elif OP == EXP:
        return exponential(a)
    elif OP == LOG:
        return tl.log(a)
    elif OP == SQRT:
        return square_root(a)
    elif OP == SQUARE:
        return a * a
    elif OP == RECIPROCAL:
        return divide(tl.full(a.shape, 1.0, a.dtype), a)
    elif OP == SIGN:
        return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)
    elif OP == ACTIVATE:
        return activate(a, ACT, SLOPE)
    elif OP == FLOOR:
        return tl.floor(a)
    elif OP == CEIL:
        return tl.ceil(a)
    elif OP == TRUNC:
        return truncate(a)
    elif OP == ROUND:
        return round_half_even(a)
    elif OP == SIN:
        return tl.sin(a)
    elif OP == COS:
        return tl.cos(a)
    elif OP == LOG1P:
        return log_1_plus(a)
    elif OP == EXPM1:
        return exp_minus_1(a)
    elif OP == ERF:
        return tl.erf(a)
    elif OP == LOG2:
        return tl.log2(a)
    elif OP == RSQRT:
        return divide(tl.full(a.shape, 1.0, a.dtype), square_root(a))
    else:
        return a


@triton.jit
def function_of_2(a, b, OP: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr):
    if OP == ADD:
        return a + b
    elif OP == ADD_ACTIVATE:
        return activate(a + b, ACT, SLOPE)
    elif OP == ACTIVATE_MUL:
        return activate(a, ACT, SLOPE) * b
    elif OP == SUB:
        return a - b
    elif OP == MUL:
        return a * b
    elif OP == DIV:
        return divide(a, b)
    elif OP == POW:
        return power(a, b).to(b.dtype)
    elif OP == MAXIMUM:
        return tl.where((a > b) | (a != a), a, b)
    elif OP == MINIMUM:
        return tl.where((a < b) | (a != a), a, b)
    elif OP == EQ:
        return a == b
    elif OP == NE:
        return a != b
    elif OP == LT:
        return a < b
    elif OP == LE:
        return a <= b
    elif OP == GT:
        return a > b
    elif OP == GE:
        return a >= b
    elif OP == PRELU:
        return tl.where(a > 0, a, a * b)
    elif OP == PRELU_GRAD_B:
        return tl.where(b > 0, 0.0, a * b)
    elif OP == ABS_GRAD:
        return a * ((b > 0).to(a.dtype) - (b < 0).to(a.dtype))
    elif OP == SQRT_GRAD:
        return divide(a, 2.0 * b)
    elif OP == SQUARE_GRAD:
        return a * (2.0 * b)
    elif OP == RECIPROCAL_GRAD:
        return -a * b * b
    elif OP == ACTIVATE_GRAD:
        return a * activate_grad(b, ACT, SLOPE)
    elif OP == DIV_TRUNC:
        return truncate(divide(a, b))
    elif OP == DIV_FLOOR:
        return floor_quotient(a, b).to(a.dtype)
    elif OP == FMOD:
        return remainder_of(a, b).to(a.dtype)
    elif OP == REMAINDER:
        return floor_remainder(a, b).to(a.dtype)
    elif OP == SIN_GRAD:
        return a * tl.cos(b)
    elif OP == COS_GRAD:
        return a * (tl.sin(b) * -1.0)
    elif OP == LOG1P_GRAD:
        return divide(a, 1.0 + b)
    elif OP == EXPM1_GRAD:
        return a * exponential(b)
    elif OP == ERF_GRAD:
        return a * (exponential(b * b * -1.0) * 1.1283791670955126)
    elif OP == LOG2_GRAD:
        return divide(a, b * 0.6931471805599453)
    elif OP == RSQRT_GRAD:
        return divide(divide(a, b), square_root(b)) * -0.5  # b sqrt(b) may overflow
    else:
        return a * activate_grad_from_output(b, ACT, SLOPE)


@triton.jit
def function_of_3(a, b, c, OP: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr):
    if OP == WHERE:
        return tl.where(a, b, c)
    elif OP == CLAMP:
        raised = tl.where(a < b, b, a)
        return tl.where(raised > c, c, raised)
    elif OP == DIV_GRAD_B:
        return -a * divide(divide(b, c), c)
    elif OP == POW_GRAD_A:
        exponent = c.to(tl.float64)
        return tl.where(c == 0, 0.0, a.to(tl.float64) * (exponent * power(b, exponent - 1.0))).to(a.dtype)
    elif OP == POW_GRAD_B:
        slope = power(b, c) * tl.log(b.to(tl.float64))
        return (a.to(tl.float64) * tl.where((b == 0) & (c >= 0), 0.0, slope)).to(a.dtype)
    elif OP == MAXIMUM_GRAD:
        return tl.where(b == c, a * 0.5, tl.where(b < c, 0.0, a))
    elif OP == MINIMUM_GRAD:
        return tl.where(b == c, a * 0.5, tl.where(b > c, 0.0, a))
    elif OP == PASS_GE:
        return tl.where(b >= c, a, 0.0)
    elif OP == PASS_LE:
        return tl.where(b <= c, a, 0.0)
    elif OP == ADD_SCALED:
        return a + c * b
    elif OP == ACTIVATE_MUL_GRAD:
        return a * activate_grad(b, ACT, SLOPE) * c  # dy b may overflow
    elif OP == PASS_GT:
        return tl.where(b <= c, 0.0, a)
    elif OP == PASS_LT:
        return tl.where(b >= c, 0.0, a)
    elif OP == PRELU_GRAD_A:
        return tl.where(b > 0, a, a * c)
    elif OP == FMOD_GRAD_B:
        return a * (truncate(divide(b, c)) * -1.0)
    elif OP == REMAINDER_GRAD_B:
        return a * (floor_quotient(b, c) * -1.0).to(a.dtype)
    elif OP == NORM_GRAD:
        return tl.where(c == 0, 0.0, a * divide(b, c))
    elif OP == MAX_GRAD:
        return a * ((b == c) | ((b != b) & (c != c))).to(a.dtype)
    else:
        return tl.where(c == c, a * (b == c).to(a.dtype), c)


@triton.jit
def function(a, b, c, operation: tl.constexpr):
    """Return f(a), f(a, b) or f(a, b, c); operands that f lacks are None."""
    if c is not None:
        return function_of_3(a, b, c, operation.OP, operation.ACT, operation.SLOPE)
    elif b is not None:
        return function_of_2(a, b, operation.OP, operation.ACT, operation.SLOPE)
    else:
        return function_of_1(a, operation.OP, operation.ACT, operation.SLOPE)
