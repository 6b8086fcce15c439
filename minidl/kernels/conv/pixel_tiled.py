"""The pixel-tiled form: an implicit GEMM whose rows are pixels of any image, for every shape (small batches included).

    y[n, q, m] = act(scale[m] * sum over taps j and channels c of x[n, at(q, j), c] w[m, j, c] + bias[m])

    x  [N, H, W, groups * C]     w  [groups * M, J, C], J = JH * JW taps
    y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

`at` is given by two walks (geometry.py). Nothing is unrolled in memory: the rows' addresses are computed once, and each
tap adds one number to all of them. With few channels a tap would leave most of a block of K empty: then taps and
channels together are walked as one axis (FLAT), at the price of index arithmetic per element.
"""

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs
from minidl.kernels.conv.epilogue import pool_quads
from minidl.kernels.conv.problem import CORRELATIONS, MANY, No, Problem, Tensors
from minidl.runtime import launch

NAME = "pixel"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv", "conv_flat", "conv_turn")


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


def able(problem: Problem) -> bool | No:
    return True


def estimate(problem: Problem) -> float:
    return costs.microseconds(problem, NAME, costs.outputs(problem) * products(problem), programs(problem))


def programs(problem: Problem) -> int:
    """What the interpreter runs one after another: each group, of few channels as long as eight others.

    64 groups of one channel, 3x3, 2 images of 9x9: 268 ms.
    """
    return 8 * problem.groups if problem.groups > 1 and flat(problem.C, problem.taps) else 1


def products(problem: Problem) -> int:
    """Of one output pixel, blocks of 16 channels or taps filled up."""
    C, taps = problem.C, problem.taps
    K = 16 * launch.cdiv(C * taps, 16) if flat(C, taps) else taps * 16 * launch.cdiv(C, 16)
    return problem.groups * max(K, costs.LEAST_VALUES) * costs.columns(problem)


def prepare(problem: Problem) -> launch.Prepared:
    h, v = problem.at.h, problem.at.v
    (H, W), (OH, OW) = problem.read, problem.written
    M, C, taps = problem.M, problem.C, problem.taps
    joined = flat(C, taps)
    image = (h.count // 2 * 2) * (v.count // 2 * 2) if problem.pool else h.count * v.count
    pixels = problem.N * image
    family, K = ("conv_flat", taps * C) if joined else ("conv", C)
    tile = problem.tile(family, M=problem.images * image, N=M, K=K)
    grid = launch.cdiv(pixels, tile["BLOCK_M"]) * launch.cdiv(M, tile["BLOCK_N"]) * problem.groups
    scalars = (
        pixels, H, W, h.count, v.count, OH, OW, M, problem.groups, h.in_start, v.in_start, h.out_start, v.out_start,
    )  # fmt: skip
    meta = {
        **problem.taps_read, "OUT_STEP_H": h.out_step, "OUT_STEP_W": v.out_step, "WIDE": pixels >= MANY,
        "LONG": h.count * v.count >= MANY, "FLAT": joined, **problem.constants, **problem.flags(), **tile.options,
    }  # fmt: skip
    return launch.Prepared(conv_pixel_kernel, (grid,), scalars, meta)


def run(prepared: launch.Prepared, t: Tensors) -> None:
    prepared.run(t.x, t.w, t.bias, t.scale, t.y, t.z)


def flat(C: int, taps: int) -> bool:
    """Whether taps and channels are one axis: where a tap's channels would leave most of a block empty."""
    return taps > 1 and C < 16
