"""The "box" form: an implicit GEMM whose column tiles are boxes of neighbouring pixels, read by tensor descriptors.

For one tap and a block of channels, the inputs of TILE_N x TILE_H x TILE_W neighbouring outputs are one descriptor
block of x [N, H, W, channels] (TMA on sm_90), with zeros outside the image:

    w [BLOCK_M, (tap, c)]   x   box of x at tap (r, s), moved by (r, s)    ->   y [BLOCK_M, box of pixels]

The form requires a stride of 1, which every backward phase has, and fills tiles even for small batches. In large images
a box touches few pages of memory, whereas a tile of the batch-tiled form touches one page per image.

The weights are the left operand and the pixels the right one, so the accumulator is [channels, pixels]. (Triton 3.6
miscomputes a left operand that is a reshaped descriptor block.) The zeros outside the image are multiplied by the
weights, so a non-finite weight gives NaN at the border.

A `ConcatPair` is read in place, through one descriptor with an axis for the half, in the order of the joined tensor.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels import float8
from minidl.kernels.activation import activate
from minidl.kernels.conv import batch_tiled, costs, tile_throughput
from minidl.kernels.conv.pixel_boxes import (
    concat_pair_box,
    images_box,
    load_box,
    pairs_box,
    shape_of_box,
    stores_boxes,
)
from minidl.kernels.conv.problem import CORRELATIONS, INT32_LIMIT, NO_BOXES, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Outputs, Taps, Weights
from minidl.kernels.conv.split import INFINITY, not_finite, split_product
from minidl.kernels.epilogue import affine, finish, split_columns
from minidl.runtime import launch

NAME = "box"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_box",)
LEAST = 64  # rows of a tile
SMALL_PIECES = 8  # of a tile whose two results would fill the registers


class BoxTile(NamedTuple):
    """BLOCK_M channels of a box of BLOCK_N = TILE_N x TILE_H x TILE_W pixels, in steps of BLOCK_K input channels.

    PIECES         parts in which the channels are stored
    PER_PROCESSOR  persistent programs per multiprocessor, 0 for one program per tile
    FLATTEN        whether the loop over tiles and the loop of a tile are one
    W_IN_PLACE     whether d_w is [groups * C, taps * M], whose blocks are transposed, else [groups * M, taps * C]
    STORE_BOX      whether the descriptor d_y stores the box; otherwise d_y is None, and p_y points to y
    PAIRS          whether outputs are pairs of neighbouring pixels and d_x has an axis for the two (`paired_box`)
    PART           channels of one half of a `ConcatPair`, 0 for one tensor
    SPLIT          whether x and w are parts, of which lo follow hi (`split_box`)
    INDEX          dtype of offsets in a box of y
    ACC, PRECISION dtype of the sums, and how products are computed
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TILE_N: int
    TILE_H: int
    TILE_W: int
    PIECES: int
    PER_PROCESSOR: int
    FLATTEN: bool
    W_IN_PLACE: bool
    STORE_BOX: bool
    PAIRS: bool
    PART: int
    SPLIT: bool
    INDEX: Any
    ACC: Any
    PRECISION: str


@triton.jit
def finish_box(
    b_acc, p_bias, p_scale, d_y, n, h, w, m, M, epilogue: tl.constexpr, tile: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Apply the epilogue to a block [pixels, channels from m on], as `epilogue.finish`, and store it by the descriptor
    of y, in PIECES."""
    SHAPE: tl.constexpr = (tile.TILE_N, tile.TILE_H, tile.TILE_W, b_acc.shape[1])
    if PIECES == 1:
        b_acc = affine(b_acc, p_bias, p_scale, m, M, 0)
        b_y = float8.stored(activate(b_acc, epilogue.ACT, epilogue.SLOPE), d_y.dtype)
        d_y.store([n, h, w, m], tl.reshape(b_y, SHAPE))
    else:
        b_left, b_right = split_columns(b_acc)
        finish_box(b_left, p_bias, p_scale, d_y, n, h, w, m, M, epilogue, tile, PIECES // 2)
        finish_box(b_right, p_bias, p_scale, d_y, n, h, w, m + b_left.shape[1], M, epilogue, tile, PIECES // 2)


@triton.jit
def box_sum(
    d_x, d_w, swapped, n, q_h, q_w, m, i_group, times, outputs, weights,
    taps: tl.constexpr, tile: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the sum [BLOCK_M, BLOCK_N] of all blocks of K, in two parts with SPLIT; if `times` is 0, zeros."""
    JW: tl.constexpr = taps.JW
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    PRECISION: tl.constexpr = tile.PRECISION
    STEPS: tl.constexpr = taps.JH * JW * (taps.C // BLOCK_K)
    o_tap = weights.start + m if tile.W_IN_PLACE else 0 * m  # a tensor, as a constant cannot change in a loop
    c = i_group * taps.C
    j_w = 0
    x_h = outputs.in_h + q_h
    x_w = outputs.in_w + q_w * (2 if tile.PAIRS else 1)
    # o_tap is a column of w; distances to the next tap in its row, and to the tap below.
    step_w = weights.tap_w if tile.W_IN_PLACE else taps.C
    step_h = weights.tap_h if tile.W_IN_PLACE else JW * taps.C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    for _ in range(STEPS if times is None else STEPS * times):
        # [BLOCK_M, BLOCK_K]
        b_w = d_w.load([c, o_tap]).T if tile.W_IN_PLACE else d_w.load([i_group * outputs.M + m, o_tap])
        b_x = load_box(d_x, swapped, n, x_h, x_w, c, tile)  # [BLOCK_K, BLOCK_N]
        if SPLIT:
            b_w_lo = d_w.load([(outputs.GROUPS + i_group) * outputs.M + m, o_tap])
            b_x_lo = load_box(d_x, swapped, outputs.N + n, x_h, x_w, c, tile)
            b_acc = split_product(b_w, b_w_lo, b_x, b_x_lo, b_acc, tile.ACC)
        else:
            b_acc = float8.product(b_w, b_x, b_acc, tile.ACC, PRECISION)
        # The next tap; at the end of a row back and one row down; after the last tap back to the first one, with the
        # next channels. Taps are the inner loop, so that concurrent programs share inputs in L2.
        j_w += 1
        row_ends = j_w == JW
        x_w += taps.IN_TAP_W - tl.where(row_ends, JW * taps.IN_TAP_W, 0)
        x_h += tl.where(row_ends, taps.IN_TAP_H, 0)
        o_tap += step_w + tl.where(row_ends, step_h - JW * step_w, 0)
        taps_end = x_h == outputs.in_h + q_h + taps.JH * taps.IN_TAP_H
        x_h -= tl.where(taps_end, taps.JH * taps.IN_TAP_H, 0)
        o_tap -= tl.where(taps_end, taps.JH * step_h - (0 if tile.W_IN_PLACE else BLOCK_K), 0)
        c += tl.where(taps_end, BLOCK_K, 0)
        j_w = tl.where(row_ends, 0, j_w)
    return b_acc


@triton.jit
def conv_box_tile(
    i_tile, d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, swapped, outputs, weights,
    taps: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M channels of a box of outputs."""
    M = outputs.M
    tiles_m = tl.cdiv(M, tile.BLOCK_M)
    tiles_w = tl.cdiv(outputs.QW, tile.TILE_W)
    tiles_h = tl.cdiv(outputs.QH, tile.TILE_H)
    m = i_tile % tiles_m * tile.BLOCK_M
    i_group = i_tile // tiles_m % outputs.GROUPS
    i_box = i_tile // (tiles_m * outputs.GROUPS)
    q_w = i_box % tiles_w * tile.TILE_W
    q_h = i_box // tiles_w % tiles_h * tile.TILE_H
    n = i_box // (tiles_w * tiles_h) * tile.TILE_N
    b_acc = box_sum(d_x, d_w, swapped, n, q_h, q_w, m, i_group, None, outputs, weights, taps, tile, tile.SPLIT)
    if tile.SPLIT:
        times = not_finite(b_acc)
        b_hi = box_sum(d_x, d_w, swapped, n, q_h, q_w, m, i_group, times, outputs, weights, taps, tile, False)
        b_acc = tl.where(tl.abs(b_acc) < INFINITY, b_acc, b_hi)
    if tile.STORE_BOX:
        finish_box(b_acc.T, p_bias, p_scale, d_y, n, q_h, q_w, m, M, epilogue, tile, tile.PIECES)
        return
    # Rows of y, counted from the first one of the box.
    i = tl.arange(0, tile.BLOCK_N).to(tile.INDEX)
    i_n = i // (tile.TILE_H * tile.TILE_W)
    i_h = i // tile.TILE_W % tile.TILE_H
    i_w = i % tile.TILE_W
    m_row = (n + i_n < outputs.N) & (q_h + i_h < outputs.QH) & (q_w + i_w < outputs.QW)
    o_row = (i_n * outputs.OH + i_h * taps.OUT_STEP_H) * outputs.OW + i_w * taps.OUT_STEP_W
    first = n.to(tl.int64) * outputs.OH + outputs.out_h + q_h * taps.OUT_STEP_H
    first = (first * outputs.OW + outputs.out_w + q_w * taps.OUT_STEP_W) * (outputs.GROUPS * M)
    p_y += first
    p_z = None if p_z is None else p_z + first
    finish(b_acc.T, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, outputs.GROUPS, epilogue, tile.PIECES)


@triton.jit(do_not_specialize=["swapped"])
def conv_box_kernel(
    d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, swapped, outputs, weights, tiles, programs,
    taps: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Run one tile per program, or persistent programs over all tiles."""
    if tile.PER_PROCESSOR == 0:
        conv_box_tile(
            tl.program_id(0), d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, swapped, outputs, weights, taps, epilogue, tile
        )  # fmt: skip
    else:
        for i_tile in tl.range(tl.program_id(0), tiles, programs, flatten=tile.FLATTEN):
            conv_box_tile(
                i_tile, d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, swapped, outputs, weights, taps, epilogue, tile
            )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    down, across = problem.at.down, problem.at.across
    return (
        (problem.pool is None or Unsupported("a pool"))
        and ((problem.C % 32 == 0 and problem.groups * problem.C * problem.dtype.itemsize % 16 == 0)
             or Unsupported("input channels that are not a multiple of 32"))
        and (down.in_step == across.in_step == 1 or Unsupported("a stride, or outputs without taps"))
        and ((problem.x_boxes and problem.w_boxes) or NO_BOXES)
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """Estimate microseconds, including the pixels of boxes that lie outside an image."""
    return costs.launch_time(problem, microseconds(problem, tile_of(problem)))


def prepare(problem: Problem, pairs: bool = False, split: bool = False) -> launch.Prepared:
    """Prepare the launch; with `pairs`, outputs of the problem are pairs of pixels and inputs single pixels; with
    `split`, x and the weights are in two parts."""
    down, across = problem.at.down, problem.at.across
    (H, W), (OH, OW) = problem.read, problem.written
    N, M, C, groups = problem.N, problem.M, problem.C, problem.groups
    chosen = tile_of(problem, split)
    options = chosen.launch_options
    block = problem.block(chosen)
    box = shape_of_box(N, down.count, across.count, chosen["BLOCK_N"])
    pieces = chosen["PIECES"]
    if problem.beside and chosen.num_warps == 8:
        pieces = SMALL_PIECES
    elif problem.beside and chosen.num_warps == 4 and chosen["BLOCK_M"] > LEAST:
        pieces = max(SMALL_PIECES, pieces)  # forced tiles, and the interpreter's
    tiles = launch.cdiv(M, chosen["BLOCK_M"]) * groups
    tiles *= math.prod(
        launch.cdiv(size, extent) for size, extent in zip((N, down.count, across.count), box, strict=True)
    )
    resident = chosen["PER_PROCESSOR"] * problem.processors
    persistent = tiles > resident > 0  # persistent programs of one tile each start later than others
    if persistent and problem.added and chosen["PER_PROCESSOR"] == 1 and problem.taps * C == block:
        # With a single step the loop over tiles also prefetches the added tensor, into shared memory.
        options["num_stages"] = min(chosen.num_stages, 3)
    stores_y = stores_boxes(problem)
    tile = chosen.record(
        BoxTile, BLOCK_K=block, TILE_N=box[0], TILE_H=box[1], TILE_W=box[2], PIECES=pieces,
        PER_PROCESSOR=chosen["PER_PROCESSOR"] * persistent, FLATTEN=chosen["FLATTEN"] * persistent,
        W_IN_PLACE=problem.in_place, STORE_BOX=stores_y, PAIRS=pairs, PART=problem.part, SPLIT=split,
        INDEX=tl.int32 if box[0] * OH * OW * groups * M < INT32_LIMIT else tl.int64,
        **(problem.constants | ({"PRECISION": "tf32"} if split else {})),
    )  # fmt: skip
    piece = max(tile.BLOCK_M // pieces, 16 // problem.result.itemsize)
    descriptors = (
        concat_pair_box(N, H, W, C, [*box, block], pairs)
        if problem.concat_pair
        else pairs_box(N, H, W, C, [*box, 1, block])
        if pairs
        else images_box((1 + split) * N, H, W, groups * C, [*box, block], problem.pitches),
        batch_tiled.weights(problem, tile.W_IN_PLACE, block, tile.BLOCK_M, parts=1 + split),
        images_box(N, OH, OW, M, [*box, piece]) if stores_y else None,
    )
    grid = resident if persistent else tiles
    scalars = Outputs.of(problem), Weights.of(problem), tiles, grid
    meta = {"taps": Taps.of(problem), "epilogue": problem.epilogue, "tile": tile, **options}
    return launch.Prepared(conv_box_kernel, (grid,), scalars, meta, descriptors)


def run(prepared: launch.Prepared, t: Tensors) -> None:
    y_descriptor = None if prepared.boxes[2] is None else t.y
    prepared.run(t.x, t.w, y_descriptor, t.bias, t.scale, t.y, t.z, t.swapped)


def reads_concat_pair(problem: Problem) -> bool:
    """Return whether every block of channels lies in one half."""
    block = problem.block(tile_of(problem))
    return problem.groups == 1 and not problem.pitches and problem.part % block == 0


def tile_of(problem: Problem, split: bool = False) -> launch.Tile:
    """Return the fastest of the tiles for a problem, by estimate."""
    down, across, C = problem.at.down, problem.at.across, problem.C
    # Parts are multiplied by `wgmma` alone, whose tiles have at least 64 rows.
    family, M = ("conv_split_box", max(problem.M, tile_throughput.WGMMA_ROWS)) if split else ("conv_box", problem.M)
    tiles = problem.tiles(family, M=M, N=problem.images * down.count * across.count, K=C & -C)
    if len(tiles) == 1:
        return tiles[0]
    # Four warps lack registers for two results of a large tile.
    fitting = [tile for tile in tiles if not problem.beside or tile.num_warps == 8 or tile["BLOCK_M"] <= LEAST]
    return min(fitting, key=lambda tile: microseconds(problem, tile, split))


def microseconds(problem: Problem, tile: launch.Tile, split: bool = False) -> float:
    """Return the microseconds of the rounds with a tile; with `split`, of operands in two parts."""
    sizes = problem.images, problem.at.down.count, problem.at.across.count
    box = shape_of_box(*sizes, tile["BLOCK_N"])
    boxes = math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))
    block = problem.block(tile)
    tiles = boxes * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    steps = tile_throughput.steps(problem, problem.taps * problem.C / block, block, boxes=True)
    throughput = tile_throughput.of_split(problem, tile) if split else tile_throughput.of_boxes(problem, tile)
    return costs.microseconds(problem, costs.Work(tiles, steps, throughput, "box"))
