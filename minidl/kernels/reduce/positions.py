"""Positions of maxima or minima (argmax, argmin), optionally with the values, and the scatter of their gradients.

    j[k] = the first r with the largest x[k, r], or with its first NaN      y[k] = x[k, j[k]]
    x      [K, R], by its plan (`layout`)

A minimum is the maximum in the reverse order: of -x, or of ~x for integers, which cannot overflow.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minidl.kernels import memory_layout
from minidl.kernels.division import as_multiple
from minidl.kernels.reduce.layout import (
    ReducePlan,
    extreme_value,
    largest,
    load_extreme,
    lowest,
    output_block,
    plan,
    reduced_pointers,
)
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

MANY = 2**31  # from this share size on, positions take 64 bits
NOWHERE, FARTHER = tl.constexpr(2**31 - 1), tl.constexpr(2**62)


@triton.jit
def update_maximum(b_v, b_at, p_x, mask, r, SMALLEST: tl.constexpr, ACC: tl.constexpr):
    """Return the larger of each lane's value and the next one, or its first NaN, and the start of the block with it."""
    b_x = load_extreme(p_x, mask, SMALLEST, ACC)
    larger = (b_x > b_v) | ((b_x != b_x) & (b_v == b_v))
    return tl.where(larger, b_x, b_v), tl.where(larger, tl.cast(r, b_at.dtype), b_at)


@triton.jit
def argmax_kernel(
    p_x, p_i, p_y, p_j, sizes, share,
    SMALLEST: tl.constexpr, LONG: tl.constexpr, ACC: tl.constexpr, EARLY: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write j of share program_id(1), and y unless it is None.

    If x has the maxima of shares, i [shares, K] has their positions. Positions in a share have 32 bits unless it is
    LONG: 64 take twice the registers. Loads are as in `reduce_kernel`.
    """
    wait(EARLY)
    shape: tl.constexpr = (tile.BLOCK_R, tile.BLOCK_K1, tile.BLOCK_K2)
    p_x, o_k, m_k = output_block(p_x, sizes, tile)
    start = tl.program_id(1).to(tl.int64) * share
    rows = tl.minimum(share, sizes.R - start)
    b_v = lowest(shape, ACC)
    b_at = tl.zeros(shape, dtype=tl.int64 if LONG else tl.int32)
    o_r = tl.arange(0, tile.BLOCK_R)
    last = rows // tile.BLOCK_R * tile.BLOCK_R
    for r in range(0, last, tile.BLOCK_R):
        p_r = reduced_pointers(p_x, start + r + o_r, sizes, tile)
        b_v, b_at = update_maximum(b_v, b_at, p_r, m_k, r, SMALLEST, ACC)
    if last < rows:
        p_r = reduced_pointers(p_x, start + last + o_r, sizes, tile)
        end = as_multiple(sizes.R, tile.ALIGN) if tile.EVEN else sizes.R
        m_r = m_k & (start + last + o_r < end)[:, None, None]
        b_v, b_at = update_maximum(b_v, b_at, p_r, m_r, last, SMALLEST, ACC)
    missing, b_missing, b_top = largest(b_v, shape, ACC)
    at_top = tl.where(b_missing[None, :, :], missing, b_v == b_top[None, :, :]) & (o_r < rows)[:, None, None]
    b_j = tl.where(at_top, b_at + o_r[:, None, None], FARTHER if LONG else NOWHERE)
    b_j = tl.min(b_j, axis=0).to(tl.int64)[None, :, :]
    if p_i is not None:
        b_j = tl.load(p_i + b_j * sizes.K1 * sizes.K2 + o_k, mask=m_k, other=0)  # [1, BLOCK_K1, BLOCK_K2]
    else:
        b_j += start
    o_y = tl.program_id(1).to(tl.int64) * sizes.K1 * sizes.K2 + o_k
    tl.store(p_j + o_y, b_j, mask=m_k)
    if p_y is not None:
        b_top = extreme_value(b_top, b_missing, SMALLEST, ACC)
        tl.store(p_y + o_y, b_top.to(p_y.dtype.element_ty)[None, :, :], mask=m_k)


def fill(
    x: torch.Tensor, axes: Sequence[int], positions: torch.Tensor, values: torch.Tensor | None, smallest: bool
) -> None:
    """Fill the positions and the maxima or minima, all contiguous in the order of the output axes."""
    first = plan(x, axes)
    shares = first.grid[1]
    if shares == 1:
        _run(first, x, None, values, positions, smallest)
        return
    top = torch.empty(shares, first.K, dtype=x.dtype, device=x.device)
    at_top = torch.empty(shares, first.K, dtype=torch.int64, device=x.device)
    _run(first, x, None, top, at_top, smallest)
    _run(plan(top, (0,), shares=1), top, at_top, values, positions, smallest)


def _run(
    plan: ReducePlan, x: torch.Tensor, of_shares: torch.Tensor | None, values: torch.Tensor | None,
    positions: torch.Tensor, smallest: bool,
) -> None:  # fmt: skip
    plan.run(
        argmax_kernel, plan.source(x), of_shares, values, positions, plan.sizes, plan.share,
        SMALLEST=smallest, LONG=plan.share >= MANY, ACC=launch.acc(x.dtype) if x.is_floating_point() else tl.int64,
        **dependent_launch.options(),
    )  # fmt: skip


@triton.jit
def spread_kernel(p_y, p_j, p_x, total, K2, J, R, BLOCK_N: tl.constexpr):
    """x[k1, j[k1, i, k2], k2] = y[k1, i, k2]: scatter `total` elements of y [K1, J, K2] to x [K1, R, K2]."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < total
    b_j = tl.load(p_j + o, mask=m, other=0)  # [BLOCK_N]
    tl.store(p_x + (o // (J * K2) * R + b_j) * K2 + o % K2, tl.load(p_y + o, mask=m, other=0), mask=m)


def spread(
    dy: torch.Tensor, positions: torch.Tensor, shape: Sequence[int], dims: Sequence[int], dim: int
) -> torch.Tensor:
    """Return zeros of `shape` with dy at its `positions` along `dim`, with the memory order `dims`.

    dy and positions have `shape` except along `dim`, where positions must be distinct. See `memory_layout.dims`.
    """
    y, j = (t.permute(*dims).contiguous() for t in (dy, positions))
    dx = torch.zeros([shape[d] for d in dims], dtype=dy.dtype, device=dy.device)
    if y.numel():
        at = dims.index(dim)
        tile = launch.tile("elementwise", dy.dtype, N=y.numel())
        launch.run(
            spread_kernel, (launch.cdiv(y.numel(), tile["BLOCK_N"]),), y, j, dx, y.numel(), dx.shape[at + 1 :].numel(),
            y.shape[at], dx.shape[at], **tile.options,
        )  # fmt: skip
    return dx.permute(memory_layout.back(dims))
