"""Records of softmax and log-softmax.

With z = x - max x, s = sum exp(z) and u the unit of the accumulate type (Blanchard, D. J. Higham and N. J. Higham, IMA
Journal of Numerical Analysis 41(4), 2021, with the errors of the functions themselves):

- an exponential of z is off by a factor of at most exp(3 u |z| + 8 u): the rounding of z, a compiled exponential's
  product with log2(e), and four units in the last place for the function; a walk along a long row multiplies by one
  more exponential at each new maximum, whose exponents add up to z;
- s is then off by gamma(d) for the sum and the mean of the terms' errors, weighted by softmax itself;
- a compiled division is off by 2 units in the last place (4 u), a logarithm by 4.

The gradients start from the output as it was rounded to its type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minidl import ops
from minidl.kernels import launch
from minidl.kernels.softmax import loop_tile
from minidl.specs import bounds
from minidl.specs.base import Bad, Case, Make, OpSpec

LOOPS = {"softmax": "softmax_loop", "softmax_grad": "softmax_grad_loop", "cross_entropy": "cross_entropy_loop"}


def row_tile(family: str, rows: int, N: int, dtype: torch.dtype) -> launch.Tile:
    """The tile for rows of N elements: of the kernel for whole rows where they fit it, else of the walk."""
    tile = launch.tile(family, dtype, M=rows, N=N)
    return tile if tile["BLOCK_N"] >= N else loop_tile(LOOPS[family], dtype, rows, N, N)


def chain(family: str, rows: int, N: int, dtype: torch.dtype) -> tuple[int, int]:
    """(additions that a term of a row's sum goes through at most, blocks that the row is walked in).

    Within a block a thread adds its own run (or NumPy a leaf of its tree), at most a 16th, and a tree joins them.
    """
    tile = row_tile(family, rows, N, dtype)
    kept = tile.sizes.get("BLOCK_KEPT", 0)
    block = max(tile["BLOCK_N"], kept)
    blocks = -(-N // tile["BLOCK_N"]) + (kept > 0)
    return min(N, min(block, block // 16 + 32) + blocks), blocks


class RowErrors(NamedTuple):
    """Of rows along `dim`: z, exp(z), s and the relative errors of the last two."""

    z: torch.Tensor
    e: torch.Tensor
    s: torch.Tensor
    e_error: torch.Tensor
    s_error: torch.Tensor


def row_errors(x: torch.Tensor, dim: int, family: str, dtype: torch.dtype) -> RowErrors:
    """The errors of the shifted exponentials and their sum, x in float64 with at least one dimension."""
    u = bounds.acc_unit(dtype)
    N = x.shape[dim]
    d, blocks = chain(family, x.numel() // N, N, dtype)
    z = x - x.amax(dim, keepdim=True)
    e = torch.exp(z)
    s = e.sum(dim, keepdim=True)
    # Where |z| is cut, the exponential is 0 in both.
    e_error = torch.expm1(3 * u * z.abs().clamp(max=1000) + 8 * u)
    walked = e_error + 9 * u * (blocks - 1)
    s_error = (1 + bounds.gamma(d, u)) * (1 + (e / s * walked).sum(dim, keepdim=True)) - 1
    return RowErrors(z, e, s, e_error, s_error / (1 - s_error))


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
    x, dim = (*case.args, -1)[:2]
    return (x.reshape(1) if x.dim() == 0 else x), dim


def _softmax_bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, dim = _arguments(case)
    if y.numel() == 0:
        return torch.zeros_like(y)
    return bounds.rounded(y, _softmax_error(x, dim, dtype).reshape(y.shape), dtype)


def _log_softmax_bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, dim = _arguments(case)
    if y.numel() == 0:
        return torch.zeros_like(y)
    return bounds.rounded(y, _log_softmax_error(x, dim, dtype).reshape(y.shape), dtype)


def _softmax_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """dx = y (dy - D), D = sum dy y, from y off by `kept`."""
    (dx,), (x, dim), u = grads, _arguments(case), bounds.acc_unit(dtype)
    if dx.numel() == 0:
        return (torch.zeros_like(dx),)
    dy = dy.reshape(x.shape)
    d, _ = chain("softmax_grad", x.numel() // x.shape[dim], x.shape[dim], dtype)
    y = torch.softmax(x, dim)
    kept = bounds.rounded(y, _softmax_error(x, dim, dtype), dtype)
    tiny = x.shape[dim] * bounds.TINY[launch.acc_torch(dtype)]
    off = (dy.abs() * (kept + bounds.gamma(d + 1, u) * (y + kept))).sum(dim, keepdim=True) + tiny
    inner = (dy - (dy * y).sum(dim, keepdim=True)).abs()
    off = off + u * (inner + off)
    error = y * off + kept * (inner + off) + u * (y + kept) * (inner + off) + tiny
    return (bounds.rounded(dx, error.reshape(dx.shape), dtype),)


def _log_softmax_grad_bound(
    case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype
) -> tuple[Any, ...]:
    """dx = dy - exp(y) S, S = sum dy, from y off by `kept`."""
    (dx,), (x, dim), u = grads, _arguments(case), bounds.acc_unit(dtype)
    if dx.numel() == 0:
        return (torch.zeros_like(dx),)
    dy = dy.reshape(x.shape)
    d, _ = chain("softmax_grad", x.numel() // x.shape[dim], x.shape[dim], dtype)
    y = torch.log_softmax(x, dim)
    kept = bounds.rounded(y, _log_softmax_error(x, dim, dtype), dtype)
    p, total = y.exp(), dy.sum(dim, keepdim=True).abs()
    factor = torch.expm1((kept + 3 * u * y.abs() + 8 * u).clamp(max=700))
    off = bounds.gamma(d, u) * dy.abs().sum(dim, keepdim=True)
    tiny = bounds.TINY[launch.acc_torch(dtype)] * (1 + total)
    error = p * (factor * (total + off) + off) + u * p * (1 + factor) * (total + off) + tiny
    error = error + u * (dx.reshape(x.shape).abs() + error)
    return (bounds.rounded(dx, error.reshape(dx.shape), dtype),)


def _inputs(make: Make) -> Case:
    form = make.choice(["rows", "any", "scalar"])
    if form == "rows":
        return Case((make.tensor(make.size(0, 8), make.size(1, 257)),))
    if form == "scalar":
        return Case((make.tensor(), make.choice([-1, 0])))
    shape = make.shape(1, 4, 0, 8)
    return Case((make.tensor(*shape), make.integer(-len(shape), len(shape) - 1)))


_EXAMPLES = {
    "short rows": lambda make: Case((make.tensor(70, 10),)),
    "between": lambda make: Case((make.tensor(3, 37, 5), 1)),
    "one block": lambda make: Case((make.tensor(3, 700),)),
    "long rows": lambda make: Case((make.tensor(2, 9001),)),
}
_BAD = (
    Bad(lambda make: Case((make.tensor(2, 3), 2)), IndexError, "dim 2 is out of range for a tensor of 2 dimensions"),
    Bad(lambda make: Case((make.integers(3, low=0, high=5), 0)), TypeError, "x has dtype torch.int64"),
)
_BENCH = {
    f"softmax {M}x{N}": (M, N)
    for M, N in ((65536, 128), (65536, 1024), (32768, 4096), (8192, 16384), (4096, 65536), (2048, 131072))
}

SPECS = [
    OpSpec(
        name="softmax",
        op=ops.softmax,
        reference=lambda x, dim=-1: torch.softmax(x, dim),
        inputs=_inputs,
        bound=_softmax_bound,
        grad_bound=_softmax_grad_bound,
        differentiable=(0,),
        families=("softmax", "softmax_grad", "softmax_loop", "softmax_grad_loop"),
        examples=_EXAMPLES,
        bad=_BAD,
        bench=_BENCH,
    ),
    OpSpec(
        name="log_softmax",
        op=ops.log_softmax,
        reference=lambda x, dim=-1: torch.log_softmax(x, dim),
        inputs=_inputs,
        bound=_log_softmax_bound,
        grad_bound=_log_softmax_grad_bound,
        differentiable=(0,),
        families=("softmax", "softmax_grad", "softmax_loop", "softmax_grad_loop"),
        examples={name: _EXAMPLES[name] for name in ("between", "long rows")},
        bad=_BAD,
    ),
]
