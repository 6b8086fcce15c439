"""The "banded" form for one channel with two rows of outputs per group and the complete band in shared memory.

G neighbouring outputs and the G below them need R + stride rows of `reach` values, which form one K. With 7x7 taps and
G = 10 these are 128: 6.4 values per output in place of 11.2 with one row. 10,000 pictures of 72x72 to 12 channels take
0.54 ms on an H200 in place of 0.70. The band holds that of `bands` twice, the second one `stride` rows lower.

A tile is DOWN pairs of rows, continuing into the next image, each with GP groups; GP is a power of two, and the last
groups may be beyond the row. So only the first row of a tile needs a division.
"""

import functools
import math

import triton
import triton.language as tl

from minidl.kernels import activation
from minidl.kernels.conv import banded, bands, costs, held
from minidl.kernels.conv.bands import padded, store_groups
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import CORRELATIONS, Problem, Tensors, Unsupported
from minidl.kernels.gemm.tiled import split_columns
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "banded"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_two_rows", "conv_band")

MOST_K = 128  # values of a group: a band of 2 * 128 columns takes 64 KiB, so two programs fit on a multiprocessor
MOST_GROUPS = 64  # in a row: a tile has all of them
MOST_DOWN = 2**13  # pairs of rows in a tile


@triton.jit
def place_of(i_tile, pairs, QH: tl.constexpr, GP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (first image, images from it, pair of rows in that) of each row of a tile; the last pair repeats."""
    DOWN: tl.constexpr = BLOCK_M // GP
    PAIRS: tl.constexpr = (QH + 1) // 2
    first = (tl.full((), 0, tl.int64) + i_tile) * DOWN
    down = tl.arange(0, BLOCK_M) // GP
    pair = (first % PAIRS).to(tl.int32) + tl.minimum(down, tl.minimum(pairs - 1 - first, BLOCK_M).to(tl.int32))
    if DOWN <= PAIRS:
        images = (pair >= PAIRS).to(tl.int32)
    else:
        images = pair // PAIRS
    return first // PAIRS, images, pair - images * PAIRS


@triton.jit
def values_of(
    p_x, i_tile, pairs, H, in_h,
    QH: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr,
    W: tl.constexpr, IN_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr, PADDED_H: tl.constexpr,
    KP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the inputs of a tile's groups [BLOCK_M, KP]: R + STEP_H rows of REACH values."""
    # The last group may exceed the image row.
    INSIDE: tl.constexpr = IN_W >= 0 and IN_W + (GROUPS - 1) * G * STEP_W + REACH <= W
    n_first, images, pair = place_of(i_tile, pairs, QH, GP, BLOCK_M)
    g = tl.arange(0, BLOCK_M) % GP
    o_k = tl.arange(0, KP)
    r = o_k // REACH
    o_reach = o_k % REACH
    x_h = in_h + pair * (2 * STEP_H)
    start = IN_W + g * (G * STEP_W)
    o_x = (images * H + x_h) * W + start
    m_x = (g < GROUPS)[:, None] & (r < R + STEP_H)[None, :]
    if PADDED_H:
        h = x_h[:, None] + r[None, :]
        m_x = m_x & (h >= 0) & (h < H)
    if QH % 2 == 1:
        # The last pair has one row; inputs of a second one may be NaN.
        m_x = m_x & ((pair * 2 + 1 < QH)[:, None] | (r < R)[None, :])
    if not INSIDE:
        at = start[:, None] + o_reach[None, :]
        m_x = m_x & (at < W)
        if IN_W < 0:
            m_x = m_x & (at >= 0)
    return tl.load(p_x + n_first * H * W + (o_x[:, None] + (r * W + o_reach)[None, :]), mask=m_x, other=0.0)


@triton.jit
def conv_two_rows_kernel(
    p_x, p_band, p_bias, p_y, pairs, tiles, H, in_h, PROGRAMS,
    QH: tl.constexpr, QW: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr, W: tl.constexpr, IN_W: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, PADDED_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    KP: tl.constexpr, NP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute NP columns for each of the two rows. AHEAD: prefetches the inputs of the next tile."""
    wait(EARLY)
    o_k = tl.arange(0, KP)[:, None]
    o_column = tl.arange(0, 2 * NP)[None, :]
    o_band = o_k - o_column // NP * (STEP_H * REACH)
    m_band = (o_band >= 0) & (o_band < R * REACH)
    b_band = tl.load(p_band + o_band * NP + o_column % NP, mask=m_band, other=0.0)  # [KP, 2 * NP]
    g = tl.arange(0, BLOCK_M) % GP
    down = tl.arange(0, BLOCK_M) // GP
    if AHEAD:
        b_x = values_of(
            p_x, tl.program_id(0), pairs, H, in_h,
            QH, G, GROUPS, GP, R, REACH, W, IN_W, STEP_H, STEP_W, PADDED_H, KP, BLOCK_M,
        )  # fmt: skip
    for i_tile in tl.range(tl.program_id(0), tiles, PROGRAMS, num_stages=1):
        b_read = values_of(
            p_x, tl.minimum(i_tile + PROGRAMS, tiles - 1) if AHEAD else i_tile, pairs, H, in_h,
            QH, G, GROUPS, GP, R, REACH, W, IN_W, STEP_H, STEP_W, PADDED_H, KP, BLOCK_M,
        )  # fmt: skip
        if not AHEAD:
            b_x = b_read
        b_upper, b_lower = split_columns(tl.dot(b_x, b_band, input_precision=PRECISION, out_dtype=ACC))
        n_first, images, pair = place_of(i_tile, pairs, QH, GP, BLOCK_M)
        n = n_first + images
        m_row = ((tl.full((), 0, tl.int64) + i_tile) * (BLOCK_M // GP) + down < pairs) & (g < GROUPS)
        store_groups(
            b_upper, p_bias, None, p_y, None, i_tile, pairs, m_row, n, pair * 2, g,
            QH, QW, G, GROUPS, M, HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, POOL,
        )  # fmt: skip
        store_groups(
            b_lower, p_bias, None, p_y, None, i_tile, pairs, m_row & (pair * 2 + 1 < QH), n, pair * 2 + 1, g,
            QH, QW, G, GROUPS, M, HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, POOL,
        )  # fmt: skip
        if AHEAD:
            b_x = b_read


@functools.lru_cache(maxsize=4096)
def group(M: int, R: int, S: int, step_h: int, step_w: int, width: int) -> tuple[int, int, int, int] | None:
    """Return (G, reach, KP, NP): pixels and values read per row of a group, rows and half the columns of the band.

    They have the lowest cost per row; None if groups of one row are cheaper, or no group has two pixels. Costs are of
    tiles on an H200, in units of 4.5 ns of a multiprocessor: 80 + KP + 4/3 NP here, 200 + 11 R for each of two with one
    row; a third more if groups may start at any value. Groups beyond the row cost two thirds.
    """
    one = bands.band(1, M, S, step_w, width, False)
    best, least = None, math.inf
    if one is not None:
        least = (400 + 22 * R) * launch.cdiv(width, one[0]) * _alignment_factor(one[0] * step_w)
    for NP in (16, 32, 64, 128):
        for G in range(2, min(NP // M, width) + 1):
            reach = (G - 1) * step_w + S
            KP = max(16, triton.next_power_of_2((R + step_h) * reach))
            groups = launch.cdiv(width, G)
            padded_groups = triton.next_power_of_2(groups)
            cost = (80 + KP + 4 / 3 * NP) * (groups + 2 * padded_groups) / 3 * _alignment_factor(G * step_w)
            if cost < least and KP <= MOST_K and padded_groups <= MOST_GROUPS:
                best, least = (G, reach, KP, NP), cost
    return best


def _alignment_factor(step: int) -> float:
    """Return the cost factor of groups `step` values apart; odd ones cannot be read two values at a time."""
    return 4 / 3 if step % 2 else 1.0


def able(problem: Problem) -> bool | Unsupported:
    in_registers = problem.target != "interpreted" and (problem.dtype.itemsize != 2 or problem.target != "sm_90")
    return (
        banded.able(problem)
        and (problem.C == problem.at.h.in_tap == 1 < problem.at.h.count or Unsupported("channels, dilation or one row"))
        and (not in_registers or Unsupported("a band that would need registers"))
        and ((problem.pool is None and not problem.preactivation and not problem.scale)
             or Unsupported("an epilogue with more than bias and activation, too large for the registers"))
        and (problem.at.h.in_step <= len(problem.at.h.taps) or Unsupported("a stride above the kernel height"))
        # 10,000 pictures of 28x28, 5x5 to 32 channels: `held` 0.126 ms, here 0.132.
        and (not held.fills_tiles(problem) or _reaches_out(problem) or Unsupported("full groups, faster in `held`"))
        and (_counted(problem) or Unsupported("images too large for 32-bit offsets"))
        and (_group(problem) is not None or Unsupported("groups of one row are estimated to cost less"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """Estimate microseconds relative to `banded`; 1->12 7x7: 0.54 ms in place of 0.70."""
    return costs.relative(problem, "two rows") * banded.estimate(problem)


def prepare(problem: Problem) -> Product:
    h, v = problem.at.h, problem.at.v
    H, W = problem.read
    G, reach, KP, NP = _group(problem)
    inside = not _reaches_out(problem) and h.count % 2 == 0
    groups = launch.cdiv(v.count, G)
    pairs_of_image = launch.cdiv(h.count, 2)
    pairs = problem.N * pairs_of_image
    GP = triton.next_power_of_2(groups)
    tile = problem.tile("conv_two_rows", M=problem.images * pairs_of_image * GP, K=KP, N=2 * NP)
    block = max(tile["BLOCK_M"], GP)
    tiles = launch.cdiv(pairs, block // GP)
    programs = min(tiles, tile["PER_PROCESSOR"] * problem.processors or tiles)
    meta = {
        "QH": h.count, "QW": v.count, "G": G, "GROUPS": groups, "GP": GP, "M": problem.M, "R": len(h.taps),
        "REACH": reach, "W": W, "IN_W": v.in_start, "STEP_H": h.in_step, "STEP_W": v.in_step, "PADDED_H": not inside,
        # Masks and GELU need the registers of a prefetch.
        "AHEAD": inside and activation.parse(problem.act)[0] in activation.FROM_OUTPUT,
        "KP": KP, "NP": NP, **problem.constants, **dependent_launch.options(target=problem.target), **problem.flags(),
        "BLOCK_M": block, "num_warps": tile.num_warps,
    }  # fmt: skip
    return Product(
        bands.prepare(problem, G, reach, NP),
        launch.Prepared(conv_two_rows_kernel, (programs,), (pairs, tiles, H, h.in_start, programs), meta),
    )


def run(prepared: Product, t: Tensors) -> None:
    prepared.launch.run(t.x, prepared.weights.of(t.w), t.bias, t.y)


def _counted(problem: Problem) -> bool:
    """Return whether 32 bits count the values from a tile's first image to its last."""
    return problem.read[0] * problem.read[1] * (2 + 2 * MOST_DOWN // problem.at.h.count) < 2**31


def _reaches_out(problem: Problem) -> bool:
    """Return whether a tap of some output lies outside the image."""
    return padded(problem.at.h, problem.read[0]) or padded(problem.at.v, problem.read[1])


def _group(problem: Problem) -> tuple[int, int, int, int] | None:
    h, v = problem.at.h, problem.at.v
    return group(problem.M, len(h.taps), len(v.taps), h.in_step, v.in_step, v.count)
