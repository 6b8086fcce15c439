"""The kernels of tiled matrix products: a loop over K by pointers, one by boxes (TMA), and the sum of shares of K.

A program computes tiles c [BLOCK_M, BLOCK_N] of C: it multiplies the blocks a of a row of blocks of A by the blocks b
of a column of blocks of B, and adds the products in registers. Then `kernels.epilogue` applies scale, bias and
activation and stores the tile.

                     +--+--+--+
                   K |  |b |  |
                     +--+--+--+      p_c              [batch, M, N], contiguous
         K           |  |b |  |      p_bias, p_scale  [N], or None
      +--+--+        +--+--+--+      p_z              as p_c, or [M / BLOCK_M, 2, N] with STATISTICS; or None
      |  |  |        |  |  |  |
    M +--+--+      M +--+--+--+
      |a |a |        |  |c |  |
      +--+--+        +--+--+--+
                          N

With SPLIT > 1, each of SPLIT shares of K has equally many blocks and its own result. Then p_c is [SPLIT, batch, M, N]
in the accumulation dtype (`Sizes.s_split` is batch M N), and there is no epilogue: bias, scale and z are None.
`gemm_sum_kernel` adds the shares in a fixed order and applies the epilogue to the sum.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels import float8
from minidl.kernels.activation import activate
from minidl.kernels.division import as_multiple
from minidl.kernels.epilogue import ADDED as ADDED
from minidl.kernels.epilogue import STATISTICS, finish, save_or_add
from minidl.kernels.epilogue import split_columns as split_columns
from minidl.kernels.gemm.fused_statistics import store_statistics
from minidl.runtime.dependent_launch import wait


class Sizes(NamedTuple):
    """Sizes of a product.

    s_split   values of c from one share to the next
    PROGRAMS  programs that share the tiles by boxes
    """

    M: int
    N: int
    K: int
    s_split: int
    SPLIT: int
    PROGRAMS: int = 1


class Strides(NamedTuple):
    """Strides of a [batch, M, K] and b [batch, K, N], in values."""

    ab: int
    am: int
    ak: int
    bb: int
    bk: int
    bn: int


class GemmTile(NamedTuple):
    """Constants of a product. Some are for products by boxes, others for those by pointers.

    ACC, PRECISION  dtype of the sums, and how products are computed
    GROUP_M  tile rows of a group, see `tile_position`
    PIECES   groups of columns that the epilogue stores one after another
    FLATTEN  boxes: whether the loops over tiles and over K become one, so that loads of the next tile begin early
    A_TRANSPOSED, B_TRANSPOSED   boxes: whether M is the contiguous axis of a, or K that of b
    UNIT_N   boxes: the largest of 1, 2, 4 and 8 that divides N, by which the compiler knows where rows of c begin
    UNITS    pointers: such divisors of M, N, K, am, ak, bk and bn
    AHEAD    pointers: whether the next block is loaded into registers before this one is multiplied, as accesses of
             less than 4 bytes cannot be asynchronous copies to shared memory
    STAGES   loads that run ahead in loops without `tl.dot`, which Triton pipelines only if the loop sets num_stages
    """

    BLOCK_M: int
    ACC: Any
    BLOCK_N: int = 1
    BLOCK_K: int = 1
    PRECISION: str = "ieee"
    GROUP_M: int = 1
    PIECES: int = 1
    FLATTEN: int = 0
    A_TRANSPOSED: bool = False
    B_TRANSPOSED: bool = False
    UNIT_N: int = 1
    UNITS: tuple[int, ...] = ()
    AHEAD: bool = False
    STAGES: int = 1


class SumTile(NamedTuple):
    """Constants of a sum of SPLIT shares: BLOCK values per program, of BLOCK_S shares at a time."""

    BLOCK: int
    BLOCK_S: int
    SPLIT: int
    ACC: Any


@triton.jit
def tile_position(i_tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return (i_m, i_n), the i-th tile's indices in units of tiles: column by column in groups of GROUP_M tile rows."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = i_tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = i_tile % (GROUP_M * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def clamped_tile(i_tile, M, N, tile: tl.constexpr):
    """Return (low_m, low_n, m, n): the first row and column of the i-th tile and of its block, in elements.

    A block is moved back to end with the matrix, because boxes that reach beyond it are slow:

        tiles   |      |      |  | N      the last block also has columns n to low_n of the tile before it,
        blocks  |      |   |     |        which `store_tile` leaves to that tile's block

    TMA, the hardware that copies boxes, takes those that begin at a multiple of 16 bytes of a contiguous axis; others
    are illegal instructions. So if N is contiguous in b, blocks begin and end at multiples of 16 columns, and the last
    one may still reach beyond N; if M is contiguous in a, blocks begin with their tile.
    """
    ALIGNMENT_N: tl.constexpr = 1 if tile.B_TRANSPOSED else 16
    i_m, i_n = tile_position(i_tile, M, N, tile.BLOCK_M, tile.BLOCK_N, tile.GROUP_M)
    low_m = i_m * tile.BLOCK_M
    low_n = i_n * tile.BLOCK_N
    m = low_m
    if not tile.A_TRANSPOSED:
        m = tl.minimum(low_m, tl.maximum(M - tile.BLOCK_M, 0))
    n = tl.minimum(low_n, tl.maximum(tl.cdiv(N, ALIGNMENT_N) * ALIGNMENT_N - tile.BLOCK_N, 0))
    return low_m, low_n, m, as_multiple(n, tile.UNIT_N)


@triton.jit
def load_boxes(d_a, d_b, m, n, k, tile: tl.constexpr):
    """Return the blocks of a [BLOCK_M, BLOCK_K] and b [BLOCK_K, BLOCK_N]."""
    b_a = d_a.load([k, m]).T if tile.A_TRANSPOSED else d_a.load([m, k])
    b_b = d_b.load([n, k]).T if tile.B_TRANSPOSED else d_b.load([k, n])
    return b_a, b_b


@triton.jit
def store_tile(
    b_acc, p_bias, p_scale, p_c, p_z, m, n, M, N, epilogue: tl.constexpr, PIECES: tl.constexpr, low_m=None, low_n=None
):  # fmt: skip
    """Apply the epilogue to the block at row m and column n of c [M, N] and store it.

    Rows m to low_m and columns n to low_n overlap the previous tile, which stores them. With STATISTICS, M is a
    multiple of BLOCK_M, and the epilogue has no scale and no activation.
    """
    o_m = m + tl.arange(0, b_acc.shape[0])
    m_m = o_m < M
    if low_m is not None:
        m_m = (o_m >= low_m) & m_m
    o_row = o_m.to(tl.int64)
    if epilogue.SAVE_Z == STATISTICS:
        b_y = store_statistics(b_acc, p_bias, p_z, m // b_acc.shape[0], n, N, low_n, p_c.dtype.element_ty)
        finish(b_y, None, None, p_c, None, o_row, m_m, n, N, 0, 1, None, PIECES, low_n)  # b_y has its bias
    else:
        finish(b_acc, p_bias, p_scale, p_c, p_z, o_row, m_m, n, N, 0, 1, epilogue, PIECES, low_n)


@triton.jit
def share_of_k(K, SPLIT, BLOCK_K: tl.constexpr):
    """Return where this program's share of K starts and ends; shares are the second axis of the grid."""
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    start = tl.program_id(1) * k_per_split
    return start, tl.minimum(K, start + k_per_split)


@triton.jit
def load_masked(p_a, p_b, m_m, m_n, k, end, BLOCK_K: tl.constexpr):
    """Return the blocks of a and b from k on; values from `end` on are 0."""
    m_k = (k + tl.arange(0, BLOCK_K)) < end
    b_a = tl.load(p_a, mask=m_m[:, None] & m_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
    b_b = tl.load(p_b, mask=m_k[:, None] & m_n[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
    return b_a, b_b


@triton.jit
def gemm_pointer_kernel(
    p_a, p_b, p_bias, p_scale, p_c, p_z, sizes, strides,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a tile of c, or of a share, by pointers."""
    wait(EARLY)
    UNITS: tl.constexpr = tile.UNITS
    M, N, K = as_multiple(sizes.M, UNITS[0]), as_multiple(sizes.N, UNITS[1]), as_multiple(sizes.K, UNITS[2])
    s_split = as_multiple(sizes.s_split, UNITS[1])
    s_am, s_ak = as_multiple(strides.am, UNITS[3]), as_multiple(strides.ak, UNITS[4])
    s_bk, s_bn = as_multiple(strides.bk, UNITS[5]), as_multiple(strides.bn, UNITS[6])
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    i_batch = (tl.program_id(0) // tiles).to(tl.int64)
    start, end = share_of_k(K, sizes.SPLIT, BLOCK_K)
    i_m, i_n = tile_position(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, tile.GROUP_M)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
    p_a += i_batch * strides.ab + o_m.to(tl.int64)[:, None] * s_am + o_k[None, :] * s_ak
    p_b += i_batch * strides.bb + o_k[:, None] * s_bk + o_n.to(tl.int64)[None, :] * s_bn
    m_m, m_n = o_m < M, o_n < N
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    tl.assume(start < end)  # no share is empty; otherwise ptxas serialises the matrix instructions
    if tile.AHEAD:
        b_a, b_b = load_masked(p_a, p_b, m_m, m_n, start, end, BLOCK_K)
        for k in tl.range(start + BLOCK_K, end + BLOCK_K, BLOCK_K, num_stages=1):
            p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
            p_b += tl.full((), BLOCK_K, tl.int64) * s_bk
            b_a_next, b_b_next = load_masked(p_a, p_b, m_m, m_n, k, end, BLOCK_K)
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
            b_a, b_b = b_a_next, b_b_next
    else:
        for k in range(start, end, BLOCK_K):
            b_a, b_b = load_masked(p_a, p_b, m_m, m_n, k, end, BLOCK_K)
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
            p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
            p_b += tl.full((), BLOCK_K, tl.int64) * s_bk
    p_c += (tl.program_id(1).to(tl.int64) * s_split) + i_batch * M * N
    if epilogue.SAVE_Z:
        p_z += i_batch * M * N
    store_tile(b_acc, p_bias, p_scale, p_c, p_z, i_m * BLOCK_M, i_n * BLOCK_N, M, N, epilogue, tile.PIECES)


@triton.jit
def gemm_tma_kernel(
    d_a, d_b, p_bias, p_scale, p_c, p_z, p_wild, sizes,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write tiles of c, or of shares, by boxes; each program writes several.

    p_wild  None, or a flag in memory (parts.py): 0 if all operands are finite and `gemm_parts_kernel` wrote c, so that
            this kernel does nothing
    """
    wait(EARLY)
    M, N, s_split = sizes.M, as_multiple(sizes.N, tile.UNIT_N), as_multiple(sizes.s_split, tile.UNIT_N)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    blocks_per_split = tl.cdiv(tl.cdiv(sizes.K, tile.BLOCK_K), sizes.SPLIT)
    tl.assume(blocks_per_split > 0)
    work = tiles * sizes.SPLIT
    if p_wild is not None:
        work = tl.where(tl.load(p_wild) == 0, 0, work)
    for i_work in tl.range(tl.program_id(0), work, sizes.PROGRAMS, flatten=tile.FLATTEN):
        i_split = i_work // tiles
        low_m, low_n, m, n = clamped_tile(i_work % tiles, M, N, tile)
        PRECISION: tl.constexpr = tile.PRECISION
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        # Every share has the same number of blocks: past the end of K the boxes are zeros.
        for i_k in range(blocks_per_split):
            b_a, b_b = load_boxes(d_a, d_b, m, n, (i_split * blocks_per_split + i_k) * tile.BLOCK_K, tile)
            b_acc = float8.product(b_a, b_b, b_acc, tile.ACC, PRECISION)
        p_share = p_c + i_split.to(tl.int64) * s_split
        store_tile(b_acc, p_bias, p_scale, p_share, p_z, m, n, M, N, epilogue, tile.PIECES, low_m, low_n)


@triton.jit
def gemm_sum_kernel(
    p_partial, p_bias, p_scale, p_c, p_z, N, total, tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Add the partial products p_partial [SPLIT, total], then apply the epilogue. tile: `SumTile`. Shares are added in
    order or, for few values, BLOCK_S at a time so that more loads run in parallel, with a final sum over these."""
    wait(EARLY)
    BLOCK: tl.constexpr = tile.BLOCK
    BLOCK_S: tl.constexpr = tile.BLOCK_S
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < total  # a mask
    if BLOCK_S == 1:
        b_acc = tl.zeros((BLOCK,), dtype=tile.ACC)
        p_partial += o
        for _ in tl.range(0, tile.SPLIT, loop_unroll_factor=8):
            b_acc += tl.load(p_partial, mask=m, other=0.0)  # [BLOCK]
            p_partial += total
    else:
        o_s = tl.arange(0, BLOCK_S)
        b_sums = tl.zeros((BLOCK_S, BLOCK), dtype=tile.ACC)
        p_shares = p_partial + (o_s.to(tl.int64) * total)[:, None] + o[None, :]
        for first in tl.range(0, tile.SPLIT, BLOCK_S, loop_unroll_factor=4):
            m_shares = (first + o_s < tile.SPLIT)[:, None] & m[None, :]
            b_sums += tl.load(p_shares, mask=m_shares, other=0.0)  # [BLOCK_S, BLOCK]
            p_shares += tl.full((), BLOCK_S, tl.int64) * total
        b_acc = tl.sum(b_sums, axis=0)
    if p_scale is not None:
        b_acc *= tl.load(p_scale + o % N, mask=m, other=0.0).to(tile.ACC)
    if p_bias is not None:
        b_acc += tl.load(p_bias + o % N, mask=m, other=0.0).to(tile.ACC)
    b_z = save_or_add(b_acc, p_z, o, m, epilogue.SAVE_Z)
    b_c = activate(b_z, epilogue.ACT, epilogue.SLOPE)
    tl.store(p_c + o, float8.stored(b_c, p_c.dtype.element_ty), mask=m)
