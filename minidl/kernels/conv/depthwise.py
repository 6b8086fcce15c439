"""The depthwise form: each output channel reads a channel or a few of its own, so no tensor cores; bound by memory.

    y[n, q, o] = act(scale[o] * sum over taps j, c < C of x[n, at(q, j), o // M * C + c] w[j, c, o] + bias[o])

    x  [N, H, W, groups * C]     w  [JH, JW, C, groups * M], made of the convolution's own weights
    y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

A program takes BLOCK_R rows of outputs, BLOCK_P pixels along the rows of all images, and BLOCK_C channels, which lie
side by side in memory. For one column of taps it loads each row of inputs once, for all the rows of outputs that read
it: the compiler merges the loads, whose text is the same (3x3, four rows: 18 loads in place of 36). A load for each tap
makes the first cache's instructions the bound.
"""

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs
from minidl.kernels.conv.prepared import Product, Weights
from minidl.kernels.conv.problem import CORRELATIONS, FORWARD, MANY, No, Problem, Tensors
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "depthwise"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_depthwise", "conv_turn")
READS_ANY_WEIGHTS = True
# Rows of taps, and channels that an output reads: both are unrolled.
MOST_ROWS = 32
MOST_CHANNELS = 4


@triton.jit
def conv_spread_kernel(
    p_w, p_spread, M, OUT, s_g, s_m, s_c, s_r, s_s, first_r, step_r, first_s, step_s,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """spread[j, c, g * M + m] = w of group g, output m and channel c, at the taps of j."""
    wait(EARLY)
    tiles_o = tl.cdiv(OUT, BLOCK_N)
    o_o = tl.program_id(0) % tiles_o * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.program_id(0) // tiles_o * BLOCK_M + tl.arange(0, BLOCK_M)
    j = o_k // C
    o_w = (first_r + j // JW * step_r) * s_r + (first_s + j % JW * step_s) * s_s + o_k % C * s_c
    o_channel = (o_o // M).to(tl.int64) * s_g + o_o % M * s_m
    m_w = (o_k < JH * JW * C)[:, None] & (o_o < OUT)[None, :]
    b_w = tl.load(p_w + o_w[:, None] + o_channel[None, :], mask=m_w, other=0.0)  # [BLOCK_M, BLOCK_N]
    tl.store(p_spread + o_k.to(tl.int64)[:, None] * OUT + o_o[None, :], b_w, mask=m_w)


@triton.jit
def conv_depthwise_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z,
    pixels, H, W, QH, QW, OH, OW, OUT, in_h, in_w, out_h, out_w,
    C: tl.constexpr, M: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    tiles_c = tl.cdiv(OUT, BLOCK_C)
    tiles_r = tl.cdiv(QH, BLOCK_R)
    i_tile = tl.program_id(0)
    o_c = i_tile % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    i_row = i_tile // tiles_c % tiles_r * BLOCK_R
    o_p = i_tile // (tiles_c * tiles_r) * BLOCK_P + tl.arange(0, BLOCK_P)
    m_c = o_c < OUT
    m_p = o_p < pixels
    n = (o_p // QW).to(tl.int64)
    q_w = o_p % QW
    x_w = in_w + q_w * IN_STEP_W
    x_h = in_h + i_row * IN_STEP_H
    CHANNELS = OUT // M * C
    if C == 1 and M == 1:
        o_in = o_c
    else:
        o_in = o_c // M * C
    p_x += (n * H * W + x_w)[:, None] * CHANNELS + o_in[None, :]  # [BLOCK_P, BLOCK_C]
    b_sums = ()
    for _ in tl.static_range(BLOCK_R):
        b_sums += (tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC),)
    for s in range(JW):
        w = x_w + s * IN_TAP_W
        m_x = (m_p & (w >= 0) & (w < W))[:, None] & m_c[None, :]
        for c in tl.static_range(C):
            b_ws = ()
            for r in tl.static_range(JH):
                p_tap = p_w + ((r * JW + s) * C + c) * OUT
                b_ws += (tl.load(p_tap + o_c, mask=m_c, other=0.0).to(ACC)[None, :],)
            b_next = ()
            for b in tl.static_range(BLOCK_R):
                b_sum = b_sums[b]
                for r in tl.static_range(JH):
                    h = x_h + (b * IN_STEP_H + r * IN_TAP_H)
                    o_tap = (h * W + s * IN_TAP_W) * CHANNELS + c
                    b_x = tl.load(p_x + o_tap, mask=m_x & (h >= 0) & (h < H), other=0.0)
                    b_sum += b_x.to(ACC) * b_ws[r]
                b_next += (b_sum,)
            b_sums = b_next
    for b in tl.static_range(BLOCK_R):
        b_sum = b_sums[b]
        if HAS_SCALE:
            b_sum *= tl.load(p_scale + o_c, mask=m_c, other=0.0).to(ACC)[None, :]
        if HAS_BIAS:
            b_sum += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(ACC)[None, :]
        o_row = (n * OH + out_h + (i_row + b) * OUT_STEP_H) * OW + out_w + q_w * OUT_STEP_W
        o_y = o_row[:, None] * OUT + o_c[None, :]
        m_y = m_p[:, None] & m_c[None, :] & (i_row + b < QH)
        if SAVE_Z:
            tl.store(p_z + o_y, b_sum.to(p_z.dtype.element_ty), mask=m_y)
        tl.store(p_y + o_y, activate(b_sum, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_y)


def able(problem: Problem) -> bool | No:
    if problem.pool:
        return No("a pool")
    return fits(problem) and (problem.M == 1 or problem.C == 1 or No("several channels to several channels"))


def fits(problem: Problem) -> bool | No:
    """Whether groups are as narrow and numbers as small as the kernels of this form need it."""
    (H, W), (OH, OW) = problem.read, problem.written
    if problem.groups == 1 or problem.C > MOST_CHANNELS:
        return No(f"more than {MOST_CHANNELS} channels to a sum, or one group")
    if len(problem.at.h.taps) > MOST_ROWS:
        return No(f"more than {MOST_ROWS} rows of taps")
    v = problem.at.v
    reach = (len(v.taps) - 1) * v.in_tap  # beside the image, from where a tap inside is counted
    images = max((H * W + reach) * problem.C, OH * OW * problem.M) * problem.groups
    weights = problem.taps * problem.C * problem.groups * problem.M
    if max(images, weights, problem.N * max(W, OW)) >= MANY:
        return No("images or weights of more values than 32 bits count")
    return True


def estimate(problem: Problem) -> float:
    return estimate_of(problem, FAMILIES[0])


def estimate_of(problem: Problem, family: str) -> float:
    """With the tile of a family."""
    tile = tile_of(problem, family)
    BLOCK_P, BLOCK_C = blocks(problem, tile)
    h, v, out = problem.at.h, problem.at.v, problem.groups * problem.M
    products = problem.N * h.count * v.count * out * problem.C * problem.taps
    programs = launch.cdiv(out, BLOCK_C) * tiles(problem, tile["BLOCK_R"], BLOCK_P)
    return costs.of_each_channel(problem, NAME, products, programs * problem.taps * tile["BLOCK_R"] * problem.C)


def prepare(problem: Problem) -> Product:
    h, v = problem.at.h, problem.at.v
    (H, W), (OH, OW) = problem.read, problem.written
    out = problem.groups * problem.M
    tile = tile_of(problem, FAMILIES[0])
    BLOCK_P, BLOCK_C = blocks(problem, tile)
    scalars = (
        problem.N * v.count, H, W, h.count, v.count, OH, OW, out, h.in_start, v.in_start, h.out_start, v.out_start,
    )  # fmt: skip
    grid = launch.cdiv(out, BLOCK_C) * tiles(problem, tile["BLOCK_R"], BLOCK_P)
    meta = {
        **problem.taps_read, "M": problem.M, "OUT_STEP_H": h.out_step, "OUT_STEP_W": v.out_step,
        "ACC": launch.acc(problem.dtype), **early.options(grid, problem.target), **problem.flags("POOL"),
        **tile.options, "BLOCK_P": BLOCK_P, "BLOCK_C": BLOCK_C,
    }  # fmt: skip
    return Product(_spread(problem), launch.Prepared(conv_depthwise_kernel, (grid,), scalars, meta))


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def tile_of(problem: Problem, family: str) -> launch.Tile:
    """The tile, before its channels are fitted."""
    h, v = problem.at.h, problem.at.v
    return problem.tile(
        family, floor=1, R=h.count, P=problem.images * v.count, C=problem.groups * problem.M, T=problem.taps,
        S=h.in_step,
    )  # fmt: skip


def blocks(problem: Problem, tile: launch.Tile) -> tuple[int, int]:
    """(pixels, channels) of a tile: fewer channels and more pixels where fewer columns are then computed in vain."""
    out, channels = problem.groups * problem.M, tile["BLOCK_C"]
    # Of 144 channels, nine blocks of 32 bytes took 1.5 times as long as they should.
    least = max(1, min(channels, 64 // problem.dtype.itemsize))
    sizes = [channels >> k for k in range(channels.bit_length()) if channels >> k >= least]
    chosen = min(sizes, key=lambda size: (launch.cdiv(out, size) * size, -size))
    return tile["BLOCK_P"] * channels // chosen, chosen


def tiles(problem: Problem, rows: int, pixels: int) -> int:
    """Tiles of so many rows and pixels, of one block of channels."""
    h, v = problem.at.h, problem.at.v
    return launch.cdiv(h.count, rows) * launch.cdiv(problem.N * v.count, pixels)


def _spread(problem: Problem) -> Weights:
    """The weights as the kernel reads them, of the convolution's own: [groups * M, R, S, C], or on a walk back
    [groups * C, M, R, S] in any strides."""
    h, v, C, M, out = problem.at.h, problem.at.v, problem.C, problem.M, problem.groups * problem.M
    JH, JW = len(h.taps), len(v.taps)
    if problem.direction == FORWARD:
        R, S = problem.geometry.h.kernel, problem.geometry.w.kernel
        strides: tuple[int, ...] = (M * R * S * C, R * S * C, 1, S * C, C)
    else:
        of_read, of_written, *of_taps = problem.strides
        strides = (C * of_read, of_written, of_read, *of_taps)
    tile = problem.tile("conv_turn", floor=1, M=JH * JW * C, N=out)
    grid = launch.cdiv(JH * JW * C, tile["BLOCK_M"]) * launch.cdiv(out, tile["BLOCK_N"])
    return Weights(
        (JH, JW, C, out),
        launch.Prepared(
            conv_spread_kernel, (grid,), (M, out, *strides, h.taps[0], h.tap_step, v.taps[0], v.tap_step),
            {"C": C, "JH": JH, "JW": JW, **early.options(grid, problem.target), **tile.options},
        ),
    )  # fmt: skip
