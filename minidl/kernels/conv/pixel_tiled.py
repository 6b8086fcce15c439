"""The "pixel" form: an implicit GEMM whose rows are output pixels of all images; supports every shape.

    y[n, q, m] = act(scale[m] * sum over taps j and channels c of x[n, at(q, j), c] w[m, j, c] + bias[m])

x  [N, H, W, groups * C]     w  [groups * M, J, C], J = JH * JW taps; backward weights may be read in place
y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

Two phases define `at` (geometry.py). Patches are never written to memory: the row addresses are computed once, with a
bit per tap that says whether its input is inside the image, and each tap adds one offset to all of them. With few
channels, where one tap would leave most of a K block empty, taps and channels form a single axis (FLAT), at the cost of
index arithmetic per element. If there are few tiles, K is split into shares that are added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import pixel_choice
from minidl.kernels.conv.epilogue import affine, finish, pool_quads
from minidl.kernels.conv.pixel_steps import add_blocks, add_flat, inside_bits, pixel
from minidl.kernels.conv.problem import CORRELATIONS, INT32_LIMIT, Problem, Tensors, Unsupported, all_inside
from minidl.kernels.gemm import launches
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = pixel_choice.NAME
IN_PLACE = True
ADDED = 8
DIRECTIONS = CORRELATIONS
FAMILIES = (*pixel_choice.FAMILIES, "conv_turn")


@triton.jit
def conv_pixel_tile(
    i_tile, i_split, p_x, p_w, p_bias, p_scale, p_y, p_z,
    pixels, H, W, QH, QW, OH, OW, in_h, in_w, out_h, out_w, JH, JW, w_start, w_tap_h, w_tap_w, s_split, depth,
    GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, W_TAPS: tl.constexpr,
    MOST_H: tl.constexpr, MOST_W: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, FLAT: tl.constexpr, INSIDE: tl.constexpr,
    MARKED: tl.constexpr, EMPTY: tl.constexpr, FEW: tl.constexpr, TURN: tl.constexpr, TAPS_INNER: tl.constexpr,
    SPLIT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the outputs of a pair of phases with JH x JW taps, at most MOST_H x MOST_W.

    w       [GROUPS * M, W_TAPS, C], with TURN [GROUPS * C, W_TAPS, M]; the first tap is at w_start
    y       with SPLIT > 1 the partial sums [SPLIT, pixels, GROUPS * M]
    depth   JH * JW * C, a run-time value: as a constant, ptxas 12.8 miscompiles the division of o_k (5x5 7->104,
            transposed, 128x64x64, 4 warps, 3 stages: 4 of 175 products used other pixels on an H200)
    INSIDE  every tap of every output is inside the image     MARKED  masks are bits per tap
    EMPTY   there may be no taps; otherwise ptxas keeps matrix instructions in flight
    WIDE    a tensor has more values than 32 bits count       FEW     all tiles have MOST_H x MOST_W taps
    Channels beyond a multiple of BLOCK_K are added last, in blocks of BLOCK_REST.
    """
    tiles_n = tl.cdiv(M, BLOCK_N)
    i_group = i_tile // tiles_n % GROUPS
    i_first = i_tile // (tiles_n * GROUPS) * BLOCK_M
    if WIDE:
        i_first = (i_tile // (tiles_n * GROUPS)).to(tl.int64) * BLOCK_M
    o_m = i_tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < M
    n, q_h, q_w = pixel(i_first, BLOCK_M, QH, QW, POOL, LONG)
    m_row = i_first + tl.arange(0, BLOCK_M) < pixels
    x_h = in_h + q_h * IN_STEP_H
    x_w = in_w + q_w * IN_STEP_W
    if not WIDE:
        n = n.to(tl.int32)
    o_x = ((n * H + x_h) * W + x_w) * CHANNELS
    if TURN:
        p_w += i_group * C * (W_TAPS * M)
        o_w = o_m.to(tl.int64)
    else:
        o_w = (i_group * M + o_m).to(tl.int64) * (W_TAPS * C)
    p_x += i_group * C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if FLAT:
        if FEW and SPLIT == 1 and MOST_H * MOST_W * C <= BLOCK_K:
            # Tap offsets are constants: 9 instructions per value in place of 40. Two or more blocks would spill, as
            # loads of the next block precede the products of this one.
            b_acc = add_flat(
                b_acc, 0, p_x, p_w, o_x, m_row, x_h, x_w, o_w, m_m, H, W, JW, MOST_H * MOST_W * C, w_start,
                w_tap_h, w_tap_w, CHANNELS, C, M, W_TAPS, IN_TAP_H, IN_TAP_W, TURN, PRECISION, BLOCK_K,
            )  # fmt: skip
        else:
            steps = tl.cdiv(depth, BLOCK_K)
            share = tl.cdiv(steps, SPLIT)
            start = i_split * share
            end = tl.minimum(start + share, steps)
            if not EMPTY:
                tl.assume(start < end)
            for i in range(start, end):
                b_acc = add_flat(
                    b_acc, i, p_x, p_w, o_x, m_row, x_h, x_w, o_w, m_m, H, W, JW, depth, w_start, w_tap_h, w_tap_w,
                    CHANNELS, C, M, W_TAPS, IN_TAP_H, IN_TAP_W, TURN, PRECISION, BLOCK_K,
                )  # fmt: skip
    else:
        in_rows = 0
        in_columns = 0
        if MARKED and not INSIDE:
            in_rows = tl.where(m_row, inside_bits(x_h, H, IN_TAP_H, MOST_H), 0)
            in_columns = inside_bits(x_w, W, IN_TAP_W, MOST_W)
        BLOCKS: tl.constexpr = C // BLOCK_K
        if BLOCKS > 0:
            share = tl.cdiv(JH * JW * BLOCKS, SPLIT)
            if not EMPTY:
                tl.assume(i_split * share < JH * JW * BLOCKS)
            b_acc = add_blocks(
                b_acc, i_split * share, tl.minimum(i_split * share + share, JH * JW * BLOCKS), p_x, p_w,
                o_x, m_row, x_h, x_w, in_rows, in_columns, o_w, m_m, H, W, JH, JW, w_start, w_tap_h, w_tap_w,
                CHANNELS, C, M, W_TAPS, IN_TAP_H, IN_TAP_W, INSIDE, MARKED, TURN, TAPS_INNER, PRECISION, 0, BLOCKS,
                BLOCK_K,
            )  # fmt: skip
        if C % BLOCK_K > 0:
            share = tl.cdiv(JH * JW, SPLIT)
            if SPLIT == 1 and not EMPTY:
                tl.assume(i_split * share < JH * JW)
            b_acc = add_blocks(
                b_acc, i_split * share, tl.minimum(i_split * share + share, JH * JW), p_x, p_w,
                o_x, m_row, x_h, x_w, in_rows, in_columns, o_w, m_m, H, W, JH, JW, w_start, w_tap_h, w_tap_w,
                CHANNELS, C, M, W_TAPS, IN_TAP_H, IN_TAP_W, INSIDE, MARKED, TURN, TAPS_INNER, PRECISION,
                BLOCKS * BLOCK_K, 1, BLOCK_REST,
            )  # fmt: skip
    m = i_tile % tiles_n * BLOCK_N
    if POOL:
        b_acc = affine(b_acc, p_bias, p_scale, m, M, i_group, HAS_BIAS, HAS_SCALE)
        b_y = pool_quads(activate(b_acc, ACT, SLOPE), POOL)  # [BLOCK_M // 4, BLOCK_N]
        o_row = (i_first // 4).to(tl.int64) + tl.arange(0, BLOCK_M // 4)
        m_y = (o_row < pixels // 4)[:, None] & m_m[None, :]
        o_y = (o_row * (GROUPS * M))[:, None] + (i_group * M + o_m)[None, :]
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)
    else:
        o_row = (n.to(tl.int64) * OH + out_h + q_h * OUT_STEP_H) * OW + out_w + q_w * OUT_STEP_W
        if SPLIT > 1:
            p_y += i_split.to(tl.int64) * s_split
        finish(
            b_acc, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, GROUPS,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES,
        )  # fmt: skip


# Triton 3.6 computes wrong addresses if QW is specialised to 1 (128x128x64, 8 warps, dilation 2).
@triton.jit(do_not_specialize=["QH", "QW"])
def conv_pixel_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z,
    pixels, H, W, QH, QW, OH, OW, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w, s_split, depth,
    GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, W_TAPS: tl.constexpr,
    JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, FLAT: tl.constexpr, INSIDE: tl.constexpr,
    MARKED: tl.constexpr, TURN: tl.constexpr, TAPS_INNER: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    conv_pixel_tile(
        tl.program_id(0), tl.program_id(1), p_x, p_w, p_bias, p_scale, p_y, p_z,
        pixels, H, W, QH, QW, OH, OW, in_h, in_w, out_h, out_w, JH, JW, w_start, w_tap_h, w_tap_w, s_split, depth,
        GROUPS, M, CHANNELS, C, W_TAPS, JH, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, OUT_STEP_H, OUT_STEP_W,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, POOL, WIDE, LONG, FLAT, INSIDE, MARKED, False, True, TURN,
        TAPS_INNER, SPLIT, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_REST, PIECES,
    )  # fmt: skip


class Prepared(NamedTuple):
    """A launch; if it computes shares, their shape [shares, values] and the launch that adds them."""

    launch: launch.Prepared
    partial: tuple[int, int]
    sum: launch.Prepared | None


def able(problem: Problem) -> bool | Unsupported:
    return True


def estimate(problem: Problem) -> float:
    return pixel_choice.estimate(problem)


programs = pixel_choice.programs


def prepare(problem: Problem) -> Prepared:
    h, v = problem.at.h, problem.at.v
    (H, W), (OH, OW) = problem.read, problem.written
    M, groups = problem.M, problem.groups
    at, turn = pixel_choice.chosen(problem), problem.in_place
    tile, C, JW, split = at.tile, at.C, at.JW, at.split
    JH = len(h.taps)
    first_tap, taps = (0, JW, 1), JH * JW
    if turn:
        S = problem.geometry.w.kernel
        first_tap, taps = (h.taps[0] * S + v.taps[0], h.tap_step * S, v.tap_step), problem.geometry.h.kernel * S
    pixels = problem.N * pixel_choice.image(problem)
    across = launch.cdiv(M, tile["BLOCK_N"]) * groups
    grid = launch.cdiv(pixels, tile["BLOCK_M"]) * across
    total = pixels * groups * M
    scalars = (
        pixels, H, W, h.count, v.count, OH, OW, h.in_start, v.in_start, h.out_start, v.out_start,
        *first_tap, total, JH * JW * C,
    )  # fmt: skip
    flags = {**problem.flags(), "SPLIT": split}
    meta = {
        **problem.taps_read, "C": C, "JW": JW, "CHANNELS": groups * problem.C, "M": M, "GROUPS": groups,
        "W_TAPS": taps, "OUT_STEP_H": h.out_step, "OUT_STEP_W": v.out_step,
        "WIDE": pixel_choice.wide(problem), "LONG": h.count * v.count >= INT32_LIMIT,
        "FLAT": pixel_choice.flat(C, JH * JW), "INSIDE": all_inside(h, H) and all_inside(v, W),
        "MARKED": max(JH, JW) <= pixel_choice.BITS, "TURN": turn,
        "TAPS_INNER": pixel_choice.taps_inner(problem),
        **problem.constants, **({**launches.bare(flags), "HAS_SCALE": False} if split > 1 else flags),
        **dependent_launch.options(target=problem.target), **pixel_choice.options(problem, at),
    }  # fmt: skip
    product = launch.Prepared(conv_pixel_kernel, (grid, split), scalars, meta)
    if split == 1:
        return Prepared(product, (1, total), None)
    flags = {**problem.flags("POOL"), "SPLIT": split, "ACC": launch.acc(problem.dtype)}
    total_sum = launches.summed(problem.dtype, groups * M, total, flags, problem.target, problem.batch_invariant)
    return Prepared(product, (split, total), total_sum)


def run(prepared: Prepared, t: Tensors) -> None:
    if prepared.sum is None:
        prepared.launch.run(t.x, t.w, t.bias, t.scale, t.y, t.z)
        return
    partial = torch.empty(prepared.partial, dtype=launch.acc_torch(t.x.dtype), device=t.x.device)
    prepared.launch.run(t.x, t.w, None, None, partial, None)
    prepared.sum.run(partial, t.bias, t.scale, t.y, t.z)
