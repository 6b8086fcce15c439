"""The pixel-tiled form: an implicit GEMM whose rows are pixels of any image, for every shape (small batches included).

    y[n, q, m] = act(scale[m] * sum over taps j and channels c of x[n, at(q, j), c] w[m, j, c] + bias[m])

x  [N, H, W, groups * C]     w  [groups * M, J, C], J = JH * JW taps; read in place on a way back
y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

`at` is given by two walks (geometry.py). Nothing is unrolled in memory: the rows' addresses are computed once, with a
bit for each tap that is inside the image, and each tap adds one number to all of them. With few channels a tap would
leave most of a block of K empty: then taps and channels together are walked as one axis (FLAT), at the price of index
arithmetic per element. Where tiles are few, taps and channels are cut into shares, whose sums are added in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs
from minidl.kernels.conv.epilogue import affine, finish, pool_quads
from minidl.kernels.conv.problem import CORRELATIONS, MANY, No, Problem, Tensors, all_inside, taps_of
from minidl.kernels.gemm import launches
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "pixel"
IN_PLACE = True
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv", "conv_flat", "conv_turn")
# Taps of an axis that have a bit each.
BITS = 31


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


@triton.jit
def inside_bits(o_first, size, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Bit j of each: whether o_first + j * STEP is in [0, size)."""
    bits = (o_first * 0).to(tl.int32)
    for j in tl.static_range(COUNT):
        o = o_first + j * STEP
        bits |= ((o >= 0) & (o < size)).to(tl.int32) << j
    return bits


@triton.jit
def add_blocks(
    b_acc, i_start, i_end, p_x, p_w, o_x, m_row, x_h, x_w, in_rows, in_columns, o_w, m_m,
    H, W, w_tap_h, w_tap_w, w_channel,
    CHANNELS: tl.constexpr, C: tl.constexpr, JW: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    INSIDE: tl.constexpr, MARKED: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr,
    START: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """b_acc with blocks i_start to i_end of the products: BLOCKS of each tap, from channel START on."""
    EVEN: tl.constexpr = START + BLOCKS * BLOCK_K <= C
    for i in range(i_start, i_end):
        j = i // BLOCKS
        r = j // JW
        s = j % JW
        o_c = START + i % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
        if INSIDE:
            m_x = m_row
        elif MARKED:
            m_x = ((in_rows >> r) & (in_columns >> s) & 1) != 0
        else:
            h = x_h + r * IN_TAP_H
            w = x_w + s * IN_TAP_W
            m_x = m_row & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        m_xc = m_x[:, None]
        m_wc = m_m[None, :]
        if not EVEN:
            m_xc &= (o_c < C)[None, :]
            m_wc &= (o_c < C)[:, None]
        o_tap = (r * IN_TAP_H * W + s * IN_TAP_W).to(o_x.dtype) * CHANNELS
        if TURN:
            o_wc = (r * w_tap_h + s * w_tap_w).to(tl.int64) + o_c.to(tl.int64) * w_channel
        else:
            o_wc = j * C + o_c
        b_x = tl.load(p_x + (o_x + o_tap)[:, None] + o_c[None, :], mask=m_xc, other=0.0)  # [BLOCK_M, BLOCK_K]
        b_w = tl.load(p_w + o_w[None, :] + o_wc[:, None], mask=m_wc, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)
    return b_acc


# Triton 3.6 computed wrong addresses where QW was known to be 1 (128x128x64, 8 warps, dilation 2).
@triton.jit(do_not_specialize=["QH", "QW"])
def conv_pixel_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z,
    pixels, H, W, QH, QW, OH, OW, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w, w_channel, s_split,
    GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr,
    JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, WIDE: tl.constexpr, LONG: tl.constexpr, FLAT: tl.constexpr, INSIDE: tl.constexpr,
    MARKED: tl.constexpr, TURN: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """INSIDE: every tap of every output is. MARKED: whether taps are inside is kept in bits. WIDE: some tensor has more
    values than 32 bits count. Channels that fill no BLOCK_K are added in blocks of BLOCK_REST, after all others.

    With SPLIT shares y is [SPLIT, pixels, GROUPS * M], of partial sums.
    """
    wait(EARLY)
    tiles_n = tl.cdiv(M, BLOCK_N)
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
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
        p_w += i_group * C * w_channel + w_start
        o_w = o_m.to(tl.int64)
    else:
        o_w = (i_group * M + o_m).to(tl.int64) * (JH * JW * C)
    p_x += i_group * C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if FLAT:
        STEPS: tl.constexpr = (JH * JW * C + BLOCK_K - 1) // BLOCK_K
        SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
        tl.assume(i_split * SHARE < STEPS)
        for i in range(i_split * SHARE, tl.minimum(i_split * SHARE + SHARE, STEPS)):
            o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            j = o_k // C
            t_h = j // JW * IN_TAP_H
            t_w = j % JW * IN_TAP_W
            h = x_h[:, None] + t_h[None, :]
            w = x_w[:, None] + t_w[None, :]
            m_x = m_row[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W) & (o_k < JH * JW * C)[None, :]
            o_tap = (t_h * W + t_w).to(o_x.dtype) * CHANNELS + o_k % C
            if TURN:
                o_wk = (j // JW * w_tap_h + j % JW * w_tap_w).to(tl.int64) + (o_k % C).to(tl.int64) * w_channel
            else:
                o_wk = o_k
            b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
            m_w = m_m[None, :] & (o_k < JH * JW * C)[:, None]
            b_w = tl.load(p_w + o_w[None, :] + o_wk[:, None], mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION, out_dtype=ACC)
    else:
        in_rows = 0
        in_columns = 0
        if MARKED and not INSIDE:
            in_rows = tl.where(m_row, inside_bits(x_h, H, IN_TAP_H, JH), 0)
            in_columns = inside_bits(x_w, W, IN_TAP_W, JW)
        BLOCKS: tl.constexpr = C // BLOCK_K
        SHARE: tl.constexpr = (JH * JW * BLOCKS + SPLIT - 1) // SPLIT
        if BLOCKS > 0:
            tl.assume(i_split * SHARE < JH * JW * BLOCKS)
            b_acc = add_blocks(
                b_acc, i_split * SHARE, tl.minimum(i_split * SHARE + SHARE, JH * JW * BLOCKS), p_x, p_w,
                o_x, m_row, x_h, x_w, in_rows, in_columns, o_w, m_m, H, W, w_tap_h, w_tap_w, w_channel,
                CHANNELS, C, JW, IN_TAP_H, IN_TAP_W, INSIDE, MARKED, TURN, PRECISION, 0, BLOCKS, BLOCK_K,
            )  # fmt: skip
        if C % BLOCK_K > 0:
            REST: tl.constexpr = (JH * JW + SPLIT - 1) // SPLIT
            b_acc = add_blocks(
                b_acc, i_split * REST, tl.minimum(i_split * REST + REST, JH * JW), p_x, p_w,
                o_x, m_row, x_h, x_w, in_rows, in_columns, o_w, m_m, H, W, w_tap_h, w_tap_w, w_channel,
                CHANNELS, C, JW, IN_TAP_H, IN_TAP_W, INSIDE, MARKED, TURN, PRECISION, BLOCKS * BLOCK_K, 1, BLOCK_REST,
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


class Prepared(NamedTuple):
    """A launch; where it makes shares, their shape [shares, values] and the launch that adds them."""

    launch: launch.Prepared
    partial: tuple[int, int]
    sum: launch.Prepared | None


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


def prepare(problem: Problem) -> Prepared:
    h, v = problem.at.h, problem.at.v
    (H, W), (OH, OW) = problem.read, problem.written
    M, groups = problem.M, problem.groups
    C, JW = run_of_taps(problem)
    JH, turn = len(h.taps), problem.in_place
    joined = flat(C, JH * JW)
    image = (h.count // 2 * 2) * (v.count // 2 * 2) if problem.pool else h.count * v.count
    pixels = problem.N * image
    family, K = ("conv_flat", JH * JW * C) if joined else ("conv", C)
    tile = problem.tile(family, M=problem.images * image, N=M, K=K)
    across = launch.cdiv(M, tile["BLOCK_N"]) * groups
    options = tile.options
    rest = C % tile["BLOCK_K"]
    # Rows that no 16 bytes divide are stored value by value, whose addresses take many registers.
    piece = 64 if M * problem.dtype.itemsize % 16 == 0 else 16
    options["PIECES"] = 1 if problem.target == "interpreted" else max(1, tile["BLOCK_N"] // piece)
    options["BLOCK_REST"] = max(16, 1 << (rest - 1).bit_length()) if rest else 16
    steps = launch.cdiv(JH * JW * C, tile["BLOCK_K"]) if joined else JH * JW * max(1, C // tile["BLOCK_K"])
    split = 1
    if not (problem.pool or problem.scale) and h.out_step == v.out_step == 1:
        split = split_of(launch.cdiv(problem.images * image, tile["BLOCK_M"]) * across, steps, problem)
    grid = launch.cdiv(pixels, tile["BLOCK_M"]) * across
    total = pixels * groups * M
    scalars = (
        pixels, H, W, h.count, v.count, OH, OW, h.in_start, v.in_start, h.out_start, v.out_start,
        *(taps_of(problem) if turn else (0, 0, 0)), problem.strides[0] if turn else 0, total,
    )  # fmt: skip
    flags = {**problem.flags(), "SPLIT": split}
    meta = {
        **problem.taps_read, "C": C, "JW": JW, "CHANNELS": groups * problem.C, "M": M, "GROUPS": groups,
        "OUT_STEP_H": h.out_step, "OUT_STEP_W": v.out_step,
        "WIDE": wide(problem), "LONG": h.count * v.count >= MANY, "FLAT": joined,
        "INSIDE": all_inside(h, H) and all_inside(v, W), "MARKED": max(JH, JW) <= BITS, "TURN": turn,
        **problem.constants, **(launches.bare(flags) if split > 1 else flags),
        **early.options(target=problem.target), **options,
    }  # fmt: skip
    made = launch.Prepared(conv_pixel_kernel, (grid, split), scalars, meta)
    if split == 1:
        return Prepared(made, (1, total), None)
    flags = {**problem.flags("HAS_SCALE", "POOL"), "SPLIT": split, "ACC": launch.acc(problem.dtype)}
    return Prepared(made, (split, total), launches.summed(problem.dtype, groups * M, total, flags, problem.target))


def run(prepared: Prepared, t: Tensors) -> None:
    if prepared.sum is None:
        prepared.launch.run(t.x, t.w, t.bias, t.scale, t.y, t.z)
        return
    partial = torch.empty(prepared.partial, dtype=launch.acc_torch(t.x.dtype), device=t.x.device)
    prepared.launch.run(t.x, t.w, None, None, partial, None)
    prepared.sum.run(partial, t.bias, t.y, t.z)


def split_of(tiles: int, steps: int, problem: Problem) -> int:
    """Shares of the taps and channels, none of them empty: enough to fill the device, of at least 8 steps each."""
    wanted = max(1, min(problem.processors // max(tiles, 1), steps // 8))
    return launch.cdiv(steps, launch.cdiv(steps, wanted))


def run_of_taps(problem: Problem) -> tuple[int, int]:
    """Channels and columns of taps: a row of taps whose inputs are all inside and side by side counts as one tap."""
    v, columns = problem.at.v, len(problem.at.v.taps)
    whole = problem.groups == 1 == v.in_tap and all_inside(v, problem.read[1]) and not problem.in_place
    return (columns * problem.C, 1) if whole else (problem.C, columns)


def wide(problem: Problem) -> bool:
    """Whether 32 bits do not count the values of a tensor, or places beside it where a tap would be."""
    H, W = problem.read
    ends = [
        max(size, walk.in_start + (walk.count - 1) * walk.in_step + (len(walk.taps) - 1) * walk.in_tap)
        for walk, size in ((problem.at.h, H), (problem.at.v, W))
    ]
    values = ((problem.N - 1) * H + ends[0] + 1) * W + ends[1]
    return max(values * problem.groups * problem.C, problem.N * problem.at.h.count * problem.at.v.count) >= MANY


def flat(C: int, taps: int) -> bool:
    """Whether taps and channels are one axis: where a tap's channels would leave most of a block empty."""
    return taps > 1 and C < 16
