"""Sort along a dimension; equal elements keep their order."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import check, memory_layout, reduce
from minidl.ops.extrema import Chosen, Found
from minidl.tensors import Tensor

__all__ = ["argsort", "msort", "sort"]


class Sort(Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, descending: bool) -> tuple[torch.Tensor, ...]:
        return Chosen.save_positions(ctx, x, dim, *sorted_values(x, dim, descending))


def sort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Found:
    """Return (values, indices) in rising order along `dim`, or falling; equal ones in their order, NaN above all
    others.

    Raises IndexError for a dimension out of range.
    """
    return Found(*Sort.apply(input, check.axis("sort", dim, max(input.ndim, 1)), descending))


def argsort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    """Return the indices of `sort`."""
    return Tensor(sorted_values(input.data, check.axis("argsort", dim, max(input.ndim, 1)), descending)[1])


def msort(input: Tensor) -> Tensor:
    """Return input sorted along its first dimension."""
    return sort(input, 0).values


def sorted_values(x: torch.Tensor, dim: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and positions (int64) along `dim`."""
    if not x.dim():
        return x.clone(), torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    moved = x.movedim(dim, -1)
    rows = moved.reshape(-1, moved.shape[-1]) if x.numel() else moved.new_empty(0, 1)
    parts = [part.reshape(moved.shape).movedim(-1, dim) for part in reduce.sort(rows, descending)]
    y, indices = (
        part if part.stride() == x.stride() else memory_layout.empty(x.shape, (x,), part.dtype).copy_(part)
        for part in parts
    )
    return y, indices
