"""Error bounds derived from the arithmetic.

A sum of products in any order whose longest chain has d additions is off by at most gamma(d) times the sum of the
absolute products, gamma(d) = d u / (1 - d u) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., ch. 3
and 4). Rounding the result to its type adds u_out |result| and half a subnormal step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minidl.runtime import launch

# Largest relative error of rounding to a dtype.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Half the distance between subnormal numbers; float32 and bfloat16 results may be flushed to zero on a GPU.
TINY = {torch.float64: 2.0**-1074, torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}


def acc_unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of one operation in the accumulate type of `dtype`."""
    return UNIT[launch.acc_torch(dtype)]


def dot_unit(dtype: torch.dtype) -> float:
    """Return the same for one step of a `tl.dot`: tensor cores truncate aligned sums, which 2^-22 covers."""
    u = acc_unit(dtype)
    return u if launch.INTERPRETED or dtype == torch.float64 else max(u, 2.0**-22)


def gamma(d: float, u: float) -> float:
    """Return d u / (1 - d u). Raises ValueError if d u is 1 or more: there is no bound."""
    if d * u >= 1:
        raise ValueError(f"no bound: a chain of {d} operations at unit roundoff {u}")
    return d * u / (1 - d * u)


def holds(got: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> bool:
    """Return whether every element is `exact` (float64) up to `error` and the rounding to its type."""
    return bool(((got.double() - exact).abs() <= rounded(exact, error, got.dtype)).all())


def or_infinite(error: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of a sum, infinite if it may overflow: the magnitudes of its terms add up to `total`."""
    return torch.where(total > torch.finfo(launch.acc_torch(dtype)).max / 2, math.inf, error)


def off_by(error: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the bound of a result with error(case, result, dtype) before it is rounded; 0 if it is infinite or NaN."""

    def bound(case: Any, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(result.isfinite(), rounded(result, error(case, result, dtype), dtype), 0.0)

    return bound


def rounded(result: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound after a result with an error of `error` is rounded to `dtype`."""
    return error + UNIT[dtype] * (result.abs() + error) + TINY[dtype]
