"""Softmax and log-softmax over one dimension, and their gradients.

    y = exp(x - m) / s                 dx = y * (dy - sum(dy * y))
    y = (x - m) - log(s)               dx = dy - exp(y) * sum(dy)             m = max x,  s = sum exp(x - m)

    x   any shape and strides          y, dx   x's shape, contiguous

The shifted form neither overflows nor loses accuracy (Blanchard, D. J. Higham and N. J. Higham, IMA Journal of
Numerical Analysis 41(4), 2021). A tensor is seen as [outer, N, inner] with rows of N elements, `inner` apart, and a
program takes BLOCK_M rows. A row that fits BLOCK_N is read once; a longer one is walked twice, first for m and s
together (Milakov and Gimelshein, arXiv 1805.02867), then for y. Its last BLOCK_KEPT elements stay in registers
meanwhile, and the second walk finds the others in the cache: 4096x65536 in float16 takes 0.27 ms in place of 0.32 with
none kept. Long rows that are not contiguous are copied first: each element's address would take two registers.
NaN anywhere in a row makes the row NaN, and so do +inf and a row of nothing but -inf.
"""

import torch

from minidl.kernels.softmax import gradient, values

__all__ = ["log_softmax", "log_softmax_grad", "softmax", "softmax_grad"]


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """exp(x) over its sum along `dim`; a scalar counts as one row of one element.

    Raises TypeError for an integer tensor, IndexError for a dimension out of range.
    """
    return values.forward("softmax", x, dim, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The logarithm of `softmax(x, dim)`, without its underflow. Raises as `softmax`."""
    return values.forward("log_softmax", x, dim, log=True)


def softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """dx of y = softmax(x, dim), from dy (any strides) and y. Raises ValueError when their shapes differ."""
    return gradient.backward("softmax_grad", dy, y, dim, log=False)


def log_softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """dx of y = log_softmax(x, dim), from dy (any strides) and y. Raises as `softmax_grad`."""
    return gradient.backward("log_softmax_grad", dy, y, dim, log=True)
