"""Medians, quantiles and histograms, and the distinct elements of a tensor.

Kernels sort and compare floating numbers and compute their bins; torch counts integers.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import check, reduce
from minidl.kernels import elementwise as kernels
from minidl.ops import extrema, sorting
from minidl.ops.arguments import Dim
from minidl.ops.conditional import where
from minidl.ops.elementwise import mul, sub
from minidl.ops.scatter_gather import Summed, gather
from minidl.ops.shape import movedim, reshape, to, unsqueeze, wide
from minidl.tensors import Scalar, Tensor

__all__ = ["bincount", "histc", "median", "quantile", "unique", "unique_consecutive"]

INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def _median(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the lower median along the last dimension, or the first NaN, and its position; the dimension stays."""
    parts, last = sorting.sorted_values(x, -1, False), x.shape[-1] - 1
    nans = kernels.ne(x, x).sum(-1, keepdim=True)
    at = torch.where(nans > 0, last + 1 - nans, last // 2)
    return tuple(part.gather(-1, at) for part in parts)


class Median(extrema.Max):
    @staticmethod
    def compute(x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        if x.numel():
            return _median(x.reshape(-1))[0].reshape(())
        return torch.full((), float("nan"), dtype=x.dtype, device=x.device)


class MedianAlong(extrema.Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keepdim: bool) -> Any:
        parts = _median(x.movedim(dim, -1) if x.dim() else x.reshape(1))
        if x.dim() and keepdim:
            parts = tuple(part.movedim(-1, dim) for part in parts)
        return extrema.Chosen.save_positions(ctx, x, dim, *(p if x.dim() and keepdim else p.squeeze(-1) for p in parts))


def median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the median of input, the lower of two; or along `dim` (values, indices). NaN if any element is NaN.

    Without `dim` equal elements share the gradient evenly; the median of no elements is NaN. Raises IndexError for a
    dimension out of range or of size 0.
    """
    if dim is None:
        return Median.apply(input, None, False)
    at = check.axis("median", dim, max(input.ndim, 1))
    if input.ndim and not input.shape[at]:
        raise IndexError(f"median: dimension {dim} of {list(input.shape)} has no elements")
    return extrema.Found(*MedianAlong.apply(input, at, keepdim))


def quantile(
    input: Tensor, q: float | Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Return the quantiles q, from 0 to 1, along `dim` or of all elements; NaN where any element is NaN.

    q: a number, or [Q] of them in input's dtype, whose dimension comes first in the result. interpolation, between the
    two elements next to q (size - 1): "linear", "lower", "higher", "midpoint" or "nearest".
    Raises TypeError unless input is float32 or float64, ValueError for no elements or another q or interpolation.
    """
    if input.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"quantile: input has dtype {input.dtype}, expected float32 or float64; convert it with .to()")
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"quantile: interpolation is {interpolation!r}, expected one of {', '.join(INTERPOLATIONS)}")
    levels = q if isinstance(q, Tensor) else Tensor(torch.tensor(float(q), dtype=input.dtype, device=input.device))
    if levels.ndim > 1 or levels.dtype != input.dtype:
        raise ValueError(
            f"quantile: q is {levels.dtype} {list(levels.shape)}, expected a number or [Q], of {input.dtype}"
        )
    at = None if dim is None else check.axis("quantile", dim, max(input.ndim, 1))
    rows = reshape(input, input.numel()) if at is None or not input.ndim else movedim(input, at, -1)
    if not rows.shape[-1]:
        raise ValueError(f"quantile: input has shape {list(input.shape)}, expected elements to take quantiles of")
    if not levels.data.is_cuda and not bool(kernels.eq(kernels.clamp(levels.data, 0.0, 1.0), levels.data).all()):
        raise ValueError("quantile: q has a number outside of 0 to 1")
    ordered = sorting.sort(rows, -1).values
    last = rows.shape[-1] - 1
    rank = mul(reshape(levels.detach(), levels.numel()), last)  # [..., Q]
    rank = where(Tensor(kernels.ne(rows.data, rows.data).any(-1, keepdim=True)), last, rank)
    lower = {"higher": rank.ceil(), "nearest": rank.round()}.get(interpolation, rank.floor())
    y = gather(ordered, -1, to(lower, torch.int64))
    if interpolation in ("linear", "midpoint"):
        weight = sub(rank, lower) if interpolation == "linear" else 0.5
        y = y.lerp(gather(ordered, -1, to(rank.ceil(), torch.int64)), weight)
    y = movedim(y, -1, 0)
    if keepdim:
        y = unsqueeze(y, at + 1) if at is not None and input.ndim else reshape(y, -1, *(1 for _ in input.shape))
    return y if levels.ndim else reshape(y, *y.shape[1:])


def histc(input: Tensor, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Tensor:
    """Return how many elements are in each of `bins` equal parts of [min, max], [bins] in input's dtype.

    With min == max the range is that of the elements. NaN and what is outside of the range is not counted. Raises
    TypeError for integers, ValueError for bins below 1 or a range that is not finite or ends before it begins.
    """
    check.floating("histc", input=input.data)
    if check.integer("histc", "bins", bins) < 1:
        raise ValueError(f"histc: bins is {bins}, expected at least 1")
    x = wide(input).data.reshape(-1)
    low, high = float(min), float(max)
    if low == high and x.numel():
        low, high = (float(function(x)) for function in (reduce.amin, reduce.amax))
    if low == high:
        low, high = low - 1, high + 1
    if not (low < high and high - low < float("inf")):
        raise ValueError(f"histc: the range is {low} to {high}, expected finite numbers, the first one below")
    inside = kernels.eq(kernels.clamp(x, low, high), x)
    at = kernels.div(kernels.mul(kernels.sub(x[inside], low), bins), high - low).to(torch.int64)
    return Tensor(torch.bincount(at.clamp(max=bins - 1), minlength=bins).to(input.dtype))


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return how often each whole number from 0 is in input [N], int64, for at least `minlength` numbers.

    With weights [N] the sum of theirs, in order, float64 unless they are float32; no gradient is recorded. Raises
    TypeError unless input has integers, ValueError for a number below 0 or other shapes.
    """
    if input.dtype.is_floating_point or input.dtype == torch.bool:
        raise TypeError(f"bincount: input has dtype {input.dtype}, expected integers; convert it with .to()")
    if check.integer("bincount", "minlength", minlength) < 0:
        raise ValueError(f"bincount: minlength is {minlength}, expected at least 0")
    if input.ndim != 1 or (weights is not None and weights.shape != input.shape):
        others = "" if weights is None else f" and weights {list(weights.shape)}"
        raise ValueError(f"bincount: input has shape {list(input.shape)}{others}, expected [N]")
    numbers = input.data.to(torch.int64)
    if numbers.numel() and int(numbers.min()) < 0:
        raise ValueError(f"bincount: input has {int(numbers.min())}, expected numbers from 0")
    counts = torch.bincount(numbers, minlength=minlength)
    if weights is None:
        return Tensor(counts)
    rows = weights.data if weights.dtype == torch.float32 else weights.data.to(torch.float64)
    return reshape(Summed.apply(numbers, Tensor(rows.unsqueeze(1)), len(counts)), len(counts))


def unique(
    input: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Any:  # fmt: skip
    """Return the distinct elements in rising order (also where `sorted` is False), or distinct parts along `dim`.

    With return_inverse, then the position of each element among them, with return_counts how often each occurs, int64.
    Every NaN is distinct. No gradient is recorded. Raises IndexError for a dimension out of range.
    """
    axis = None if dim is None else check.axis("unique", dim, max(input.ndim, 1))
    values, codes = _codes(input.data)
    outputs = torch.unique(codes, return_inverse=return_inverse, return_counts=return_counts, dim=axis)
    first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    elements = Tensor(first if values is None else values[first])
    return (elements, *map(Tensor, others)) if others else elements


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the elements, or parts along `dim`, that differ from the one before; arguments, results and errors as
    `unique`."""
    axis = None if dim is None else check.axis("unique_consecutive", dim, max(input.ndim, 1))
    x = input.data.reshape(-1) if axis is None else input.data
    _, inverse, counts = torch.unique_consecutive(_codes(input.data)[1], True, True, dim=axis)
    first = x.reshape(x.shape or 1).index_select(axis or 0, counts.cumsum(0) - counts)
    others = [each for each, returned in ((inverse, return_inverse), (counts, return_counts)) if returned]
    return (Tensor(first), *map(Tensor, others)) if others else Tensor(first)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the sorted elements of a floating tensor and, in its shape, the position of the first one that is equal;
    None and x for integers."""
    if not x.dtype.is_floating_point:
        return None, x
    values, order = sorting.sorted_values(x.reshape(-1), 0, False)
    differs = kernels.ne(values[1:], values[:-1])
    ranks = torch.cat([torch.zeros_like(order[:1]), differs.to(torch.int64).cumsum(0)])
    codes = torch.empty_like(order).scatter_(0, order, ranks)
    starts = torch.cat([torch.ones_like(order[:1], dtype=torch.bool), differs])
    return values[starts], codes.reshape(x.shape)
