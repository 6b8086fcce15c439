"""The weight gradient in the depthwise form: an input channel has M outputs, or an output channel C inputs.

    dw[o, j, c] = sum over images and pixels q of dy[n, q, o] x[n, at(q, j), i],    i = o // M * C + c

A program walks over a share of the tiles (BLOCK_R rows, BLOCK_P pixels along the rows of all images, BLOCK_C channels)
with a sum for each tap of TAPS columns, so that a tile of x and dy is loaded for all of them; rows that are left over
are tiles of one. The pixels of a tile are added at the end, the shares after that, both in a fixed order.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, depthwise, narrow
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, No, Problem, Tensors
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "depthwise"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_depthwise_grad_weight",)
# Rows of taps of a program, unrolled.
MOST_ROWS = 11
# Sums and gradients of a thread that registers hold, with as many addresses of inputs of several channels.
MOST_VALUES = 140


@triton.jit
def add_tile(
    b_sums, p_x, p_dy, i_row, o_p, m_p, m_c, o_in, o_out, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
    JH: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr,
    IN_TAP_W: tl.constexpr, ACC: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The sums with the products of rows i_row to i_row + BLOCK_R, all of which there are."""
    n = (o_p // QW).to(tl.int64)
    q_w = o_p % QW
    x_w = in_w + q_w * IN_STEP_W
    x_h = in_h + i_row * IN_STEP_H
    p_x += ((n * H * W + x_w) * CHANNELS)[:, None] + o_in[None, :]
    p_dy += (((n * QH + i_row) * QW + q_w) * OUT)[:, None] + o_out[None, :]
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
    C: tl.constexpr, M: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partial [shares, OUT, JH * JW, C]: the sums over one share of the tiles, and of the REST of the rows."""
    wait(EARLY)
    PAIRS = vectors * VEC
    CHANNELS = PAIRS // M
    OUT = PAIRS // C
    tiles_c = tl.cdiv(PAIRS, BLOCK_C)
    tiles_s: tl.constexpr = (JW + TAPS - 1) // TAPS
    i_part = tl.program_id(0)
    i_s = i_part // tiles_c % tiles_s * TAPS
    i_r = i_part // (tiles_c * tiles_s) * ROWS
    o_c = i_part % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < PAIRS
    o_in = o_c
    if M > 1:
        o_in = o_c // M
    o_out = o_c
    if C > 1:
        o_out = o_c // C
    in_w += i_s * IN_TAP_W
    in_h += i_r * IN_TAP_H
    # Taps that find no input inside have no tiles.
    inside = (in_h + (QH - 1) * IN_STEP_H + (ROWS - 1) * IN_TAP_H >= 0) & (in_h < H)
    tiles = tl.where(inside, tiles, 0)
    rest = tl.where(inside, rest, 0)
    b_sums = ()
    for _ in tl.static_range(ROWS * TAPS):
        b_sums += (tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC),)
    whole = QH // BLOCK_R
    first = tl.program_id(1) * share
    for i_tile in range(first, tl.minimum(first + share, tiles)):
        i_row = i_tile % whole * BLOCK_R
        o_p = i_tile // whole * BLOCK_P + tl.arange(0, BLOCK_P)
        b_sums = add_tile(
            b_sums, p_x, p_dy, i_row, o_p, o_p < pixels, m_c, o_in, o_out, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
            ROWS, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, ACC, TAPS, BLOCK_R,
        )  # fmt: skip
    if REST > 0:
        first = tl.program_id(1) * share_rest
        for i_tile in range(first, tl.minimum(first + share_rest, rest)):
            i_row = QH - REST + i_tile % REST
            o_p = i_tile // REST * BLOCK_P + tl.arange(0, BLOCK_P)
            b_sums = add_tile(
                b_sums, p_x, p_dy, i_row, o_p, o_p < pixels, m_c, o_in, o_out, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
                ROWS, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, ACC, TAPS, 1,
            )  # fmt: skip
    p_partial += tl.program_id(1).to(tl.int64) * PAIRS * (JH * JW) + o_out.to(tl.int64) * (JH * JW * C)
    if C > 1:
        p_partial += o_c % C
    for s in tl.static_range(TAPS):
        for r in tl.static_range(ROWS):
            b_sum = tl.sum(b_sums[s * ROWS + r], axis=0)
            m_sum = m_c & (i_r + r < JH) & (i_s + s < JW)
            tl.store(p_partial + ((i_r + r) * JW + i_s + s) * C, b_sum.to(p_partial.dtype.element_ty), mask=m_sum)


@triton.jit
def conv_depthwise_sum_kernel(
    p_partial, p_dw, shares, total, EARLY: tl.constexpr, ACC: tl.constexpr, SHARES: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """dw [total] = the sum of partial [shares, total]: SHARES at a time, added to one another at the end."""
    wait(EARLY)
    o_n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    o_s = tl.arange(0, SHARES)
    p_partial += o_s.to(tl.int64)[:, None] * total + o_n[None, :]
    b_sum = tl.zeros((SHARES, OUTPUTS), dtype=ACC)
    for i in range(tl.cdiv(shares, SHARES)):
        first = i * SHARES
        m = (first + o_s < shares)[:, None] & (o_n < total)[None, :]
        b_sum += tl.load(p_partial + tl.cast(first, tl.int64) * total, mask=m, other=0.0)  # [SHARES, OUTPUTS]
    tl.store(p_dw + o_n, tl.sum(b_sum, axis=0).to(p_dw.dtype.element_ty), mask=o_n < total)


def able(problem: Problem) -> bool | No:
    if problem.C > 1 and problem.M > 1:
        return No("several channels to several channels")
    return depthwise.fits(problem)


def estimate(problem: Problem) -> float:
    found = cut(problem)
    products = costs.outputs(problem) * problem.groups * problem.M * problem.C * problem.taps
    rounds = found.parts * math.prod(found.taps) * (found.tiles * found.rows + found.rest)
    time = costs.of_each_channel(problem, "depthwise, weight", products, rounds)
    return costs.beside_tiles(problem, "depthwise, weight", time)


class Cut(NamedTuple):
    """How a problem is cut: `taps` (rows, columns) and `rows` of outputs of a program, `parts` of the gradient, and of
    every part so many `tiles` and tiles of one row, the `rest`."""

    tile: launch.Tile
    taps: tuple[int, int]
    rows: int
    parts: int
    tiles: int
    rest: int


def cut(problem: Problem) -> Cut:
    _, (QH, QW) = narrow.joined(problem, problem.geometry[:2])
    pairs, (JH, JW) = problem.groups * problem.M * problem.C, (axis.kernel for axis in problem.geometry[:2])
    tile = problem.tile(FAMILIES[0], floor=1, R=QH, P=problem.N * QW, C=pairs, T=JH * JW, S=problem.geometry.h.stride)
    compiled = problem.target != "interpreted"
    of_a_thread = max(1, tile["BLOCK_P"] * tile["BLOCK_C"] // (32 * tile.num_warps)) if compiled else 1
    held = MOST_VALUES // of_a_thread // (1 if problem.M == problem.C == 1 else 2)
    taps = launch.cdiv(JH, launch.cdiv(JH, max(1, min(MOST_ROWS, held // 2))))
    columns = launch.cdiv(JW, launch.cdiv(JW, max(1, min(tile["SUMS"], held - 1) // taps)))
    rows = rows_of(QH, max(1, min(tile["BLOCK_R"], held - taps * columns)), taps)
    parts = launch.cdiv(pairs, tile["BLOCK_C"]) * launch.cdiv(JH, taps) * launch.cdiv(JW, columns)
    blocks = launch.cdiv(problem.N * QW, tile["BLOCK_P"])
    return Cut(tile, (taps, columns), rows, parts, blocks * (QH // rows), blocks * (QH % rows))


def prepare(problem: Problem) -> Shares:
    h, v = problem.at.h, problem.at.v
    (H, W), (QH, QW) = narrow.joined(problem, problem.geometry[:2])
    tile, (taps, columns), rows, parts, tiles, rest = cut(problem)
    options = tile.options
    del options["SUMS"]
    outputs, most_shares = options.pop("OUTPUTS"), options.pop("SHARES")
    wanted = max(1, min(options.pop("PER_PROCESSOR") * problem.processors // parts, tiles + rest))
    share = launch.cdiv(tiles, wanted)
    shares = launch.cdiv(tiles, share)
    pairs = problem.groups * problem.M * problem.C
    vec = narrow.vector(pairs, problem)
    scalars = (
        problem.N * QW, H, W, QH, QW, pairs // vec, h.in_start, v.in_start, tiles, share, rest,
        launch.cdiv(rest, shares),
    )  # fmt: skip
    meta = {
        **problem.taps_read, "M": problem.M, "ACC": launch.acc(problem.dtype), "REST": QH % rows, "VEC": vec,
        **early.options(parts * shares, problem.target), **options, "ROWS": taps, "TAPS": columns, "BLOCK_R": rows,
    }  # fmt: skip
    made = launch.Prepared(conv_depthwise_grad_weight_kernel, (parts, shares), scalars, meta)
    total = math.prod(problem.shape)
    grid = launch.cdiv(total, outputs)
    blocks = {"SHARES": min(most_shares, triton.next_power_of_2(shares)), "OUTPUTS": outputs}
    joined = launch.Prepared(
        conv_depthwise_sum_kernel, (grid,), (shares, total),
        {"ACC": launch.acc(problem.dtype), **early.options(grid, problem.target), **blocks, "num_warps": 4},
    )  # fmt: skip
    return Shares(made, shares, problem.shape, joined)


def rows_of(QH: int, most: int, JH: int) -> int:
    """Rows of a tile, of which QH may leave a rest that is added row by row: with the fewest loads and products."""

    def cost(rows: int) -> float:
        return QH // rows * (JH * rows + 1.5 * (2 * rows + JH - 1)) + QH % rows * (JH + 1.5 * (JH + 1))

    return min(range(1, most + 1), key=lambda rows: (cost(rows), rows))


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)
