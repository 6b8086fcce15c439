"""The "unfolded" weight gradient: one product whose columns are taps and channels, and whose K are the pixels.

    dw[m, (j, c)] = sum over pixels of dy[n, q, m] x[n, at(q, j), c]

              j, c                     j, c       A tile has BLOCK_M rows and BLOCK_N columns, in units of adjacent
           q | x  [ ]                             channels of one tap: with 64 channels 256 columns are four taps.
    m | dy ->| |  [ ]        =    m | dw [ ]      As in `pixel_grad_weight` patches are never written to memory.

SWAPPED: with a stride of 1 the pixels may be those of x and the taps those of dy. This helps if dy has few channels,
which would leave rows of a tile empty and are cheaper to read for each of 9 taps.

Complete rounds of tiles are summed by one program per tile and written directly. The remaining tiles are split into
shares, so that they fill a round, too; the shares are added in order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.problem import GRAD_WEIGHT, INT32_LIMIT, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Taps
from minidl.kernels.conv.unfolded_tiles import UnfoldedTile, positions, tile_at
from minidl.kernels.division import fast_divide, reciprocal
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "unfolded"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_unfolded_grad_weight",)
LEAST = 4  # blocks of a share
ROWS = 64  # that a tensor core multiplies at least
FEWEST = 16  # channels, on both sides
TOGETHER = tl.constexpr(16)  # shares that are read at once
VALUES = 512  # values that a program adds
INSIDE = 0.88  # time of loads without masks
ADDING = 3.0  # us of a launch, and of adding TOGETHER shares


@triton.jit(do_not_specialize=["QH", "QW", "full_tiles", "rest"])
def conv_unfolded_grad_weight_kernel(
    p_dy, p_x, p_dw, p_partial, QH, QW, full_tiles, rest, pixels, share, image, start, reciprocals,
    taps: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum a tile in each of the first `full_tiles` programs; in others a share of the pixels of the `rest` tiles.

    partial [shares, rest, BLOCK_M, BLOCK_N]
    """
    wait(EARLY)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    H, W = image
    in_h, in_w = start
    by_image, by_row = reciprocals
    i_rest = tl.program_id(0) - full_tiles
    is_full = i_rest < 0
    i_tile = tl.where(is_full, tl.program_id(0), full_tiles + i_rest % rest)
    first = tl.where(is_full, 0, i_rest // rest * share)
    end = tl.where(is_full, pixels, tl.minimum(first + share, pixels))
    i_group, m, j, o_c = tile_at(i_tile, taps, tile)
    o_m = m + tl.arange(0, BLOCK_M)
    m_m = o_m < tile.M
    m_c = (j < taps.JH * taps.JW) & (o_c < taps.C)
    t_h = j // taps.JW * taps.IN_TAP_H
    t_w = j % taps.JW * taps.IN_TAP_W
    o_tap = (t_h * W + t_w) * (tile.GROUPS * taps.C) + o_c
    p_dy += i_group * tile.M
    p_x += i_group * taps.C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    tl.assume(first < end)
    for i_first in range(first, end, tile.BLOCK_K):
        o_row = i_first + tl.arange(0, tile.BLOCK_K)
        m_row = o_row < end
        n = fast_divide(o_row, QH * QW, by_image, tl.int32)
        o = o_row - n * (QH * QW)
        q_h = fast_divide(o, QW, by_row, tl.int32)
        x_h = in_h + q_h * taps.IN_STEP_H
        x_w = in_w + (o - q_h * QW) * taps.IN_STEP_W
        o_x = ((n * H + x_h) * W + x_w) * (tile.GROUPS * taps.C)
        o_dy = o_row * (tile.GROUPS * tile.M)
        m_dy = m_row[:, None] & m_m[None, :]
        b_dy = tl.load(p_dy + o_dy[:, None] + o_m[None, :], mask=m_dy, other=0.0)  # [BLOCK_K, BLOCK_M]
        m_x = m_row[:, None] & m_c[None, :]
        if not tile.INSIDE:
            h = x_h[:, None] + t_h[None, :]
            w = x_w[:, None] + t_w[None, :]
            m_x &= (h >= 0) & (h < H) & (w >= 0) & (w < W)
        b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_K, BLOCK_N]
        b_acc = tl.dot(b_dy.T, b_x, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
    if is_full:
        o_w, m_w = positions(i_group, o_m, j, o_c, taps, tile)
        tl.store(p_dw + o_w, b_acc.to(p_dw.dtype.element_ty), mask=m_w)
    else:
        p_partial += tl.cast(i_rest, tl.int64) * (BLOCK_M * BLOCK_N)
        o = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(p_partial + o, b_acc.to(p_partial.dtype.element_ty))


@triton.jit(do_not_specialize=["full_tiles", "rest"])
def conv_unfolded_sum_kernel(
    p_partial, p_dw, full_tiles, rest, shares, taps: tl.constexpr, tile: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add the shares of ROWS rows of a remaining tile, in order."""
    wait(EARLY)
    PIECES: tl.constexpr = tile.BLOCK_M // ROWS
    i_rest = tl.program_id(0) // PIECES
    row = tl.program_id(0) % PIECES * ROWS
    i_group, m, j, o_c = tile_at(full_tiles + i_rest, taps, tile)
    o = (row + tl.arange(0, ROWS))[:, None] * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)[None, :]
    p_partial += tl.cast(i_rest, tl.int64) * (tile.BLOCK_M * tile.BLOCK_N)
    step = tl.cast(rest, tl.int64) * (tile.BLOCK_M * tile.BLOCK_N)
    b_total = tl.load(p_partial + o)  # [ROWS, BLOCK_N]
    for i_first in range(1, shares, TOGETHER):
        for i in tl.static_range(TOGETHER):
            p_partial += step
            m_share = tl.full(o.shape, 1, tl.int1) & (i_first + i < shares)
            b_total += tl.load(p_partial + o, mask=m_share, other=0.0)
    o_w, m_w = positions(i_group, m + row + tl.arange(0, ROWS), j, o_c, taps, tile)
    tl.store(p_dw + o_w, b_total.to(p_dw.dtype.element_ty), mask=m_w)


def able(problem: Problem) -> bool | Unsupported:
    values = max(_side(problem, problem.read, problem.C), _side(problem, problem.written, problem.M))
    return (
        (problem.target == "interpreted" or (problem.dtype.itemsize == 2 and launch.boxes(problem.target))
             or Unsupported("not 16 bits on sm_90"))
        and (problem.taps > 1 or Unsupported("one tap, which `product` computes"))
        and (min(problem.C, problem.M) >= FEWEST or Unsupported(f"fewer than {FEWEST} channels of a group"))
        and (all(channels * problem.dtype.itemsize % 16 == 0 for channels in (problem.C, problem.M))
             or Unsupported("channels of a group whose bytes are not a multiple of 16"))
        and (0 < values < INT32_LIMIT or Unsupported("no pixels, or more values than 32 bits count"))
        and (math.prod(problem.shape) < INT32_LIMIT or Unsupported("more weights than 32 bits count"))
    )  # fmt: skip


def _side(problem: Problem, size: tuple[int, int], channels: int) -> int:
    """Return the values of x or dy, including offsets of taps outside it."""
    down, across = problem.geometry.h, problem.geometry.w
    reach = (down.kernel * down.dilation + 1) * (size[1] + across.kernel * across.dilation)
    return (problem.N * size[0] * size[1] + reach) * problem.groups * channels if problem.N else 0


def estimate(problem: Problem) -> float:
    return costs.launch_time(problem, cut(problem).microseconds)


class Cut(NamedTuple):
    """The decomposition: M rows, C channels of columns, adjacent channels of a `unit`, and the number of pixels.

    Of all `tiles` the first `unsplit` are not split; each of the others has `shares` of `share` pixels."""

    tile: launch.Tile
    swapped: bool
    M: int
    C: int
    unit: int
    pixels: int
    tiles: int
    unsplit: int
    shares: int
    share: int
    microseconds: float


def cut(problem: Problem) -> Cut:
    """Return the fastest decomposition over all tiles, and with a stride of 1 both orders of x and dy."""
    options = []
    for swapped, M, C, image in sides(problem):
        pixels, columns = problem.N * image, problem.taps * launch.cdiv(C, FEWEST) * FEWEST
        tiles = problem.tiles(FAMILIES[0], M=max(M, ROWS), N=max(columns, ROWS), K=pixels)
        options += [_cut(problem, tile, swapped, M, C, pixels) for tile in tiles]
    return min(options, key=lambda at: at.microseconds)


def sides(problem: Problem) -> list[tuple[bool, int, int, int]]:
    """Return the possible (swapped, rows, channels of columns, pixels of an image)."""
    down, across = problem.at.down, problem.at.across
    options = [(False, problem.M, problem.C, down.count * across.count)]
    if down.in_step == across.in_step == 1:
        options.append((True, problem.C, problem.M, math.prod(problem.read)))
    return options


def _cut(problem: Problem, tile: launch.Tile, swapped: bool, M: int, C: int, pixels: int) -> Cut:
    columns = tile["BLOCK_N"]
    units = [unit for unit in (16, 32, 64, 128, 256) if unit <= columns]
    unit = min(reversed(units), key=lambda unit: launch.cdiv(problem.taps * launch.cdiv(C, unit), columns // unit))
    tiles = problem.groups * launch.cdiv(M, tile["BLOCK_M"])
    tiles *= launch.cdiv(problem.taps * launch.cdiv(C, unit), columns // unit)
    block, blocks = tile["BLOCK_K"], launch.cdiv(pixels, tile["BLOCK_K"])
    loads = INSIDE if not swapped and _inside(problem) else 1.0
    unsplit, count, time = _split(problem, tile, tiles, blocks, loads)
    share = launch.cdiv(blocks, count)
    return Cut(tile, swapped, M, C, unit, pixels, tiles, unsplit, launch.cdiv(blocks, share), share * block, time)


def _inside(problem: Problem) -> bool:
    return problem.at.down.all_inside(problem.read[0]) and problem.at.across.all_inside(problem.read[1])


def _split(problem: Problem, tile: launch.Tile, tiles: int, blocks: int, loads: float) -> tuple[int, int, float]:
    """Return (tiles that are not split, shares of the others, us)."""
    most = max(1, blocks // LEAST)
    rows, columns = tile["BLOCK_M"], tile["BLOCK_N"]
    slots, step = tile_throughput.of(problem, rows, columns, f"weight unfolded {rows}x{columns}", loads=loads)
    device, fixed = problem.processors * slots, costs.constants(problem).steps.rounds["unfolded"]

    def rounds(programs: int, blocks: int) -> float:
        steps = tile_throughput.steps(problem, blocks, tile["BLOCK_K"])
        return launch.cdiv(programs, device) * (fixed + steps * step)

    options = [(tiles, 1, rounds(tiles, blocks))]
    for unsplit in {0, tiles // device * device} - {tiles}:
        rest = tiles - unsplit
        for target in {min(most, n * device // rest) for n in range(1, costs.MOST_ROUNDS)} - {0, 1}:
            share = launch.cdiv(blocks, target)
            count = launch.cdiv(blocks, share)
            time = rounds(unsplit, blocks) + rounds(rest * count, share)
            time += costs.shares_time(problem, count, rest * rows * columns)
            options.append((unsplit, count, time + ADDING * (1 + launch.cdiv(count - 1, TOGETHER.value)) / 2))
    return min(options, key=lambda at: (at[2], at[1]))


class Prepared(NamedTuple):
    """The product, the shape of partial sums, the launch that adds them or None, and the gradient's shape."""

    product: launch.Prepared
    partial: tuple[int, ...]
    sum: launch.Prepared | None
    shape: tuple[int, ...]
    swapped: bool


def prepare(problem: Problem) -> Prepared:
    down, across, groups, at = problem.at.down, problem.at.across, problem.groups, cut(problem)
    (H, W), (QH, QW) = (problem.written, problem.read) if at.swapped else (problem.read, problem.written)
    sign = -1 if at.swapped else 1
    rest = at.tiles - at.unsplit
    tile = at.tile.record(
        UnfoldedTile, GROUPS=groups, M=at.M, UNIT=at.unit, INSIDE=not at.swapped and _inside(problem),
        SWAPPED=at.swapped, **problem.constants,
    )  # fmt: skip
    taps = Taps.of(problem)._replace(C=at.C, IN_TAP_H=sign * down.in_tap, IN_TAP_W=sign * across.in_tap)
    meta = {"taps": taps, "tile": tile, **dependent_launch.options(target=problem.target)}
    scalars = QH, QW, at.unsplit, max(rest, 1)
    start = sign * down.in_start, sign * across.in_start
    pixels = at.pixels, at.share, (H, W), start, (reciprocal(QH * QW), reciprocal(QW))
    product = launch.Prepared(
        conv_unfolded_grad_weight_kernel, (at.unsplit + rest * at.shares,),
        (*scalars, *pixels), {**meta, **at.tile.launch_options},
    )  # fmt: skip
    rows = max(1, min(VALUES // tile.BLOCK_N, tile.BLOCK_M))
    total_sum = launch.Prepared(
        conv_unfolded_sum_kernel, (rest * tile.BLOCK_M // rows,), (*scalars[2:], at.shares), {**meta, "ROWS": rows}
    )
    partial = at.shares, rest, tile.BLOCK_M, tile.BLOCK_N
    return Prepared(product, partial, total_sum if rest else None, problem.shape, at.swapped)


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    dy, x = (t.x, t.w) if prepared.swapped else (t.w, t.x)
    dw = torch.empty(prepared.shape, dtype=t.x.dtype, device=t.x.device)
    partial = dw if prepared.sum is None else dw.new_empty(prepared.partial, dtype=launch.acc_torch(dw.dtype))
    prepared.product.run(dy, x, dw, partial)
    if prepared.sum is not None:
        prepared.sum.run(partial, dw)
    return dw
