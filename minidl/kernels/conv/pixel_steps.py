"""Records and device functions of the pixel form: pixel indices of a tile, and the steps along K."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class PixelSizes(NamedTuple):
    """Run-time numbers of a pair of phases with `pixels` outputs; the first reads (in_h, in_w) and is (out_h, out_w).

    w_start, w_tap_h, w_tap_w  the first tap of w, and the distances to the next one down and across, in taps
    s_split                    distance between the partial sums of shares
    depth                      JH * JW * C; as a constant, ptxas 12.8 miscompiles the division of o_k
    """

    pixels: Any
    H: Any
    W: Any
    OH: Any
    OW: Any
    in_h: Any
    in_w: Any
    out_h: Any
    out_w: Any
    w_start: Any
    w_tap_h: Any
    w_tap_w: Any
    s_split: Any
    depth: Any


class PixelTile(NamedTuple):
    """Constants of a launch; channels beyond a multiple of BLOCK_K are added last, in blocks of BLOCK_REST.

    GROUPS, M     groups, and output channels of a group; CHANNELS: input channels of all groups
    W_TAPS        taps of a row of w [GROUPS * M, W_TAPS, C], or with W_IN_PLACE [GROUPS * C, W_TAPS, M]
    FLAT          taps and channels are one axis
    INSIDE        every tap of every output is inside the image
    MARKED        masks are bits per tap
    WIDE, LONG    a tensor has more values, an image more pixels, than 32 bits count
    PHASES        tiles belong to several phases, with at most JH x JW taps, or none if EMPTY
    TAPS_INNER    taps are the inner loop
    SPLIT         shares of K
    PIECES        parts of a tile's channels that are stored one after another
    TAPS          taps of a program of the weight gradient
    """

    GROUPS: int
    M: int
    CHANNELS: int
    FLAT: bool
    ACC: Any
    PRECISION: str
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    BLOCK_REST: int = 16
    PIECES: int = 1
    TAPS: int = 1
    SPLIT: int = 1
    W_TAPS: int = 0
    W_IN_PLACE: bool = False
    INSIDE: bool = False
    MARKED: bool = True
    WIDE: bool = False
    LONG: bool = False
    PHASES: bool = False
    EMPTY: bool = False
    TAPS_INNER: bool = False


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
    b_acc, i_start, i_end, rows, p_w, o_w, m_m, JH, JW, sizes, taps: tl.constexpr, tile: tl.constexpr,
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
        m_wc = m_m[None, :]
        if not EVEN:
            m_xc &= (o_c < taps.C)[None, :]
            m_wc &= (o_c < taps.C)[:, None]
        o_tap = (r * taps.IN_TAP_H * sizes.W + s * taps.IN_TAP_W).to(rows.o_x.dtype) * tile.CHANNELS
        tap = sizes.w_start + r * sizes.w_tap_h + s * sizes.w_tap_w
        if tile.W_IN_PLACE:
            o_wc = o_c.to(tl.int64) * (tile.W_TAPS * tile.M) + tap * tile.M
        else:
            o_wc = tap * taps.C + o_c
        b_x = tl.load(rows.p_x + (rows.o_x + o_tap)[:, None] + o_c[None, :], mask=m_xc, other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(p_w + o_w[None, :] + o_wc[:, None], mask=m_wc, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision=tile.PRECISION, out_dtype=b_acc.dtype)
    return b_acc


@triton.jit
def add_flat(b_acc, i, rows, p_w, o_w, m_m, JW, depth, sizes, taps: tl.constexpr, tile: tl.constexpr):
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
    if tile.W_IN_PLACE:
        o_wk = (o_k % taps.C).to(tl.int64) * (tile.W_TAPS * tile.M) + tap * tile.M
    else:
        o_wk = tap * taps.C + o_k % taps.C
    b_x = tl.load(rows.p_x + rows.o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
    m_w = m_m[None, :] & (o_k < depth)[:, None]
    b_w = tl.load(p_w + o_w[None, :] + o_wk[:, None], mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
    return tl.dot(b_x, b_w, b_acc, input_precision=tile.PRECISION, out_dtype=b_acc.dtype)
