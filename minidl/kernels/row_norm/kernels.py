"""The kernels of `row_norm`, for contiguous rows and for rows of several runs.

    rows that fit      x [BLOCK_M, L] -> y, mean, rstd             x, dy [per, L] -> dx, and dw, db of these rows
    longer rows        x -> mean, rstd        x, mean, rstd -> y   x, dy -> sums        x, dy, sums -> dx

An arrow is a launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sizes(NamedTuple):
    """G rows of L elements per image, of CHANNELS channels of S elements, with strides.

    With SPREAD a row is runs of RUN elements, s_run apart.
    """

    G: int
    L: int
    S: int
    CHANNELS: int
    s_image: int
    s_group: int
    s_run: int
    RUN: int


class Tile(NamedTuple):
    """Constants: RMS norm or not, whether BLOCK_N elements are a WHOLE row, whether rows are SPREAD, and whether the
    BLOCK_M rows of a block are SIDE_BY_SIDE in memory, channels of one image."""

    RMS: bool
    WHOLE: bool
    SPREAD: bool
    SIDE_BY_SIDE: bool
    ACC: Any
    BLOCK_M: int
    BLOCK_N: int


@triton.jit
def offsets(o_m, o_n, sizes, tile: tl.constexpr):
    """Return memory offsets of elements o_n of rows o_m."""
    i_image, i_group = o_m // sizes.G, o_m % sizes.G
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    if tile.SIDE_BY_SIDE:
        i_image, i_group = tl.max_constancy(i_image, BLOCK_M), tl.max_contiguous(i_group, BLOCK_M)
    o_row = i_image * sizes.s_image + i_group * sizes.s_group
    if tile.SPREAD:
        o_n = (o_n // sizes.RUN) * sizes.s_run + o_n % sizes.RUN
    return o_row[:, None] + o_n[None, :]


@triton.jit
def load_per_channel(p, o_m, o_n, m_mn, sizes, tile: tl.constexpr):
    """Load the value of p for the channel of each element [BLOCK_M, BLOCK_N]; a row has CHANNELS channels."""
    if tile.SPREAD:
        o_c = o_n % sizes.RUN
    else:
        o_c = o_n // sizes.S
    o_c = (o_m % sizes.G * sizes.CHANNELS)[:, None] + o_c[None, :]
    return tl.load(p + o_c, mask=m_mn, other=0.0).to(tile.ACC)


@triton.jit
def deviations(b_x, m_mn, L, RMS: tl.constexpr):
    """Return (x - mean, mean) of complete rows, 0 beyond their end; the mean is 0 with RMS."""
    if RMS:
        return b_x, tl.sum(b_x, axis=1) * 0.0
    else:
        b_mean = tl.sum(b_x, axis=1) / L
        return tl.where(m_mn, b_x - b_mean[:, None], 0.0), b_mean


@triton.jit
def row_stats_kernel(p_x, p_mean, p_rstd, R, sizes, EPS: tl.constexpr, tile: tl.constexpr):
    """Write mean and rstd of BLOCK_M rows, with one pass for each."""
    L = sizes.L
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    m_m = o_m < R
    b_sum = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    if not tile.RMS:
        for n in range(0, L, tile.BLOCK_N):
            o_n = n + tl.arange(0, tile.BLOCK_N)
            o_x = offsets(o_m, o_n, sizes, tile)
            b_sum += tl.load(p_x + o_x, mask=m_m[:, None] & (o_n < L)[None, :], other=0.0).to(tile.ACC)
    b_mean = tl.sum(b_sum, axis=1) / L
    b_sum = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    for n in range(0, L, tile.BLOCK_N):
        o_n = n + tl.arange(0, tile.BLOCK_N)
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = offsets(o_m, o_n, sizes, tile)
        b_x = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        b_d = tl.where(m_mn, b_x - b_mean[:, None], 0.0)
        b_sum += b_d * b_d
    tl.store(p_mean + o_m, b_mean, mask=m_m)
    tl.store(p_rstd + o_m, 1.0 / tl.sqrt(tl.sum(b_sum, axis=1) / L + EPS), mask=m_m)


@triton.jit
def row_norm_kernel(
    p_x, p_added, p_total, p_w, p_b, p_y, p_mean, p_rstd, R, sizes, EPS: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Write BLOCK_N elements of BLOCK_M rows; with WHOLE a block has complete rows, and their statistics are stored.

    With p_added the rows are x + added, which are stored at p_total.
    """
    L = sizes.L
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    o_n = tl.program_id(1) * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
    m_m = o_m < R
    m_mn = m_m[:, None] & (o_n < L)[None, :]
    o_x = offsets(o_m, o_n, sizes, tile)
    b_x = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
    if p_added is not None:
        b_x += tl.load(p_added + o_x, mask=m_mn, other=0.0).to(tile.ACC)
        b_total = b_x.to(p_total.dtype.element_ty)
        tl.store(p_total + o_x, b_total, mask=m_mn)
        b_x = b_total.to(tile.ACC)
    if tile.WHOLE:
        b_d, b_mean = deviations(b_x, m_mn, L, tile.RMS)
        b_rstd = 1.0 / tl.sqrt(tl.sum(b_d * b_d, axis=1) / L + EPS)
        tl.store(p_mean + o_m, b_mean, mask=m_m)
        tl.store(p_rstd + o_m, b_rstd, mask=m_m)
    else:
        b_d = b_x
        if not tile.RMS:
            b_d = b_x - tl.load(p_mean + o_m, mask=m_m, other=0.0)[:, None]
        b_rstd = tl.load(p_rstd + o_m, mask=m_m, other=0.0)
    b_y = b_d * b_rstd[:, None]
    if p_w is not None:
        b_y *= load_per_channel(p_w, o_m, o_n, m_mn, sizes, tile)
    if p_b is not None:
        b_y += load_per_channel(p_b, o_m, o_n, m_mn, sizes, tile)
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=m_mn)


@triton.jit
def row_sums_kernel(p_x, p_dy, p_w, p_mean, p_rstd, p_g, p_gv, R, sizes, PER_STATISTIC, tile: tl.constexpr):
    """Write the sums of g and g v over each row; w has the row's length. PER_STATISTIC rows share mean and rstd."""
    L = sizes.L
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    m_m = o_m < R
    b_rstd = tl.load(p_rstd + o_m // PER_STATISTIC, mask=m_m, other=0.0)
    b_g = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    b_gv = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    for n in range(0, L, tile.BLOCK_N):
        o_n = n + tl.arange(0, tile.BLOCK_N)
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = offsets(o_m, o_n, sizes, tile)
        b_v = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        b_dy = tl.load(p_dy + o_x, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        if p_w is not None:
            b_dy *= tl.load(p_w + o_n, mask=o_n < L, other=0.0).to(tile.ACC)[None, :]
        if not tile.RMS:
            b_v -= tl.load(p_mean + o_m // PER_STATISTIC, mask=m_m, other=0.0)[:, None]
        b_g += b_dy
        b_gv += tl.where(m_mn, b_dy * (b_v * b_rstd[:, None]), 0.0)
    tl.store(p_g + o_m, tl.sum(b_g, axis=1), mask=m_m)
    tl.store(p_gv + o_m, tl.sum(b_gv, axis=1), mask=m_m)


@triton.jit
def row_norm_grad_kernel(
    p_x, p_dy, p_w, p_mean, p_rstd, p_g, p_gv, p_added, p_dx, p_dw, p_db, images, sizes, per, tile: tl.constexpr
):  # fmt: skip
    """Write dx of BLOCK_N elements of `per` rows, one group of `per` images, and their partial sums of dw and db.

    With p_added dx is the sum of the gradient and `added`. With WHOLE these are complete rows, and the sums of g and
    g v are computed here; else they are loaded.
    """
    G, L = sizes.G, sizes.L
    i_share = tl.program_id(0) // G
    i_group = tl.program_id(0) % G
    o_n = tl.program_id(1) * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
    b_dw = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    b_db = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    for n in range(0, per, tile.BLOCK_M):
        o_image = i_share.to(tl.int64) * per + n + tl.arange(0, tile.BLOCK_M)
        o_m = o_image * G + i_group
        m_m = o_image < images
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = offsets(o_m, o_n, sizes, tile)
        b_v = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        b_dy = tl.load(p_dy + o_x, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        b_rstd = tl.load(p_rstd + o_m, mask=m_m, other=0.0)[:, None]
        if not tile.RMS:
            b_v -= tl.load(p_mean + o_m, mask=m_m, other=0.0)[:, None]
        b_v = tl.where(m_mn, b_v * b_rstd, 0.0)
        if p_dw is not None:
            b_dw += b_dy * b_v
        if p_db is not None:
            b_db += b_dy
        if p_dx is not None:
            b_g = b_dy
            if p_w is not None:
                b_g *= load_per_channel(p_w, o_m, o_n, m_mn, sizes, tile)
            if tile.WHOLE:
                b_mean_gv = tl.sum(b_g * b_v, axis=1) / L
            else:
                b_mean_gv = tl.load(p_gv + o_m, mask=m_m, other=0.0) / L
            b_dx = b_g - b_v * b_mean_gv[:, None]
            if not tile.RMS:
                if tile.WHOLE:
                    b_mean_g = tl.sum(b_g, axis=1) / L
                else:
                    b_mean_g = tl.load(p_g + o_m, mask=m_m, other=0.0) / L
                b_dx -= b_mean_g[:, None]
            b_dx *= b_rstd
            if p_added is not None:
                b_dx += tl.load(p_added + o_x, mask=m_mn, other=0.0).to(tile.ACC)
            tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_mn)
    if p_dw is not None:
        tl.store(p_dw + i_share * L + o_n, tl.sum(b_dw, axis=0), mask=o_n < L)
    if p_db is not None:
        tl.store(p_db + i_share * L + o_n, tl.sum(b_db, axis=0), mask=o_n < L)
