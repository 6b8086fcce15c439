"""Device functions of the pixel-tiled form: pixel indices of a tile, and the steps along K."""

import triton
import triton.language as tl


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
    b_acc, i_start, i_end, p_x, p_w, o_x, m_row, x_h, x_w, in_rows, in_columns, o_w, m_m,
    H, W, JH, JW, w_start, w_tap_h, w_tap_w,
    CHANNELS: tl.constexpr, C: tl.constexpr, M: tl.constexpr, W_TAPS: tl.constexpr,
    IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    INSIDE: tl.constexpr, MARKED: tl.constexpr, TURN: tl.constexpr, TAPS_INNER: tl.constexpr, PRECISION: tl.constexpr,
    START: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return b_acc plus the products of blocks i_start to i_end: BLOCKS per tap, from channel START on."""
    EVEN: tl.constexpr = START + BLOCKS * BLOCK_K <= C
    for i in range(i_start, i_end):
        if TAPS_INNER:
            j = i % (JH * JW)
            block = i // (JH * JW)
        else:
            j = i // BLOCKS
            block = i % BLOCKS
        r = j // JW
        s = j % JW
        o_c = START + block * BLOCK_K + tl.arange(0, BLOCK_K)
        if INSIDE:
            m_x = m_row
        elif MARKED:
            m_x = ((in_rows >> r) & (in_columns >> s) & 1) != 0
        else:
            h = x_h + r * IN_TAP_H
            w = x_w + s * IN_TAP_W
            m_x = m_row & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        m_xc = m_x[:, None]
        m_wc = m_m[None, :]
        if not EVEN:
            m_xc &= (o_c < C)[None, :]
            m_wc &= (o_c < C)[:, None]
        o_tap = (r * IN_TAP_H * W + s * IN_TAP_W).to(o_x.dtype) * CHANNELS
        tap = w_start + r * w_tap_h + s * w_tap_w
        if TURN:
            o_wc = o_c.to(tl.int64) * (W_TAPS * M) + tap * M
        else:
            o_wc = tap * C + o_c
        b_x = tl.load(p_x + (o_x + o_tap)[:, None] + o_c[None, :], mask=m_xc, other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(p_w + o_w[None, :] + o_wc[:, None], mask=m_wc, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)
    return b_acc


@triton.jit
def add_flat(
    b_acc, i, p_x, p_w, o_x, m_row, x_h, x_w, o_w, m_m, H, W, JW, depth, w_start, w_tap_h, w_tap_w,
    CHANNELS: tl.constexpr, C: tl.constexpr, M: tl.constexpr, W_TAPS: tl.constexpr,
    IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return b_acc plus the products of block i, with taps and channels as one axis of `depth` values."""
    o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
    j = o_k // C
    t_h = j // JW * IN_TAP_H
    t_w = j % JW * IN_TAP_W
    h = x_h[:, None] + t_h[None, :]
    w = x_w[:, None] + t_w[None, :]
    m_x = m_row[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W) & (o_k < depth)[None, :]
    o_tap = (t_h * W + t_w).to(o_x.dtype) * CHANNELS + o_k % C
    tap = w_start + j // JW * w_tap_h + j % JW * w_tap_w
    if TURN:
        o_wk = (o_k % C).to(tl.int64) * (W_TAPS * M) + tap * M
    else:
        o_wk = tap * C + o_k % C
    b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
    m_w = m_m[None, :] & (o_k < depth)[:, None]
    b_w = tl.load(p_w + o_w[None, :] + o_wk[:, None], mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
    return tl.dot(b_x, b_w, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)
