"""Prepared launches of forms: a product with reordered weights, or a sum in shares."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from minidl.kernels import gemm
from minidl.kernels.conv.problem import Tensors
from minidl.runtime import launch


class Copy(NamedTuple):
    """A launch that copies weights or images into another order, or with zeros in between, and the result's shape."""

    shape: tuple[int, ...]
    launch: launch.Prepared

    def run(self, w: torch.Tensor) -> torch.Tensor:
        """Return the contiguous copy of w."""
        out = torch.empty(self.shape, dtype=w.dtype, device=w.device)
        self.launch.run(w, out)
        return out


class Product(NamedTuple):
    """A launch that reads copied weights, or the convolution's own if `weights` is None."""

    weights: Copy | None
    launch: launch.Prepared

    def run(self, t: Tensors) -> None:
        """Write y, and z if there is one."""
        w = t.w if self.weights is None else self.weights.run(t.w)
        self.launch.run(t.x, w, t.bias, t.scale, t.y, t.z)


class Shares(NamedTuple):
    """One launch sums a gradient of `shape` in `number` shares, another adds the shares (None: that of `gemm`)."""

    launch: launch.Prepared
    number: int
    shape: tuple[int, ...]
    sum: launch.Prepared | None = None

    def run(self, dy: torch.Tensor, *others: Any) -> torch.Tensor:
        """Return the gradient: the partial sums of all shares, added in a fixed order."""
        partial = self.partial(dy.dtype, dy.device, self.number)
        self.launch.run(dy, *others, partial)
        return self.total(partial, dy.dtype)

    def partial(self, dtype: torch.dtype, device: torch.device, shares: int) -> torch.Tensor:
        """Return an uninitialised tensor for the partial sums of this many shares, of one launch or of several."""
        dtype = dtype if shares == 1 else launch.acc_torch(dtype)
        return torch.empty(shares, math.prod(self.shape), dtype=dtype, device=device)

    def total(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of the shares."""
        if self.sum is None or len(partial) == 1:
            return gemm.sum_shares(partial, dtype).view(self.shape)
        total = torch.empty(self.shape, dtype=dtype, device=partial.device)
        self.sum.run(partial, total)
        return total
