"""Sums of x, of squares and of equal elements, maxima and minima: in one launch, or in shares and a second launch.

    y[k] = finish(sum over r of f(x[k, r]))      f(x) = x, x^2, or 1 where x equals m[k]; or the maximum or minimum
    x  [K, R], by its plan (`layout`)            y  [K], or [shares, K]

A second launch joins shares; only then is the sum divided by the count, or its root taken.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minidl.kernels.division import as_multiple
from minidl.kernels.reduce.layout import (
    ReducePlan,
    block_sizes,
    extreme_value,
    largest,
    load_extreme,
    lowest,
    output_block,
    plan,
    reduced_pointers,
    shares_of,
)
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

SUM, SQUARES, EQUAL, MAX, MIN = map(tl.constexpr, range(5))
UNCHANGED, OVER_COUNT, ROOT = map(tl.constexpr, range(3))


@triton.jit
def accumulate(b_acc, p_x, mask, b_m, OP: tl.constexpr, ACC: tl.constexpr):
    """Return b_acc with one more block; masked lanes have no effect."""
    if OP >= MAX:  # or MIN
        return tl.maximum(b_acc, load_extreme(p_x, mask, OP == MIN, ACC), propagate_nan=tl.PropagateNan.ALL)
    b_x = tl.load(p_x, mask=mask, other=0).to(ACC)
    if OP == EQUAL:
        return b_acc + (mask & ((b_x == b_m) | ((b_x != b_x) & (b_m != b_m)))).to(ACC)
    elif OP == SQUARES:
        return b_acc + b_x * b_x
    else:
        return b_acc + b_x


@triton.jit
def reduce_kernel(
    p_x, p_m, p_y, sizes, share, count,
    OP: tl.constexpr, FINISH: tl.constexpr, ACC: tl.constexpr, EARLY: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write y of share program_id(1). Loads of the last block of R take ALIGN elements at once only if R is EVEN."""
    wait(EARLY)
    shape: tl.constexpr = (tile.BLOCK_R, tile.BLOCK_K1, tile.BLOCK_K2)
    p_x, o_k, m_k = output_block(p_x, sizes, tile)
    start = tl.program_id(1).to(tl.int64) * share
    rows = tl.minimum(share, sizes.R - start)
    if OP >= MAX:  # or MIN
        b_acc = lowest(shape, ACC)
    else:
        b_acc = tl.zeros(shape, dtype=ACC)
    if OP == EQUAL:
        b_m = tl.load(p_m + o_k, mask=m_k, other=0).to(ACC)
    else:
        b_m = None
    o_r = start + tl.arange(0, tile.BLOCK_R)
    last = rows // tile.BLOCK_R * tile.BLOCK_R
    for r in range(0, last, tile.BLOCK_R):
        p_r = reduced_pointers(p_x, r + o_r, sizes, tile)
        b_acc = accumulate(b_acc, p_r, m_k, b_m, OP, ACC)
    if last < rows:
        p_r = reduced_pointers(p_x, last + o_r, sizes, tile)
        end = as_multiple(sizes.R, tile.ALIGN) if tile.EVEN else sizes.R
        b_acc = accumulate(b_acc, p_r, m_k & (last + o_r < end)[:, None, None], b_m, OP, ACC)
    if OP >= MAX:  # or MIN
        _, b_missing, b_y = largest(b_acc, shape, ACC)
        b_y = extreme_value(b_y, b_missing, OP == MIN, ACC)
    else:
        b_y = tl.sum(b_acc, axis=0)
    if FINISH == OVER_COUNT:
        b_y = b_y / count
    elif FINISH == ROOT:
        b_y = tl.sqrt(b_y)
    o_y = tl.program_id(1).to(tl.int64) * sizes.K1 * sizes.K2 + o_k
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty)[None, :, :], mask=m_k)


def fill(
    x: torch.Tensor,
    axes: Sequence[int],
    y: torch.Tensor,
    op: tl.constexpr = SUM,
    finish: tl.constexpr = UNCHANGED,
    m: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill y, contiguous in the order of the output axes, and return it."""
    if x.numel() == 0:
        return y.fill_(math.nan if finish == OVER_COUNT else 0)
    if y.numel() == x.numel() and op in (SUM, MAX, MIN):
        return y.copy_(x.reshape(y.shape))
    first = plan(x, axes)
    acc, shares = _acc_dtype(x, op), first.grid[1]
    join = shares > 1
    partial = torch.empty(shares, first.K, dtype=acc, device=y.device) if join else y
    _run(first, x, m, partial, first.sizes.R, op, UNCHANGED if join else finish, acc)
    if join:
        second = plan(partial, (0,), shares=1)
        _run(second, partial, None, y, first.sizes.R, op if op in (MAX, MIN) else SUM, finish, acc)
    return y


def _run(
    plan: ReducePlan, x: torch.Tensor, m: torch.Tensor | None, y: torch.Tensor, count: int, op: tl.constexpr,
    finish: tl.constexpr, acc: torch.dtype,
) -> None:  # fmt: skip
    plan.run(
        reduce_kernel, plan.source(x), m, y, plan.sizes, plan.share, count,
        OP=op, FINISH=finish, ACC=_ACC[acc], **dependent_launch.options(),
    )  # fmt: skip


def _acc_dtype(x: torch.Tensor, op: tl.constexpr) -> torch.dtype:
    """Return the dtype of partial results."""
    if not x.is_floating_point():
        return torch.int64
    if op in (MAX, MIN):
        # Triton computes maxima of bfloat16 in float32.
        return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    return torch.float64 if op == SQUARES else launch.acc_torch(x.dtype)


_ACC = {torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64}


def depth(K: int, R: int, dtype: torch.dtype) -> int:
    """Return the longest chain of additions of a term when K outputs are summed over R, in any layout.

    A lane adds one term of each block of its share. The lanes of a block are added as a tree of at most 64 levels: a
    GPU thread has at most 32 lanes, and NumPy sums a row pairwise in runs of 16, but several columns row by row (512
    equal terms in two are off by 99 units). Then the shares are added. The chain is longest for either the fewest or
    the most shares that K outputs can have.
    """
    longest = 0
    for family in () if R < 2 else ("reduce_rows", "reduce_columns"):
        tile = launch.tile(family, dtype, K=K, R=R)
        along = 1
        while along <= tile["BLOCK_K"]:
            _, rows, _ = block_sizes(tile, max(K // along, 1), R, along, family == "reduce_columns")
            blocks, tree_depth = launch.cdiv(R, rows), rows if launch.INTERPRETED and K > 1 else min(rows, 64)
            for programs in (launch.cdiv(K, tile["BLOCK_K"]), 2 * launch.cdiv(K, along)):
                shares = shares_of(blocks, programs, launch.processors())
                longest = max(longest, launch.cdiv(blocks, shares) + tree_depth + shares)
            along *= 2
    return min(max(R - 1, 0), longest)
