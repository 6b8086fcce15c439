"""The kernels of cross-entropy: rows that fit a block, longer rows, the weights of targets, the gradient's factor."""

import triton
import triton.language as tl

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

NO_CLASS = tl.constexpr(-(2**63))
# Targets per step of a program that sums the weights of all targets.
TARGETS = tl.constexpr(1024)


@triton.jit
def row_targets(p_t, p_w, o_m, m_m, N, ignore_index, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr):
    """Return per row: the class, its weight, whether the row is not ignored, and whether the class is in [0, N).

    Ignored rows and classes out of range have weight 0.
    """
    if SOFT:
        b_t = o_m * 0
        m_counts = m_m
        m_class = m_m
    else:
        b_t = tl.load(p_t + o_m, mask=m_m, other=ignore_index).to(tl.int64)  # [BLOCK_M]
        m_counts = m_m & (b_t != ignore_index)
        m_class = (b_t >= 0) & (b_t < N)
    b_wt = (m_counts & m_class).to(ACC)
    if WEIGHTED and not SOFT:
        b_wt = tl.load(p_w + b_t, mask=m_counts & m_class, other=0.0).to(ACC)  # [BLOCK_M]
    return b_t, b_wt, m_counts, m_class


@triton.jit
def target_kernel(
    p_t, p_w, p_sum, p_wrong, R, N, ignore_index, programs,
    WEIGHTED: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store per program the weight of its targets and, in p_wrong, the largest class out of range (or NO_CLASS)."""
    wait(EARLY)
    i_r = tl.program_id(0).to(tl.int64)
    b_sum = tl.zeros((BLOCK_N,), ACC)
    b_wrong = tl.full((BLOCK_N,), NO_CLASS, tl.int64)
    for r in range(0, R, programs * BLOCK_N):
        o_r = r + i_r * BLOCK_N + tl.arange(0, BLOCK_N)
        b_t, b_wt, m_counts, m_class = row_targets(p_t, p_w, o_r, o_r < R, N, ignore_index, False, WEIGHTED, ACC)
        b_sum += b_wt
        if p_wrong is not None:
            b_wrong = tl.maximum(b_wrong, tl.where(m_counts & (m_class == 0), b_t, NO_CLASS))
    tl.store(p_sum + i_r, tl.sum(b_sum, axis=0))
    if p_wrong is not None:
        tl.store(p_wrong + i_r, tl.max(b_wrong, axis=0))


@triton.jit
def all_targets(p_t, p_w, R, N, ignore_index, WEIGHTED: tl.constexpr, ACC: tl.constexpr):
    """Return the weight of all R targets, added in the same order in every program."""
    b_sum = tl.zeros((TARGETS,), ACC)
    for r in range(0, R, TARGETS):
        o_r = r + tl.arange(0, TARGETS).to(tl.int64)
        _, b_wt, _, _ = row_targets(p_t, p_w, o_r, o_r < R, N, ignore_index, False, WEIGHTED, ACC)
        b_sum += b_wt
    return tl.sum(b_sum, axis=0)


@triton.jit
def class_shares(
    p_q, p_w, b_t, b_wt, o_n, m_mn, N,
    SMOOTHING: tl.constexpr, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return q of the classes o_n, 0 outside the mask; o_n, b_t and b_wt broadcast to the mask."""
    if WEIGHTED:
        b_w = tl.load(p_w + o_n, mask=(o_n >= 0) & (o_n < N), other=0.0).to(ACC)
    else:
        b_w = tl.full(o_n.shape, 1.0, ACC)
    if SOFT:
        b_q = b_w * tl.load(p_q, mask=m_mn, other=0.0).to(ACC)
        if SMOOTHING > 0.0:
            b_q = (1.0 - SMOOTHING) * b_q + b_w * SMOOTHING / N
    else:
        b_q = tl.where(o_n == b_t.to(tl.int32), (1.0 - SMOOTHING) * b_wt, 0.0)
        if SMOOTHING > 0.0:
            b_q += b_w * SMOOTHING / N
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
    p_x, p_t, p_w, p_sum, p_loss, p_dx, R, N, INNER, s_x1, s_x2, s_xn, s_y1, s_y2, s_yn, ignore_index, count,
    SMOOTHING: tl.constexpr, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, EACH: tl.constexpr, GRAD: tl.constexpr,
    DIVIDE: tl.constexpr, ALONE: tl.constexpr, ONLY: tl.constexpr, LEVELS: tl.constexpr, ALIGN: tl.constexpr,
    LANES: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute rows of at most BLOCK_N classes; probabilities and dx have the same strides.

    With ALONE, each program sums the weight of all targets itself, and the first stores it to p_sum; with ONLY there is
    a single program, which also divides the sum of its losses by it.
    """
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = columns(BLOCK_N, LANES)
    m_m = o_m < R
    m_mn = m_m[None, :, None] & (o_n < as_multiple(N, ALIGN))
    o_y = as_multiple(offsets(o_m, INNER, s_y1, s_y2, LEVELS), ALIGN)[None, :, None] + o_n.to(tl.int64) * s_yn
    b_t, b_wt, m_counts, m_class = row_targets(p_t, p_w, o_m, m_m, N, ignore_index, SOFT, WEIGHTED, ACC)
    p_x += as_multiple(offsets(o_m, INNER, s_x1, s_x2, LEVELS), ALIGN)[None, :, None]
    p_x = row_pointers(p_x, o_n.to(tl.int64) * s_xn, BLOCK_N, LANES)
    b_x = tl.load(p_x, mask=m_mn, other=MINUS_INF).to(ACC)  # [pieces, BLOCK_M, LANES]
    if ALONE:
        divisor = all_targets(p_t, p_w, R, N, ignore_index, WEIGHTED, ACC)
        tl.store(p_sum, divisor, mask=tl.program_id(0) == 0)
    elif DIVIDE and GRAD:
        divisor = share_sum(p_sum, count, ACC)
    b_z = b_x - block_max(b_x)[None, :, None]
    b_e = tl.exp(b_z)
    b_s = row_sum(b_e)
    b_target, b_weight = b_t[None, :, None], b_wt[None, :, None]
    p_q = row_pointers(p_t, o_y, BLOCK_N, LANES) if SOFT else p_t
    b_q = class_shares(p_q, p_w, b_target, b_weight, o_n, m_mn, N, SMOOTHING, SOFT, WEIGHTED, ACC)
    b_all = row_sum(b_q)
    b_loss = b_all * tl.log(b_s) - row_sum(share_times(b_q, b_z))
    if ALONE and ONLY:
        store_losses(p_loss, b_loss, divisor, o_m, m_m, m_counts, m_class, EACH)
    else:
        store_losses(p_loss, b_loss, None, o_m, m_m, m_counts, m_class, EACH)
    if GRAD:
        b_scale = tl.where(m_class, 1.0, float("nan")).to(ACC)
        if DIVIDE:
            b_scale = b_scale / divisor
        b_dx = (b_e * (b_all / b_s)[None, :, None] - b_q) * b_scale[None, :, None]
        b_dx = tl.where(m_counts[None, :, None], b_dx, 0.0)
        tl.store(row_pointers(p_dx, o_y, BLOCK_N, LANES), b_dx.to(p_dx.dtype.element_ty), mask=m_mn)


@triton.jit
def logit_grad(b_x, b_q, b_m, b_ratio, b_scale, m_counts):
    """Return dx of a block, from values [rows, 1]."""
    b_dx = (tl.exp(b_x - b_m) * b_ratio - b_q) * b_scale
    return tl.where(m_counts, b_dx, 0.0)


@triton.jit
def cross_entropy_loop_kernel(
    p_x, p_t, p_w, p_sum, p_loss, p_dx, R, N, s_x, ignore_index, count,
    SMOOTHING: tl.constexpr, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, EACH: tl.constexpr, GRAD: tl.constexpr,
    DIVIDE: tl.constexpr, ALIGN: tl.constexpr, ENDS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute contiguous rows of any length; rows of x have the stride s_x. ENDS as in `softmax_loop_kernel`."""
    DENSE: tl.constexpr = SOFT or SMOOTHING > 0.0  # several classes have a share
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = (o_m < R)[:, None]
    b_t, b_wt, m_counts, m_class = row_targets(p_t, p_w, o_m, o_m < R, N, ignore_index, SOFT, WEIGHTED, ACC)
    b_target, b_weight = b_t[:, None], b_wt[:, None]
    o_x, o_y = o_m * s_x, o_m * N
    p_xt = p_x + (o_x + b_t)[:, None]
    b_m = tl.full((BLOCK_M,), MINUS_INF, ACC)
    b_s = tl.zeros((BLOCK_M,), ACC)
    b_all = tl.zeros((BLOCK_M,), ACC)
    b_head, b_body = ends(o_y, N, ALIGN)
    if ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, ALIGN)
        m_e = m_e & m_m
        b_x_ends = tl.load(p_x + o_x[:, None] + o_e, mask=m_e, other=MINUS_INF).to(ACC)  # [BLOCK_M, 2 ALIGN]
        b_m, b_s = online(b_x_ends, b_m, b_s)
        o_ye = o_y[:, None] + o_e
        b_q_ends = class_shares(p_t + o_ye, p_w, b_target, b_weight, o_e, m_e, N, SMOOTHING, SOFT, WEIGHTED, ACC)
        b_all += tl.sum(b_q_ends, axis=1)
        o_x += b_head
        o_y += b_head
    p_x += as_multiple(o_x, ALIGN)[:, None]
    o_y = as_multiple(o_y, ALIGN)[:, None]
    n_end = as_multiple(N, ALIGN)
    for n in range(0, n_end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_x = tl.load(p_x + o_n, mask=m_mn, other=MINUS_INF).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_m, b_s = online(b_x, b_m, b_s)
        if DENSE:
            o_c = b_head[:, None] + o_n if ENDS else o_n
            b_q = class_shares(p_t + o_y + o_n, p_w, b_target, b_weight, o_c, m_mn, N, SMOOTHING, SOFT, WEIGHTED, ACC)
            b_all += tl.sum(b_q, axis=1)
    b_m = shift(b_m)
    if DENSE:
        b_loss = b_all * tl.log(b_s)
    else:
        b_all = b_wt
        b_xt = tl.sum(tl.load(p_xt, mask=(m_counts & m_class)[:, None], other=0.0).to(ACC), axis=1)  # [BLOCK_M]
        b_loss = b_all * (tl.log(b_s) - (b_xt - b_m))
    b_ratio = (b_all / b_s)[:, None]
    b_scale = tl.where(m_class, 1.0, float("nan")).to(ACC)
    if DIVIDE:
        b_scale = b_scale / share_sum(p_sum, count, ACC)
    b_m, b_scale, m_rows = b_m[:, None], b_scale[:, None], m_counts[:, None]
    if DENSE or GRAD:
        for n in range(0, n_end, BLOCK_N):
            o_n = n + tl.arange(0, BLOCK_N)[None, :]
            m_mn = m_m & (o_n < b_body[:, None])
            b_x = tl.load(p_x + o_n, mask=m_mn, other=MINUS_INF).to(ACC)  # [BLOCK_M, BLOCK_N]
            o_c = b_head[:, None] + o_n if ENDS else o_n
            b_q = class_shares(p_t + o_y + o_n, p_w, b_target, b_weight, o_c, m_mn, N, SMOOTHING, SOFT, WEIGHTED, ACC)
            if DENSE:
                b_loss -= tl.sum(share_times(b_q, b_x - b_m), axis=1)
            if GRAD:
                b_dx = logit_grad(b_x, b_q, b_m, b_ratio, b_scale, m_rows)
                tl.store(p_dx + o_y + o_n, b_dx.to(p_dx.dtype.element_ty), mask=m_mn)
        if ENDS and DENSE:
            b_loss -= tl.sum(share_times(b_q_ends, b_x_ends - b_m), axis=1)
        if ENDS and GRAD:
            b_dx_ends = logit_grad(b_x_ends, b_q_ends, b_m, b_ratio, b_scale, m_rows)
            tl.store(p_dx + o_ye, b_dx_ends.to(p_dx.dtype.element_ty), mask=m_e)
    store_losses(p_loss, b_loss, None, o_m, o_m < R, m_counts, m_class, EACH)


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
