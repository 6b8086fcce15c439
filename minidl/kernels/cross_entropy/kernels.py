"""The kernels of cross-entropy: rows that fit a block, longer rows, and the factor of the gradient.

    rows that fit a block      x, t [BLOCK_M, N] -> loss of each row or their sum, dx
    longer rows                x -> max x, s, then x, t -> loss, dx, BLOCK_N at a time

Formulas are in `cross_entropy`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels.cross_entropy.targets import all_targets, row_targets
from minidl.kernels.loss_total import share_sum
from minidl.kernels.reduce import as_multiple, offsets
from minidl.kernels.softmax.rows import (
    MINUS_INF,
    block_max,
    columns,
    end_columns,
    ends,
    online,
    row_pointers,
    row_sum,
    shift,
)
from minidl.runtime.dependent_launch import wait


class Form(NamedTuple):
    """What is computed.

    SMOOTHING  e
    SOFT       whether targets are probabilities
    EACH       whether the loss of each row is stored, not their sum
    DIVIDE     whether the gradient is divided by the weight of all targets, the sum of `count` numbers at p_sum
    ALONE      each program sums the weight of all targets itself, and the first stores it to p_sum
    ONLY       with ALONE: there is a single program, which also divides the sum of its losses
    """

    SMOOTHING: float
    SOFT: bool
    EACH: bool
    DIVIDE: bool
    ALONE: bool = False
    ONLY: bool = False


@triton.jit
def class_shares(p_q, p_w, b_t, b_wt, o_n, m_mn, N, form: tl.constexpr, ACC: tl.constexpr):
    """Return q of the classes o_n, 0 outside the mask; o_n, b_t and b_wt broadcast to the mask."""
    if p_w is not None:
        b_w = tl.load(p_w + o_n, mask=(o_n >= 0) & (o_n < N), other=0.0).to(ACC)
    else:
        b_w = tl.full(o_n.shape, 1.0, ACC)
    if form.SOFT:
        b_q = b_w * tl.load(p_q, mask=m_mn, other=0.0).to(ACC)
        if form.SMOOTHING > 0.0:
            b_q = (1.0 - form.SMOOTHING) * b_q + b_w * form.SMOOTHING / N
    else:
        b_q = tl.where(o_n == b_t.to(tl.int32), (1.0 - form.SMOOTHING) * b_wt, 0.0)
        if form.SMOOTHING > 0.0:
            b_q += b_w * form.SMOOTHING / N
    return tl.where(m_mn, b_q, 0.0)


@triton.jit
def share_times(b_q, b_z):
    """Return q_c z_c, with 0 for a class without a share even at -inf."""
    return tl.where(b_q == 0.0, 0.0, b_q * b_z)


@triton.jit
def store_losses(p_loss, b_loss, divisor, o_m, m_m, m_counts, m_class, EACH: tl.constexpr):
    """Store the loss of each row, or the sum of the program's rows, divided by the divisor if there is one."""
    b_loss = tl.where(m_counts, tl.where(m_class, b_loss, float("nan")), 0.0)
    if EACH:
        tl.store(p_loss + o_m, b_loss.to(p_loss.dtype.element_ty), mask=m_m)
    else:
        total = tl.sum(b_loss, axis=0)
        if divisor is not None:
            total = total / divisor
        tl.store(p_loss + tl.program_id(0), total.to(p_loss.dtype.element_ty))


@triton.jit
def cross_entropy_kernel(
    p_x, p_t, p_w, p_sum, p_loss, p_dx, sizes, ignore_index, count, form: tl.constexpr, tile: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute rows of at most BLOCK_N classes; probabilities and dx have the same strides."""
    wait(EARLY)
    R, N = sizes.R, sizes.N
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    o_n = columns(tile)
    m_m = o_m < R
    m_mn = m_m[None, :, None] & (o_n < as_multiple(N, tile.ALIGN))
    o_y = as_multiple(offsets(o_m, sizes.INNER, sizes.s_y1, sizes.s_y2, tile.LEVELS), tile.ALIGN)[None, :, None]
    o_y += o_n.to(tl.int64) * sizes.s_yn
    b_t, b_wt, m_counts, m_class = row_targets(p_t, p_w, o_m, m_m, N, ignore_index, form.SOFT, tile.ACC)
    p_x += as_multiple(offsets(o_m, sizes.INNER, sizes.s_x1, sizes.s_x2, tile.LEVELS), tile.ALIGN)[None, :, None]
    p_x = row_pointers(p_x, o_n.to(tl.int64) * sizes.s_xn, tile)
    b_x = tl.load(p_x, mask=m_mn, other=MINUS_INF).to(tile.ACC)  # [pieces, BLOCK_M, LANES]
    if form.ALONE:
        divisor = all_targets(p_t, p_w, R, N, ignore_index, tile.ACC)
        tl.store(p_sum, divisor, mask=tl.program_id(0) == 0)
    elif form.DIVIDE and p_dx is not None:
        divisor = share_sum(p_sum, count, tile.ACC)
    b_z = b_x - block_max(b_x)[None, :, None]
    b_e = tl.exp(b_z)
    b_s = row_sum(b_e)
    b_target, b_weight = b_t[None, :, None], b_wt[None, :, None]
    p_q = row_pointers(p_t, o_y, tile) if form.SOFT else p_t
    b_q = class_shares(p_q, p_w, b_target, b_weight, o_n, m_mn, N, form, tile.ACC)
    b_all = row_sum(b_q)
    b_loss = b_all * tl.log(b_s) - row_sum(share_times(b_q, b_z))
    store_losses(p_loss, b_loss, divisor if form.ONLY else None, o_m, m_m, m_counts, m_class, form.EACH)
    if p_dx is not None:
        b_scale = tl.where(m_class, 1.0, float("nan")).to(tile.ACC)
        if form.DIVIDE:
            b_scale = b_scale / divisor
        b_dx = (b_e * (b_all / b_s)[None, :, None] - b_q) * b_scale[None, :, None]
        b_dx = tl.where(m_counts[None, :, None], b_dx, 0.0)
        tl.store(row_pointers(p_dx, o_y, tile), b_dx.to(p_dx.dtype.element_ty), mask=m_mn)


@triton.jit
def logit_grad(b_x, b_q, b_m, b_ratio, b_scale, m_counts):
    """Return dx of a block, from values [rows, 1]."""
    b_dx = (tl.exp(b_x - b_m) * b_ratio - b_q) * b_scale
    return tl.where(m_counts, b_dx, 0.0)


@triton.jit
def cross_entropy_loop_kernel(
    p_x, p_t, p_w, p_sum, p_loss, p_dx, sizes, ignore_index, count, form: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Compute contiguous rows of any length."""
    DENSE: tl.constexpr = form.SOFT or form.SMOOTHING > 0.0  # several classes have a share
    GRAD: tl.constexpr = p_dx is not None
    R, N, s_x = sizes
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    m_m = (o_m < R)[:, None]
    b_t, b_wt, m_counts, m_class = row_targets(p_t, p_w, o_m, o_m < R, N, ignore_index, form.SOFT, tile.ACC)
    b_target, b_weight = b_t[:, None], b_wt[:, None]
    o_x, o_y = o_m * s_x, o_m * N
    p_xt = p_x + (o_x + b_t)[:, None]
    b_m = tl.full((tile.BLOCK_M,), MINUS_INF, tile.ACC)
    b_s = tl.full((tile.BLOCK_M,), 0.0, tile.ACC)
    b_all = tl.full((tile.BLOCK_M,), 0.0, tile.ACC)
    b_head, b_body = ends(o_y, N, tile.ALIGN)
    if tile.ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, tile.ALIGN)
        m_e = m_e & m_m
        b_x_ends = tl.load(p_x + o_x[:, None] + o_e, mask=m_e, other=MINUS_INF).to(tile.ACC)  # [BLOCK_M, 2 ALIGN]
        b_m, b_s = online(b_x_ends, b_m, b_s)
        o_ye = o_y[:, None] + o_e
        b_q_ends = class_shares(p_t + o_ye, p_w, b_target, b_weight, o_e, m_e, N, form, tile.ACC)
        b_all += tl.sum(b_q_ends, axis=1)
        o_x += b_head
        o_y += b_head
    p_x += as_multiple(o_x, tile.ALIGN)[:, None]
    o_y = as_multiple(o_y, tile.ALIGN)[:, None]
    n_end = as_multiple(N, tile.ALIGN)
    for n in range(0, n_end, tile.BLOCK_N):
        o_n = n + tl.arange(0, tile.BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_x = tl.load(p_x + o_n, mask=m_mn, other=MINUS_INF).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        b_m, b_s = online(b_x, b_m, b_s)
        if DENSE:
            o_c = b_head[:, None] + o_n if tile.ENDS else o_n
            b_q = class_shares(p_t + o_y + o_n, p_w, b_target, b_weight, o_c, m_mn, N, form, tile.ACC)
            b_all += tl.sum(b_q, axis=1)
    b_m = shift(b_m)
    if DENSE:
        b_loss = b_all * tl.log(b_s)
    else:
        b_all = b_wt
        b_xt = tl.sum(tl.load(p_xt, mask=(m_counts & m_class)[:, None], other=0.0).to(tile.ACC), axis=1)  # [BLOCK_M]
        b_loss = b_all * (tl.log(b_s) - (b_xt - b_m))
    b_ratio = (b_all / b_s)[:, None]
    b_scale = tl.where(m_class, 1.0, float("nan")).to(tile.ACC)
    if form.DIVIDE:
        b_scale = b_scale / share_sum(p_sum, count, tile.ACC)
    b_m, b_scale, m_rows = b_m[:, None], b_scale[:, None], m_counts[:, None]
    if DENSE or GRAD:
        for n in range(0, n_end, tile.BLOCK_N):
            o_n = n + tl.arange(0, tile.BLOCK_N)[None, :]
            m_mn = m_m & (o_n < b_body[:, None])
            b_x = tl.load(p_x + o_n, mask=m_mn, other=MINUS_INF).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
            o_c = b_head[:, None] + o_n if tile.ENDS else o_n
            b_q = class_shares(p_t + o_y + o_n, p_w, b_target, b_weight, o_c, m_mn, N, form, tile.ACC)
            if DENSE:
                b_loss -= tl.sum(share_times(b_q, b_x - b_m), axis=1)
            if GRAD:
                b_dx = logit_grad(b_x, b_q, b_m, b_ratio, b_scale, m_rows)
                tl.store(p_dx + o_y + o_n, b_dx.to(p_dx.dtype.element_ty), mask=m_mn)
        if tile.ENDS and DENSE:
            b_loss -= tl.sum(share_times(b_q_ends, b_x_ends - b_m), axis=1)
        if tile.ENDS and GRAD:
            b_dx_ends = logit_grad(b_x_ends, b_q_ends, b_m, b_ratio, b_scale, m_rows)
            tl.store(p_dx + o_ye, b_dx_ends.to(p_dx.dtype.element_ty), mask=m_e)
    store_losses(p_loss, b_loss, None, o_m, o_m < R, m_counts, m_class, form.EACH)


@triton.jit
def scale_kernel(
    p_g, p_dy, p_divisor, n, N, INNER, EACH: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """g *= dy / divisor in place; dy is one value or one for each row. A factor of 1 writes nothing."""
    wait(EARLY)
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    if EACH:
        o_r = (o // INNER // N) * INNER + o % INNER
        b_dy = tl.load(p_dy + o_r, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
        b_g = tl.load(p_g + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
        tl.store(p_g + o, (b_g * b_dy).to(p_g.dtype.element_ty), mask=m)
    else:
        factor = tl.full((), 1.0, ACC)
        if p_dy is not None:
            factor = tl.load(p_dy).to(ACC)
        if p_divisor is not None:
            divisor = tl.load(p_divisor)
            factor = factor / divisor
        if factor != 1.0:
            b_g = tl.load(p_g + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
            b_scaled = b_g * factor
            if p_divisor is not None:
                # If all rows are ignored, their zeros stay 0 instead of becoming NaN.
                b_scaled = tl.where((divisor == 0.0) & (b_g == 0.0), b_g, b_scaled)
            tl.store(p_g + o, b_scaled.to(p_g.dtype.element_ty), mask=m)
