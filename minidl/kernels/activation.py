"""Activations as device functions, shared by every kernel that applies one.

    relu        max(z, 0)                        leaky_relu  z if z > 0 else slope * z
    sigmoid     1 / (1 + exp(-z))                tanh        1 - 2 / (1 + exp(2 z))
    gelu        z Phi(z)                         gelu_tanh   z/2 * (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))
    silu        z * sigmoid(z)                   relu6       min(max(z, 0), 6)
    elu         z if z > 0 else slope (e^z - 1)  softplus    log(1 + e^(slope z)) / slope, z where slope z > 20
    mish        z * tanh(log(1 + e^z))           hardswish   z * hardsigmoid(z)
    hardsigmoid min(max(z + 3, 0), 6) / 6

Phi is the normal distribution function. GELU: Hendrycks and Gimpel, arXiv 1606.08415. SiLU: Elfwing et al.,
arXiv 1702.03118. ELU: Clevert et al., arXiv 1511.07289. Mish: Misra, arXiv 1908.08681. All propagate NaN and accept
blocks of float32 or float64 of any shape.

Memory traffic hides some 20 instructions per float16 number. A compiled division takes 8 instructions, `tl.exp` 5 and
`tl.erf` 28, but `tl.exp2` and `tl.rsqrt` one each. So exponentials are computed as powers of two, and 1/d as the square
of 1/sqrt(d). Each is off by at most 3 units in the last place.
"""

from typing import Any

import triton
import triton.language as tl

NAMES = ("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "relu6")
RARE = ("elu", "softplus", "mish", "hardswish", "hardsigmoid")
# Plain integers, which the host compares and hashes faster than constexpr.
CODES = {name: code for code, name in enumerate((None, *NAMES, *RARE))}
NONE, RELU, LEAKY_RELU, SIGMOID, TANH, GELU, GELU_TANH, SILU, RELU6, ELU, SOFTPLUS, MISH, HARDSWISH, HARDSIGMOID = map(
    tl.constexpr, CODES.values()
)
# Activations whose derivative follows from the output, so the gradient needs only the output.
FROM_OUTPUT = (None, "relu", "leaky_relu", "sigmoid", "tanh", "relu6")
FROM_INPUT_IN_TORCH = ("leaky_relu", "relu6")  # torch allows in-place changes of their output before backward
NEGATIVE_SLOPE = 0.01
# Default slopes.
SLOPES = {"leaky_relu": NEGATIVE_SLOPE, "elu": 1.0, "softplus": 1.0}

Activation = str | tuple[str, float] | None


def parse(act: Activation) -> tuple[str | None, float]:
    """Return (name, slope) of an activation, which is a name, None, or (name, slope) for a name in SLOPES.

    Raises ValueError for an unknown name, a slope for another activation, or a slope that is not positive; the slope of
    elu, torch's alpha, may be any number. Raises TypeError for other types.
    """
    if act is None or (type(act) is str and act in CODES):
        return act, SLOPES.get(act or "", NEGATIVE_SLOPE)
    name: Any
    slope: Any
    name, slope = act if isinstance(act, tuple) and len(act) == 2 else (act, NEGATIVE_SLOPE)
    if not isinstance(name, str | None) or not hasattr(slope, "__float__"):
        raise TypeError(f"activation is {act!r}, expected None, a name, or a name and a slope such as ('elu', 0.5)")
    if name not in CODES:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join((*NAMES, *RARE))}")
    if isinstance(act, tuple) and name not in SLOPES:
        raise ValueError(f"activation {name!r} takes no slope; only {', '.join(SLOPES)} do")
    if not slope > 0 and name != "elu":
        raise ValueError(f"{name} needs a slope above 0, got {slope}")
    return name, float(slope)


@triton.jit
def exponential(x):
    """Return exp(x), off by at most |x| + 4 units in the last place."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(d):
    """Return 1 / d for d >= 1."""
    r = tl.rsqrt(d)
    return r * r


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z)); an exponential that overflows gives the correct 0."""
    return reciprocal(1.0 + exponential(-z))


@triton.jit
def tanh(z):
    """Return tanh(z), off by 16 units in the last place in float32, by 8 units of 1 in float64.

    The formula is 1 - 2 / (1 + exp(2|z|)) with the sign of z. It cancels near 0, so for |z| < 0.5 float32 uses
    z + z^3 p(z^2), with p fitted to an error of a quarter of a unit.
    """
    t = 1.0 - 2.0 * reciprocal(1.0 + exponential(2.0 * tl.abs(z)))
    t = tl.where(z < 0.0, -t, t)
    if z.dtype == tl.float32:
        s = z * z
        p = 0.01723992 * s - 0.05304483
        p = p * s + 0.13325871
        p = p * s - 0.33333144
        t = tl.where(s < 0.25, z + z * (p * s), t)
    return t


@triton.jit
def log1p(e):
    """Return log(1 + e) for -1/2 <= e <= 1, to a few units in the last place.

    It equals 2 artanh(e / (2 + e)), whose series has terms of one sign with ratios of at most 1/9.
    """
    TERMS: tl.constexpr = 17 if e.dtype == tl.float64 else 8
    z = e / (2.0 + e)
    b_p = tl.full(e.shape, 1.0 / (2 * TERMS - 1), e.dtype)
    for k in tl.static_range(1, TERMS):
        b_p = b_p * (z * z) + 1.0 / (2 * (TERMS - k) - 1)
    return 2.0 * z * b_p


@triton.jit
def expm1(z):
    """Return e^z - 1 for z <= 0: 2 t / (1 - t) with t = tanh(z / 2), off by 24 units in the last place in float32."""
    t = tanh(0.5 * z)
    return 2.0 * t * reciprocal(1.0 - t)


@triton.jit
def mish_parts(z):
    """Return d, p and m with tanh(log(1 + e^z)) = p / d = 1 - m / d; all have one sign and none overflows."""
    e = exponential(tl.abs(z) * -1.0)
    p = tl.where(z < 0.0, e * (e + 2.0), 1.0 + 2.0 * e)
    m = tl.where(z < 0.0, e * 0.0 + 2.0, 2.0 * e * e)
    return p + m, p, m


@triton.jit
def tanh_grad(z):
    """Return 1 - tanh(z)^2 = 4 e / (1 + e)^2 with e = exp(-2|z|), which does not cancel for large z."""
    e = exponential(-2.0 * tl.abs(z))
    r = reciprocal(1.0 + e)
    return 4.0 * e * r * r


@triton.jit
def normal_cdf(z):
    """Return Phi(z), off by 16 + 2 z^2 units in the last place in float32, also for small values.

    For z < 0 it is exp(-z^2/2) t P(t) with t = 1 / (1 + 0.305 |z|) and P of degree 7, fitted to a relative error of
    2^-23 for |z| up to 14 (form: Hastings, Approximations for Digital Computers, 1955), else 1 minus that for -z.
    float64 uses (1 + erf(z / sqrt 2)) / 2, whose error for z < 0 is a unit of 1.
    """
    if z.dtype == tl.float32:
        t = reciprocal(1.0 + 0.305 * tl.abs(z))
        p = 0.03669903033 * t - 0.1529876673
        p = p * t + 0.185715828
        p = p * t - 0.03797587186
        p = p * t + 0.1210211895
        p = p * t + 0.1034210093
        p = p * t + 0.1224667949
        p = p * t + 0.121639734
        below = tl.exp2(z * z * -0.7213475204444817) * (p * t)
        return tl.where(z < 0.0, below, 1.0 - below)
    else:
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def activate(z, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """Return act(z)."""
    if ACT == RELU:
        return tl.where(z <= 0.0, 0.0, z)
    elif ACT == LEAKY_RELU:
        return tl.where(z <= 0.0, z * SLOPE, z)
    elif ACT == SIGMOID:
        return sigmoid(z)
    elif ACT == TANH:
        return tanh(z)
    elif ACT == GELU:
        return z * normal_cdf(z)
    elif ACT == GELU_TANH:
        # (1 + tanh(w)) / 2 is sigmoid(2 w).
        return z * sigmoid(z * (1.5957691216057308 + 0.0713548162726002 * z * z))
    elif ACT == SILU:
        return z * sigmoid(z)
    elif ACT == RELU6:
        return tl.where(z <= 0.0, 0.0, tl.where(z >= 6.0, 6.0, z))
    elif ACT == ELU:
        return tl.where(z > 0.0, z, expm1(tl.where(z > 0.0, 0.0, z)) * SLOPE)
    elif ACT == SOFTPLUS:
        w = z * SLOPE
        soft = (log1p(exponential(tl.abs(w) * -1.0)) + tl.where(w < 0.0, 0.0, w)) / SLOPE
        return tl.where(w > 20.0, z, soft)
    elif ACT == MISH:
        d, p, _m = mish_parts(z)
        return z * (p / d)
    elif ACT == HARDSWISH:
        return z * tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 6.0, z + 3.0)) / 6.0
    elif ACT == HARDSIGMOID:
        return tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 6.0, z + 3.0)) / 6.0
    else:
        return z


@triton.jit
def activate_grad(z, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """Return act'(z). At 0, relu, leaky_relu and elu have the left derivative, as in torch; relu6 has 0 at 0 and at 6.
    In piecewise functions, NaN selects the same piece as in torch."""
    if ACT == RELU:
        return tl.where(z <= 0.0, 0.0, 1.0).to(z.dtype)
    elif ACT == LEAKY_RELU:
        return tl.where(z > 0.0, 1.0, tl.full(z.shape, SLOPE, z.dtype))  # two literals would be float32
    elif ACT == SIGMOID:
        return sigmoid(z) * sigmoid(-z)
    elif ACT == TANH:
        return tanh_grad(z)
    elif ACT == GELU:
        return normal_cdf(z) + z * (0.3989422804014327 * tl.exp2(z * z * -0.7213475204444817))
    elif ACT == GELU_TANH:
        w = z * (1.5957691216057308 + 0.0713548162726002 * z * z)
        s = sigmoid(w)
        bend = s * sigmoid(-w) * z
        # If z z overflows, bend is 0.
        bend = tl.where(bend == 0.0, 0.0, bend * (1.5957691216057308 + 0.2140644488178007 * z * z))
        return s + bend
    elif ACT == SILU:
        # sigmoid(-z) and not 1 - sigmoid(z), whose rounding error z would multiply.
        return sigmoid(z) * (1.0 + z * sigmoid(-z))
    elif ACT == RELU6:
        return tl.where((z <= 0.0) | (z >= 6.0), 0.0, 1.0).to(z.dtype)
    elif ACT == ELU:
        return tl.where(z <= 0.0, exponential(tl.where(z <= 0.0, z, 0.0)) * SLOPE, 1.0)
    elif ACT == SOFTPLUS:
        return tl.where(z * SLOPE > 20.0, 1.0, sigmoid(z * SLOPE))
    elif ACT == MISH:
        d, p, m = mish_parts(z)
        # z tanh' = z (1 - p / d) (1 + p / d) sigmoid(z)
        bend = z * (m / d) * sigmoid(z)
        return p / d + tl.where(bend == 0.0, 0.0, bend * (1.0 + p / d))
    elif ACT == HARDSWISH:
        return tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z / 3.0 + 0.5, 1.0))
    elif ACT == HARDSIGMOID:
        return tl.where((z > -3.0) & (z < 3.0), tl.full(z.shape, 1.0, z.dtype) / 6.0, 0.0)
    else:
        return tl.full(z.shape, 1.0, z.dtype)


@triton.jit
def activate_grad_from_output(y, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """Return act'(z) for y = act(z), for the activations in FROM_OUTPUT."""
    if ACT == SIGMOID:
        return y * (1.0 - y)
    elif ACT == TANH:
        return 1.0 - y * y
    else:
        return activate_grad(y, ACT, SLOPE)  # y has the sign of z, and is 6 where z is above
