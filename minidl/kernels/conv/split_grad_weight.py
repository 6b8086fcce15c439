"""The "split" weight gradient: float32 in tf32 parts, of which channels are rows and pixels the K of a GEMM.

    dy  [parts, M, places]            x  [parts, columns of taps * C, places]
    m | .. dy(place) .. |   x   (j_w, c) | .. x(place, shifted by j_w; + j_h rows) .. |^T   ->   partial[share, m, j, c]

Tensor cores read tf32 along K alone, so the copies that split (`split`) also put the pixels of a channel side by side,
in places that are the same for x and dy. Boxes begin at a multiple of 16 bytes: x is copied once for each column of
taps, and a row of taps is a distance of whole rows, whose lengths are multiples of 4. An image has as many rows of
zeros as taps reach beyond it. With a stride s down, x is also copied once for each remainder of its rows modulo s.
Such zeros are multiplied by x, so a non-finite pixel of the first or last rows or columns gives NaN for its channel.

Copies of more than `split.MOST` bytes are made in slices of the images, one after another. The precision "tf32" has one
part, the nearest tf32 numbers. With a single row of taps dy is read where it lies, as blocks of pixels that are split
and transposed in registers; in a product of pixels (1x1) with more input than output channels x is, and the result is
transposed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, split, tile_throughput
from minidl.kernels.conv.prepared import Copy, Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, NO_BOXES, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Taps
from minidl.kernels.conv.split import Places, not_finite, split_product
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "split"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_split_grad_weight", "conv_split_across")

LEAST = 8  # minimum steps of a share
COPIES = 2**16 - 1  # the second axis of a grid
# Copies of other numbers of channels than multiples of LANES, or of groups, take SCATTERED times as long (measured on
# an H200: 2.1 to 3.5); the launches that wait for one another take LAUNCHES us more.
LANES, SCATTERED, LAUNCHES = 32, 2.5, 4.0
HALF = 2048  # accumulators of a warp that take half of its registers
FAR = tl.constexpr(2**16)  # strides added to a tap's distance, so that its division rounds down


class Grid(NamedTuple):
    """M output channels in each of GROUPS groups; rows of `width` places; `steps` of a share; the first row `in_h` of
    taps, and the remainders of rows."""

    M: int
    GROUPS: int
    width: int
    steps: int
    in_h: int
    remainders: int


class SplitTile(NamedTuple):
    """BLOCK_M output channels x BLOCK_N columns of taps and channels, in steps of BLOCK_K places; PARTS of operands.

    IN_PLACE  whether dy is [places, GROUPS * M]
    TRANSPOSED    whether dy and x are exchanged, so that the result is transposed
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    ACC: Any
    PARTS: Any
    IN_PLACE: Any
    TRANSPOSED: Any


@triton.jit
def _load_rows(d_dy, o_m, lo_m, o_k, tile: tl.constexpr):
    """Return hi and lo of dy [BLOCK_M, BLOCK_K]."""
    if tile.IN_PLACE:
        b_hi, b_lo = split.split(d_dy.load([o_k, o_m]))
        return b_hi.T, b_lo.T
    else:
        b_hi = d_dy.load([o_m, o_k])
        return b_hi, b_hi if tile.PARTS == 1 else d_dy.load([lo_m + o_m, o_k])


@triton.jit
def _add_product(b_acc, b_dy, b_x, one, tile: tl.constexpr):
    """Return the accumulator [M, N] plus dy [M, K] times x [K, N].

    Triton would leave a product of registers in flight while the next block is loaded to these registers. It does not
    if the product is another tensor than the accumulator, which a factor of `one`, unknown to it, ensures.
    """
    if tile.IN_PLACE:
        return b_acc + tl.dot(b_dy, b_x, input_precision="tf32", out_dtype=tile.ACC) * one
    else:
        return tl.dot(b_dy, b_x, b_acc, input_precision="tf32", out_dtype=tile.ACC)


@triton.jit
def conv_split_grad_weight_kernel(
    d_dy, d_x, p_partial, grid, taps: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Write partial [shares, groups * M, JH * JW * C]."""
    wait(EARLY)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    JH: tl.constexpr = taps.JH
    N: tl.constexpr = taps.JW * taps.C
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEP: tl.constexpr = taps.IN_STEP_H
    M, GROUPS, width, steps, in_h, remainders = grid
    tiles_m = tl.cdiv(M, BLOCK_M)
    j = tl.program_id(0) % JH
    n = tl.program_id(0) // JH % tiles_n * BLOCK_N
    m = tl.program_id(0) // (JH * tiles_n) % tiles_m * BLOCK_M
    i_group = tl.program_id(0) // (JH * tiles_n * tiles_m) % GROUPS
    i_share = tl.program_id(0) // (JH * tiles_n * tiles_m * GROUPS)
    tap = in_h + j * taps.IN_TAP_H + FAR * STEP
    k = i_share * steps * BLOCK_K
    k_x = k + (tap // STEP - FAR) * width
    o_m = i_group * M + m
    o_n = (tap % STEP * GROUPS + i_group) * N + n
    lo_m = GROUPS * M
    lo_n = remainders * GROUPS * N
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    one = (steps > 0).to(tile.ACC)
    for i in range(steps):
        b_dy, b_dy_lo = _load_rows(d_dy, o_m, lo_m, k + i * BLOCK_K, tile)  # [BLOCK_M, BLOCK_K]
        b_x = d_x.load([o_n, k_x + i * BLOCK_K]).T  # [BLOCK_K, BLOCK_N]
        if tile.PARTS == 1:
            b_acc = _add_product(b_acc, b_dy, b_x, one, tile)
        else:
            b_x_lo = d_x.load([lo_n + o_n, k_x + i * BLOCK_K]).T
            b_acc = split_product(b_dy, b_dy_lo, b_x, b_x_lo, b_acc, tile.ACC)
    if tile.PARTS == 2:
        b_hi = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        for i in range(steps * not_finite(b_acc)):
            b_dy, _ = _load_rows(d_dy, o_m, lo_m, k + i * BLOCK_K, tile)
            b_x = d_x.load([o_n, k_x + i * BLOCK_K]).T
            b_hi = _add_product(b_hi, b_dy, b_x, one, tile)
        b_acc = tl.where(tl.abs(b_acc) < split.INFINITY, b_acc, b_hi)
    r_m = m + tl.arange(0, BLOCK_M)
    r_n = n + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (JH * N)
    if tile.TRANSPOSED:
        p_partial += (i_group * N + r_n).to(tl.int64)[None, :] * M + r_m[:, None]
    else:
        p_partial += (i_group * M + r_m).to(tl.int64)[:, None] * (JH * N) + j * N + r_n[None, :]
    tl.store(p_partial, b_acc, mask=(r_m < M)[:, None] & (r_n < N)[None, :])


class Prepared(NamedTuple):
    """The copies of dy (None in place) and of x to parts, and the product, for each of `slices` of the images."""

    dy: Copy | None
    x: Copy
    product: Shares
    slices: int
    transposed: bool


def able(problem: Problem) -> bool | Unsupported:
    part, _, _ = _part(problem)
    x, dy = _places(part)
    return (
        split.able(part, _written(part))
        and (problem.boxes(x.pitch) or NO_BOXES)
        and (dy is not None or problem.boxes(problem.groups * part.M) or NO_BOXES)
        and (x.remainders * x.columns <= COPIES or Unsupported("more copies than a grid has rows"))
    )


def estimate(problem: Problem) -> float:
    problem, slices, _ = _part(problem)
    written, (OH, OW) = _written(problem), problem.written
    in_place = 0 if _places(problem)[1] else problem.N * OH * OW * problem.groups * problem.M * problem.dtype.itemsize
    copies = costs.copy_time(problem, written) + costs.copy_time(problem, costs.moved(problem) - in_place)
    odd = problem.groups > 1 or problem.C % LANES or problem.M % LANES
    copies = copies * (SCATTERED if odd else 1.0) + LAUNCHES
    return slices * (copies + costs.launch_time(problem, _cut(problem).microseconds, written + in_place))


def prepare(problem: Problem) -> Prepared:
    shape = problem.shape
    problem, slices, transposed = _part(problem)
    x, dy = _places(problem)
    tile, shares, parts = tile_of(problem), _cut(problem).shares, split.parts(problem)
    steps = launch.cdiv(launch.cdiv(x.length, tile["BLOCK_K"]), shares)
    grid = Grid(problem.M, problem.groups, x.width, steps, problem.at.down.in_start - x.first_h, x.remainders)
    record = tile.record(
        SplitTile, ACC=launch.acc(problem.dtype), PARTS=parts, IN_PLACE=dy is None, TRANSPOSED=transposed
    )  # fmt: skip
    meta = {
        "taps": Taps.of(problem), "tile": record, **dependent_launch.options(target=problem.target),
        **tile.launch_options,
    }  # fmt: skip
    channels = problem.groups * problem.M
    boxes = (
        Box((x.length, channels), (channels, 1), (tile["BLOCK_K"], tile["BLOCK_M"]))
        if dy is None
        else Box((parts * dy.rows, dy.length), (dy.pitch, 1), (tile["BLOCK_M"], tile["BLOCK_K"])),
        Box((parts * x.rows, x.length), (x.pitch, 1), (tile["BLOCK_N"], tile["BLOCK_K"])),
    )
    product = launch.Prepared(conv_split_grad_weight_kernel, (_tiles(problem, tile) * shares,), (grid,), meta, boxes)
    of_dy = dy and split.prepare_across(problem, dy)
    return Prepared(of_dy, split.prepare_across(problem, x), Shares(product, shares, shape), slices, transposed)


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    of_dy, of_x, product, slices, transposed = prepared
    partial = product.partial(t.w.dtype, t.w.device, slices)
    operands = (t.x, t.w) if transposed else (t.w, t.x)
    for dy, x, part in zip(*(each.chunk(slices) for each in (*operands, partial)), strict=True):
        product.launch.run(dy if of_dy is None else of_dy.run(dy), of_x.run(x), part)
    return product.total(partial, t.w.dtype)


def tile_of(problem: Problem) -> launch.Tile:
    """Return the fastest of the tiles for a problem, by estimate."""
    columns = len(problem.at.across.taps) * problem.C
    rows = max(problem.M, tile_throughput.WGMMA_ROWS)
    tiles = problem.tiles("conv_split_grad_weight", M=rows, N=max(columns, tile_throughput.LEAST_COLUMNS))
    if _places(problem)[1] is None:  # two accumulators
        fits = tuple(tile for tile in tiles if tile["BLOCK_M"] * tile["BLOCK_N"] <= HALF * tile.num_warps)
        tiles = fits or tiles[-1:]
    return min(tiles, key=lambda tile: _shares(problem, tile).microseconds)


def _tiles(problem: Problem, tile: launch.Tile) -> int:
    columns = len(problem.at.across.taps) * problem.C
    tiles = launch.cdiv(problem.M, tile["BLOCK_M"]) * launch.cdiv(columns, tile["BLOCK_N"])
    return tiles * len(problem.at.down.taps) * problem.groups


def _cut(problem: Problem) -> costs.Split:
    """Return the fastest number of shares of the fastest tile."""
    return _shares(problem, tile_of(problem))


def _shares(problem: Problem, tile: launch.Tile) -> costs.Split:
    """Return the fastest number of shares of a tile."""
    blocks = launch.cdiv(_places(problem)[0].length, tile["BLOCK_K"])
    steps = tile_throughput.steps(problem, blocks, tile["BLOCK_K"], boxes=True)
    values = problem.groups * problem.M * problem.taps * problem.C
    throughput = tile_throughput.of_split(problem, tile)
    work = costs.Work(_tiles(problem, tile), steps, throughput, "weight", values=values)
    return costs.in_shares(problem, work, blocks, LEAST)


def _part(problem: Problem) -> tuple[Problem, int, bool]:
    """Return the problem of as many images as have copies of at most `split.MOST` bytes, the number of such slices, and
    whether dy and x are exchanged."""
    across, down = problem.at.across, problem.at.down
    alike = problem.taps == 1 and problem.read == problem.written and across.in_step == down.in_step == 1
    transposed = alike and problem.C > problem.M
    if transposed:
        problem = problem._replace(C=problem.M, M=problem.C)
    least = launch.cdiv(_written(problem), split.MOST)
    slices = next((n for n in range(least, problem.N + 1) if problem.N % n == 0), problem.N) if least > 1 else 1
    return problem._replace(N=problem.N // max(1, slices)), slices, transposed


def _written(problem: Problem) -> int:
    """Return the bytes of the copies."""
    x, dy = _places(problem)
    return split.parts(problem) * problem.dtype.itemsize * (x.rows + (dy.rows if dy else 0)) * x.pitch


def _places(problem: Problem) -> tuple[Places, Places | None]:
    """Return the places of x and of dy; None for dy in place."""
    down, across = problem.at.down, problem.at.across
    (H, W), (OH, OW) = problem.read, problem.written
    alone = len(down.taps) == 1
    # A single row of taps has one remainder, in which x begins.
    first, remainders = (down.in_start % down.in_step, 1) if alone else (0, down.in_step)
    starts = [down.in_start - first + j * down.in_tap for j in range(len(down.taps))]
    above, below = min(starts) // down.in_step, max(starts) // down.in_step
    height = max(launch.cdiv(H - first, down.in_step) - min(above, 0), OH + max(below, 0))
    width = launch.cdiv(OW, 4) * 4
    in_place = alone and problem.boxes(problem.groups * problem.M, problem.aligned)
    if in_place:  # the places are the pixels of dy
        first, height, width = down.in_start, OH, OW
    pitch = launch.cdiv(problem.N * height * width, 4) * 4
    x = Places(
        problem.N, H, W, problem.groups, problem.C, height, width, first, down.in_step, remainders,
        across.in_start, across.in_step, across.in_tap, len(across.taps), pitch,
    )  # fmt: skip
    dy = Places(problem.N, OH, OW, problem.groups, problem.M, height, width, 0, 1, 1, 0, 1, 1, 1, pitch)
    return x, None if in_place else dy
