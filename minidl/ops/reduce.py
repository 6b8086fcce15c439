"""Reductions. `dim` is one dimension, several, or None for all; with `keepdim` they stay with size 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import elementwise, reduce
from minidl.tensors import Tensor

__all__ = ["amax", "argmax", "max", "mean", "norm", "sum"]

Dim = int | Sequence[int] | None


class Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.sum(x, dim, keepdim)
        ctx.shape, ctx.kept = x.shape, reduce.kept_shape(x, dim)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy.reshape(ctx.kept).expand(ctx.shape), None, None


class Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.mean(x, dim, keepdim)
        ctx.shape, ctx.kept = x.shape, reduce.kept_shape(x, dim)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        count = ctx.shape.numel() // torch.Size(ctx.kept).numel() if dy.numel() else 1
        return elementwise.div(dy.reshape(ctx.kept), count).expand(ctx.shape), None, None


class Amax(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.amax(x, dim, keepdim)
        ctx.dim, ctx.kept = dim, reduce.kept_shape(x, dim)
        ctx.save(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, y = ctx.saved
        y, dy = y.reshape(ctx.kept), dy.reshape(ctx.kept)
        return elementwise.amax_grad(dy, x, y, reduce.count_equal(x, y, ctx.dim)), None, None


class Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.norm(x, dim, keepdim)
        ctx.kept = reduce.kept_shape(x, dim)
        ctx.save(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, y = ctx.saved
        return elementwise.norm_grad(dy.reshape(ctx.kept), x, y.reshape(ctx.kept)), None, None


def sum(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The sum over `dim`, in x's dtype; int64 for integers and bools. The sum of no elements is 0.

    Raises IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Sum.apply(x, dim, keepdim)


def mean(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The mean over `dim`. The mean of no elements is NaN.

    Raises TypeError for integers, IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Mean.apply(x, dim, keepdim)


def amax(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The maximum over `dim`; NaN if any element is NaN. Equal maxima share the gradient evenly.

    Raises ValueError for the maximum of no elements or a dimension named twice, IndexError for one out of range.
    """
    return Amax.apply(x, dim, keepdim)


def max(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The same as `amax`: unlike torch's, it returns no positions along one dimension. `argmax` returns them."""
    return Amax.apply(x, dim, keepdim)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first maximum along `dim`, or in flattened x, as int64; of the first NaN if there is one.

    Raises ValueError for the maximum of no elements, IndexError for a dimension out of range.
    """
    return Tensor(reduce.argmax(x.data, dim, keepdim))


def norm(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The square root of the sum of squares over `dim`. The gradient of a norm of 0 is 0.

    Raises TypeError for integers, IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Norm.apply(x, dim, keepdim)
