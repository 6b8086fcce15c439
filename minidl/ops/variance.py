"""Variance and standard deviation, computed from the operations that they name."""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl.kernels import check
from minidl.ops import elementwise, powers, reduce
from minidl.ops.arguments import Dim
from minidl.ops.shape import to
from minidl.tensors import Tensor

__all__ = ["std", "std_mean", "var", "var_mean"]


def var(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of squared distances from the mean over `dim`, divided by their number less `correction` (1; 0 if
    not unbiased), computed in float32 at least. NaN for one element.

    Raises TypeError for integers, IndexError for a dimension out of range, ValueError for one named twice.
    """
    away, dim, left = _spread("var", input, dim, unbiased, correction)
    return to(elementwise.div(reduce.sum(powers.square(away), dim, keepdim), left), input.dtype)


def std(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the square root of `var`, with gradient 0 where it is 0. Of one element it is NaN, as is its gradient."""
    away, dim, left = _spread("std", input, dim, unbiased, correction)
    if not left:
        return powers.sqrt(var(input, dim, keepdim=keepdim, unbiased=unbiased, correction=correction))
    return to(elementwise.div(reduce.norm(away, 2, dim, keepdim), math.sqrt(left)), input.dtype)


def var_mean(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `var` and `mean`."""
    return var(input, dim, unbiased, keepdim, correction=correction), _mean(input, dim, keepdim)


def std_mean(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `std` and `mean`."""
    return std(input, dim, unbiased, keepdim, correction=correction), _mean(input, dim, keepdim)


def _mean(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    return reduce.mean(x, None if isinstance(dim, bool) else dim, keepdim)


def _spread(name: str, x: Tensor, dim: Any, unbiased: Any, correction: Any) -> tuple[Tensor, Dim, float]:
    """Return distances from the mean, the dimensions, and what sums of squares are divided by."""
    if isinstance(dim, bool):
        unbiased, dim = dim, None
    if unbiased is not None and correction is not None:
        raise ValueError(f"{name}: got both unbiased and correction; give one")
    check.floating(name, input=x.data)
    off = correction if correction is not None else 1 if unbiased is None else int(unbiased)
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    wide = to(x, torch.float32) if narrow else x
    mean = reduce.mean(wide, dim, True)
    count = x.numel() // max(mean.numel(), 1)
    return elementwise.sub(wide, mean), dim, float(max(count - off, 0))
