"""Arithmetic element by element, with broadcasting: y = f(a), f(a, b) or f(a, b, c), and the gradients.

    a, b, c   any shapes that broadcast, any strides; Python numbers may stand for operands
    y         the broadcast shape, contiguous, in the operands' dtype; torch.bool for comparisons

Floating values are computed in float32 (float64 for float64, and for powers) and rounded once at the end. Integers
are computed in their own type. The gradient of f is one more such function of dy and what was kept, so one pair of
kernels serves all: neighbouring dimensions are merged on the host where the strides of every operand allow it, which
leaves a single contiguous run in the common case, and otherwise a grid of two-dimensional tiles.
At ties and kinks the gradients follow torch: equal operands of maximum share the gradient, |x| has 0 at 0.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check, launch
from minidl.kernels.activation import Activation, activate, activate_grad, activate_grad_from_output

Operand = torch.Tensor | float | int | bool

# One operand.
NEG = tl.constexpr(1)
ABS = tl.constexpr(2)
EXP = tl.constexpr(3)
LOG = tl.constexpr(4)
SQRT = tl.constexpr(5)
SQUARE = tl.constexpr(6)
RECIPROCAL = tl.constexpr(7)
SIGN = tl.constexpr(8)
ACTIVATE = tl.constexpr(9)
# Two.
ADD = tl.constexpr(20)
SUB = tl.constexpr(21)
MUL = tl.constexpr(22)
DIV = tl.constexpr(23)
POW = tl.constexpr(24)
MAXIMUM = tl.constexpr(25)
MINIMUM = tl.constexpr(26)
EQ = tl.constexpr(27)
NE = tl.constexpr(28)
LT = tl.constexpr(29)
LE = tl.constexpr(30)
GT = tl.constexpr(31)
GE = tl.constexpr(32)
# dy and what the operation kept.
ABS_GRAD = tl.constexpr(40)
SQRT_GRAD = tl.constexpr(41)
SQUARE_GRAD = tl.constexpr(42)
RECIPROCAL_GRAD = tl.constexpr(43)
ACTIVATE_GRAD = tl.constexpr(44)
ACTIVATE_GRAD_FROM_OUTPUT = tl.constexpr(45)
# Three.
WHERE = tl.constexpr(60)
CLAMP = tl.constexpr(61)
DIV_GRAD_B = tl.constexpr(62)
POW_GRAD_A = tl.constexpr(63)
POW_GRAD_B = tl.constexpr(64)
MAXIMUM_GRAD = tl.constexpr(65)
MINIMUM_GRAD = tl.constexpr(66)
PASS_GE = tl.constexpr(67)
PASS_LE = tl.constexpr(68)
NORM_GRAD = tl.constexpr(69)
AMAX_GRAD = tl.constexpr(70)

COMPARISONS = (EQ, NE, LT, LE, GT, GE)
# They choose among their operands, so a number has to be one that the tensor's type has.
CHOICES = (*COMPARISONS, MAXIMUM, MINIMUM, CLAMP, MAXIMUM_GRAD, MINIMUM_GRAD, PASS_GE, PASS_LE)


@triton.jit
def divide(a, b):
    """a / b, correctly rounded also in float32 (a compiled `/` is off by up to 2 units in the last place)."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def root(x):
    """sqrt(x), correctly rounded."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def exponential(x):
    """exp(x), off by 5 units in the last place in float32, also where x is large.

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
    """a to the power b in float64 as exp(b log|a|), with the signs and exceptions of C's pow."""
    a = a.to(tl.float64)
    b = b.to(tl.float64)
    size = tl.exp(b * tl.log(tl.abs(a)))
    half = b * 0.5
    whole = tl.floor(b) == b
    odd = whole & (tl.floor(half) != half)
    size = tl.where((a.to(tl.int64, bitcast=True) < 0) & odd, size * -1.0, size)  # -0 too
    size = tl.where((a < 0.0) & (a > float("-inf")) & (whole == 0), float("nan"), size)
    return tl.where((b == 0.0) | (a == 1.0) | ((a == -1.0) & (tl.abs(b) == float("inf"))), 1.0, size)


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
        return root(a)
    elif OP == SQUARE:
        return a * a
    elif OP == RECIPROCAL:
        return divide(tl.full(a.shape, 1.0, a.dtype), a)
    elif OP == SIGN:
        return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)
    elif OP == ACTIVATE:
        return activate(a, ACT, SLOPE)
    else:
        return a


@triton.jit
def function_of_2(a, b, OP: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr):
    if OP == ADD:
        return a + b
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
    else:
        return a * activate_grad_from_output(b, ACT, SLOPE)


@triton.jit
def function_of_3(a, b, c, OP: tl.constexpr):
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
    elif OP == NORM_GRAD:
        return tl.where(c == 0, 0.0, a * divide(b, c))
    else:
        return a * (b == c).to(a.dtype)


@triton.jit
def function(a, b, c, OP: tl.constexpr, OPERANDS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr):
    if OPERANDS == 1:
        return function_of_1(a, OP, ACT, SLOPE)
    elif OPERANDS == 2:
        return function_of_2(a, b, OP, ACT, SLOPE)
    else:
        return function_of_3(a, b, c, OP)


@triton.jit
def load_run(p, o, m, SCALAR: tl.constexpr, ACC: tl.constexpr):
    """A run of an operand, or its one value."""
    if SCALAR:
        return tl.load(p).to(ACC)
    else:
        return tl.load(p + o, mask=m, other=0).to(ACC)


@triton.jit
def flat_kernel(
    p_a, p_b, p_c, p_y, N,
    OP: tl.constexpr, OPERANDS: tl.constexpr, SCALARS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ACC: tl.constexpr, ACC_A: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """N elements in order; bit i of SCALARS says that operand i is a single value."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    o = tl.arange(0, BLOCK_N)
    m = o < tl.minimum(N - start, BLOCK_N).to(tl.int32)
    b_a = load_run(p_a + (0 if SCALARS & 1 else start), o, m, SCALARS & 1, ACC_A)  # [BLOCK_N]
    b_b = b_a
    b_c = b_a
    if OPERANDS > 1:
        b_b = load_run(p_b + (0 if SCALARS & 2 else start), o, m, SCALARS & 2, ACC)
    if OPERANDS > 2:
        b_c = load_run(p_c + (0 if SCALARS & 4 else start), o, m, SCALARS & 4, ACC)
    b_y = function(b_a, b_b, b_c, OP, OPERANDS, ACT, SLOPE)
    tl.store(p_y + start + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def tile_kernel(
    p_a, p_b, p_c, p_y, M, N, D1, D2, D3,
    s_am, s_an, s_a0, s_a1, s_a2, s_a3, s_bm, s_bn, s_b0, s_b1, s_b2, s_b3,
    s_cm, s_cn, s_c0, s_c1, s_c2, s_c3, s_ym, s_yn, s_y0, s_y1, s_y2, s_y3,
    OP: tl.constexpr, OPERANDS: tl.constexpr, OUTER: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ACC: tl.constexpr, ACC_A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of an [M, N] plane, for each position of up to four outer dimensions [D0, D1, D2, D3]."""
    i_m = tl.program_id(0) % tl.cdiv(M, BLOCK_M)
    rest = tl.program_id(0) // tl.cdiv(M, BLOCK_M)
    i_n = rest % tl.cdiv(N, BLOCK_N)
    rest = rest // tl.cdiv(N, BLOCK_N)
    if OUTER:
        i_3 = (rest % D3).to(tl.int64)
        rest = rest // D3
        i_2 = (rest % D2).to(tl.int64)
        rest = rest // D2
        i_1 = (rest % D1).to(tl.int64)
        i_0 = (rest // D1).to(tl.int64)
        p_a += i_0 * s_a0 + i_1 * s_a1 + i_2 * s_a2 + i_3 * s_a3
        p_y += i_0 * s_y0 + i_1 * s_y1 + i_2 * s_y2 + i_3 * s_y3
        if OPERANDS > 1:
            p_b += i_0 * s_b0 + i_1 * s_b1 + i_2 * s_b2 + i_3 * s_b3
        if OPERANDS > 2:
            p_c += i_0 * s_c0 + i_1 * s_c1 + i_2 * s_c2 + i_3 * s_c3
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m = (o_m < M) & (o_n < N)
    b_a = tl.load(p_a + o_m * s_am + o_n * s_an, mask=m, other=0).to(ACC_A)  # [BLOCK_M, BLOCK_N]
    b_b = b_a
    b_c = b_a
    if OPERANDS > 1:
        b_b = tl.load(p_b + o_m * s_bm + o_n * s_bn, mask=m, other=0).to(ACC)
    if OPERANDS > 2:
        b_c = tl.load(p_c + o_m * s_cm + o_n * s_cn, mask=m, other=0).to(ACC)
    b_y = function(b_a, b_b, b_c, OP, OPERANDS, ACT, SLOPE)
    tl.store(p_y + o_m * s_ym + o_n * s_yn, b_y.to(p_y.dtype.element_ty), mask=m)


def neg(x: torch.Tensor) -> torch.Tensor:
    """-x."""
    return _compute("neg", NEG, x, integers=True)


def abs(x: torch.Tensor) -> torch.Tensor:
    """|x|."""
    return _compute("abs", ABS, x, integers=True)


def abs_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy sign(x)."""
    return _compute("abs_grad", ABS_GRAD, dy, x)


def sign(x: torch.Tensor) -> torch.Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return _compute("sign", SIGN, x, integers=True)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the power x. Its gradient is dy y."""
    return _compute("exp", EXP, x)


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm. Its gradient is dy / x."""
    return _compute("log", LOG, x)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root."""
    return _compute("sqrt", SQRT, x)


def sqrt_grad(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dy / (2 y) for y = sqrt(x)."""
    return _compute("sqrt_grad", SQRT_GRAD, dy, y)


def square(x: torch.Tensor) -> torch.Tensor:
    """x x."""
    return _compute("square", SQUARE, x, integers=True)


def square_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """2 dy x."""
    return _compute("square_grad", SQUARE_GRAD, dy, x)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x."""
    return _compute("reciprocal", RECIPROCAL, x)


def reciprocal_grad(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """-dy y y for y = 1 / x."""
    return _compute("reciprocal_grad", RECIPROCAL_GRAD, dy, y)


def act(x: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(x) for an activation of `activation.py`."""
    return _compute("act", ACTIVATE, x, act=act)


def act_grad(dy: torch.Tensor, x: torch.Tensor, act: Activation, from_output: bool = False) -> torch.Tensor:
    """dy act'(x); with `from_output`, x is act(z) and this is dy act'(z), for the activations in FROM_OUTPUT.

    Raises ValueError for an activation whose derivative does not follow from its output.
    """
    if not from_output:
        return _compute("act_grad", ACTIVATE_GRAD, dy, x, act=act)
    if activation.parse(act)[0] not in activation.FROM_OUTPUT:
        raise ValueError(f"act_grad: the derivative of {act} does not follow from its output; give its input")
    return _compute("act_grad", ACTIVATE_GRAD_FROM_OUTPUT, dy, x, act=act)


def add(a: Operand, b: Operand) -> torch.Tensor:
    """a + b."""
    return _compute("add", ADD, a, b, integers=True)


def sub(a: Operand, b: Operand) -> torch.Tensor:
    """a - b."""
    return _compute("sub", SUB, a, b, integers=True)


def mul(a: Operand, b: Operand) -> torch.Tensor:
    """a b."""
    return _compute("mul", MUL, a, b, integers=True)


def div(a: Operand, b: Operand) -> torch.Tensor:
    """a / b. Its gradient in a is dy / b."""
    return _compute("div", DIV, a, b)


def div_grad_b(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """-dy (a / b) / b."""
    return _compute("div_grad_b", DIV_GRAD_B, dy, a, b)


def pow(a: Operand, b: Operand) -> torch.Tensor:
    """a to the power b, computed in float64 throughout."""
    return _compute("pow", POW, a, b)


def pow_grad_a(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """dy b a^(b - 1); 0 where b is 0."""
    return _compute("pow_grad_a", POW_GRAD_A, dy, a, b)


def pow_grad_b(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """dy a^b log(a); 0 where a is 0 and b is not negative."""
    return _compute("pow_grad_b", POW_GRAD_B, dy, a, b)


def maximum(a: Operand, b: Operand) -> torch.Tensor:
    """The larger of a and b; NaN where one is."""
    return _compute("maximum", MAXIMUM, a, b, integers=True)


def maximum_grad(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """The gradient in a: dy where a is larger, half of it where they are equal. For that in b, exchange a and b."""
    return _compute("maximum_grad", MAXIMUM_GRAD, dy, a, b)


def minimum(a: Operand, b: Operand) -> torch.Tensor:
    """The smaller of a and b; NaN where one is."""
    return _compute("minimum", MINIMUM, a, b, integers=True)


def minimum_grad(dy: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """The gradient in a: dy where a is smaller, half of it where they are equal. For that in b, exchange a and b."""
    return _compute("minimum_grad", MINIMUM_GRAD, dy, a, b)


def eq(a: Operand, b: Operand) -> torch.Tensor:
    """a == b, as torch.bool."""
    return _compute("eq", EQ, a, b, integers=True)


def ne(a: Operand, b: Operand) -> torch.Tensor:
    """a != b, as torch.bool."""
    return _compute("ne", NE, a, b, integers=True)


def lt(a: Operand, b: Operand) -> torch.Tensor:
    """a < b, as torch.bool."""
    return _compute("lt", LT, a, b, integers=True)


def le(a: Operand, b: Operand) -> torch.Tensor:
    """a <= b, as torch.bool."""
    return _compute("le", LE, a, b, integers=True)


def gt(a: Operand, b: Operand) -> torch.Tensor:
    """a > b, as torch.bool."""
    return _compute("gt", GT, a, b, integers=True)


def ge(a: Operand, b: Operand) -> torch.Tensor:
    """a >= b, as torch.bool."""
    return _compute("ge", GE, a, b, integers=True)


def where(condition: torch.Tensor, a: Operand, b: Operand) -> torch.Tensor:
    """a where the torch.bool tensor `condition` is true, else b. Its gradient in a is where(condition, dy, 0)."""
    return _compute("where", WHERE, condition, a, b, integers=True, condition=True)


def clamp(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """x moved into [low, high]; None leaves that side open. NaN stays. Raises ValueError unless low <= high."""
    if low is None and high is None:
        raise ValueError("clamp: got neither min nor max, expected at least one")
    if low is None:
        return _compute("clamp", MINIMUM, x, high, integers=True)
    if high is None:
        return _compute("clamp", MAXIMUM, x, low, integers=True)
    if not low <= high:
        raise ValueError(f"clamp: min {low} is above max {high}")
    return _compute("clamp", CLAMP, x, low, high, integers=True)


def clamp_grad(dy: torch.Tensor, x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """dy where low <= x <= high, else 0."""
    dx = dy if low is None else _compute("clamp_grad", PASS_GE, dy, x, low)
    return dx if high is None else _compute("clamp_grad", PASS_LE, dx, x, high)


def norm_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dy x / y for y = |x|_2 (of size 1, as dy, along what was reduced); 0 where y is 0."""
    return _compute("norm_grad", NORM_GRAD, dy, x, y)


def amax_grad(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """dy / count where x equals its maximum y (of size 1, as dy and count, along what was reduced), else 0."""
    return _compute("amax_grad", AMAX_GRAD, _compute("amax_grad", DIV, dy, count, wide=True), x, y)


_INTEGERS = {
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
MAX_OUTER = 4


def _compute(
    name: str,
    op: tl.constexpr,
    *operands: Operand,
    integers: bool = False,
    act: Activation = None,
    condition: bool = False,
    wide: bool = False,
) -> torch.Tensor:
    """f of up to three operands of one dtype, that of the first tensor; numbers take the type computed in.

    With `condition`, a torch.bool tensor stands before them. With `wide`, tensors of the accumulate type may be among
    them.
    """
    first = _first_tensor(name, operands[1:] if condition else operands)
    dtype, device = first.dtype, first.device
    comparison = op in COMPARISONS
    acc = _acc(name, dtype, integers, comparison)
    for i, x in enumerate(operands):
        if isinstance(x, torch.Tensor):
            _check(name, x, first, condition and i == 0, wide)
    tensors = [x if isinstance(x, torch.Tensor) else _filled(name, x, dtype, device, op in CHOICES) for x in operands]
    shape = broadcast(name, [x.shape for x in tensors])
    y = torch.empty(shape, dtype=torch.bool if comparison else dtype, device=device)
    activation_, slope = activation.parse(act)
    flags = {
        "OP": op,
        "OPERANDS": len(tensors),
        "ACT": activation.CODES[activation_],
        "SLOPE": slope,
        "ACC": acc,
        "ACC_A": tl.int1 if condition else acc,
    }
    _launch(tensors, y, dtype, flags)
    return y


def _launch(tensors: list[torch.Tensor], y: torch.Tensor, dtype: torch.dtype, flags: dict) -> None:
    total = y.numel()
    if total == 0:
        return
    padding = [tensors[0]] * (3 - len(tensors))
    if all(x.numel() == 1 or (x.numel() == total and x.is_contiguous()) for x in tensors):
        tile = launch.tile("elementwise", dtype, N=total)
        # One element in all is a run of length 1, so that no result is a scalar.
        scalars = sum((x.numel() == 1 < total) << i for i, x in enumerate(tensors))
        grid = (triton.cdiv(total, tile["BLOCK_N"]),)
        launch.run(flat_kernel, grid, *tensors, *padding, y, total, SCALARS=scalars, **flags, **tile.options)
        return
    sizes, strides = collapse(y.shape, [*(_strides(x, y.shape) for x in tensors), y.stride()])
    if len(sizes) > MAX_OUTER + 2:
        whole = [x if x.numel() == 1 else x.expand(y.shape).contiguous() for x in tensors]
        _launch(whole, y, dtype, flags)
        return
    # The plane is the innermost dimension and the largest of the others; a program walks no loop, so the more of the
    # problem lies in the plane the better.
    order = sorted(range(len(sizes) - 1), key=lambda i: sizes[i])
    outer, plane = sorted(order[:-1]), [*order[-1:], len(sizes) - 1]
    extents = [1] * (2 - len(plane)) + [sizes[i] for i in plane]
    outside = [1] * (MAX_OUTER - len(outer)) + [sizes[i] for i in outer]
    steps = []
    for s in [*strides[:-1], *[strides[0]] * len(padding), strides[-1]]:
        steps += [0] * (2 - len(plane)) + [s[i] for i in plane] + [0] * (MAX_OUTER - len(outer)) + [s[i] for i in outer]
    M, N = extents
    tile = launch.tile("elementwise_tile", dtype, M=M, N=N)
    programs = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
    for extent in outside:
        programs *= extent
    launch.run(
        tile_kernel, (programs,), *tensors, *padding, y, M, N, *outside[1:], *steps,
        OUTER=bool(outer), **flags, **tile.options,
    )  # fmt: skip


def broadcast(name: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all shapes broadcast to. Raises ValueError where they do not."""
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes):
        return first
    result: list[int] = []
    for i in range(1, max(len(shape) for shape in shapes) + 1):
        sizes = {shape[-i] for shape in shapes if len(shape) >= i} - {1}
        if len(sizes) > 1:
            listed = " and ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{name}: shapes {listed} do not broadcast: sizes must be equal or 1, counted from the end"
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(reversed(result))


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Sizes and each operand's strides, without dimensions of size 1 and with neighbours merged where all allow it."""
    kept = [i for i, size in enumerate(shape) if size != 1] or list(range(len(shape)))[-1:]
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for i in kept:
        if sizes and all(m[-1] == s[i] * shape[i] for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= shape[i]
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[i]
        else:
            sizes.append(shape[i])
            for m, s in zip(merged, strides, strict=True):
                m.append(s[i])
    return sizes, merged


def _strides(x: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of x broadcast to `shape`: 0 along what is repeated."""
    missing = len(shape) - x.dim()
    return [0] * missing + [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]


def _first_tensor(name: str, operands: Sequence[Operand]) -> torch.Tensor:
    for x in operands:
        if isinstance(x, torch.Tensor):
            return x
    raise TypeError(f"{name}: got only Python numbers, expected at least one tensor")


def _acc(name: str, dtype: torch.dtype, integers: bool, comparison: bool) -> tl.dtype:
    """The type to compute in. Raises TypeError for a dtype that the operation does not take."""
    if dtype.is_floating_point and dtype in check.FLOATING:
        return launch.acc(dtype)
    if integers and dtype in _INTEGERS:
        return _INTEGERS[dtype]
    if comparison and dtype == torch.bool:
        return tl.int8
    expected = "a floating or integer type" if integers else "a floating type"
    raise TypeError(f"{name}: got dtype {dtype}, expected {expected}; convert it with .to()")


def _check(name: str, x: torch.Tensor, first: torch.Tensor, condition: bool, wide: bool) -> None:
    if condition and x.dtype != torch.bool:
        raise TypeError(f"{name}: the condition has dtype {x.dtype}, expected torch.bool; compare it, as in x > 0")
    if not condition and x.dtype != first.dtype and not (wide and x.dtype == launch.acc_torch(first.dtype)):
        raise TypeError(f"{name}: got operands of {first.dtype} and {x.dtype}; convert one of them with .to()")
    if x.device != first.device:
        raise ValueError(f"{name}: got operands on {first.device} and {x.device}; move one of them with .to()")


def _filled(
    name: str, value: float | int | bool, dtype: torch.dtype, device: torch.device, narrow: bool
) -> torch.Tensor:
    """A number as a tensor: in the type computed in, so that it is not rounded to a narrower one, unless `narrow`."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor or a number")
    if not dtype.is_floating_point and isinstance(value, float):
        raise TypeError(f"{name}: got a {dtype} tensor and the number {value}; convert the tensor to a floating type")
    if dtype == torch.bool:
        # Beyond 0 and 1 only the order counts.
        return torch.full((), max(-1, min(2, value)), dtype=torch.int8, device=device)
    kind = launch.acc_torch(dtype) if dtype.is_floating_point and not narrow else dtype
    if not dtype.is_floating_point and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
        raise ValueError(f"{name}: the number {value} is outside the range of {dtype}; convert the tensor with .to()")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ValueError(f"{name}: a whole number of {value.bit_length()} bits is outside the range of {dtype}")
    return torch.full((), value, dtype=kind, device=device)
