"""Cumulative sums along a dimension: y[.., r, ..] = x[.., 0, ..] + ... + x[.., r, ..], or from the other end.

    x, y  [A, R, B], contiguous; the gradient of a cumulative sum is the cumulative sum of dy from the other end

A program takes BLOCK_M of the A B rows and loops over R, BLOCK_N at a time, with the sum so far. If rows are few and
long, programs take shares of R: one launch sums each share, another computes cumulative sums of these, and a third
scans each share from its offset. The order of additions depends only on the tile and the number of multiprocessors.
Sums are in float32 (float64 for float64) and rounded when stored.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.reduce.layout import shares_of
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

LONG = 16  # the fewest blocks of a row that is split into shares, for two more launches


@triton.jit
def row_offsets(K, R, B, BLOCK_M: tl.constexpr):
    """Return a program's rows [BLOCK_M, 1], their mask, and their offsets: row k begins at k // B * R * B + k % B."""
    o_k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return o_k[:, None], (o_k < K)[:, None], ((o_k // B) * R * B + o_k % B)[:, None]


@triton.jit
def share_sums_kernel(
    p_x, p_sum, K, R, B, share, shares, REVERSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the sums of shares of rows, [K, shares], counted from the end with REVERSE."""
    o_k, m_k, o_row = row_offsets(K, R, B, BLOCK_M)
    begin = tl.program_id(1).to(tl.int64) * share
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(begin, tl.minimum(begin + share, R), BLOCK_N):
        o_r = start + tl.arange(0, BLOCK_N)
        o = o_row + ((R - 1 - o_r) if REVERSE else o_r).to(tl.int64)[None, :] * B
        b_sum += tl.load(p_x + o, mask=m_k & (o_r < R)[None, :], other=0.0).to(ACC)
    tl.store(p_sum + o_k * shares + tl.program_id(1), tl.sum(b_sum, axis=1)[:, None], mask=m_k)


@triton.jit
def cumsum_kernel(
    p_x, p_y, p_before, K, R, B, share, shares, REVERSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scan BLOCK_M rows, or a share of each, from p_before [K, shares], the cumulative sums of the shares."""
    o_k, m_k, o_row = row_offsets(K, R, B, BLOCK_M)
    begin, end = 0, R
    b_sum = tl.zeros((BLOCK_M, 1), ACC)
    if p_before is not None:
        at = tl.program_id(1)
        begin = at.to(tl.int64) * share
        end = tl.minimum(begin + share, R)
        b_sum = tl.load(p_before + o_k * shares + at - 1, mask=m_k & (at > 0), other=0.0)
    for start in range(begin, end, BLOCK_N):
        o_r = start + tl.arange(0, BLOCK_N)
        m = m_k & (o_r < R)[None, :]
        o = o_row + ((R - 1 - o_r) if REVERSE else o_r).to(tl.int64)[None, :] * B
        b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_y = tl.cumsum(b_x, axis=1) + b_sum
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)
        # The last column; accumulating sums of b_x here fails in a pass of Triton 3.6 and 3.7 (OptimizeThreadLocality).
        last = tl.arange(0, BLOCK_N)[None, :] == BLOCK_N - 1
        b_sum = tl.sum(tl.where(last, b_y, 0.0), axis=1)[:, None]


def partition(K: int, R: int, dtype: torch.dtype) -> tuple[launch.Tile, int, int]:
    """Return the tile for K rows of R, the elements of a share, and the shares per row."""
    tile = launch.tile("elementwise_tile", dtype, M=K, N=R)
    blocks, programs = launch.cdiv(R, tile["BLOCK_N"]), launch.cdiv(K, tile["BLOCK_M"])
    processors = launch.processors()
    few = blocks >= LONG and programs <= processors
    share = launch.cdiv(blocks, shares_of(blocks, programs, processors) if few else 1) * tile["BLOCK_N"]
    return tile, share, launch.cdiv(R, share)


def depth(K: int, R: int, dtype: torch.dtype) -> int:
    """Return the longest chain of additions of an element: in a block, over blocks, and both over the shares."""
    tile, share, shares = partition(K, R, dtype)
    pass_length = min(tile["BLOCK_N"], R) + launch.cdiv(share, tile["BLOCK_N"])
    return pass_length if shares == 1 else 2 * pass_length + depth(K, shares, launch.acc_torch(dtype))


@replayed
def cumsum(x: torch.Tensor, dim: int, reverse: bool = False) -> torch.Tensor:
    """Return the cumulative sums of a floating tensor along `dim`, from its end with `reverse`; contiguous.

    Raises TypeError for integers, IndexError for a dimension out of range.
    """
    check.floating("cumsum", input=x)
    axis = check.axis("cumsum", dim, max(x.dim(), 1))
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    R = x.shape[axis] if x.dim() else 1
    B = math.prod(x.shape[axis + 1 :])
    K = x.numel() // R
    tile, share, shares = partition(K, R, x.dtype)
    grid = launch.cdiv(K, tile["BLOCK_M"]), shares
    constants = {"REVERSE": reverse, "ACC": launch.acc(x.dtype), **tile.options}
    before = None
    if shares > 1:
        sums = torch.empty(K, shares, dtype=launch.acc_torch(x.dtype), device=x.device)
        launch.run(share_sums_kernel, grid, x, sums, K, R, B, share, shares, **constants)
        before = cumsum(sums, 1)
    launch.run(cumsum_kernel, grid, x, y, before, K, R, B, share, shares, **constants)
    return y
