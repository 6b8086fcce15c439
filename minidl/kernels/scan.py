"""Running sums along a dimension: y[.., r, ..] = x[.., 0, ..] + ... + x[.., r, ..], or from the other end.

    x, y  [A, R, B], contiguous; the gradient of a running sum is the running sum of dy from the other end

A program takes BLOCK_M of the A B rows and walks along R, BLOCK_N at a time, with the sum so far. Where rows are few
and long, programs take shares of R: one launch sums each share, another makes running sums of these, and a third walks
along each share from where it begins. The order of the additions depends on the tile and the number of processors
alone. Sums are in float32 (float64 for float64) and rounded as they are stored.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.reduce.layout import shares_of
from minidl.runtime import launch

# The fewest blocks of a row that is shared out: a program walks over one in 0.5 us on an H200, and two more launches
# take some 5 us.
LONG = 16


@triton.jit
def places(K, R, B, BLOCK_M: tl.constexpr):
    """A program's rows [BLOCK_M, 1]: which there are, and where they begin: row k at k // B * R * B + k % B."""
    o_k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return o_k[:, None], (o_k < K)[:, None], ((o_k // B) * R * B + o_k % B)[:, None]


@triton.jit
def share_sums_kernel(
    p_x, p_sum, K, R, B, share, shares, REVERSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of shares of rows, [K, shares], counted from the end with REVERSE."""
    o_k, m_k, o_row = places(K, R, B, BLOCK_M)
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
    """BLOCK_M rows, or a share of them from p_before [K, shares], the running sums of their shares."""
    o_k, m_k, o_row = places(K, R, B, BLOCK_M)
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
        # Its last column: a sum of b_x, added up here, fails in a pass of Triton 3.6 and 3.7 (OptimizeThreadLocality).
        last = tl.arange(0, BLOCK_N)[None, :] == BLOCK_N - 1
        b_sum = tl.sum(tl.where(last, b_y, 0.0), axis=1)[:, None]


def shared(K: int, R: int, dtype: torch.dtype) -> tuple[launch.Tile, int, int]:
    """The tile of K rows of R, how much of a row a program takes, and how many take one."""
    tile = launch.tile("elementwise_tile", dtype, M=K, N=R)
    blocks, programs = launch.cdiv(R, tile["BLOCK_N"]), launch.cdiv(K, tile["BLOCK_M"])
    few = blocks >= LONG and programs <= launch.processors()
    share = launch.cdiv(blocks, shares_of(blocks, programs) if few else 1) * tile["BLOCK_N"]
    return tile, share, launch.cdiv(R, share)


def depth(K: int, R: int, dtype: torch.dtype) -> int:
    """The most additions that any element goes through: those of a block, those of blocks, and both of the shares."""
    tile, share, shares = shared(K, R, dtype)
    walk = min(tile["BLOCK_N"], R) + launch.cdiv(share, tile["BLOCK_N"])
    return walk if shares == 1 else 2 * walk + depth(K, shares, launch.acc_torch(dtype))


def cumsum(x: torch.Tensor, dim: int, reverse: bool = False) -> torch.Tensor:
    """The running sums of a floating tensor along `dim`, from its end with `reverse`; contiguous.

    Raises TypeError for integers, IndexError for a dimension out of range.
    """
    check.floating("cumsum", input=x)
    at = check.axis("cumsum", dim, max(x.dim(), 1))
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    R = x.shape[at] if x.dim() else 1
    B = math.prod(x.shape[at + 1 :])
    K = x.numel() // R
    tile, share, shares = shared(K, R, x.dtype)
    grid = launch.cdiv(K, tile["BLOCK_M"]), shares
    how = {"REVERSE": reverse, "ACC": launch.acc(x.dtype), **tile.options}
    before = None
    if shares > 1:
        sums = torch.empty(K, shares, dtype=launch.acc_torch(x.dtype), device=x.device)
        launch.run(share_sums_kernel, grid, x, sums, K, R, B, share, shares, **how)
        before = cumsum(sums, 1)
    launch.run(cumsum_kernel, grid, x, y, before, K, R, B, share, shares, **how)
    return y
