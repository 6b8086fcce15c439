"""Spectra of real tiles of T x T values for the FFT form: the transform, the product and the inverse transform.

A tile X [T, T] is transformed by two products with a T x T matrix, V = G X G^T, whose rows are

    row k < T/2       cos(2 pi k h / T)
    row T/2           cos(pi h)
    row T/2 + k       sin(2 pi k h / T), 0 < k < T/2

For real input F(-k, -l) = conj F(k, l), so T * T real values suffice: V has them, as products cc, cs, sc, ss of a
vertical and a horizontal cosine or sine. They give A - i B at the frequencies (k, l) and (k, -l),

    A = cc -+ ss,   B = cs +- sc      for 0 < k, l < T/2.

For k = 0 (or l = 0) the four are A and B at 0 and at T/2: cc, cs and sc, ss (or cc, sc and cs, ss). At k = l = 0 they
are four real frequencies. So a spectrum is T * T / 2 pairs (A, B), complex numbers except for two pairs of reals. For
each pair the sum over channels is a complex matrix product [tiles, C] x [C, M], computed as three real ones.
"""

import triton
import triton.language as tl

from minidl.kernels.activation import activate


@triton.jit
def conv_fft_matrix_kernel(p_g, T: tl.constexpr):
    """Write g [T, T], each entry rounded once: a float64 Taylor series of an angle in the first quadrant."""
    o_row = tl.arange(0, T)[:, None]
    o_point = tl.arange(0, T)[None, :]
    k = tl.where(o_row > T // 2, o_row - T // 2, o_row)
    # In units of 1 / T of a full turn; a sine is a cosine shifted by a quarter turn.
    angle = (k * o_point + tl.where(o_row > T // 2, T - T // 4, 0)) % T
    t = (angle % (T // 4)).to(tl.float64) * (6.283185307179586 / T)
    b_cos = t * 0.0 + 1.0
    b_sin = t * 0.0 + 1.0
    for i in tl.static_range(12):
        b_cos = 1.0 - t * t * b_cos * (1.0 / ((23 - 2 * i) * (24 - 2 * i)))
        b_sin = 1.0 - t * t * b_sin * (1.0 / ((24 - 2 * i) * (25 - 2 * i)))
    b_sin = b_sin * t
    quarter = angle // (T // 4)
    b_g = tl.where(quarter % 2 == 0, b_cos, b_sin)  # [T, T]
    b_g = tl.where((quarter == 1) | (quarter == 2), -b_g, b_g)
    tl.store(p_g + o_row * T + o_point, b_g.to(tl.float32))


@triton.jit
def conv_fft_kernel(
    p_x, p_g, p_f, lines, H, W, C, start, step, taps, tiles_w, size,
    T: tl.constexpr, PRECISION: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write f [2 (A, B), T * T / 2, tiles, lines]: the spectra of a tile for a block of lines, channels of images.

    x [N, H, W, C]; the tile (i, j) starts at `start` + (i, j) `step`, and has `taps` points down and across.
    """
    in_h, in_w = start
    step_h, step_w = step
    taps_h, taps_w = taps
    L: tl.constexpr = BLOCK_V // (T * T)
    HALF: tl.constexpr = T // 2
    blocks = tl.cdiv(lines, L)
    i_tile = tl.program_id(0) // blocks
    o_line = tl.program_id(0) % blocks * L + tl.arange(0, L)
    o_point = tl.arange(0, T * T)
    h = in_h + i_tile // tiles_w * step_h + o_point // T
    w = in_w + i_tile % tiles_w * step_w + o_point % T
    m_point = (o_point // T < taps_h) & (o_point % T < taps_w) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    o_x = (o_line // C).to(tl.int64) * (H * W * C) + o_line % C
    b_x = tl.load(
        p_x + o_x[:, None] + ((h * W + w).to(tl.int64) * C)[None, :],
        mask=(o_line < lines)[:, None] & m_point[None, :], other=0.0,
    )  # [L, T * T]  # fmt: skip
    b_g = tl.trans(tl.load(p_g + tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]))  # [T, T]
    b_v = tl.reshape(b_x.to(tl.float32), (L * T, T))
    b_v = tl.dot(b_v, b_g, input_precision=PRECISION)  # across
    b_v = tl.reshape(tl.permute(tl.reshape(b_v, (L, T, T)), (0, 2, 1)), (L * T, T))
    b_v = tl.dot(b_v, b_g, input_precision=PRECISION)  # down
    # [L, sine across, l, sine down, k]
    b_v = tl.permute(tl.reshape(b_v, (L, 2, HALF, 2, HALF)), (0, 2, 4, 1, 3))
    b_c, b_s = tl.split(b_v)
    b_cc, b_cs = tl.split(b_c)  # [L, HALF, HALF]
    b_sc, b_ss = tl.split(b_s)
    l_0 = tl.arange(0, HALF)[None, :, None] == 0
    k_0 = tl.arange(0, HALF)[None, None, :] == 0
    b_a0 = tl.where(k_0 | l_0, b_cc, b_cc - b_ss)
    b_b0 = tl.where(k_0, b_cs, tl.where(l_0, b_sc, b_cs + b_sc))
    b_a1 = tl.where(k_0, b_sc, tl.where(l_0, b_cs, b_cc + b_ss))
    b_b1 = tl.where(k_0 | l_0, b_ss, b_sc - b_cs)
    Q: tl.constexpr = HALF * HALF
    o_f = tl.arange(0, Q).to(tl.int64)[None, :]
    m_f = (o_line < lines)[:, None] & (o_f < Q)
    p_f += i_tile.to(tl.int64) * lines + o_line[:, None]
    tl.store(p_f + o_f * size, tl.reshape(b_a0, (L, Q)), mask=m_f)
    tl.store(p_f + (o_f + Q) * size, tl.reshape(b_a1, (L, Q)), mask=m_f)
    tl.store(p_f + (o_f + 2 * Q) * size, tl.reshape(b_b0, (L, Q)), mask=m_f)
    tl.store(p_f + (o_f + 3 * Q) * size, tl.reshape(b_b1, (L, Q)), mask=m_f)


@triton.jit
def conv_fft_product_kernel(
    p_x, p_w, p_y, rows, N, M, C, tiles_w, tiles_w_x, rows_x, blocks,
    F: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write y [2, F, rows, M] = x [2, F, rows_x, C] conj(w [2, F, taps, M, C]): one pair (A, B) of a block per program.

    Rows are (tile down, tile across, image). With x = A - iB and w = A' - iB', three products give the complex one:
    A A', B B' and (A + B)(A' - B').
    """
    taps, blocks_w = blocks
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(M, BLOCK_N)
    f = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    o_row = tl.program_id(0) // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_m = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    i_tile = o_row // N
    # Within one frequency 32 bits suffice: the spectrum has at least 128 times as many values.
    o_x = ((i_tile // tiles_w * tiles_w_x + i_tile % tiles_w) * N + o_row % N) * C
    p_xa = p_x + f * rows_x * C
    p_xb = p_x + (f + F) * rows_x * C
    p_wa = p_w + f * taps * M * C
    p_wb = p_w + (f + F) * taps * M * C
    b_aa = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    b_bb = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    b_both = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    blocks_c = tl.cdiv(C, BLOCK_K)
    for i in range(taps * blocks_c):
        tap = i // blocks_c
        o_c = i % blocks_c * BLOCK_K + tl.arange(0, BLOCK_K)
        o_k = (tap // blocks_w * tiles_w_x + tap % blocks_w) * (N * C) + o_c
        m_x = (o_row < rows)[:, None] & (o_c < C)[None, :]
        b_xa = tl.load(p_xa + (o_x[:, None] + o_k[None, :]), mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        b_xb = tl.load(p_xb + (o_x[:, None] + o_k[None, :]), mask=m_x, other=0.0)
        o_w = (tap * M + o_m) * C
        m_w = (o_c < C)[:, None] & (o_m < M)[None, :]
        b_wa = tl.load(p_wa + (o_c[:, None] + o_w[None, :]), mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_wb = tl.load(p_wb + (o_c[:, None] + o_w[None, :]), mask=m_w, other=0.0)
        b_aa = tl.dot(b_xa, b_wa, b_aa, input_precision=PRECISION)
        b_bb = tl.dot(b_xb, b_wb, b_bb, input_precision=PRECISION)
        b_both = tl.dot(b_xa + b_xb, b_wa - b_wb, b_both, input_precision=PRECISION)
    # The first pair of each half consists of two real frequencies.
    real = (f == 0) | (f == F // 2)
    m_y = (o_row < rows)[:, None] & (o_m < M)[None, :]
    o_y = (f * rows + o_row) * M
    tl.store(p_y + o_y[:, None] + o_m[None, :], tl.where(real, b_aa, b_aa + b_bb), mask=m_y)
    o_y = ((f + F) * rows + o_row) * M
    tl.store(p_y + o_y[:, None] + o_m[None, :], tl.where(real, b_bb, b_both - b_aa + b_bb), mask=m_y)


@triton.jit
def conv_fft_inverse_kernel(
    p_f, p_g, p_bias, p_scale, p_y, p_z, lines, M, image, step, tiles_w, size,
    epilogue: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write y [N, QH, QW, M] from f [2, T * T / 2, tiles, lines]: the first step_h x step_w points of a tile.

    X = D^T V D with D = G, but for the weights of its rows: 1/T for the cosines of 0 and T/2, 2/T for the others.
    """
    QH, QW = image
    step_h, step_w = step
    L: tl.constexpr = BLOCK_V // (T * T)
    HALF: tl.constexpr = T // 2
    blocks = tl.cdiv(lines, L)
    i_tile = tl.program_id(0) // blocks
    o_line = tl.program_id(0) % blocks * L + tl.arange(0, L)
    Q: tl.constexpr = HALF * HALF
    o_f = tl.arange(0, Q).to(tl.int64)[None, :]
    m_line = o_line < lines
    m_f = m_line[:, None] & (o_f < Q)
    p_f += i_tile.to(tl.int64) * lines + o_line[:, None]
    b_a0 = tl.reshape(tl.load(p_f + o_f * size, mask=m_f, other=0.0), (L, HALF, HALF))
    b_a1 = tl.reshape(tl.load(p_f + (o_f + Q) * size, mask=m_f, other=0.0), (L, HALF, HALF))
    b_b0 = tl.reshape(tl.load(p_f + (o_f + 2 * Q) * size, mask=m_f, other=0.0), (L, HALF, HALF))
    b_b1 = tl.reshape(tl.load(p_f + (o_f + 3 * Q) * size, mask=m_f, other=0.0), (L, HALF, HALF))
    l_0 = tl.arange(0, HALF)[None, :, None] == 0
    k_0 = tl.arange(0, HALF)[None, None, :] == 0
    b_cc = tl.where(k_0 | l_0, b_a0, 0.5 * (b_a0 + b_a1))
    b_cs = tl.where(k_0, b_b0, tl.where(l_0, b_a1, 0.5 * (b_b0 - b_b1)))
    b_sc = tl.where(k_0, b_a1, tl.where(l_0, b_b0, 0.5 * (b_b0 + b_b1)))
    b_ss = tl.where(k_0 | l_0, b_b1, 0.5 * (b_a1 - b_a0))
    b_v = tl.join(tl.join(b_cc, b_cs), tl.join(b_sc, b_ss))  # [L, l, k, sine across, sine down]
    b_v = tl.reshape(tl.permute(b_v, (0, 3, 1, 4, 2)), (L * T, T))
    o_t = tl.arange(0, T)
    b_weight = tl.where((o_t == 0) | (o_t == HALF), 1.0 / T, 2.0 / T)
    b_d = tl.load(p_g + o_t[:, None] * T + o_t[None, :]) * b_weight[:, None]  # [T, T]
    b_v = tl.dot(b_v, b_d, input_precision=PRECISION)  # down
    b_v = tl.reshape(tl.permute(tl.reshape(b_v, (L, T, T)), (0, 2, 1)), (L * T, T))
    b_v = tl.dot(b_v, b_d, input_precision=PRECISION)  # across
    b_y = tl.reshape(b_v, (L, T * T))
    if p_scale is not None:
        b_y *= tl.load(p_scale + o_line % M, mask=m_line, other=0.0).to(tl.float32)[:, None]
    if p_bias is not None:
        b_y += tl.load(p_bias + o_line % M, mask=m_line, other=0.0).to(tl.float32)[:, None]
    o_point = tl.arange(0, T * T)
    h = i_tile // tiles_w * step_h + o_point // T
    w = i_tile % tiles_w * step_w + o_point % T
    m_point = (o_point // T < step_h) & (o_point % T < step_w) & (h < QH) & (w < QW)
    o_y = (o_line // M).to(tl.int64) * (QH * QW * M) + o_line % M
    o_y = o_y[:, None] + ((h * QW + w).to(tl.int64) * M)[None, :]
    m_y = m_line[:, None] & m_point[None, :]
    if epilogue.SAVE_Z:
        tl.store(p_z + o_y, b_y.to(p_z.dtype.element_ty), mask=m_y)
    tl.store(p_y + o_y, activate(b_y, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_y)
