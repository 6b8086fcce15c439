"""Maximum pooling, also adaptive, and its gradient.

The forward pass saves the tap of each maximum in its window: the first in row-major order, or the last NaN, as torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels.pool import problem
from minidl.kernels.pool.geometry import Windows
from minidl.kernels.pool.problem import SIZES, in_image, output_index, window
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed

MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=SIZES)
def max_pool_kernel(
    p_x, p_y, p_i, P, C_V, rows, columns, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    VEC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, ADAPTIVE: tl.constexpr, INSIDE: tl.constexpr, KEEP: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write y, and with KEEP the tap r * S + s of each maximum. INSIDE: every window lies in the image."""
    wait(EARLY)
    C = C_V * VEC
    line = tl.cast(W, tl.int64) * C
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, INDEX, BLOCK_P, BLOCK_C)
    if ADAPTIVE:
        o_h, end_h = window(o_h, H, OH, pad_h, R, STRIDE_H, ADAPTIVE)
        o_w, end_w = window(o_w, W, OW, pad_w, S, STRIDE_W, ADAPTIVE)
    else:
        o_h = o_h * STRIDE_H - pad_h
        o_w = o_w * STRIDE_W - pad_w
        end_h = H
        end_w = W
    p_first = (p_x + ((o_n * H + o_h) * W + o_w) * C)[:, None] + o_c[None, :]
    b_v = tl.full((BLOCK_P, BLOCK_C), MINUS_INF, ACC)
    b_i = tl.zeros((BLOCK_P, BLOCK_C), tl.int32)
    if KEEP and not INSIDE:
        # If all values are -inf, the first tap inside the image gets the gradient.
        first_h = (tl.maximum(-o_h, 0) + DIL_H - 1) // DIL_H
        first_w = (tl.maximum(-o_w, 0) + DIL_W - 1) // DIL_W
        b_i += (first_h * S + first_w).to(tl.int32)[:, None]
    for t in tl.range(0, R * S, loop_unroll_factor=UNROLL):
        r = (t // S) * DIL_H
        s = (t % S) * DIL_W
        m_t = m_p if INSIDE else in_image(o_h + r, o_w + s, end_h, end_w) & m_p
        p_t = p_first + (r * line + s * C)
        b_x = tl.load(p_t, mask=m_t[:, None] & m_c[None, :], other=MINUS_INF).to(ACC)  # [BLOCK_P, BLOCK_C]
        if KEEP:
            better = (b_x > b_v) | (b_x != b_x)
            b_v = tl.where(better, b_x, b_v)
            b_i = tl.where(better, t, b_i)
        else:
            b_v = tl.maximum(b_v, b_x, propagate_nan=tl.PropagateNan.ALL)
    o_y = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    m_y = m_p[:, None] & m_c[None, :]
    tl.store(p_y + o_y, b_v.to(p_y.dtype.element_ty), mask=m_y)
    if KEEP:
        tl.store(p_i + o_y, b_i.to(p_i.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=SIZES)
def max_pool_grad_kernel(
    p_dy, p_i, p_dx, P, C_V, rows, columns, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    VEC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, ADAPTIVE: tl.constexpr, NEAR_H: tl.constexpr, NEAR_W: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write dx of pixels: each checks the NEAR_H x NEAR_W windows that may contain it."""
    wait(EARLY)
    C = C_V * VEC
    line = tl.cast(OW, tl.int64) * C
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, INDEX, BLOCK_P, BLOCK_C)
    if ADAPTIVE:
        # Pixel i is in the windows from floor(i O / I) on: the same rule with the sizes exchanged.
        first_h = (o_h * OH) // H
        first_w = (o_w * OW) // W
    else:
        o_h += pad_h
        o_w += pad_w
        first_h = o_h // STRIDE_H - (NEAR_H - 1)
        first_w = o_w // STRIDE_W - (NEAR_W - 1)
    o_first = (((o_n * OH + first_h) * OW + first_w) * C)[:, None] + o_c[None, :]
    b_dx = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    for j in tl.range(0, NEAR_H * NEAR_W, loop_unroll_factor=UNROLL):
        oh = first_h + j // NEAR_W
        ow = first_w + j % NEAR_W
        if ADAPTIVE:
            h0, h1 = window(oh, H, OH, pad_h, R, STRIDE_H, ADAPTIVE)
            w0, w1 = window(ow, W, OW, pad_w, S, STRIDE_W, ADAPTIVE)
            r = o_h - h0
            s = o_w - w0
            m_t = m_p & in_image(oh, ow, OH, OW) & (r >= 0) & (o_h < h1) & (s >= 0) & (o_w < w1)
        else:
            r = o_h - oh * STRIDE_H
            s = o_w - ow * STRIDE_W
            m_t = m_p & in_image(oh, ow, OH, OW) & (r < R * DIL_H) & (s < S * DIL_W)
        if DIL_H > 1:
            m_t = m_t & (r % DIL_H == 0)
        if DIL_W > 1:
            m_t = m_t & (s % DIL_W == 0)
        b_tap = ((r // DIL_H) * S + s // DIL_W).to(p_i.dtype.element_ty)
        o_t = o_first + ((j // NEAR_W) * line + (j % NEAR_W) * C)
        m_tc = m_t[:, None] & m_c[None, :]
        b_i = tl.load(p_i + o_t, mask=m_tc, other=-1)  # [BLOCK_P, BLOCK_C]
        b_dy = tl.load(p_dy + o_t, mask=m_tc, other=0).to(ACC)  # [BLOCK_P, BLOCK_C]
        b_dx += tl.where(b_i == b_tap[:, None], b_dy, 0.0)
    o_x = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=SIZES)
def max_pool_spread_kernel(
    p_dy, p_i, p_dx, P, C_V, rows, columns, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    VEC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, ADAPTIVE: tl.constexpr, EXACT: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write dx for disjoint windows: each window writes the STRIDE_H x STRIDE_W pixels from its first one."""
    wait(EARLY)
    C = C_V * VEC
    line = tl.cast(W, tl.int64) * C
    _, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, INDEX, BLOCK_P, BLOCK_C)
    m_y = m_p if EXACT else m_p & (o_h < OH) & (o_w < OW)
    o_y = (((o_n * OH + o_h) * OW + o_w) * C)[:, None] + o_c[None, :]
    m_yc = m_y[:, None] & m_c[None, :]
    b_i = tl.load(p_i + o_y, mask=m_yc, other=-1).to(tl.int32)  # [BLOCK_P, BLOCK_C]
    b_dy = tl.load(p_dy + o_y, mask=m_yc, other=0)  # [BLOCK_P, BLOCK_C]
    o_h = o_h * STRIDE_H - pad_h
    o_w = o_w * STRIDE_W - pad_w
    p_first = (p_dx + ((o_n * H + o_h) * W + o_w) * C)[:, None] + o_c[None, :]
    for j in tl.range(0, STRIDE_H * STRIDE_W, loop_unroll_factor=UNROLL):
        r = j // STRIDE_W
        s = j % STRIDE_W
        m_t = m_p if EXACT else in_image(o_h + r, o_w + s, H, W) & m_p
        is_tap = (r % DIL_H == 0) & (s % DIL_W == 0) & (r // DIL_H < R) & (s // DIL_W < S)
        b_dx = tl.where(is_tap & (b_i == (r // DIL_H) * S + s // DIL_W), b_dy, 0.0)
        p_t = p_first + (r * line + s * C)
        tl.store(p_t, b_dx.to(p_dx.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])


@replayed
def max_pool2d(x: torch.Tensor, at: Windows, keep: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, the tap of each maximum in its window); the taps are for the gradient, None unless `keep`.

    x [N, C, H, W]; y [N, C, OH, OW]; taps have y's shape, int8, or int32 for windows of over 127 taps.
    """
    image, y = problem.last(x), problem.empty(x, at.output)
    R, S = at.kernel
    taps = torch.empty_like(y, dtype=torch.int8 if R * S <= 127 else torch.int32) if keep else None
    grid, sizes, meta = problem.plan("pool", y, at, at.output, R * S)
    launch.run(
        max_pool_kernel, grid, image, y, taps, *sizes,
        INSIDE=at.inside, KEEP=keep, **_constants(at), **meta,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2), None if taps is None else taps.permute(0, 3, 1, 2)


@replayed
def max_pool2d_grad(dy: torch.Tensor, taps: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return dx [N, C, H, W] from dy and the taps of the maxima, both [N, C, OH, OW]."""
    return problem.grad(max_pool_spread_kernel, max_pool_grad_kernel, at, dy, taps, **_constants(at))


def _constants(at: Windows) -> dict[str, Any]:
    return {"DIL_H": at.dilation[0], "DIL_W": at.dilation[1], "ADAPTIVE": at.adaptive}
