"""The kernels of `row_norm`, for contiguous rows and for rows of several runs."""

import triton
import triton.language as tl


@triton.jit
def offsets(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD: tl.constexpr):
    """Return memory offsets of elements o_n of rows o_m. With SPREAD a row is runs of RUN elements, s_run apart."""
    o_row = (o_m // G) * s_image + (o_m % G) * s_group
    if SPREAD:
        o_n = (o_n // RUN) * s_run + o_n % RUN
    return o_row[:, None] + o_n[None, :]


@triton.jit
def load_per_channel(p, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD: tl.constexpr, ACC: tl.constexpr):
    """Load the value of p for the channel of each element [BLOCK_M, BLOCK_N]; a row has CHANNELS channels."""
    if SPREAD:
        o_c = o_n % RUN
    else:
        o_c = o_n // S
    o_c = (o_m % G * CHANNELS)[:, None] + o_c[None, :]
    return tl.load(p + o_c, mask=m_mn, other=0.0).to(ACC)


@triton.jit
def deviations(b_x, m_mn, L, RMS: tl.constexpr):
    """Return (x - mean, mean) of complete rows, 0 beyond their end; the mean is 0 with RMS."""
    if RMS:
        return b_x, tl.sum(b_x, axis=1) * 0.0
    else:
        b_mean = tl.sum(b_x, axis=1) / L
        return tl.where(m_mn, b_x - b_mean[:, None], 0.0), b_mean


@triton.jit
def row_stats_kernel(
    p_x, p_mean, p_rstd, R, G, L, s_image, s_group, s_run, RUN,
    EPS: tl.constexpr, RMS: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write mean and rstd of BLOCK_M rows, with one pass for each."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < R
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if not RMS:
        for n in range(0, L, BLOCK_N):
            o_n = n + tl.arange(0, BLOCK_N)
            o_x = offsets(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
            b_sum += tl.load(p_x + o_x, mask=m_m[:, None] & (o_n < L)[None, :], other=0.0).to(ACC)
    b_mean = tl.sum(b_sum, axis=1) / L
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for n in range(0, L, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = offsets(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
        b_x = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_d = tl.where(m_mn, b_x - b_mean[:, None], 0.0)
        b_sum += b_d * b_d
    tl.store(p_mean + o_m, b_mean, mask=m_m)
    tl.store(p_rstd + o_m, 1.0 / tl.sqrt(tl.sum(b_sum, axis=1) / L + EPS), mask=m_m)


@triton.jit
def row_norm_kernel(
    p_x, p_w, p_b, p_y, p_mean, p_rstd, R, G, L, S, CHANNELS, s_image, s_group, s_run, RUN,
    EPS: tl.constexpr, RMS: tl.constexpr, WHOLE: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N elements of BLOCK_M rows; with WHOLE a block has complete rows, and their statistics are stored."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < R
    m_mn = m_m[:, None] & (o_n < L)[None, :]
    o_x = offsets(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
    b_x = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    if WHOLE:
        b_d, b_mean = deviations(b_x, m_mn, L, RMS)
        b_rstd = 1.0 / tl.sqrt(tl.sum(b_d * b_d, axis=1) / L + EPS)
        tl.store(p_mean + o_m, b_mean, mask=m_m)
        tl.store(p_rstd + o_m, b_rstd, mask=m_m)
    else:
        b_d = b_x
        if not RMS:
            b_d = b_x - tl.load(p_mean + o_m, mask=m_m, other=0.0)[:, None]
        b_rstd = tl.load(p_rstd + o_m, mask=m_m, other=0.0)
    b_y = b_d * b_rstd[:, None]
    if p_w is not None:
        b_y *= load_per_channel(p_w, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD, ACC)
    if p_b is not None:
        b_y += load_per_channel(p_b, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD, ACC)
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=m_mn)


@triton.jit
def row_sums_kernel(
    p_x, p_dy, p_w, p_mean, p_rstd, p_g, p_gv, R, G, L, PER_STATISTIC, s_image, s_group, s_run, RUN,
    RMS: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the sums of g and g v over each row; w has the row's length. PER_STATISTIC rows share mean and rstd."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < R
    b_rstd = tl.load(p_rstd + o_m // PER_STATISTIC, mask=m_m, other=0.0)
    b_g = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    b_gv = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for n in range(0, L, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = offsets(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
        b_v = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_dy = tl.load(p_dy + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        if p_w is not None:
            b_dy *= tl.load(p_w + o_n, mask=o_n < L, other=0.0).to(ACC)[None, :]
        if not RMS:
            b_v -= tl.load(p_mean + o_m // PER_STATISTIC, mask=m_m, other=0.0)[:, None]
        b_g += b_dy
        b_gv += tl.where(m_mn, b_dy * (b_v * b_rstd[:, None]), 0.0)
    tl.store(p_g + o_m, tl.sum(b_g, axis=1), mask=m_m)
    tl.store(p_gv + o_m, tl.sum(b_gv, axis=1), mask=m_m)


@triton.jit
def row_norm_grad_kernel(
    p_x, p_dy, p_w, p_mean, p_rstd, p_g, p_gv, p_dx, p_dw, p_db, images, G, L, S, CHANNELS, s_image, s_group, s_run,
    RUN, per,
    RMS: tl.constexpr, WHOLE: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dx of BLOCK_N elements of `per` rows, one group of `per` images, and their partial sums of dw and db.

    With WHOLE these are complete rows, and the sums of g and g v are computed here; else they are loaded.
    """
    i_share = tl.program_id(0) // G
    i_group = tl.program_id(0) % G
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_dw = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    b_db = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for n in range(0, per, BLOCK_M):
        o_image = i_share.to(tl.int64) * per + n + tl.arange(0, BLOCK_M)
        o_m = o_image * G + i_group
        m_m = o_image < images
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = offsets(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
        b_v = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_dy = tl.load(p_dy + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_rstd = tl.load(p_rstd + o_m, mask=m_m, other=0.0)[:, None]
        if not RMS:
            b_v -= tl.load(p_mean + o_m, mask=m_m, other=0.0)[:, None]
        b_v = tl.where(m_mn, b_v * b_rstd, 0.0)
        if p_dw is not None:
            b_dw += b_dy * b_v
        if p_db is not None:
            b_db += b_dy
        if p_dx is not None:
            b_g = b_dy
            if p_w is not None:
                b_g *= load_per_channel(p_w, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD, ACC)
            if WHOLE:
                b_mean_gv = tl.sum(b_g * b_v, axis=1) / L
            else:
                b_mean_gv = tl.load(p_gv + o_m, mask=m_m, other=0.0) / L
            b_dx = b_g - b_v * b_mean_gv[:, None]
            if not RMS:
                if WHOLE:
                    b_mean_g = tl.sum(b_g, axis=1) / L
                else:
                    b_mean_g = tl.load(p_g + o_m, mask=m_m, other=0.0) / L
                b_dx -= b_mean_g[:, None]
            tl.store(p_dx + o_x, (b_dx * b_rstd).to(p_dx.dtype.element_ty), mask=m_mn)
    if p_dw is not None:
        tl.store(p_dw + i_share * L + o_n, tl.sum(b_dw, axis=0), mask=o_n < L)
    if p_db is not None:
        tl.store(p_db + i_share * L + o_n, tl.sum(b_db, axis=0), mask=o_n < L)
