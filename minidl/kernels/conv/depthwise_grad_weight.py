"""The weight gradient in the "depthwise" form: an input channel has M outputs, or an output channel C inputs.

    dw[o, j, c] = sum over images and pixels q of dy[n, q, o] x[n, at(q, j), i],    i = o // M * C + c

    dy  [N, QH, QW, groups * M]     x  [N, H, W, groups * C]     dw  [groups * M, R, S, C]

    rows of dy  rows of x     A program loops over a share of the tiles: BLOCK_R rows of BLOCK_P sets of COLUMNS pixels
    0 | q q ..  0 | x x ..    q, of all images, and BLOCK_C channels, with an accumulator for each of ROWS x TAPS taps.
    1 | q q ..  1 | x x ..    Within a tile it proceeds down the rows of x, and loads each value of x once for all taps
                2 | x x ..    and pixels of a set. Remaining rows are separate tiles.

The pixels of a tile, then the shares, are added at the end in a fixed order.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import depthwise, narrow, narrow_grad_weight
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Taps
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "depthwise"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = (narrow_grad_weight.FAMILY,)
MOST_SHARES = 64  # shares added at a time


class DepthwiseGradWeightSizes(NamedTuple):
    """Run-time numbers: sets of pixels of a row of all images, sizes of an image, vectors of a pixel, and tiles of full
    and of remaining rows, of all shares and of one."""

    sets: int
    H: int
    W: int
    QH: int
    QW: int
    vectors: int
    tiles: int
    share: int
    rest: int
    share_rest: int


class FirstInput(NamedTuple):
    """The input of the first output at the first tap; with a depth, of slices: QD outputs of D."""

    in_h: Any
    in_w: Any
    in_d: Any = None
    D: Any = None
    QD: Any = None


class DepthwiseGradWeightTile(NamedTuple):
    """Constants of a launch; the tile as in the drawing, of vectors of VEC channels.

    M, REST     outputs of an input channel, and the remaining rows
    FULL        whether all blocks of channels are full
    FIRST, END  the columns of x that are inside the image for every set
    """

    M: int
    ACC: Any
    REST: int
    VEC: int
    ROWS: int
    TAPS: int
    COLUMNS: int
    FULL: bool
    FIRST: int
    END: int
    BLOCK_R: int
    BLOCK_P: int
    BLOCK_C: int


@triton.jit
def add_tile(
    b_sums, p_x, p_dy, i_row, o_p, o_c, first, sizes,
    taps: tl.constexpr, depth: tl.constexpr, down: tl.constexpr, across: tl.constexpr, tile: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the sums plus the products of rows i_row to i_row + BLOCK_R, which must exist.

    The rows of x are down.UNIT apart: output row b and tap r read row b STEP + r TAP; columns are analogous.
    """
    ROWS: tl.constexpr = tile.ROWS
    TAPS: tl.constexpr = tile.TAPS
    COLUMNS: tl.constexpr = tile.COLUMNS
    STEP: tl.constexpr = down.STEP
    TAP: tl.constexpr = down.TAP
    READ_COLUMNS: tl.constexpr = across.COUNT
    PAIRS = sizes.vectors * tile.VEC
    CHANNELS = PAIRS // tile.M
    OUT = PAIRS // taps.C
    o_in = o_c // tile.M
    o_out = o_c // taps.C
    m_p = o_p < sizes.sets
    n = (o_p // (sizes.QW // COLUMNS)).to(tl.int64)
    q_w = o_p % (sizes.QW // COLUMNS) * COLUMNS
    x_w = first.in_w + q_w * taps.IN_STEP_W
    x_h = first.in_h + i_row * taps.IN_STEP_H
    n_x = n
    m_x = m_p
    if depth is not None:
        d = first.in_d + o_p // (sizes.QW // COLUMNS) % first.QD * depth.IN_STEP_D
        m_x = m_p & (d >= 0) & (d < first.D)
        n_x = n // first.QD * first.D + d
    o_x = ((n_x * sizes.H * sizes.W + x_w) * CHANNELS)[:, None] + o_in[None, :]
    o_dy = ((n * sizes.QH * sizes.QW + q_w) * OUT)[:, None] + o_out[None, :]
    m_dy = m_p[:, None]
    m_x = m_x[:, None]
    if not tile.FULL:
        m_dy = m_dy & (o_c < PAIRS)[None, :]
        m_x = m_x & (o_c < PAIRS)[None, :]
    # One unsigned comparison for row and column: negative columns become very large.
    o_ws = ()
    for v in tl.static_range(READ_COLUMNS):
        o_ws += (tl.where(m_x, (x_w + v * across.UNIT)[:, None], -1).to(tl.uint32, bitcast=True),)
    b_dys = ()
    for k in tl.static_range((BLOCK_R - 1) * STEP + (ROWS - 1) * TAP + 1):
        if k % STEP == 0 and k // STEP < BLOCK_R:
            for v in tl.static_range(COLUMNS):
                p_row = p_dy + ((i_row + k // STEP) * sizes.QW + v) * OUT
                b_dys += (tl.load(p_row + o_dy, mask=m_dy, other=0.0).to(tile.ACC),)  # [BLOCK_P, BLOCK_C]
        h = x_h + k * down.UNIT
        inside = (h >= 0) & (h < sizes.H)
        end = tl.where(inside, sizes.W, 0).to(tl.uint32, bitcast=True)
        m_row = m_x & inside
        b_xs = ()
        for v in tl.static_range(READ_COLUMNS):
            m_v = m_row
            if v < tile.FIRST or v >= tile.END:
                m_v = o_ws[v] < end
            p_row = p_x + (h * sizes.W + v * across.UNIT) * CHANNELS
            b_xs += (tl.load(p_row + o_x, mask=m_v, other=0.0).to(tile.ACC),)  # [BLOCK_P, BLOCK_C]
        b_next = ()
        for s in tl.static_range(TAPS):
            for r in tl.static_range(ROWS):
                b_sum = b_sums[s * ROWS + r]
                if (k >= r * TAP) and (k - r * TAP) % STEP == 0 and (k - r * TAP) // STEP < BLOCK_R:
                    for v in tl.static_range(COLUMNS):
                        b_x = b_xs[v * across.STEP + s * across.TAP]
                        b_sum += b_x * b_dys[(k - r * TAP) // STEP * COLUMNS + v]
                b_next += (b_sum,)
        b_sums = b_next
    return b_sums


@triton.jit
def conv_depthwise_grad_weight_kernel(
    p_dy, p_x, p_partial, sizes, first,
    taps: tl.constexpr, depth: tl.constexpr, down: tl.constexpr, across: tl.constexpr, tile: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write partial [shares, OUT, (JD *) JH * JW, C]: the sums over a share of the tiles and of the REST rows."""
    wait(EARLY)
    BLOCK_R: tl.constexpr = tile.BLOCK_R
    BLOCK_P: tl.constexpr = tile.BLOCK_P
    BLOCK_C: tl.constexpr = tile.BLOCK_C
    ROWS: tl.constexpr = tile.ROWS
    TAPS: tl.constexpr = tile.TAPS
    C: tl.constexpr = taps.C
    J: tl.constexpr = taps.JH * taps.JW
    tiles_s: tl.constexpr = (taps.JW + TAPS - 1) // TAPS
    i_part = tl.program_id(0)
    PAIRS = sizes.vectors * tile.VEC
    tiles_c = tl.cdiv(PAIRS, BLOCK_C)
    i_s = i_part // tiles_c % tiles_s * TAPS
    i_r = i_part // (tiles_c * tiles_s) * ROWS
    all_taps = J
    in_d = first.in_d
    if depth is not None:
        tiles_r: tl.constexpr = (taps.JH + ROWS - 1) // ROWS
        i_q = i_part // (tiles_c * tiles_s * tiles_r)
        i_r = i_part // (tiles_c * tiles_s) % tiles_r * ROWS
        in_d += i_q * depth.IN_TAP_D
        p_partial += i_q * (J * C)
        all_taps = depth.JD * J
    i_c = i_part % tiles_c * BLOCK_C
    o_c = i_c + tl.arange(0, BLOCK_C)
    if tile.FULL:
        # The last block is full, too: it overlaps the previous one, which stores the shared channels.
        o_c = tl.where(i_c + BLOCK_C > PAIRS, PAIRS - BLOCK_C, i_c) + tl.arange(0, BLOCK_C)
    in_w = first.in_w + i_s * taps.IN_TAP_W
    in_h = first.in_h + i_r * taps.IN_TAP_H
    # Taps without any input inside the image have no tiles.
    inside = (in_h + (sizes.QH - 1) * taps.IN_STEP_H + (ROWS - 1) * taps.IN_TAP_H >= 0) & (in_h < sizes.H)
    tiles = tl.where(inside, sizes.tiles, 0)
    rest = tl.where(inside, sizes.rest, 0)
    first = FirstInput(in_h, in_w, in_d, first.D, first.QD)
    b_sums = ()
    for _ in tl.static_range(ROWS * TAPS):
        b_sums += (tl.zeros((BLOCK_P, BLOCK_C), dtype=tile.ACC),)
    full_tiles = sizes.QH // BLOCK_R
    i_first = tl.program_id(1) * sizes.share
    for i_tile in range(i_first, tl.minimum(i_first + sizes.share, tiles)):
        o_p = i_tile // full_tiles * BLOCK_P + tl.arange(0, BLOCK_P)
        b_sums = add_tile(
            b_sums, p_x, p_dy, i_tile % full_tiles * BLOCK_R, o_p, o_c, first, sizes,
            taps, depth, down, across, tile, BLOCK_R,
        )  # fmt: skip
    if tile.REST > 0:
        i_first = tl.program_id(1) * sizes.share_rest
        for i_tile in range(i_first, tl.minimum(i_first + sizes.share_rest, rest)):
            o_p = i_tile * BLOCK_P + tl.arange(0, BLOCK_P)
            b_sums = add_tile(
                b_sums, p_x, p_dy, sizes.QH - tile.REST, o_p, o_c, first, sizes,
                taps, depth, down, across, tile, tile.REST,
            )  # fmt: skip
    p_partial += tl.program_id(1).to(tl.int64) * PAIRS * all_taps + (o_c // C).to(tl.int64) * (all_taps * C)
    p_partial += o_c % C
    for s in tl.static_range(TAPS):
        for r in tl.static_range(ROWS):
            b_sum = tl.sum(b_sums[s * ROWS + r], axis=0)
            m_sum = (o_c < PAIRS) & (o_c >= i_c) & (i_r + r < taps.JH) & (i_s + s < taps.JW)
            o_tap = ((i_r + r) * taps.JW + i_s + s) * C
            tl.store(p_partial + o_tap, b_sum.to(p_partial.dtype.element_ty), mask=m_sum)


@triton.jit
def conv_depthwise_sum_kernel(
    p_partial, p_dw, shares, total, EARLY: tl.constexpr, ACC: tl.constexpr, SHARES: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Write dw [total], the sum of partial [shares, total]: SHARES accumulators, added at the end."""
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


def able(problem: Problem) -> bool | Unsupported:
    if problem.C > 1 and problem.M > 1:
        return Unsupported("several channels to several channels")
    return depthwise.fits(problem)


def estimate(problem: Problem) -> float:
    return narrow_grad_weight.estimate(problem)


def prepare(problem: Problem, depth: narrow.Depth | None = None) -> Shares:
    """Prepare the launches; with a depth, images are slices of volumes."""
    (H, W), (QH, QW) = narrow.image_sizes(problem, problem.geometry[:2])
    cut = narrow_grad_weight.cut(problem)
    shape, first = problem.shape, FirstInput(problem.at.down.in_start, problem.at.across.in_start)
    if depth is not None:
        cut = cut._replace(parts=cut.parts * depth.kernel)
        shape = shape[0], depth.kernel, *shape[1:]
        first = first._replace(in_d=depth.phase.in_start, D=depth.size, QD=depth.phase.count)
    down, across = cut.taps
    share, shares = cut.in_shares(problem.processors)
    pairs, acc = problem.groups * problem.M * problem.C, launch.acc(problem.dtype)
    vec = narrow.vector(pairs, problem)
    sizes = DepthwiseGradWeightSizes(
        problem.N * (QW // cut.columns), H, W, QH, QW, pairs // vec, cut.tiles, share, cut.rest,
        launch.cdiv(cut.rest, shares),
    )  # fmt: skip
    first_column, end = narrow.always_inside(problem.geometry.w, W, QW, cut.columns, across)
    tile = DepthwiseGradWeightTile(
        problem.M, acc, QH % cut.rows, vec, down, across, cut.columns, pairs >= cut.tile["BLOCK_C"], first_column, end,
        cut.rows, cut.tile["BLOCK_P"], cut.tile["BLOCK_C"],
    )  # fmt: skip
    product = launch.Prepared(
        conv_depthwise_grad_weight_kernel, (cut.parts, shares), (sizes, first),
        {
            "taps": Taps.of(problem), "depth": None if depth is None else depth.constants,
            "down": narrow.overlap(problem.geometry.h, cut.rows, down),
            "across": narrow.overlap(problem.geometry.w, cut.columns, across), "tile": tile,
            **dependent_launch.options(cut.parts * shares, problem.target), **cut.tile.launch_options,
        },
    )  # fmt: skip
    total, outputs = math.prod(shape), cut.tile["OUTPUTS"]
    grid = launch.cdiv(total, outputs)
    shares_sum = launch.Prepared(
        conv_depthwise_sum_kernel, (grid,), (shares, total),
        {
            "ACC": acc, "SHARES": min(MOST_SHARES, triton.next_power_of_2(shares)), "OUTPUTS": outputs,
            **dependent_launch.options(grid, problem.target), "num_warps": 4,
        },
    )  # fmt: skip
    return Shares(product, shares, shape, shares_sum)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)
