"""The weight gradient in the depthwise form: every output channel has one input channel, shared by M of them.

    dw[o, j] = sum over images and pixels q of dy[n, q, o] x[n, at(q, j), o // M]

A program walks over a share of the tiles of `depthwise` (BLOCK_R rows, BLOCK_P pixels, BLOCK_C channels) with a sum for
each tap of TAPS columns, so that a tile of x and dy is loaded for all of them. The pixels of a tile are added at the
end, the shares after that, both in a fixed order.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import depthwise
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, No, Problem, Tensors
from minidl.runtime import launch

NAME = "depthwise"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_depthwise_grad_weight",)
# Sums of a program, unrolled: a column of taps has at most so many.
MOST_ROWS = 11
# Tiles that a share has at least, if there are as many: its sums cost about as much as two.
LEAST = 4


@triton.jit
def conv_depthwise_grad_weight_kernel(
    p_dy, p_x, p_partial, pixels, tiles, H, W, QH, QW, OUT, in_h, in_w, share,
    M: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    ACC: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [shares, OUT, JH * JW]: the sums over one share of the tiles."""
    tiles_c = tl.cdiv(OUT, BLOCK_C)
    i_part = tl.program_id(0)
    i_s = i_part // tiles_c * TAPS
    o_c = i_part % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < OUT
    if M == 1:
        o_in = o_c
    else:
        o_in = o_c // M
    CHANNELS = OUT // M
    tiles_r = tl.cdiv(QH, BLOCK_R)
    first = tl.program_id(1) * share
    b_sums = ()
    for _ in tl.static_range(JH * TAPS):
        b_sums += (tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC),)
    for i_tile in range(first, tl.minimum(first + share, tiles)):
        i_row = i_tile % tiles_r * BLOCK_R
        o_p = i_tile // tiles_r * BLOCK_P + tl.arange(0, BLOCK_P)
        m_p = o_p < pixels
        n = (o_p // QW).to(tl.int64)
        q_w = o_p % QW
        x_w = in_w + (q_w * IN_STEP_W + i_s * IN_TAP_W)
        x_h = in_h + i_row * IN_STEP_H
        p_tile = p_x + (n * H * W + x_w)[:, None] * CHANNELS + o_in[None, :]
        p_dtile = p_dy + (n * QH * QW + q_w)[:, None] * OUT + o_c[None, :]
        m_dy = m_p[:, None] & m_c[None, :]
        b_dys = ()
        for b in tl.static_range(BLOCK_R):
            b_dy = tl.load(p_dtile + (i_row + b) * QW * OUT, mask=m_dy & (i_row + b < QH), other=0.0)
            b_dys += (b_dy.to(ACC),)
        b_next = ()
        for s in tl.static_range(TAPS):
            w = x_w + s * IN_TAP_W
            m_x = (m_p & (w >= 0) & (w < W))[:, None] & m_c[None, :]
            for r in tl.static_range(JH):
                b_sum = b_sums[s * JH + r]
                for b in tl.static_range(BLOCK_R):
                    h = x_h + (b * IN_STEP_H + r * IN_TAP_H)
                    o_tap = (h * W + s * IN_TAP_W) * CHANNELS
                    b_x = tl.load(p_tile + o_tap, mask=m_x & (h >= 0) & (h < H), other=0.0)
                    # A row of outputs past the last has no share, whatever its inputs are.
                    b_sum += tl.where(i_row + b < QH, b_x.to(ACC) * b_dys[b], 0.0)
                b_next += (b_sum,)
        b_sums = b_next
    p_partial += tl.program_id(1).to(tl.int64) * OUT * (JH * JW)
    for s in tl.static_range(TAPS):
        for r in tl.static_range(JH):
            o_w = o_c.to(tl.int64) * (JH * JW) + (r * JW + i_s + s)
            tl.store(p_partial + o_w, tl.sum(b_sums[s * JH + r], axis=0), mask=m_c & (i_s + s < JW))


def able(problem: Problem) -> bool | No:
    if problem.C > 1:
        return No("several channels to a sum")
    if len(problem.at.h.taps) > MOST_ROWS:
        return No(f"more than {MOST_ROWS} rows of taps")
    return depthwise.fits(problem)


def estimate(problem: Problem) -> float:
    return depthwise.estimate_of(problem, FAMILIES[0])


def prepare(problem: Problem) -> Shares:
    h, v = problem.at.h, problem.at.v
    H, W = problem.read
    out = problem.groups * problem.M
    tile = depthwise.tile_of(problem, FAMILIES[0])
    BLOCK_P, BLOCK_C = depthwise.blocks(problem, tile)
    options = tile.options
    options["TAPS"] = columns = max(1, min(options.pop("SUMS") // len(h.taps), len(v.taps)))
    parts = launch.cdiv(out, BLOCK_C) * launch.cdiv(len(v.taps), columns)
    tiles = depthwise.tiles(problem, tile["BLOCK_R"], BLOCK_P)
    wanted = max(1, min(options.pop("PER_PROCESSOR") * problem.processors // parts, tiles // LEAST))
    share = launch.cdiv(tiles, wanted)
    shares = launch.cdiv(tiles, share)
    scalars = (problem.N * v.count, tiles, H, W, h.count, v.count, out, h.in_start, v.in_start, share)
    read = problem.taps_read
    del read["C"]
    meta = {
        **read, "M": problem.M, "ACC": launch.acc(problem.dtype), **options, "BLOCK_P": BLOCK_P, "BLOCK_C": BLOCK_C,
    }  # fmt: skip
    made = launch.Prepared(conv_depthwise_grad_weight_kernel, (parts, shares), scalars, meta)
    return Shares(made, shares, problem.shape)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)
