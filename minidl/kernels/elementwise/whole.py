"""Whole numbers near a value, quotients rounded to one and what they leave, exactly as C's and torch's functions.

A compiled `a % b` is a - trunc(a / b) b in one type, off by a rounding of the quotient times b. Here remainders are
exact: each step takes a multiple of b with 26 bits away, whose products with both halves of b are exact in float64, and
so is what is left.
"""

import triton
import triton.language as tl


@triton.jit
def truncated(x):
    """x without its fraction."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def nearest(x):
    """The nearest whole number, the even one of two; 0 keeps x's sign."""
    low = tl.floor(x)
    half = low * 0.5
    off = x - low
    y = tl.where((off > 0.5) | ((off == 0.5) & (tl.floor(half) != half)), low + 1.0, low)
    return tl.where(y == 0.0, x * 0.0, y)


@triton.jit
def leading(x):
    """x with the first 26 bits of its fraction, in float64."""
    return (x.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)


@triton.jit
def left_over(a, b):
    """C's fmod in float64: a - trunc(a / b) b, with a's sign; NaN where a / b overflows.

    A quotient of n bits takes n // 25 + 1 steps, so one up to 2^25; all of a block take as many as its largest.
    """
    x = a.to(tl.float64)
    y = tl.abs(b.to(tl.float64))
    high = leading(y)
    low = y - high
    ratio = tl.abs(x) / y
    x = tl.where(ratio == float("inf"), float("nan"), x)
    exponent = ((ratio.to(tl.int64, bitcast=True) >> 52) & 2047) - 1023
    size = tl.where((exponent > 0) & (exponent < 1024), exponent, 0)
    for _ in range(tl.max(size) // 25 + 1):
        quotient = truncated(leading(x / y))
        x = (x - quotient * high) - quotient * low
    x = tl.where((y == float("inf")) & (tl.abs(a) < float("inf")), a.to(tl.float64), x)
    # A quotient that was rounded up leaves something of the other sign; 0 keeps a's.
    x = tl.where((x < 0.0) & (a > 0.0), x + y, tl.where((x > 0.0) & (a < 0.0), x - y, x))
    return tl.where(x == 0.0, a.to(tl.float64) * 0.0, x)


@triton.jit
def modulo(a, b):
    """What is left with b's sign, in float64."""
    x = left_over(a, b)
    y = b.to(tl.float64)
    return tl.where((x != 0.0) & ((x < 0.0) != (y < 0.0)), x + y, x)


@triton.jit
def floor_quotient(a, b):
    """The largest whole number that a / b is not below, in float64; NaN for an infinite a, as torch has it.

    Of float32 the quotient in float64 has a fraction of more than 2^-53 of it if it has one, up to 2^29, and is rounded
    to 24 bits above. Of float64, what the division leaves decides.
    """
    x = a.to(tl.float64)
    y = b.to(tl.float64)
    quotient = x / y
    whole = tl.floor(quotient)
    if a.dtype == tl.float64:
        whole = tl.where(tl.abs(quotient) < 2251799813685248.0, nearest((x - modulo(a, b)) / y), whole)
    whole = tl.where(whole == 0.0, quotient * 0.0, whole)
    whole = tl.where((quotient == 0.0) & (x != 0.0) & ((x < 0.0) != (y < 0.0)), -1.0, whole)
    return tl.where((tl.abs(x) == float("inf")) & (y != 0.0), float("nan"), whole)
