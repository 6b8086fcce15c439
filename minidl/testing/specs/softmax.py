"""Specs of softmax and log-softmax.

With z = x - max x, s = sum exp(z) and u the unit of the accumulate type (Blanchard, D. J. Higham and N. J. Higham, IMA
Journal of Numerical Analysis 41(4), 2021, with the errors of the functions themselves):

- an exponential of z has a factor of error of at most exp(3 u |z| + 8 u): the rounding of z, a compiled exponential's
  product with log2(e), and four units in the last place for the function; the loop over a long row multiplies by one
  more exponential at each new maximum, whose exponents add up to z;
- s then has an error of gamma(d) for the sum and the mean of the terms' errors, weighted by the softmax;
- a compiled division has an error of 2 units in the last place (4 u), a logarithm of 4.

The gradients start from the output rounded to its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minidl import ops
from minidl.kernels.softmax.rows import fits_block, loop_tile
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, integers, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def row_tile(family: str, rows: int, N: int, dtype: torch.dtype) -> launch.Tile:
    """Return the tile for rows of N elements: of the kernel for rows that fit one block, otherwise of the loop."""
    tile = launch.tile(family, dtype, M=rows, N=N)
    return tile if fits_block(family, tile, dtype, N, N) else loop_tile(f"{family}_loop", dtype, rows, N, N)


def chain(family: str, rows: int, N: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the longest chain of additions of a row's sum, and the number of blocks of the row.

    In a block, a thread adds its elements (or NumPy a leaf of its tree), at most a 16th, and a tree joins the sums.
    """
    tile = row_tile(family, rows, N, dtype)
    first = tile.sizes.get("BLOCK_KEPT", 0)
    block = max(tile["BLOCK_N"], first)
    blocks = -(-N // tile["BLOCK_N"]) + (first > 0)
    return min(N, min(block, block // 16 + 32) + blocks), blocks


class RowErrors(NamedTuple):
    """d, z, exp(z) and s of rows, and the relative errors of the last two."""

    d: int
    z: torch.Tensor
    e: torch.Tensor
    s: torch.Tensor
    e_error: torch.Tensor
    s_error: torch.Tensor


def row_errors(x: torch.Tensor, dim: int, family: str, dtype: torch.dtype) -> RowErrors:
    """Return the errors of the shifted exponentials and their sum, x in float64 with at least one dimension."""
    u = bounds.acc_unit(dtype)
    N = x.shape[dim]
    d, blocks = chain(family, x.numel() // N, N, dtype)
    z = x - x.amax(dim, keepdim=True)
    e = torch.exp(z)
    s = e.sum(dim, keepdim=True)
    # Where |z| is clamped, the exponential is 0 in both.
    e_error = torch.expm1(3 * u * z.abs().clamp(max=1000) + 8 * u)
    total_error = e_error + 9 * u * (blocks - 1)
    s_error = (1 + bounds.gamma(d, u)) * (1 + (e / s * total_error).sum(dim, keepdim=True)) - 1
    return RowErrors(d, z, e, s, e_error, s_error / (1 - s_error))


def _softmax_error(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    u = bounds.acc_unit(dtype)
    row = row_errors(x, dim, "softmax", dtype)
    return row.e / row.s * ((1 + row.e_error) * (1 + row.s_error) * (1 + 6 * u) - 1)


def _log_softmax_error(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    u = bounds.acc_unit(dtype)
    row = row_errors(x, dim, "softmax", dtype)
    log = row.s.log()
    error = u * row.z.abs() + row.s_error + 8 * u * log
    return error + u * ((row.z - log).abs() + error)


def _arguments(case: Case) -> tuple[torch.Tensor, int]:
    x, dim, _ = case.arguments(ops.softmax)
    return torch.atleast_1d(x), -1 if dim is None else dim


def _bound(error: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if y.numel() == 0:
            return torch.zeros_like(y)
        return bounds.rounded(y, error(*_arguments(case), dtype).reshape(y.shape), dtype)

    return bound


def _grad_bound(error: Callable[..., torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
    """Return the bound from error(dx, dy, x, dim, d, tiny, dtype), d the chain of the sum along a row."""

    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        (dx,), (x, dim) = grads, _arguments(case)
        if dx.numel() == 0:
            return (torch.zeros_like(dx),)
        d, _ = chain("softmax_grad", x.numel() // x.shape[dim], x.shape[dim], dtype)
        tiny = bounds.TINY[launch.acc_torch(dtype)]
        dx_error = error(dx.reshape(x.shape), dy.reshape(x.shape), x, dim, d, tiny, dtype)
        return (bounds.rounded(dx, dx_error.reshape(dx.shape), dtype),)

    return bound


def _softmax_grad_error(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, dim: int, d: int, tiny: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the error of dx = y (dy - D), D = sum dy y, computed from the rounded y."""
    u, y = bounds.acc_unit(dtype), torch.softmax(x, dim)
    y_error = bounds.rounded(y, _softmax_error(x, dim, dtype), dtype)
    tiny = x.shape[dim] * tiny
    off = (dy.abs() * (y_error + bounds.gamma(d + 1, u) * (y + y_error))).sum(dim, keepdim=True) + tiny
    inner = (dy - (dy * y).sum(dim, keepdim=True)).abs()
    off = off + u * (inner + off)
    return y * off + y_error * (inner + off) + u * (y + y_error) * (inner + off) + tiny


def _log_softmax_grad_error(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, dim: int, d: int, tiny: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the error of dx = dy - exp(y) S, S = sum dy, computed from the rounded y."""
    u, y = bounds.acc_unit(dtype), torch.log_softmax(x, dim)
    y_error = bounds.rounded(y, _log_softmax_error(x, dim, dtype), dtype)
    p, total = y.exp(), dy.sum(dim, keepdim=True).abs()
    factor = torch.expm1((y_error + 3 * u * y.abs() + 8 * u).clamp(max=700))
    off = bounds.gamma(d, u) * dy.abs().sum(dim, keepdim=True)
    error = p * (factor * (total + off) + off) + u * p * (1 + factor) * (total + off) + tiny * (1 + total)
    return error + u * (dx.abs() + error)


def _inputs(make: Make) -> Case:
    form = make.choice(["rows", "any", "scalar"])
    if form == "rows":
        return Case((make.tensor(make.size(0, 8), make.size(1, 257)),))
    if form == "scalar":
        return Case((make.tensor(), make.choice([-1, 0])))
    shape = make.shape(1, 4, 0, 8)
    return Case((make.tensor(*shape), make.integer(-len(shape), len(shape) - 1)))


_EXAMPLES = {
    "short rows": tensors((70, 10)),
    "between": tensors((3, 37, 5), extra=(1,)),
    "one block": tensors((3, 700)),
    "long rows": tensors((2, 9001)),
}
_spec = spec_factory(
    inputs=_inputs,
    differentiable=(0,),
    families=("softmax", "softmax_grad", "softmax_loop", "softmax_grad_loop"),
    bad=(
        refuses(IndexError, "dim 2 is out of range for a tensor of 2 dimensions", (2, 3), extra=(2,)),
        refuses(TypeError, "x has dtype torch.int64", integers(3), extra=(0,)),
    ),
)

SPECS = [
    _spec(
        "softmax",
        reference=lambda x, dim=-1: torch.softmax(x, dim),
        bound=_bound(_softmax_error),
        grad_bound=_grad_bound(_softmax_grad_error),
        examples=_EXAMPLES,
    ),
    _spec(
        "log_softmax",
        reference=lambda x, dim=-1: torch.log_softmax(x, dim),
        bound=_bound(_log_softmax_error),
        grad_bound=_grad_bound(_log_softmax_grad_error),
        examples={name: _EXAMPLES[name] for name in ("between", "long rows")},
    ),
]
