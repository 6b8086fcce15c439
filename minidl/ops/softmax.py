"""Softmax and log-softmax. Both keep only their output."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import softmax as kernels
from minidl.tensor import Tensor

__all__ = ["log_softmax", "softmax"]


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = kernels.softmax(x, dim)
        ctx.save(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (y,) = ctx.saved
        return kernels.softmax_grad(dy, y, ctx.dim), None


class LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = kernels.log_softmax(x, dim)
        ctx.save(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (y,) = ctx.saved
        return kernels.log_softmax_grad(dy, y, ctx.dim), None


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) over its sum along `dim`, in x's shape and dtype.

    A row with NaN or +inf, and a row of nothing but -inf, is NaN. Raises TypeError for an integer tensor, IndexError
    for a dimension out of range.
    """
    return Softmax.apply(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of `softmax(x, dim)`, exact where softmax itself vanishes. Raises as `softmax`."""
    return LogSoftmax.apply(x, dim)
