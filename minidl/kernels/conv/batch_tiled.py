"""The "batch" form: an implicit GEMM whose row tile is BLOCK_M images at one output pixel.

In x as a matrix [N, H * W * channels], the inputs of consecutive images at one tap and a block of channels are one
descriptor block (TMA on sm_90). So padding only bounds the loops over taps, without masks, multiplications by zero or
index arithmetic per element; stride and dilation only change which blocks are read.

         x: pixels of an image              w                        y: pixels of an image
    n  | .. at(q, j) c .. |   x    (j, c) [ BLOCK_N ]   ->   n  | .. q m .. |      BLOCK_M images n, one pixel q
    n+1| ..   [ ]      .. |                                  n+1| ..  [ ]   .. |

The channels per group must be a multiple of 32; batches should have 64 images or more. A block ends at a multiple of
BLOCK_K channels, so that values of neighbouring pixels are never multiplied.

Persistent programs may run double tiles, of twice the output channels (DOUBLE), which read a quarter less for the same
products.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels import float8
from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.problem import (
    CORRELATIONS,
    NO_BOXES,
    TRANSPOSED,
    Problem,
    Tensors,
    Unsupported,
)
from minidl.kernels.conv.records import Outputs, Taps, Weights
from minidl.kernels.epilogue import finish
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "batch"
LARGE = 2**20  # bytes of an image from which on a run touches many pages of memory
RUN = 64  # images of a run; with fewer its rows are partly empty
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_batch", "conv_batch_narrow")


class Inputs(NamedTuple):
    """H x W pixels of x, and the taps of an output along each axis, which `batch_back` computes from a tile's index."""

    H: Any
    W: Any
    taps_h: Any
    taps_w: Any


class Schedule(NamedTuple):
    """The numbers of all tiles, of double tiles, each of which replaces two, and of programs."""

    tiles: int
    double_tiles: int
    programs: int


class BatchTile(NamedTuple):
    """BLOCK_M images and BLOCK_N channels, in steps of BLOCK_K input channels.

    PIECES         parts in which the channels are stored
    W_IN_PLACE     whether d_w is [groups * C, taps * M], else [groups * M, taps * C], whose blocks are transposed
    ALL_TAPS       whether d_w also has taps of other phases, as it has with W_IN_PLACE
    PER_PROCESSOR  persistent programs per multiprocessor, 0 for one program per tile
    FLATTEN        whether the loop over tiles and the loop of a tile are one
    DOUBLE         whether the first tiles are double, with weights from d_w_double
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    PIECES: int
    W_IN_PLACE: bool
    ACC: Any
    PRECISION: str
    ALL_TAPS: bool = False
    PER_PROCESSOR: int = 0
    FLATTEN: bool = False
    DOUBLE: bool = False


@triton.jit
def inside(start, size, STEP: tl.constexpr, COUNT):
    """Return (first, number) of the j < COUNT for which start + j * STEP is in [0, size)."""
    first = tl.cdiv(tl.maximum(-start, 0), STEP)
    last = tl.minimum(COUNT, tl.cdiv(tl.maximum(size - start, 0), STEP))
    return first, tl.maximum(last - first, 0)


@triton.jit
def conv_batch_tile(
    i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z, inputs, outputs, weights,
    taps: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M images at one output pixel."""
    C: tl.constexpr = taps.C
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    W_IN_PLACE: tl.constexpr = tile.W_IN_PLACE
    PRECISION: tl.constexpr = tile.PRECISION
    IN_TAP_H: tl.constexpr = taps.IN_TAP_H
    IN_TAP_W: tl.constexpr = taps.IN_TAP_W
    H = inputs.H
    W = inputs.W
    M = outputs.M
    tiles_n = tl.cdiv(M, BLOCK_N)
    runs = tl.cdiv(outputs.N, BLOCK_M)
    m = i_tile % tiles_n * BLOCK_N
    i_group = i_tile // tiles_n % outputs.GROUPS
    n = i_tile // (tiles_n * outputs.GROUPS) % runs * BLOCK_M
    q = i_tile // (tiles_n * outputs.GROUPS * runs)
    q_w = q % outputs.QW
    q_h = q // outputs.QW
    start_h = outputs.in_h + q_h * taps.IN_STEP_H
    start_w = outputs.in_w + q_w * taps.IN_STEP_W
    j_h, taps_h = inside(start_h, H, IN_TAP_H, inputs.taps_h)
    j_w, taps_w = inside(start_w, W, IN_TAP_W, inputs.taps_w)
    channels = outputs.GROUPS * C
    nowhere = H * W * channels
    steps = taps_h * taps_w * (C // BLOCK_K)
    o_x = ((start_h + j_h * IN_TAP_H) * W + start_w + j_w * IN_TAP_W) * channels + i_group * C
    # Without a tap inside, run one step that reads zeros.
    o_x = tl.where(steps == 0, nowhere, o_x)
    steps = tl.maximum(steps, 1)
    if W_IN_PLACE:
        o_tap = weights.start + j_h * weights.tap_h + j_w * weights.tap_w + m
    elif tile.ALL_TAPS:
        o_tap = weights.start + j_h * weights.tap_h + j_w * weights.tap_w
    else:
        o_tap = (j_h * inputs.taps_w + j_w) * C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    # o_tap is a column of w; distances to the next tap in its row, and to the tap below.
    step_w = weights.tap_w if W_IN_PLACE or tile.ALL_TAPS else C
    step_h = weights.tap_h if W_IN_PLACE or tile.ALL_TAPS else inputs.taps_w * C
    i_h = 0
    i_w = 0
    c = i_group * C
    tl.assume(steps > 0)
    for _ in range(steps):
        # [BLOCK_K, BLOCK_N]
        b_w = d_w.load([c, o_tap]) if W_IN_PLACE else d_w.load([i_group * M + m, o_tap]).T
        b_x = d_x.load([n, o_x])  # [BLOCK_M, BLOCK_K]
        b_acc = float8.product(b_x, b_w, b_acc, tile.ACC, PRECISION)
        # The next tap; at the end of a row back and one row down; after the last tap back to the first one, with the
        # next channels. Taps are the inner loop, so that concurrent programs share inputs in L2.
        i_w += 1
        row_ends = i_w == taps_w
        i_w = tl.where(row_ends, 0, i_w)
        i_h += tl.where(row_ends, 1, 0)
        taps_end = i_h == taps_h
        i_h = tl.where(taps_end, 0, i_h)
        o_x += IN_TAP_W * channels + tl.where(row_ends, (IN_TAP_H * W - taps_w * IN_TAP_W) * channels, 0)
        o_x += tl.where(taps_end, BLOCK_K - taps_h * IN_TAP_H * W * channels, 0)
        o_tap += step_w + tl.where(row_ends, step_h - taps_w * step_w, 0)
        o_tap += tl.where(taps_end, (0 if W_IN_PLACE else BLOCK_K) - taps_h * step_h, 0)
        c += tl.where(taps_end, BLOCK_K, 0)
    o_n = n + tl.arange(0, BLOCK_M)
    o_row = o_n.to(tl.int64) * (outputs.OH * outputs.OW)
    o_row = o_row + (outputs.out_h + q_h * taps.OUT_STEP_H) * outputs.OW + outputs.out_w + q_w * taps.OUT_STEP_W
    m_row = o_n < outputs.N
    finish(b_acc, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, outputs.GROUPS, epilogue, PIECES)


@triton.jit
def conv_batch_kernel(
    d_x, d_w, d_w_double, p_bias, p_scale, p_y, p_z, H, W, outputs, weights, schedule,
    taps: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Run one tile per program, or persistent programs, which with DOUBLE begin with double tiles.

    Channel tiles vary fastest and come in whole pairs, so double tile i covers the tiles 2 i and 2 i + 1.
    """
    wait(EARLY)
    inputs = Inputs(H, W, taps.JH, taps.JW)
    if tile.PER_PROCESSOR == 0:
        conv_batch_tile(
            tl.program_id(0), d_x, d_w, p_bias, p_scale, p_y, p_z, inputs, outputs, weights,
            taps, epilogue, tile, tile.BLOCK_N, tile.PIECES,
        )  # fmt: skip
    else:
        if tile.DOUBLE:
            for i_tile in tl.range(tl.program_id(0), schedule.double_tiles, schedule.programs):
                conv_batch_tile(
                    i_tile, d_x, d_w_double, p_bias, p_scale, p_y, p_z, inputs, outputs, weights,
                    taps, epilogue, tile, 2 * tile.BLOCK_N, 2 * tile.PIECES,
                )  # fmt: skip
        first = tl.program_id(0) + 2 * schedule.double_tiles
        for i_tile in tl.range(first, schedule.tiles, schedule.programs, flatten=tile.FLATTEN):
            conv_batch_tile(
                i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z, inputs, outputs, weights,
                taps, epilogue, tile, tile.BLOCK_N, tile.PIECES,
            )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    return (
        (problem.pool is None or Unsupported("a pool"))
        and (problem.C % 32 == 0 or Unsupported("input channels that are not a multiple of 32"))
        and ((problem.x_boxes and problem.w_boxes) or NO_BOXES)
    )


def estimate(problem: Problem) -> float:
    tile = tile_of(problem)
    block = problem.block(tile)
    tiles = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups * launch.cdiv(problem.images, tile["BLOCK_M"])
    tiles *= costs.outputs(problem) // problem.images
    steps = tile_throughput.steps(problem, costs.taps_inside(problem) * problem.C / block, block, boxes=True)
    steps *= costs.constants(problem).steps.pages if problem.image_bytes >= LARGE else 1.0
    work = costs.Work(tiles, steps, tile_throughput.of_runs(problem, tile), "batch")
    short = costs.constants(problem).steps.short if problem.images < RUN else 1.0
    return costs.launch_time(problem, short * costs.microseconds(problem, work))


def prepare(problem: Problem) -> launch.Prepared:
    down, across, (H, W), _ = problem.at
    N, M, C, groups = problem.N, problem.M, problem.C, problem.groups
    chosen = tile_of(problem)
    block_n, per_processor = chosen["BLOCK_N"], chosen["PER_PROCESSOR"]
    tiles = launch.cdiv(M, block_n) * groups * launch.cdiv(N, chosen["BLOCK_M"]) * down.count * across.count
    resident = per_processor * problem.processors
    programs = min(tiles, resident) if resident else tiles
    # Only full rounds of double tiles: single tiles balance the last round.
    doubles = chosen["DOUBLE"] and resident and M % (2 * block_n) == 0
    double_tiles = tiles // 2 // resident * resident if doubles else 0
    tile = chosen.record(
        BatchTile, BLOCK_K=problem.block(chosen), DOUBLE=double_tiles > 0, W_IN_PLACE=problem.in_place,
        **problem.constants,
    )  # fmt: skip
    scalars = H, W, Outputs.of(problem), Weights.of(problem), Schedule(tiles, double_tiles, programs)
    meta = {
        "taps": Taps.of(problem), "epilogue": problem.epilogue, "tile": tile,
        **dependent_launch.options(target=problem.target), **chosen.launch_options,
    }  # fmt: skip
    descriptors = (
        Box.of_rows(N, H * W * groups * C, (tile.BLOCK_M, tile.BLOCK_K)),
        weights(problem, tile.W_IN_PLACE, tile.BLOCK_K, block_n),
        weights(problem, tile.W_IN_PLACE, tile.BLOCK_K, block_n * (2 if tile.DOUBLE else 1)),
    )
    return launch.Prepared(conv_batch_kernel, (programs,), scalars, meta, descriptors)


def tile_of(problem: Problem) -> launch.Tile:
    return family_tile(problem, "conv_batch", costs.outputs(problem) // max(problem.N, 1))


def family_tile(problem: Problem, family: str, pixels: int) -> launch.Tile:
    """Return the tile of a family for images of `pixels` outputs."""
    C = problem.C
    if problem.dtype.itemsize == 2 and C % 64:
        family = "conv_batch_narrow"  # a short K does not hide wide epilogues
    return problem.tile(family, M=problem.images, N=problem.M, K=C & -C, pixels=pixels)


def weights(problem: Problem, in_place: bool, block_k: int, block_n: int, parts: int = 1) -> Box:
    """Return the descriptor of w [groups * M, JH, JW, C] or, with `in_place`, of all weights [groups * C, R, S, M].

    parts: copies of w, one after the other."""
    if in_place:
        row = problem.geometry.h.kernel * problem.geometry.w.kernel * problem.M
        return Box.of_rows(problem.groups * problem.C, row, (block_k, block_n))
    taps = problem.taps if problem.direction != TRANSPOSED else problem.geometry.h.kernel * problem.geometry.w.kernel
    return Box.of_rows(parts * problem.groups * problem.M, taps * problem.C, (block_n, block_k))


def run(prepared: launch.Prepared, t: Tensors) -> None:
    prepared.run(t.x, t.w, t.w, t.bias, t.scale, t.y, t.z)
