"""Rounding to integers, integer quotients and exact remainders, with the results of C and torch.

A compiled `a % b` is a - trunc(a / b) b in one type, off by a rounding of the quotient times b. Here remainders are
exact: each step subtracts a multiple of b with 26 bits, whose products with both halves of b are exact in float64, and
so is the difference.
"""

import triton
import triton.language as tl


@triton.jit
def truncate(x):
    """Return x without its fraction."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_half_even(x):
    """Return the nearest integer, the even one of two; 0 keeps x's sign."""
    low = tl.floor(x)
    half = low * 0.5
    fraction = x - low
    y = tl.where((fraction > 0.5) | ((fraction == 0.5) & (tl.floor(half) != half)), low + 1.0, low)
    return tl.where(y == 0.0, x * 0.0, y)


@triton.jit
def high_part(x):
    """Return x with the first 26 bits of its fraction, in float64."""
    return (x.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)


@triton.jit
def remainder_of(a, b):
    """Return C's fmod in float64: a - trunc(a / b) b, with a's sign; NaN where a / b overflows.

    A quotient of n bits takes n // 25 + 1 steps (one step up to 2^25); a block takes as many as its largest quotient.
    """
    x = a.to(tl.float64)
    y = tl.abs(b.to(tl.float64))
    high = high_part(y)
    low = y - high
    ratio = tl.abs(x) / y
    x = tl.where(ratio == float("inf"), float("nan"), x)
    exponent = ((ratio.to(tl.int64, bitcast=True) >> 52) & 2047) - 1023
    size = tl.where((exponent > 0) & (exponent < 1024), exponent, 0)
    for _ in range(tl.max(size) // 25 + 1):
        quotient = truncate(high_part(x / y))
        x = (x - quotient * high) - quotient * low
    x = tl.where((y == float("inf")) & (tl.abs(a) < float("inf")), a.to(tl.float64), x)
    # A quotient that was rounded up leaves a remainder of the other sign; 0 keeps a's sign.
    x = tl.where((x < 0.0) & (a > 0.0), x + y, tl.where((x > 0.0) & (a < 0.0), x - y, x))
    return tl.where(x == 0.0, a.to(tl.float64) * 0.0, x)


@triton.jit
def floor_remainder(a, b):
    """Return the remainder with b's sign, in float64."""
    x = remainder_of(a, b)
    y = b.to(tl.float64)
    return tl.where((x != 0.0) & ((x < 0.0) != (y < 0.0)), x + y, x)


@triton.jit
def floor_quotient(a, b):
    """Return floor(a / b), in float64; NaN for an infinite a, as in torch.

    For float32, a float64 quotient up to 2^29 has a fraction of more than 2^-53 of it, if any; larger ones are rounded
    to 24 bits. For float64, the remainder decides.
    """
    x = a.to(tl.float64)
    y = b.to(tl.float64)
    quotient = x / y
    result = tl.floor(quotient)
    if a.dtype == tl.float64:
        exact = round_half_even((x - floor_remainder(a, b)) / y)
        result = tl.where(tl.abs(quotient) < 2251799813685248.0, exact, result)
    result = tl.where(result == 0.0, quotient * 0.0, result)
    result = tl.where((quotient == 0.0) & (x != 0.0) & ((x < 0.0) != (y < 0.0)), -1.0, result)
    return tl.where((tl.abs(x) == float("inf")) & (y != 0.0), float("nan"), result)
