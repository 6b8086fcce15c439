"""The weight gradient in the "depthwise" form: an input channel has M outputs, or an output channel C inputs.

    dw[o, j, c] = sum over images and pixels q of dy[n, q, o] x[n, at(q, j), i],    i = o // M * C + c

A program loops over a share of the tiles (BLOCK_R rows of BLOCK_P sets of COLUMNS pixels, of all images, and BLOCK_C
channels) with an accumulator for each tap of TAPS columns. Within a tile it proceeds down the rows of x and loads each
value of x once for all taps and pixels of a set. Remaining rows are separate tiles. The pixels of a tile, then the
shares, are added at the end in a fixed order.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import depthwise, narrow, narrow_grad_weight
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "depthwise"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = (narrow_grad_weight.FAMILY,)
MOST_SHARES = 64  # shares added at a time


@triton.jit
def add_tile(
    b_sums, p_x, p_dy, i_row, o_p, m_p, m_c, o_in, o_out, H, W, QH, QW, OUT, CHANNELS, in_h, in_w, D, QD, in_d,
    JD: tl.constexpr, IN_STEP_D: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, UNIT_H: tl.constexpr, UNIT_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, TAP_H: tl.constexpr, TAP_W: tl.constexpr, ACC: tl.constexpr,
    FULL: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr,
    JH: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums plus the products of rows i_row to i_row + BLOCK_R, which must exist.

    The rows of x are UNIT_H apart: output row b and tap r read row b STEP_H + r TAP_H; columns are analogous.
    """
    n = (o_p // (QW // COLUMNS)).to(tl.int64)
    q_w = o_p % (QW // COLUMNS) * COLUMNS
    x_w = in_w + q_w * IN_STEP_W
    x_h = in_h + i_row * IN_STEP_H
    n_x = n
    m_x = m_p
    if JD > 0:
        d = in_d + o_p // (QW // COLUMNS) % QD * IN_STEP_D
        m_x = m_p & (d >= 0) & (d < D)
        n_x = n // QD * D + d
    o_x = ((n_x * H * W + x_w) * CHANNELS)[:, None] + o_in[None, :]
    o_dy = ((n * QH * QW + q_w) * OUT)[:, None] + o_out[None, :]
    m_dy = m_p[:, None]
    m_x = m_x[:, None]
    if not FULL:
        m_dy = m_dy & m_c[None, :]
        m_x = m_x & m_c[None, :]
    # One unsigned comparison for row and column: negative columns become very large.
    o_ws = ()
    for v in tl.static_range((COLUMNS - 1) * STEP_W + (TAPS - 1) * TAP_W + 1):
        o_ws += (tl.where(m_x, (x_w + v * UNIT_W)[:, None], -1).to(tl.uint32, bitcast=True),)
    b_dys = ()
    for k in tl.static_range((BLOCK_R - 1) * STEP_H + (JH - 1) * TAP_H + 1):
        if k % STEP_H == 0 and k // STEP_H < BLOCK_R:
            for v in tl.static_range(COLUMNS):
                p_row = p_dy + ((i_row + k // STEP_H) * QW + v) * OUT
                b_dys += (tl.load(p_row + o_dy, mask=m_dy, other=0.0).to(ACC),)  # [BLOCK_P, BLOCK_C]
        h = x_h + k * UNIT_H
        inside = (h >= 0) & (h < H)
        end = tl.where(inside, W, 0).to(tl.uint32, bitcast=True)
        m_row = m_x & inside
        b_xs = ()
        for v in tl.static_range((COLUMNS - 1) * STEP_W + (TAPS - 1) * TAP_W + 1):
            m_v = m_row
            if v < FIRST or v >= END:
                m_v = o_ws[v] < end
            p_row = p_x + (h * W + v * UNIT_W) * CHANNELS
            b_xs += (tl.load(p_row + o_x, mask=m_v, other=0.0).to(ACC),)  # [BLOCK_P, BLOCK_C]
        b_next = ()
        for s in tl.static_range(TAPS):
            for r in tl.static_range(JH):
                b_sum = b_sums[s * JH + r]
                if k >= r * TAP_H and (k - r * TAP_H) % STEP_H == 0 and (k - r * TAP_H) // STEP_H < BLOCK_R:
                    for v in tl.static_range(COLUMNS):
                        b_sum += b_xs[v * STEP_W + s * TAP_W] * b_dys[(k - r * TAP_H) // STEP_H * COLUMNS + v]
                b_next += (b_sum,)
        b_sums = b_next
    return b_sums


@triton.jit
def conv_depthwise_grad_weight_kernel(
    p_dy, p_x, p_partial, sets, H, W, QH, QW, vectors, in_h, in_w, D, QD, in_d, tiles, share, rest, share_rest,
    JD: tl.constexpr, IN_STEP_D: tl.constexpr, IN_TAP_D: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    UNIT_H: tl.constexpr, STEP_H: tl.constexpr, TAP_H: tl.constexpr,
    UNIT_W: tl.constexpr, STEP_W: tl.constexpr, TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write partial [shares, OUT, (JD *) JH * JW, C]: the sums over a share of the tiles and of the REST rows."""
    wait(EARLY)
    PAIRS = vectors * VEC
    CHANNELS = PAIRS // M
    OUT = PAIRS // C
    tiles_c = tl.cdiv(PAIRS, BLOCK_C)
    tiles_s: tl.constexpr = (JW + TAPS - 1) // TAPS
    i_part = tl.program_id(0)
    i_s = i_part // tiles_c % tiles_s * TAPS
    i_r = i_part // (tiles_c * tiles_s) * ROWS
    taps = JH * JW
    if JD > 0:
        tiles_r: tl.constexpr = (JH + ROWS - 1) // ROWS
        i_q = i_part // (tiles_c * tiles_s * tiles_r)
        i_r = i_part // (tiles_c * tiles_s) % tiles_r * ROWS
        in_d += i_q * IN_TAP_D
        p_partial += i_q * (JH * JW * C)
        taps = JD * JH * JW
    i_c = i_part % tiles_c * BLOCK_C
    o_c = i_c + tl.arange(0, BLOCK_C)
    if FULL:
        # The last block is full, too: it overlaps the previous one, which stores the shared channels.
        o_c = tl.where(i_c + BLOCK_C > PAIRS, PAIRS - BLOCK_C, i_c) + tl.arange(0, BLOCK_C)
    m_c = o_c < PAIRS
    o_in = o_c
    if M > 1:
        o_in = o_c // M
    o_out = o_c
    if C > 1:
        o_out = o_c // C
    in_w += i_s * IN_TAP_W
    in_h += i_r * IN_TAP_H
    # Taps without any input inside the image have no tiles.
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
            b_sums, p_x, p_dy, i_row, o_p, o_p < sets, m_c, o_in, o_out, H, W, QH, QW, OUT, CHANNELS, in_h, in_w,
            D, QD, in_d, JD, IN_STEP_D, IN_STEP_H, IN_STEP_W, UNIT_H, UNIT_W, STEP_H, STEP_W, TAP_H, TAP_W, ACC, FULL,
            FIRST, END, ROWS, TAPS, BLOCK_R, COLUMNS,
        )  # fmt: skip
    if REST > 0:
        first = tl.program_id(1) * share_rest
        for i_tile in range(first, tl.minimum(first + share_rest, rest)):
            o_p = i_tile * BLOCK_P + tl.arange(0, BLOCK_P)
            b_sums = add_tile(
                b_sums, p_x, p_dy, QH - REST, o_p, o_p < sets, m_c, o_in, o_out, H, W, QH, QW, OUT, CHANNELS, in_h,
                in_w, D, QD, in_d, JD, IN_STEP_D, IN_STEP_H, IN_STEP_W, UNIT_H, UNIT_W, STEP_H, STEP_W, TAP_H, TAP_W,
                ACC, FULL, FIRST, END, ROWS, TAPS, REST, COLUMNS,
            )  # fmt: skip
    p_partial += tl.program_id(1).to(tl.int64) * PAIRS * taps + o_out.to(tl.int64) * (taps * C)
    if C > 1:
        p_partial += o_c % C
    for s in tl.static_range(TAPS):
        for r in tl.static_range(ROWS):
            b_sum = tl.sum(b_sums[s * ROWS + r], axis=0)
            m_sum = m_c & (o_c >= i_c) & (i_r + r < JH) & (i_s + s < JW)
            tl.store(p_partial + ((i_r + r) * JW + i_s + s) * C, b_sum.to(p_partial.dtype.element_ty), mask=m_sum)


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


programs = narrow_grad_weight.programs


def prepare(problem: Problem, depth: narrow.Depth | None = None) -> Shares:
    """Prepare the launches; with a depth, images are slices of volumes."""
    h, v = problem.at.h, problem.at.v
    (H, W), (QH, QW) = narrow.image_sizes(problem, problem.geometry[:2])
    cut = narrow_grad_weight.cut(problem)
    shape, depth_sizes, constants = problem.shape, (0, 0, 0), {"JD": 0, "IN_STEP_D": 0, "IN_TAP_D": 0}
    if depth is not None:
        cut = cut._replace(parts=cut.parts * depth.kernel)
        shape = shape[0], depth.kernel, *shape[1:]
        depth_sizes = depth.size, depth.phase.count, depth.phase.in_start
        constants = {name: depth.constants[name] for name in constants}
    tile, (down, across), rows, columns, parts, tiles, rest = cut
    options = tile.options
    del options["SUMS"], options["BLOCK_W"], options["PER_PROCESSOR"]
    outputs = options.pop("OUTPUTS")
    share, shares = cut.in_shares(problem.processors)
    pairs = problem.groups * problem.M * problem.C
    vec = narrow.vector(pairs, problem)
    scalars = (
        problem.N * (QW // columns), H, W, QH, QW, pairs // vec, h.in_start, v.in_start, *depth_sizes, tiles, share,
        rest, launch.cdiv(rest, shares),
    )  # fmt: skip
    meta = {
        **problem.taps_read, "M": problem.M, "ACC": launch.acc(problem.dtype), "REST": QH % rows, "VEC": vec,
        **dependent_launch.options(parts * shares, problem.target), **options, **constants,
        **narrow.overlap_constants("H", problem.geometry.h, rows, down),
        **narrow.overlap_constants("W", problem.geometry.w, columns, across),
        "ROWS": down, "TAPS": across, "BLOCK_R": rows, "COLUMNS": columns, "FULL": pairs >= tile["BLOCK_C"],
    }  # fmt: skip
    product = launch.Prepared(conv_depthwise_grad_weight_kernel, (parts, shares), scalars, meta)
    first, end = narrow.always_inside(problem.geometry.w, W, QW, columns, across)
    meta |= {"FIRST": first, "END": end}
    total = math.prod(shape)
    grid = launch.cdiv(total, outputs)
    blocks = {"SHARES": min(MOST_SHARES, triton.next_power_of_2(shares)), "OUTPUTS": outputs}
    shares_sum = launch.Prepared(
        conv_depthwise_sum_kernel, (grid,), (shares, total),
        {"ACC": launch.acc(problem.dtype), **dependent_launch.options(grid, problem.target), **blocks, "num_warps": 4},
    )  # fmt: skip
    return Shares(product, shares, shape, shares_sum)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)
