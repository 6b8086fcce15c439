"""Average pooling, also adaptive, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import reduce
from minidl.kernels.pool import problem
from minidl.kernels.pool.geometry import Windows
from minidl.kernels.pool.problem import SIZES, in_image, output_index, window
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def inverse_divisor(h0, h1, w0, w1, H, W, DIVISOR: tl.constexpr, PADDED: tl.constexpr, ACC: tl.constexpr):
    """Return 1 / divisor of a window; finite also outside the valid windows."""
    if DIVISOR != 0:
        return tl.full(h0.shape, 1.0, ACC) / DIVISOR
    elif PADDED:
        return 1.0 / tl.maximum((h1 - h0) * (w1 - w0), 1).to(ACC)
    else:
        height = tl.minimum(h1, H) - tl.maximum(h0, 0)
        width = tl.minimum(w1, W) - tl.maximum(w0, 0)
        return 1.0 / tl.maximum(height * width, 1).to(ACC)


@triton.jit(do_not_specialize=SIZES)
def avg_pool_kernel(
    p_x, p_y, P, C_V, rows, columns, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    VEC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    ADAPTIVE: tl.constexpr, DIVISOR: tl.constexpr, PADDED: tl.constexpr, INSIDE: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write means of windows of at most R x S pixels. INSIDE: every window lies in the image."""
    wait(EARLY)
    C = C_V * VEC
    line = tl.cast(W, tl.int64) * C
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, INDEX, BLOCK_P, BLOCK_C)
    h0, h1 = window(o_h, H, OH, pad_h, R, STRIDE_H, ADAPTIVE)
    w0, w1 = window(o_w, W, OW, pad_w, S, STRIDE_W, ADAPTIVE)
    b_share = inverse_divisor(h0, h1, w0, w1, H, W, DIVISOR, PADDED, ACC)
    h1 = tl.where(m_p, tl.minimum(h1, H), 0)
    w1 = tl.minimum(w1, W)
    p_first = (p_x + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    b_y = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    for t in tl.range(0, R * S, loop_unroll_factor=UNROLL):
        h = h0 + t // S
        w = w0 + t % S
        m_t = m_p if INSIDE else in_image(h, w, h1, w1)
        p_t = p_first + ((t // S) * line + (t % S) * C)
        b_y += tl.load(p_t, mask=m_t[:, None] & m_c[None, :], other=0).to(ACC)  # [BLOCK_P, BLOCK_C]
    o_y = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_y + o_y, (b_y * b_share[:, None]).to(p_y.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=SIZES)
def avg_pool_grad_kernel(
    p_dy, p_dx, P, C_V, rows, columns, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    VEC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    ADAPTIVE: tl.constexpr, DIVISOR: tl.constexpr, PADDED: tl.constexpr, NEAR_H: tl.constexpr, NEAR_W: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write dx of pixels: each adds its share of the NEAR_H x NEAR_W windows that may contain it."""
    wait(EARLY)
    C = C_V * VEC
    line = tl.cast(OW, tl.int64) * C
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, INDEX, BLOCK_P, BLOCK_C)
    if ADAPTIVE:
        # Pixel i is in the windows from floor(i O / I) on: the same rule with the sizes exchanged.
        first_h = (o_h * OH) // H
        first_w = (o_w * OW) // W
    else:
        first_h = (o_h + pad_h) // STRIDE_H - (NEAR_H - 1)
        first_w = (o_w + pad_w) // STRIDE_W - (NEAR_W - 1)
    p_first = (p_dy + ((o_n * OH + first_h) * OW + first_w) * C)[:, None] + o_c[None, :]
    b_dx = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    for j in tl.range(0, NEAR_H * NEAR_W, loop_unroll_factor=UNROLL):
        oh = first_h + j // NEAR_W
        ow = first_w + j % NEAR_W
        h0, h1 = window(oh, H, OH, pad_h, R, STRIDE_H, ADAPTIVE)
        w0, w1 = window(ow, W, OW, pad_w, S, STRIDE_W, ADAPTIVE)
        m_t = m_p & in_image(oh, ow, OH, OW) & (h0 <= o_h) & (o_h < h1) & (w0 <= o_w) & (o_w < w1)
        b_share = inverse_divisor(h0, h1, w0, w1, H, W, DIVISOR, PADDED, ACC)
        p_t = p_first + ((j // NEAR_W) * line + (j % NEAR_W) * C)
        b_dy = tl.load(p_t, mask=m_t[:, None] & m_c[None, :], other=0).to(ACC)  # [BLOCK_P, BLOCK_C]
        b_dx += b_dy * b_share[:, None]
    o_x = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=SIZES)
def avg_pool_spread_kernel(
    p_dy, p_dx, P, C_V, rows, columns, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    VEC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    ADAPTIVE: tl.constexpr, DIVISOR: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr,
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
    b_dy = tl.load(p_dy + o_y, mask=m_y[:, None] & m_c[None, :], other=0).to(ACC)  # [BLOCK_P, BLOCK_C]
    h0, h1 = window(o_h, H, OH, pad_h, R, STRIDE_H, ADAPTIVE)
    w0, w1 = window(o_w, W, OW, pad_w, S, STRIDE_W, ADAPTIVE)
    b_dy = (b_dy * inverse_divisor(h0, h1, w0, w1, H, W, DIVISOR, PADDED, ACC)[:, None]).to(p_dx.dtype.element_ty)
    p_first = (p_dx + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    for j in tl.range(0, STRIDE_H * STRIDE_W, loop_unroll_factor=UNROLL):
        r = j // STRIDE_W
        s = j % STRIDE_W
        m_t = m_p if EXACT else in_image(h0 + r, w0 + s, H, W) & m_p
        b_dx = b_dy
        if STRIDE_H > R or STRIDE_W > S:
            b_dx = tl.where((r < R) & (s < S), b_dy, 0.0).to(p_dx.dtype.element_ty)
        p_t = p_first + (r * line + s * C)
        tl.store(p_t, b_dx, mask=m_t[:, None] & m_c[None, :])


@replayed
def avg_pool2d(x: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return the means of windows, also adaptive: x [N, C, H, W] -> [N, C, OH, OW].

    A single adaptive window is a reduction, which splits the image over several programs.
    """
    if at.adaptive and at.output == (1, 1):
        return reduce.mean(problem.last(x), (1, 2), keepdim=True).permute(0, 3, 1, 2)
    y = problem.empty(x, at.output)
    grid, sizes, meta = problem.plan("pool", y, at, at.output, at.kernel[0] * at.kernel[1])
    launch.run(avg_pool_kernel, grid, problem.last(x), y, *sizes, INSIDE=at.inside, **_constants(at), **meta)
    return y.permute(0, 3, 1, 2)


@replayed
def avg_pool2d_grad(dy: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return dx [N, C, H, W] from dy [N, C, OH, OW]."""
    return problem.grad(avg_pool_spread_kernel, avg_pool_grad_kernel, at, dy, **_constants(at))


def _constants(at: Windows) -> dict[str, Any]:
    divisor = at.divisor or (at.kernel[0] * at.kernel[1] if at.full else 0)
    return {"ADAPTIVE": at.adaptive, "DIVISOR": divisor, "PADDED": at.padded}
