"""Sums of x, of squares, of what is equal; maxima, minima. Each in one launch or in shares that a second one joins."""

import torch
import triton
import triton.language as tl

from minidl.kernels.reduce.layout import LOWEST_INTEGER, Seen, block, box, kept, lowest, seen, shares_of, turned, whole
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait

SUM, SQUARES, EQUAL, MAX, MIN = map(tl.constexpr, range(5))
AS_IT_IS, OVER_COUNT, ROOT = map(tl.constexpr, range(3))


@triton.jit
def added(b_acc, p_x, mask, b_m, OP: tl.constexpr, ACC: tl.constexpr):
    """b_acc with one more block, of which lanes outside the mask add nothing."""
    if OP == MAX and ACC.is_floating():
        b_x = tl.load(p_x, mask=mask, other=float("-inf")).to(ACC)
    elif OP == MIN and ACC.is_floating():
        b_x = tl.load(p_x, mask=mask, other=float("inf")).to(ACC)
    else:
        b_x = tl.load(p_x, mask=mask, other=0).to(ACC)
    if OP >= MAX:  # or MIN
        b_x = turned(b_x, OP == MIN)
        if not ACC.is_floating():
            b_x = tl.where(mask, b_x, LOWEST_INTEGER)
        return tl.maximum(b_acc, b_x, propagate_nan=tl.PropagateNan.ALL)
    elif OP == EQUAL:
        return b_acc + (mask & ((b_x == b_m) | ((b_x != b_x) & (b_m != b_m)))).to(ACC)
    elif OP == SQUARES:
        return b_acc + b_x * b_x
    else:
        return b_acc + b_x


@triton.jit
def reduce_kernel(
    p_x, p_m, p_y, K1, R, K2, R2, s_k1, s_k2, s_r1, s_r2, share, count,
    OP: tl.constexpr, FINISH: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
    R_LEVELS: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_K1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K2: tl.constexpr,
):  # fmt: skip
    """y[i, k1, k2] = sum of f(x[k1, r, k2]) over share i of r: f(x) = x, x^2, or 1 where x equals m[k1, k2]; or the
    maximum, or the minimum.

    Loads take ALIGN neighbours at once, in the last block of rows only where R is EVEN, a multiple of ALIGN.
    """
    wait(EARLY)
    p_x, o_k, m_k = kept(p_x, K1, K2, s_k1, s_k2, COLUMNS, ALIGN, BLOCK_K1, BLOCK_K2)
    start = tl.program_id(1).to(tl.int64) * share
    rows = tl.minimum(share, R - start)
    if OP >= MAX:  # or MIN
        b_acc = lowest((BLOCK_R, BLOCK_K1, BLOCK_K2), ACC)
    else:
        b_acc = tl.zeros((BLOCK_R, BLOCK_K1, BLOCK_K2), dtype=ACC)
    if OP == EQUAL:
        b_m = tl.load(p_m + o_k, mask=m_k, other=0).to(ACC)
    else:
        b_m = None
    o_r = start + tl.arange(0, BLOCK_R)
    last = rows // BLOCK_R * BLOCK_R
    for r in range(0, last, BLOCK_R):
        p_r = block(p_x, r + o_r, R2, s_r1, s_r2, R_LEVELS, COLUMNS, ALIGN, BLOCK_K1, BLOCK_K2)
        b_acc = added(b_acc, p_r, m_k, b_m, OP, ACC)
    if last < rows:
        p_r = block(p_x, last + o_r, R2, s_r1, s_r2, R_LEVELS, COLUMNS, ALIGN, BLOCK_K1, BLOCK_K2)
        end = whole(R, ALIGN) if EVEN else R
        b_acc = added(b_acc, p_r, m_k & (last + o_r < end)[:, None, None], b_m, OP, ACC)
    if OP >= MAX:  # or MIN
        # A maximum over lanes may drop NaN or keep it, so NaN is looked for by itself.
        missing = b_acc != b_acc
        b_missing = tl.max(missing.to(tl.int32), axis=0) > 0  # [BLOCK_K1, BLOCK_K2]
        b_y = tl.max(tl.where(missing, lowest((BLOCK_R, BLOCK_K1, BLOCK_K2), ACC), b_acc), axis=0)
        b_y = turned(b_y, OP == MIN)
        if ACC.is_floating():
            b_y = tl.where(b_missing, float("nan"), b_y)
    else:
        b_y = tl.sum(b_acc, axis=0)
    if FINISH == OVER_COUNT:
        b_y = b_y / count
    elif FINISH == ROOT:
        b_y = tl.sqrt(b_y)
    o_y = tl.program_id(1).to(tl.int64) * K1 * K2 + o_k
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty)[None, :, :], mask=m_k)


def fill(
    x: Seen,
    y: torch.Tensor,
    op: tl.constexpr = SUM,
    finish: tl.constexpr = AS_IT_IS,
    m: torch.Tensor | None = None,
) -> None:
    """Fill y, contiguous in the order of the kept axes."""
    _run(x, y, x.R, op, finish, m, _wide(x.x, op), None)


def _wide(x: torch.Tensor, op: tl.constexpr) -> torch.dtype:
    """What is accumulated."""
    if not x.is_floating_point():
        return torch.int64
    if op in (MAX, MIN):
        # Triton's maximum of bfloat16 is one of float32.
        return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    return torch.float64 if op == SQUARES else launch.acc_torch(x.dtype)


_ACC = {torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64}


def _run(
    x: Seen,
    y: torch.Tensor,
    count: int,
    op: tl.constexpr,
    finish: tl.constexpr,
    m: torch.Tensor | None,
    wide: torch.dtype,
    shares: int | None,
) -> None:
    at = x.cut(shares)
    partial = y if at.shares == 1 else torch.empty(at.shares, x.K, dtype=wide, device=y.device)
    launch.run(
        reduce_kernel, at.grid, x.x, m, partial, *x.extents, at.share, count,
        OP=op, FINISH=finish if at.shares == 1 else AS_IT_IS, ACC=_ACC[wide], **x.options, **at.options,
    )  # fmt: skip
    if at.shares > 1:
        _run(seen(partial, (0,)), y, count, op if op in (MAX, MIN) else SUM, finish, None, wide, 1)


def depth(K: int, R: int, dtype: torch.dtype) -> int:
    """The longest chain of additions that a term goes through when x of K outputs is summed over R, in any layout.

    A lane takes one term of each block of its share. The lanes of a block are joined as a tree over runs, together at
    most 64 deep: a thread of a GPU has at most 32 lanes of its own, and NumPy sums a row in pairs of runs of 16;
    several columns it adds one row after the other (512 equal terms in two are off by 99 units). Then come the shares.
    Between the fewest and the most of these that K outputs may have, the chain is longest at one end.
    """
    longest = 0
    for family in () if R < 2 else ("reduce_rows", "reduce_columns"):
        tile = launch.tile(family, dtype, K=K, R=R)
        along = 1
        while along <= tile["BLOCK_K"]:
            _, rows, _ = box(tile, max(K // along, 1), R, along, family == "reduce_columns")
            blocks, joined = launch.cdiv(R, rows), rows if launch.INTERPRETED and K > 1 else min(rows, 64)
            for programs in (launch.cdiv(K, tile["BLOCK_K"]), 2 * launch.cdiv(K, along)):
                shares = shares_of(blocks, programs)
                longest = max(longest, launch.cdiv(blocks, shares) + joined + shares)
            along *= 2
    return min(max(R - 1, 0), longest)
