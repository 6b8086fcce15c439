"""The pixel-tiled form: an implicit GEMM whose rows are pixels of any image, for every shape (small batches included).

    y[n, q, m] = act(scale[m] * sum over taps j and channels c of x[n, at(q, j), c] w[m, j, c] + bias[m])

    x  [N, H, W, groups * C]     w  [groups * M, J, C], J = JH * JW taps
    y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

`at` is given by two walks (geometry.py). Nothing is unrolled in memory: the rows' addresses are computed once, and each
tap adds one number to all of them. With few channels a tap would leave most of a block of K empty: then taps and
channels together are walked as one axis (FLAT), at the price of index arithmetic per element.

The weight gradient dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, at(q, j), c] has the pixels as its K. They are cut
into shares; the partial sums of the shares are added in order.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import gemm, launch
from minidl.kernels.activation import activate
from minidl.kernels.conv.geometry import Geometry, Walk
from minidl.kernels.conv.problem import MANY, Epilogue, pool_quads


@triton.jit
def pixel(i_first, BLOCK: tl.constexpr, QH, QW, POOL: tl.constexpr, LONG: tl.constexpr):
    """Image and place of `BLOCK` pixels from number i_first; with POOL the four of a 2x2 window stand together.

    LONG: an image has more pixels than 32 bits count.
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


# Triton 3.6 computed wrong addresses where QW was known to be 1 (128x128x64, 8 warps, dilation 2).
@triton.jit(do_not_specialize=["QH", "QW"])
def conv_pixel_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z,
    pixels, H, W, QH, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, FLAT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(M, BLOCK_N)
    i_group = tl.program_id(0) // tiles_n % GROUPS
    i_first = tl.program_id(0) // (tiles_n * GROUPS) * BLOCK_M
    if WIDE:
        i_first = (tl.program_id(0) // (tiles_n * GROUPS)).to(tl.int64) * BLOCK_M
    o_m = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < M
    n, q_h, q_w = pixel(i_first, BLOCK_M, QH, QW, POOL, LONG)
    m_row = i_first + tl.arange(0, BLOCK_M) < pixels
    x_h = in_h + q_h * IN_STEP_H
    x_w = in_w + q_w * IN_STEP_W
    p_x += i_group * C
    o_x = ((n * H + x_h) * W + x_w) * (GROUPS * C)
    p_w += (i_group * M + o_m).to(tl.int64)[None, :] * (JH * JW * C)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if FLAT:
        for k in range(0, JH * JW * C, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            j = o_k // C
            t_h = j // JW * IN_TAP_H
            t_w = j % JW * IN_TAP_W
            h = x_h[:, None] + t_h[None, :]
            w = x_w[:, None] + t_w[None, :]
            m_x = m_row[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W) & (o_k < JH * JW * C)[None, :]
            o_tap = (t_h * W + t_w).to(tl.int64) * (GROUPS * C) + o_k % C
            b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
            m_w = m_m[None, :] & (o_k < JH * JW * C)[:, None]
            b_w = tl.load(p_w + o_k[:, None], mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION, out_dtype=ACC)
    else:
        BLOCKS_C: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
        for i in range(JH * JW * BLOCKS_C):
            j = i // BLOCKS_C
            o_c = i % BLOCKS_C * BLOCK_K + tl.arange(0, BLOCK_K)
            t_h = j // JW * IN_TAP_H
            t_w = j % JW * IN_TAP_W
            h = x_h + t_h
            w = x_w + t_w
            m_x = m_row & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            o_tap = o_x + (t_h * W + t_w).to(tl.int64) * (GROUPS * C)
            b_x = tl.load(
                p_x + o_tap[:, None] + o_c[None, :], mask=m_x[:, None] & (o_c < C)[None, :], other=0.0
            )  # [BLOCK_M, BLOCK_K]
            b_w = tl.load(
                p_w + (j * C + o_c)[:, None], mask=m_m[None, :] & (o_c < C)[:, None], other=0.0
            )  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION, out_dtype=ACC)
    o_m += i_group * M
    if HAS_SCALE:
        b_acc *= tl.load(p_scale + o_m, mask=m_m, other=0.0).to(ACC)[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_m, mask=m_m, other=0.0).to(ACC)[None, :]
    if POOL:
        b_y = pool_quads(activate(b_acc, ACT, SLOPE), POOL)  # [BLOCK_M // 4, BLOCK_N]
        o_row = (i_first // 4).to(tl.int64) + tl.arange(0, BLOCK_M // 4)
        m_y = (o_row < pixels // 4)[:, None] & m_m[None, :]
        tl.store(p_y + (o_row * (GROUPS * M))[:, None] + o_m[None, :], b_y.to(p_y.dtype.element_ty), mask=m_y)
    else:
        o_row = ((n * OH + out_h + q_h * OUT_STEP_H) * OW + out_w + q_w * OUT_STEP_W) * (GROUPS * M)
        o_y = o_row[:, None] + o_m[None, :]
        m_y = m_row[:, None] & m_m[None, :]
        if SAVE_Z:
            tl.store(p_z + o_y, b_acc.to(p_z.dtype.element_ty), mask=m_y)
        tl.store(p_y + o_y, activate(b_acc, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["QH", "QW"])
def conv_pixel_grad_weight_kernel(
    p_dy, p_x, p_partial, pixels, H, W, QH, QW, M, GROUPS, in_h, in_w, share,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    WIDE: tl.constexpr, LONG: tl.constexpr, FLAT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial [shares, groups * M, J * C]: the sum over one share of the pixels. BLOCK_N channels, BLOCK_K pixels."""
    K: tl.constexpr = JH * JW * C
    BLOCKS_C: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    tiles_c: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N if FLAT else JH * JW * BLOCKS_C
    i_c = tl.program_id(0) % tiles_c
    i_group = tl.program_id(0) // tiles_c % GROUPS
    o_m = tl.program_id(0) // (tiles_c * GROUPS) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < M
    if FLAT:
        o_k = i_c * BLOCK_N + tl.arange(0, BLOCK_N)
        j = o_k // C
        o_c = o_k % C
        m_c = o_k < K
    else:
        j = i_c // BLOCKS_C
        o_c = i_c % BLOCKS_C * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = j * C + o_c
        m_c = o_c < C
    t_h = j // JW * IN_TAP_H
    t_w = j % JW * IN_TAP_W
    p_x += i_group * C
    p_dy += i_group * M
    first = tl.program_id(1) * share
    if WIDE:
        first = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(first + share, pixels)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(share > 0)
    for k in range(0, share, BLOCK_K):
        i_first = first + k
        n, q_h, q_w = pixel(i_first, BLOCK_K, QH, QW, False, LONG)
        m_row = i_first + tl.arange(0, BLOCK_K) < end
        o_row = i_first.to(tl.int64) + tl.arange(0, BLOCK_K)
        x_h = in_h + q_h * IN_STEP_H
        x_w = in_w + q_w * IN_STEP_W
        o_x = ((n * H + x_h) * W + x_w) * (GROUPS * C)
        if FLAT:
            h = x_h[:, None] + t_h[None, :]
            w = x_w[:, None] + t_w[None, :]
            m_x = m_row[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W) & m_c[None, :]
            o_tap = (t_h * W + t_w).to(tl.int64) * (GROUPS * C) + o_c
        else:
            h = x_h + t_h
            w = x_w + t_w
            m_x = (m_row & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None] & m_c[None, :]
            o_tap = (t_h * W + t_w).to(tl.int64) * (GROUPS * C) + o_c
        b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_dy = tl.load(
            p_dy + (o_row * (GROUPS * M))[None, :] + o_m[:, None], mask=m_m[:, None] & m_row[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_K]
        b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
    o_m += i_group * M
    p_partial += tl.program_id(1).to(tl.int64) * (GROUPS * M) * K
    o_w = o_m.to(tl.int64)[:, None] * K + o_k[None, :]
    tl.store(p_partial + o_w, b_acc, mask=m_m[:, None] & m_c[None, :])


def correlate(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, h: Walk, v: Walk, groups: int, epilogue: Epilogue, precision: str
) -> None:
    """Write the outputs of one pair of walks into y.

    x [N, H, W, groups * C], w [groups * M, JH, JW, C], y [N, OH, OW, groups * M] (or pooled), all contiguous.
    """
    N, H, W, _ = x.shape
    M, C = w.shape[0] // groups, w.shape[3]
    taps = len(h.taps) * len(v.taps)
    flat = _flat(C, taps)
    pixels = N * (h.count // 2 * 2) * (v.count // 2 * 2) if epilogue.pool else N * h.count * v.count
    family, K = ("conv_flat", taps * C) if flat else ("conv", C)
    tile = launch.tile(family, x.dtype, floor=16, precision=precision, M=pixels, N=M, K=K)
    grid = (launch.cdiv(pixels, tile["BLOCK_M"]) * launch.cdiv(M, tile["BLOCK_N"]) * groups,)
    launch.run(
        conv_pixel_kernel, grid, x, w, epilogue.bias, epilogue.scale, y, epilogue.z,
        pixels, H, W, h.count, v.count, y.shape[1], y.shape[2], M, groups,
        h.in_start, v.in_start, h.out_start, v.out_start,
        C=C, JH=len(h.taps), JW=len(v.taps),
        IN_STEP_H=h.in_step, IN_STEP_W=v.in_step, IN_TAP_H=h.in_tap, IN_TAP_W=v.in_tap,
        OUT_STEP_H=h.out_step, OUT_STEP_W=v.out_step,
        WIDE=pixels >= MANY, LONG=h.count * v.count >= MANY, FLAT=flat, ACC=launch.acc(x.dtype), PRECISION=precision,
        **epilogue.flags, **tile.options,
    )  # fmt: skip


def grad_weight(x: torch.Tensor, dy: torch.Tensor, geometry: Geometry, precision: str) -> torch.Tensor:
    """The weight gradient [groups * M, R, S, C] of a convolution of x [N, H, W, groups * C] with output gradient dy."""
    N, H, W, channels = x.shape
    h, v, groups = geometry.h.forward(), geometry.w.forward(), geometry.groups
    C, M = channels // groups, dy.shape[3] // groups
    taps = len(h.taps) * len(v.taps)
    flat = _flat(C, taps)
    pixels = N * h.count * v.count
    tile = launch.tile(
        "conv_grad_weight", x.dtype, floor=16, precision=precision, M=M, N=taps * C if flat else C, K=pixels
    )
    tiles_c = launch.cdiv(taps * C, tile["BLOCK_N"]) if flat else taps * launch.cdiv(C, tile["BLOCK_N"])
    tiles = tiles_c * launch.cdiv(M, tile["BLOCK_M"]) * groups
    share, shares = shares_of(pixels, tile["BLOCK_K"], tiles)
    partial = torch.empty(shares, groups * M, taps * C, dtype=launch.acc_torch(x.dtype), device=x.device)
    launch.run(
        conv_pixel_grad_weight_kernel, (tiles, shares), dy, x, partial,
        pixels, H, W, h.count, v.count, M, groups, h.in_start, v.in_start, share,
        C=C, JH=len(h.taps), JW=len(v.taps),
        IN_STEP_H=h.in_step, IN_STEP_W=v.in_step, IN_TAP_H=h.in_tap, IN_TAP_W=v.in_tap,
        WIDE=pixels >= MANY, LONG=h.count * v.count >= MANY, FLAT=flat, ACC=launch.acc(x.dtype), PRECISION=precision,
        **tile.options,
    )  # fmt: skip
    total = gemm.sum_shares(partial.view(shares, -1), x.dtype)
    return total.view(groups * M, len(h.taps), len(v.taps), C)


def shares_of(length: int, block: int, tiles: int) -> tuple[int, int]:
    """(length of a share in whole blocks, number of shares): enough to fill the device, at least 8 blocks each."""
    blocks = launch.cdiv(length, block)
    wanted = max(1, min(2 * launch.processors() // max(tiles, 1), blocks // 8))
    share = launch.cdiv(blocks, wanted)
    return share * block, launch.cdiv(blocks, share)


def _flat(C: int, taps: int) -> bool:
    """Whether taps and channels are one axis: where a tap's channels would leave most of a block empty."""
    return taps > 1 and C < 16
