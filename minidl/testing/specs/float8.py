"""Errors of float8: of rounding to float8, and of sums of products."""

from __future__ import annotations

import torch

from minidl.testing.specs import bounds

# Largest relative error of a value, and half a step of the smallest ones, in scales.
ROUNDING = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.float8_e5m2: (2.0**-3, 2.0**-17)}
# The number of products that tensor cores add at once, and before the sum moves to a float32 register.
AT_ONCE = 32
MOST = 128
# They align the products and the partial sum to the largest of them, and drop bits below 2^-13 of it.
DROPPED = 2.0**-13


def rounding(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of `scale * values` for finite x (float64) in the range of the scale."""
    relative, step = ROUNDING[dtype]
    return (relative * x.abs()).clamp_min(step * scale)


def sum_error(total: torch.Tensor, K: int, precision: str) -> torch.Tensor:
    """Return the error of sums of K products of float8 values, which are exact, for the sum of their magnitudes.

    precision  as in `kernels.conv.float8.precision`. Every step of a tensor core drops less than DROPPED of the
    largest term for each of its AT_ONCE + 1 terms, and no term is larger than the sum of the magnitudes of its share:
    at most MOST products, whose sums are then added in float32; with "float8_fast" all of them.
    """
    unit = bounds.dot_unit(torch.float16)
    if precision == "float16":
        return bounds.gamma(K + 2, unit) * total
    share = K if precision == "float8_fast" else min(K, MOST)
    steps = -(-share // AT_ONCE)
    return (steps * (AT_ONCE + 1) * DROPPED + bounds.gamma(-(-K // AT_ONCE) + 2, unit)) * total
