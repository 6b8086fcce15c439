"""The kernels of tiled matrix products: a loop over K by pointers, one by boxes (TMA), and the split-K sum."""

import triton
import triton.language as tl

from minidl.kernels import float8
from minidl.kernels.activation import activate
from minidl.kernels.division import as_multiple
from minidl.kernels.epilogue import ADDED as ADDED
from minidl.kernels.epilogue import STATISTICS, save_or_add, split_columns
from minidl.kernels.gemm.fused_statistics import store_statistics
from minidl.runtime.dependent_launch import wait

# `float8.stored` and `float8.product` accept every dtype: except for float8 they are a conversion and a `tl.dot`.


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
def finish(
    b_acc, p_bias, p_scale, p_c, p_z, m, n, M, N,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    low_m=0, low_n=0,
):  # fmt: skip
    """Store act(z) of the block at row m and column n; z is `save_or_add` of scale A B + bias.
    Rows m to low_m and columns n to low_n overlap the previous tile, which stores them."""
    o_m = m + tl.arange(0, b_acc.shape[0])
    o_n = n + tl.arange(0, b_acc.shape[1])
    m_mn = ((o_m >= low_m) & (o_m < M))[:, None] & ((o_n >= low_n) & (o_n < N))[None, :]
    o_mn = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    if HAS_SCALE:
        b_acc *= tl.load(p_scale + o_n, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
    b_acc = save_or_add(b_acc, p_z, o_mn, m_mn, SAVE_Z)
    tl.store(p_c + o_mn, float8.stored(activate(b_acc, ACT, SLOPE), p_c.dtype.element_ty), mask=m_mn)


@triton.jit
def epilogue(
    b_acc, p_bias, p_scale, p_c, p_z, m, n, M, N,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    PIECES: tl.constexpr, low_m=0, low_n=0,
):  # fmt: skip
    """Run `finish` on 1, 2 or 4 groups of columns in sequence, to need less shared memory and fewer registers.

    With STATISTICS, M is a multiple of BLOCK_M, and the epilogue has no scale and no activation."""
    WIDTH: tl.constexpr = b_acc.shape[1] // PIECES
    if SAVE_Z == STATISTICS:
        b_y = store_statistics(b_acc, p_bias, p_z, m // b_acc.shape[0], n, N, low_n, HAS_BIAS, p_c.dtype.element_ty)
        # b_y has its bias, so nothing of the epilogue is left but the store.
        epilogue(b_y, None, None, p_c, None, m, n, M, N, False, False, 0, 0.0, 0, PIECES, low_m, low_n)
    else:
        b_pieces = (b_acc,)
        if PIECES > 1:
            b_pieces = split_columns(b_acc)
        if PIECES == 4:
            b_pieces = split_columns(b_pieces[0]) + split_columns(b_pieces[1])
        for i in tl.static_range(PIECES):
            finish(
                b_pieces[i], p_bias, p_scale, p_c, p_z, m, n + i * WIDTH, M, N,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, low_m, low_n,
            )  # fmt: skip


@triton.jit
def clamped_tile(
    i_tile, M, N, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, UNIT_N: tl.constexpr,
):  # fmt: skip
    """Return (low_m, low_n, m, n): the first row and column of the i-th tile and of its block, in elements.

    A block is moved back to end with the matrix, because boxes that reach beyond it are slow: 76x4096x4096 in two
    blocks of 64 rows took 24 us with 52 rows beyond the end, and 16 us with none (H100). A box must begin at a multiple
    of 16 bytes of a contiguous axis. So if N is contiguous in b, blocks begin and end at multiples of 16 columns, and
    the last one may still reach beyond N; if M is contiguous in a, blocks begin with their tile. Columns 518 and 414 of
    A^T B of 646x542x9752 caused an illegal instruction.
    """
    ALIGNMENT_N: tl.constexpr = 1 if B_TRANSPOSED else 16
    i_m, i_n = tile_position(i_tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    low_m = i_m * BLOCK_M
    low_n = i_n * BLOCK_N
    m = low_m
    if not A_TRANSPOSED:
        m = tl.minimum(low_m, tl.maximum(M - BLOCK_M, 0))
    n = tl.minimum(low_n, tl.maximum(tl.cdiv(N, ALIGNMENT_N) * ALIGNMENT_N - BLOCK_N, 0))
    return low_m, low_n, m, as_multiple(n, UNIT_N)


@triton.jit
def gemm_pointer_kernel(
    p_a, p_b, p_bias, p_scale, p_c, p_z, M, N, K, s_ab, s_am, s_ak, s_bb, s_bk, s_bn, s_split, SPLIT,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write a tile of c, or of a share, by pointers. UNITS divide M, N, K, s_am, s_ak, s_bk and s_bn, in this order.

    Accesses of less than 4 bytes cannot use asynchronous copies to shared memory. With AHEAD the next block is loaded
    into registers before this one is multiplied.
    """
    wait(EARLY)
    M, N, K = as_multiple(M, UNITS[0]), as_multiple(N, UNITS[1]), as_multiple(K, UNITS[2])
    s_split, s_am, s_ak = as_multiple(s_split, UNITS[1]), as_multiple(s_am, UNITS[3]), as_multiple(s_ak, UNITS[4])
    s_bk, s_bn = as_multiple(s_bk, UNITS[5]), as_multiple(s_bn, UNITS[6])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    i_batch = (tl.program_id(0) // tiles).to(tl.int64)
    i_split = tl.program_id(1)
    i_m, i_n = tile_position(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    start = i_split * k_per_split
    end = tl.minimum(K, start + k_per_split)
    o_k = start + tl.arange(0, BLOCK_K)
    p_a += i_batch * s_ab + o_m.to(tl.int64)[:, None] * s_am + o_k.to(tl.int64)[None, :] * s_ak
    p_b += i_batch * s_bb + o_k.to(tl.int64)[:, None] * s_bk + o_n.to(tl.int64)[None, :] * s_bn
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(start < end)  # no share is empty; otherwise ptxas serialises the matrix instructions
    if AHEAD:
        m_k = o_k < end
        b_a = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        b_b = tl.load(p_b, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
        for k in tl.range(start + BLOCK_K, end + BLOCK_K, BLOCK_K, num_stages=1):
            p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
            p_b += tl.full((), BLOCK_K, tl.int64) * s_bk
            m_k = (k + tl.arange(0, BLOCK_K)) < end
            b_a_next = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0)
            b_b_next = tl.load(p_b, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0)
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=ACC)
            b_a, b_b = b_a_next, b_b_next
    else:
        for k in range(start, end, BLOCK_K):
            m_k = (k + tl.arange(0, BLOCK_K)) < end
            b_a = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
            b_b = tl.load(p_b, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=ACC)
            p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
            p_b += tl.full((), BLOCK_K, tl.int64) * s_bk
    p_c += (i_split.to(tl.int64) * s_split) + i_batch * M * N
    if SAVE_Z:
        p_z += i_batch * M * N
    epilogue(
        b_acc, p_bias, p_scale, p_c, p_z, i_m * BLOCK_M, i_n * BLOCK_N, M, N,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES,
    )  # fmt: skip


@triton.jit
def gemm_tma_kernel(
    d_a, d_b, p_bias, p_scale, p_c, p_z, p_wild, M, N, K, s_split, PROGRAMS, SPLIT,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    UNIT_N: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write tiles of c, or of shares, by boxes; each of the PROGRAMS programs writes several.

    p_wild  None, or a flag in memory (parts.py): 0 if all operands are finite and `gemm_parts_kernel` wrote c, so that
            this kernel does nothing
    """
    wait(EARLY)
    N, s_split = as_multiple(N, UNIT_N), as_multiple(s_split, UNIT_N)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    blocks_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    tl.assume(blocks_per_split > 0)
    work = tiles * SPLIT
    if p_wild is not None:
        work = tl.where(tl.load(p_wild) == 0, 0, work)
    for i_work in tl.range(tl.program_id(0), work, PROGRAMS, flatten=FLATTEN):
        i_split = i_work // tiles
        low_m, low_n, m, n = clamped_tile(
            i_work % tiles, M, N, A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, GROUP_M, UNIT_N
        )  # fmt: skip
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        # Every share has the same number of blocks: past the end of K the boxes are zeros.
        for i_k in range(blocks_per_split):
            k = (i_split * blocks_per_split + i_k) * BLOCK_K
            if A_TRANSPOSED:
                b_a = d_a.load([k, m]).T  # [BLOCK_M, BLOCK_K]
            else:
                b_a = d_a.load([m, k])
            if B_TRANSPOSED:
                b_b = d_b.load([n, k]).T  # [BLOCK_K, BLOCK_N]
            else:
                b_b = d_b.load([k, n])
            b_acc = float8.product(b_a, b_b, b_acc, ACC, PRECISION)
        epilogue(
            b_acc, p_bias, p_scale, p_c + i_split.to(tl.int64) * s_split, p_z, m, n, M, N,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES, low_m, low_n,
        )  # fmt: skip


@triton.jit
def gemm_sum_kernel(
    p_partial, p_bias, p_scale, p_c, p_z, N, total,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the SPLIT partial products p_partial [SPLIT, total], then apply the epilogue. Shares are added in order or,
    for few values, BLOCK_S at a time so that more loads run in parallel, with a final sum over these."""
    wait(EARLY)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < total  # a mask
    if BLOCK_S == 1:
        b_acc = tl.zeros((BLOCK,), dtype=ACC)
        p_partial += o
        for _ in tl.range(0, SPLIT, loop_unroll_factor=8):
            b_acc += tl.load(p_partial, mask=m, other=0.0)  # [BLOCK]
            p_partial += total
    else:
        o_s = tl.arange(0, BLOCK_S)
        b_sums = tl.zeros((BLOCK_S, BLOCK), dtype=ACC)
        p_shares = p_partial + (o_s.to(tl.int64) * total)[:, None] + o[None, :]
        for first in tl.range(0, SPLIT, BLOCK_S, loop_unroll_factor=4):
            m_shares = (first + o_s < SPLIT)[:, None] & m[None, :]
            b_sums += tl.load(p_shares, mask=m_shares, other=0.0)  # [BLOCK_S, BLOCK]
            p_shares += tl.full((), BLOCK_S, tl.int64) * total
        b_acc = tl.sum(b_sums, axis=0)
    if HAS_SCALE:
        b_acc *= tl.load(p_scale + o % N, mask=m, other=0.0).to(ACC)
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o % N, mask=m, other=0.0).to(ACC)
    b_acc = save_or_add(b_acc, p_z, o, m, SAVE_Z)
    tl.store(p_c + o, float8.stored(activate(b_acc, ACT, SLOPE), p_c.dtype.element_ty), mask=m)
