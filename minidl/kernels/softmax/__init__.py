"""Softmax and log-softmax over one dimension, and their gradients.

    softmax        y = exp(x - m) / s          dx = y * (dy - sum(dy * y))
    log-softmax    y = (x - m) - log(s)        dx = dy - exp(y) * sum(dy)            m = max x,  s = sum exp(x - m)

    x   any shape and strides          y, dx   x's shape and memory layout

Subtracting the maximum prevents overflow without loss of accuracy (Blanchard, D. J. Higham and N. J. Higham, IMA
Journal of Numerical Analysis 41(4), 2021). The kernels view a tensor as [outer, N, inner], as rows of N elements with
stride `inner`; a program computes BLOCK_M rows. A row that fits BLOCK_N is read once. A longer row is read in two
passes, the first for m and s together (Milakov and Gimelshein, arXiv 1805.02867), the second for y. Its last BLOCK_KEPT
elements stay in registers in between, and the second pass reads the others from the cache: 4096x65536 in float16 takes
0.27 ms, and 0.32 ms without kept elements. Long strided rows are copied first: each element's address would take two
registers. A row with NaN or +inf, or of -inf only, gives NaN.

Read `values` first, then `gradient`; `rows` has the shared addressing.
"""

from collections.abc import Callable

import torch

from minidl.kernels import check, memory_layout
from minidl.kernels.softmax import gradient, values

__all__ = ["log_softmax", "log_softmax_grad", "softmax", "softmax_grad"]


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return exp(x) divided by its sum along `dim`; a scalar counts as one row of one element.

    Raises TypeError for an integer tensor, IndexError for a dimension out of range.
    """
    return _in_memory_order("softmax", values.forward, (x,), dim, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the logarithm of `softmax(x, dim)`, without its underflow. Raises as `softmax`."""
    return _in_memory_order("log_softmax", values.forward, (x,), dim, log=True)


def softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return dx of y = softmax(x, dim), from dy (any strides) and y. Raises ValueError if their shapes differ."""
    return _in_memory_order("softmax_grad", gradient.backward, (dy, y), dim, log=False)


def log_softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return dx of y = log_softmax(x, dim), from dy (any strides) and y. Raises as `softmax_grad`."""
    return _in_memory_order("log_softmax_grad", gradient.backward, (dy, y), dim, log=True)


def _in_memory_order(
    op: str, function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], dim: int, log: bool
) -> torch.Tensor:
    """Call the function with dimensions permuted to the memory order of the last tensor: contiguous if it is dense."""
    x = tensors[-1]
    if x.is_contiguous() or any(t.shape != x.shape for t in tensors):
        return function(op, *tensors, dim, log=log)
    dims = memory_layout.dims(x)
    axis = dims.index(check.axis(op, dim, x.dim()))
    return function(op, *(t.permute(dims) for t in tensors), axis, log=log).permute(memory_layout.back(dims))
