"""Device functions of the pixel-tiled form: pixel indices of a tile, and the steps along K."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """The rows of a tile: where row i begins in x, whether it exists, its pixel, and which taps are inside the image.

    in_rows, in_columns have a bit per tap row and column.
    """

    p_x: Any
    o_x: Any
    m_row: Any
    x_h: Any
    x_w: Any
    in_rows: Any
    in_columns: Any


class Columns(NamedTuple):
    """The columns of a tile: where column m begins in w, and whether it exists."""

    p_w: Any
    o_w: Any
    m_m: Any


@triton.jit
def pixel(i_first, BLOCK: tl.constexpr, QH, QW, POOL: tl.constexpr, LONG: tl.constexpr):
    """Return the image, row and column of `BLOCK` pixels from i_first on.

    POOL: the four pixels of a 2x2 window are adjacent. LONG: an image has more pixels than 32 bits count.
    """
    if LONG:
        QH = QH.to(tl.int64)
    if POOL:
        QH = QH // 2
        QW = QW // 2
    per_image = QH * QW * (4 if POOL else 1)
    o = i_first % per_image
    if not LONG:
        o = o.to(tl.int32)
    o += tl.arange(0, BLOCK)
    n = (i_first // per_image).to(tl.int64) + o // per_image
    o = o % per_image
    if POOL:
        corner = o % 4
        o = o // 4
        return n, o // QW * 2 + corner // 2, o % QW * 2 + corner % 2
    else:
        return n, o // QW, o % QW


@triton.jit
def inside_bits(o_first, size, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Return masks whose bit j says whether o_first + j * STEP is in [0, size)."""
    bits = (o_first * 0).to(tl.int32)
    for j in tl.static_range(COUNT):
        o = o_first + j * STEP
        bits |= ((o >= 0) & (o < size)).to(tl.int32) << j
    return bits


@triton.jit
def add_blocks(
    b_acc, i_start, i_end, rows, columns, JH, JW, sizes, taps: tl.constexpr, tile: tl.constexpr,
    START: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return b_acc plus the products of blocks i_start to i_end: BLOCKS per tap, from channel START on."""
    EVEN: tl.constexpr = START + BLOCKS * BLOCK_K <= taps.C
    for i in range(i_start, i_end):
        if tile.TAPS_INNER:
            j = i % (JH * JW)
            block = i // (JH * JW)
        else:
            j = i // BLOCKS
            block = i % BLOCKS
        r = j // JW
        s = j % JW
        o_c = START + block * BLOCK_K + tl.arange(0, BLOCK_K)
        if tile.INSIDE:
            m_x = rows.m_row
        elif tile.MARKED:
            m_x = ((rows.in_rows >> r) & (rows.in_columns >> s) & 1) != 0
        else:
            h = rows.x_h + r * taps.IN_TAP_H
            w = rows.x_w + s * taps.IN_TAP_W
            m_x = rows.m_row & (h >= 0) & (h < sizes.H) & (w >= 0) & (w < sizes.W)
        m_xc = m_x[:, None]
        m_wc = columns.m_m[None, :]
        if not EVEN:
            m_xc &= (o_c < taps.C)[None, :]
            m_wc &= (o_c < taps.C)[:, None]
        o_tap = (r * taps.IN_TAP_H * sizes.W + s * taps.IN_TAP_W).to(rows.o_x.dtype) * tile.CHANNELS
        tap = sizes.w_start + r * sizes.w_tap_h + s * sizes.w_tap_w
        if tile.TURN:
            o_wc = o_c.to(tl.int64) * (tile.W_TAPS * tile.M) + tap * tile.M
        else:
            o_wc = tap * taps.C + o_c
        b_x = tl.load(rows.p_x + (rows.o_x + o_tap)[:, None] + o_c[None, :], mask=m_xc, other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(columns.p_w + columns.o_w[None, :] + o_wc[:, None], mask=m_wc, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision=tile.PRECISION, out_dtype=b_acc.dtype)
    return b_acc


@triton.jit
def add_flat(b_acc, i, rows, columns, JW, depth, sizes, taps: tl.constexpr, tile: tl.constexpr):
    """Return b_acc plus the products of block i, with taps and channels as one axis of `depth` values."""
    o_k = i * tile.BLOCK_K + tl.arange(0, tile.BLOCK_K)
    j = o_k // taps.C
    t_h = j // JW * taps.IN_TAP_H
    t_w = j % JW * taps.IN_TAP_W
    h = rows.x_h[:, None] + t_h[None, :]
    w = rows.x_w[:, None] + t_w[None, :]
    m_x = rows.m_row[:, None] & (h >= 0) & (h < sizes.H) & (w >= 0) & (w < sizes.W) & (o_k < depth)[None, :]
    o_tap = (t_h * sizes.W + t_w).to(rows.o_x.dtype) * tile.CHANNELS + o_k % taps.C
    tap = sizes.w_start + j // JW * sizes.w_tap_h + j % JW * sizes.w_tap_w
    if tile.TURN:
        o_wk = (o_k % taps.C).to(tl.int64) * (tile.W_TAPS * tile.M) + tap * tile.M
    else:
        o_wk = tap * taps.C + o_k % taps.C
    b_x = tl.load(rows.p_x + rows.o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
    m_w = columns.m_m[None, :] & (o_k < depth)[:, None]
    b_w = tl.load(columns.p_w + columns.o_w[None, :] + o_wk[:, None], mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
    return tl.dot(b_x, b_w, b_acc, input_precision=tile.PRECISION, out_dtype=b_acc.dtype)
