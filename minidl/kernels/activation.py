"""Activations as device functions, shared by every kernel that applies one.

    relu        max(z, 0)                        leaky_relu  z if z > 0 else slope * z
    sigmoid     1 / (1 + exp(-z))                tanh        (1 - exp(-2 z)) / (1 + exp(-2 z))
    gelu        z/2 * (1 + erf(z / sqrt 2))      gelu_tanh   z/2 * (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))
    silu        z * sigmoid(z)

GELU: Hendrycks and Gimpel, arXiv 1606.08415. SiLU: Elfwing et al., arXiv 1702.03118.
All propagate NaN, and take blocks of float32 or float64 of any shape.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
LEAKY_RELU = tl.constexpr(2)
SIGMOID = tl.constexpr(3)
TANH = tl.constexpr(4)
GELU = tl.constexpr(5)
GELU_TANH = tl.constexpr(6)
SILU = tl.constexpr(7)

CODES = {
    None: NONE,
    "relu": RELU,
    "leaky_relu": LEAKY_RELU,
    "sigmoid": SIGMOID,
    "tanh": TANH,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU,
}
NAMES = tuple(name for name in CODES if name is not None)
# The derivative of these follows from the output alone, so nothing else needs keeping for the gradient.
FROM_OUTPUT = (None, "relu", "leaky_relu", "sigmoid", "tanh")
NEGATIVE_SLOPE = 0.01

Activation = str | tuple[str, float] | None


def parse(act: Activation) -> tuple[str | None, float]:
    """(name, slope) of an activation given as a name, None, or ("leaky_relu", slope) with slope > 0.

    Raises ValueError for an unknown name, a slope for anything else, or a slope that is not positive.
    """
    name, slope = act if isinstance(act, tuple) else (act, NEGATIVE_SLOPE)
    if name not in CODES:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(NAMES)}")
    if isinstance(act, tuple) and name != "leaky_relu":
        raise ValueError(f"activation {name!r} takes no slope; only leaky_relu does")
    if not slope > 0:
        raise ValueError(f"leaky_relu needs a slope above 0, got {slope}")
    return name, float(slope)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) without overflow: the exponential is only taken of numbers at or below 0."""
    e = tl.exp(-tl.abs(z))
    larger = 1.0 / (1.0 + e)
    return tl.where(z >= 0, larger, e * larger)


@triton.jit
def tanh(z):
    """tanh(z): to a few units in the last place in float32, to a few units of 1 in float64.

    Away from 0 by exp(-2|z|). Near 0 that cancels, so float32 takes the odd Taylor series to z^13 below 0.25, whose
    next term is under 2^-36 of z there.
    """
    a = tl.abs(z)
    e = tl.exp(-2.0 * a)
    t = (1.0 - e) / (1.0 + e)
    if z.dtype == tl.float32:
        s = z * z
        p = 21844.0 / 6081075.0 * s - 1382.0 / 155925.0
        p = p * s + 62.0 / 2835.0
        p = p * s - 17.0 / 315.0
        p = p * s + 2.0 / 15.0
        p = p * s - 1.0 / 3.0
        t = tl.where(a < 0.25, a + a * (p * s), t)
    return tl.where(z < 0, -t, t)


@triton.jit
def tanh_grad(z):
    """1 - tanh(z)^2 = 4 e / (1 + e)^2 with e = exp(-2|z|), which does not cancel for large z."""
    e = tl.exp(-2.0 * tl.abs(z))
    d = 1.0 + e
    return 4.0 * e / (d * d)


@triton.jit
def activate(z, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """act(z)."""
    if ACT == RELU:
        return tl.where(z <= 0.0, 0.0, z)
    elif ACT == LEAKY_RELU:
        return tl.where(z <= 0.0, z * SLOPE, z)
    elif ACT == SIGMOID:
        return sigmoid(z)
    elif ACT == TANH:
        return tanh(z)
    elif ACT == GELU:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACT == GELU_TANH:
        return 0.5 * z * (1.0 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif ACT == SILU:
        return z * sigmoid(z)
    else:
        return z


@triton.jit
def activate_grad(z, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """act'(z). At 0, relu and leaky_relu take the left derivative, as torch does."""
    if ACT == RELU:
        return tl.where(z <= 0.0, 0.0, 1.0).to(z.dtype)
    elif ACT == LEAKY_RELU:
        return tl.where(z <= 0.0, tl.full(z.shape, SLOPE, z.dtype), 1.0)  # two literals would be float32
    elif ACT == SIGMOID:
        return sigmoid(z) * sigmoid(-z)
    elif ACT == TANH:
        return tanh_grad(z)
    elif ACT == GELU:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACT == GELU_TANH:
        inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        slope = tanh_grad(inner)
        bend = 0.5 * z * slope * 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        return 0.5 * (1.0 + tanh(inner)) + tl.where(slope == 0.0, 0.0, bend)  # z z may be infinite there
    elif ACT == SILU:
        # sigmoid(-z) and not 1 - sigmoid(z), which z would multiply with its rounding error.
        return sigmoid(z) * (1.0 + z * sigmoid(-z))
    else:
        return tl.full(z.shape, 1.0, z.dtype)


@triton.jit
def activate_grad_from_output(y, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """act'(z) for y = act(z), for the activations in FROM_OUTPUT."""
    if ACT == RELU:
        return tl.where(y <= 0.0, 0.0, 1.0).to(y.dtype)
    elif ACT == LEAKY_RELU:
        return tl.where(y <= 0.0, tl.full(y.shape, SLOPE, y.dtype), 1.0)  # two literals would be float32
    elif ACT == SIGMOID:
        return y * (1.0 - y)
    elif ACT == TANH:
        return 1.0 - y * y
    else:
        return tl.full(y.shape, 1.0, y.dtype)
