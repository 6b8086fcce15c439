"""The weight gradient in the pixel-tiled form, for every shape.

    dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, at(q, j), c]

The pixels are the K of the GEMM, whose tiles are found as in `pixel_tiled`. They are cut into shares; the partial sums
of the shares are added in order.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs
from minidl.kernels.conv.pixel_tiled import flat, pixel, products, programs
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, MANY, No, Problem, Tensors
from minidl.runtime import launch

NAME = "pixel"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_grad_weight",)


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


def able(problem: Problem) -> bool | No:
    return True


def estimate(problem: Problem) -> float:
    return costs.microseconds(problem, NAME, costs.outputs(problem) * products(problem), programs(problem))


def prepare(problem: Problem) -> Shares:
    h, v = problem.at.h, problem.at.v
    H, W = problem.read
    M, C, taps, groups = problem.M, problem.C, problem.taps, problem.groups
    joined = flat(C, taps)
    pixels = problem.N * h.count * v.count
    tile = problem.tile("conv_grad_weight", M=M, N=taps * C if joined else C, K=pixels)
    tiles_c = launch.cdiv(taps * C, tile["BLOCK_N"]) if joined else taps * launch.cdiv(C, tile["BLOCK_N"])
    tiles = tiles_c * launch.cdiv(M, tile["BLOCK_M"]) * groups
    share, shares = shares_of(pixels, tile["BLOCK_K"], tiles, problem.processors)
    scalars = (pixels, H, W, h.count, v.count, M, groups, h.in_start, v.in_start, share)
    meta = {
        **problem.taps_read, "WIDE": pixels >= MANY, "LONG": h.count * v.count >= MANY, "FLAT": joined,
        **problem.constants, **tile.options,
    }  # fmt: skip
    return Shares(launch.Prepared(conv_pixel_grad_weight_kernel, (tiles, shares), scalars, meta), shares, problem.shape)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)


def shares_of(length: int, block: int, tiles: int, processors: int) -> tuple[int, int]:
    """(length of a share in whole blocks, number of shares): enough to fill the device, at least 8 blocks each."""
    blocks = launch.cdiv(length, block)
    wanted = max(1, min(2 * processors // max(tiles, 1), blocks // 8))
    share = launch.cdiv(blocks, wanted)
    return share * block, launch.cdiv(blocks, share)
