"""The weight gradient in the depthwise form: every output channel has one input channel, shared by M of them.

    dw[o, j] = sum over images and pixels q of dy[n, q, o] x[n, at(q, j), o // M]

A program walks over a share of the tiles (BLOCK_R rows, BLOCK_P pixels along the rows of all images, BLOCK_C channels)
with a sum for each tap of TAPS columns, so that a tile of x and dy is loaded for all of them; rows that are left over
are tiles of one. The pixels of a tile are added at the end, the shares after that, both in a fixed order.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import depthwise
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, No, Problem, Tensors
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "depthwise"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_depthwise_grad_weight",)
# Sums of a program, unrolled: a column of taps has at most so many.
MOST_ROWS = 11
# Tiles that a share has at least, if there are as many: its sums cost about as much as two.
LEAST = 4


@triton.jit
def add_tile(
    b_sums, p_x, p_dy, i_row, o_p, m_p, o_c, m_c, o_in, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
    JH: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr,
    IN_TAP_W: tl.constexpr, ACC: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The sums with the products of rows i_row to i_row + BLOCK_R, all of which there are."""
    n = (o_p // QW).to(tl.int64)
    q_w = o_p % QW
    x_w = in_w + q_w * IN_STEP_W
    x_h = in_h + i_row * IN_STEP_H
    p_x += ((n * H * W + x_w) * CHANNELS)[:, None] + o_in[None, :]
    p_dy += (((n * QH + i_row) * QW + q_w) * OUT)[:, None] + o_c[None, :]
    b_dys = ()
    for b in tl.static_range(BLOCK_R):
        b_dy = tl.load(p_dy + b * QW * OUT, mask=m_p[:, None] & m_c[None, :], other=0.0)  # [BLOCK_P, BLOCK_C]
        b_dys += (b_dy.to(ACC),)
    b_next = ()
    for s in tl.static_range(TAPS):
        w = x_w + s * IN_TAP_W
        m_x = m_p & (w >= 0) & (w < W)
        for r in tl.static_range(JH):
            b_sum = b_sums[s * JH + r]
            for b in tl.static_range(BLOCK_R):
                h = x_h + (b * IN_STEP_H + r * IN_TAP_H)
                o_tap = (h * W + s * IN_TAP_W) * CHANNELS
                m_tap = (m_x & (h >= 0) & (h < H))[:, None] & m_c[None, :]
                b_x = tl.load(p_x + o_tap, mask=m_tap, other=0.0)  # [BLOCK_P, BLOCK_C]
                b_sum += b_x.to(ACC) * b_dys[b]
            b_next += (b_sum,)
    return b_next


@triton.jit
def conv_depthwise_grad_weight_kernel(
    p_dy, p_x, p_partial, pixels, H, W, QH, QW, vectors, in_h, in_w, tiles, share, rest, share_rest,
    M: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [shares, OUT, JH * JW]: the sums over one share of the tiles, and of the REST of the rows."""
    wait(EARLY)
    OUT = vectors * VEC
    CHANNELS = OUT // M
    tiles_c = tl.cdiv(OUT, BLOCK_C)
    i_part = tl.program_id(0)
    i_s = i_part // tiles_c * TAPS
    o_c = i_part % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < OUT
    if M == 1:
        o_in = o_c
    else:
        o_in = o_c // M
    in_w += i_s * IN_TAP_W
    b_sums = ()
    for _ in tl.static_range(JH * TAPS):
        b_sums += (tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC),)
    whole = QH // BLOCK_R
    first = tl.program_id(1) * share
    for i_tile in range(first, tl.minimum(first + share, tiles)):
        i_row = i_tile % whole * BLOCK_R
        o_p = i_tile // whole * BLOCK_P + tl.arange(0, BLOCK_P)
        b_sums = add_tile(
            b_sums, p_x, p_dy, i_row, o_p, o_p < pixels, o_c, m_c, o_in, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
            JH, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, ACC, TAPS, BLOCK_R,
        )  # fmt: skip
    if REST > 0:
        first = tl.program_id(1) * share_rest
        for i_tile in range(first, tl.minimum(first + share_rest, rest)):
            i_row = QH - REST + i_tile % REST
            o_p = i_tile // REST * BLOCK_P + tl.arange(0, BLOCK_P)
            b_sums = add_tile(
                b_sums, p_x, p_dy, i_row, o_p, o_p < pixels, o_c, m_c, o_in, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
                JH, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, ACC, TAPS, 1,
            )  # fmt: skip
    p_partial += tl.program_id(1).to(tl.int64) * OUT * (JH * JW)
    for s in tl.static_range(TAPS):
        for r in tl.static_range(JH):
            o_w = o_c.to(tl.int64) * (JH * JW) + (r * JW + i_s + s)
            b_sum = tl.sum(b_sums[s * JH + r], axis=0)
            tl.store(p_partial + o_w, b_sum.to(p_partial.dtype.element_ty), mask=m_c & (i_s + s < JW))


def able(problem: Problem) -> bool | No:
    if problem.C > 1:
        return No("several channels to a sum")
    if problem.geometry.h.kernel > MOST_ROWS:
        return No(f"more than {MOST_ROWS} rows of taps")
    return depthwise.fits(problem)


def estimate(problem: Problem) -> float:
    return depthwise.estimate(problem)


def prepare(problem: Problem) -> Shares:
    h, v = problem.at.h, problem.at.v
    (H, W), (QH, QW) = depthwise.joined(problem)
    out, JH, JW = problem.groups * problem.M, len(h.taps), len(v.taps)
    tile = problem.tile(FAMILIES[0], floor=1, R=QH, P=problem.N * QW, C=out, T=JH * JW, S=h.in_step)
    options = tile.options
    options["TAPS"] = columns = launch.cdiv(JW, launch.cdiv(JW, max(1, options.pop("SUMS") // JH)))
    options["BLOCK_R"] = rows = rows_of(QH, tile["BLOCK_R"], JH)
    parts = launch.cdiv(out, tile["BLOCK_C"]) * launch.cdiv(JW, columns)
    pixel_blocks = launch.cdiv(problem.N * QW, tile["BLOCK_P"])
    tiles, rest = pixel_blocks * (QH // rows), pixel_blocks * (QH % rows)
    wanted = max(1, min(options.pop("PER_PROCESSOR") * problem.processors // parts, (tiles + rest) // LEAST))
    share = launch.cdiv(tiles, wanted)
    shares = launch.cdiv(tiles, share)
    vec = depthwise.vector(problem, 16)
    scalars = (
        problem.N * QW, H, W, QH, QW, out // vec, h.in_start, v.in_start, tiles, share, rest,
        launch.cdiv(rest, shares),
    )  # fmt: skip
    read = problem.taps_read
    del read["C"]
    meta = {
        **read, "M": problem.M, "ACC": launch.acc(problem.dtype), "REST": QH % rows, "VEC": vec,
        **early.options(parts * shares, problem.target), **options,
    }  # fmt: skip
    made = launch.Prepared(conv_depthwise_grad_weight_kernel, (parts, shares), scalars, meta)
    return Shares(made, shares, problem.shape)


def rows_of(QH: int, most: int, JH: int) -> int:
    """Rows of a tile, of which QH may leave a rest that is added row by row: with the fewest loads and products."""

    def cost(rows: int) -> float:
        return QH // rows * (JH * rows + 1.5 * (2 * rows + JH - 1)) + QH % rows * (JH + 1.5 * (JH + 1))

    return min(range(1, most + 1), key=lambda rows: (cost(rows), rows))


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)
