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
from minidl.kernels.conv.pixel_boxes import concat_pair_box, images_box, pairs_box, shape_of_box, stores_boxes
from minidl.kernels.conv.problem import CORRELATIONS, NO_BOXES, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Outputs, Taps, Weights
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
    TURN           whether d_w is [groups * C, taps * M]
    STORE_BOX      whether the descriptor d_y stores the box; otherwise d_y is None, and p_y points to y
    PAIRS          whether outputs are pairs of neighbouring pixels and d_x has an axis for the two (`paired_box`)
    PART           channels of one half of a `ConcatPair`, 0 for one tensor
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
    TURN: bool
    STORE_BOX: bool
    PAIRS: bool
    PART: int
    ACC: Any
    PRECISION: str


@triton.jit
def finish_box(
    b_acc, p_bias, p_scale, d_y, n, h, w, m, M, epilogue: tl.constexpr, tile: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Apply the epilogue to a block [pixels, channels from m on] and store it by the descriptor of y, in PIECES."""
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
def load_box(d_x, swapped, n, x_h, x_w, c, tile: tl.constexpr):
    """Return the inputs [BLOCK_K, BLOCK_N] of a box at (n, x_h, x_w), channels c.

    The halves of a pair are exchanged if `swapped`; pixels of a pair then share the channel axis, as a descriptor has
    at most five axes.
    """
    if tile.PART:
        half = c // tile.PART
        at_c = c - half * tile.PART
        if tile.PAIRS:
            b_box = d_x.load([half ^ swapped, n, x_h, x_w >> 1, (x_w & 1) * tile.PART + at_c])
        else:
            b_box = d_x.load([half ^ swapped, n, x_h, x_w, at_c])
    elif tile.PAIRS:
        b_box = d_x.load([n, x_h, x_w >> 1, x_w & 1, c])
    else:
        b_box = d_x.load([n, x_h, x_w, c])
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    return tl.reshape(b_box, (BLOCK_N, BLOCK_K)).T


@triton.jit
def conv_box_tile(
    i_tile, d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, swapped, outputs, weights,
    taps: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M channels of a box of outputs."""
    JW: tl.constexpr = taps.JW
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    PRECISION: tl.constexpr = tile.PRECISION
    M = outputs.M
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(outputs.QW, tile.TILE_W)
    tiles_h = tl.cdiv(outputs.QH, tile.TILE_H)
    m = i_tile % tiles_m * BLOCK_M
    i_group = i_tile // tiles_m % outputs.GROUPS
    i_box = i_tile // (tiles_m * outputs.GROUPS)
    q_w = i_box % tiles_w * tile.TILE_W
    q_h = i_box // tiles_w % tiles_h * tile.TILE_H
    n = i_box // (tiles_w * tiles_h) * tile.TILE_N
    o_w = weights.start + m if tile.TURN else 0 * m
    c = i_group * taps.C
    j_w = 0
    x_h = outputs.in_h + q_h
    x_w = outputs.in_w + q_w * (2 if tile.PAIRS else 1)
    # Distance in columns of w to the next tap in its row, and to the tap below.
    step_w = weights.tap_w if tile.TURN else taps.C
    step_h = weights.tap_h if tile.TURN else JW * taps.C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    for _ in range(taps.JH * JW * (taps.C // BLOCK_K)):
        # [BLOCK_M, BLOCK_K]
        b_w = d_w.load([c, o_w]).T if tile.TURN else d_w.load([i_group * M + m, o_w])
        b_x = load_box(d_x, swapped, n, x_h, x_w, c, tile)  # [BLOCK_K, BLOCK_N]
        b_acc = float8.product(b_w, b_x, b_acc, tile.ACC, PRECISION)
        # Taps are the inner loop, so that concurrent programs share inputs in L2.
        j_w += 1
        row = j_w == JW
        x_w += taps.IN_TAP_W - tl.where(row, JW * taps.IN_TAP_W, 0)
        x_h += tl.where(row, taps.IN_TAP_H, 0)
        o_w += step_w + tl.where(row, step_h - JW * step_w, 0)
        every = x_h == outputs.in_h + q_h + taps.JH * taps.IN_TAP_H
        x_h -= tl.where(every, taps.JH * taps.IN_TAP_H, 0)
        o_w -= tl.where(every, taps.JH * step_h - (0 if tile.TURN else BLOCK_K), 0)
        c += tl.where(every, BLOCK_K, 0)
        j_w = tl.where(row, 0, j_w)
    if tile.STORE_BOX:
        finish_box(b_acc.T, p_bias, p_scale, d_y, n, q_h, q_w, m, M, epilogue, tile, tile.PIECES)
        return
    o_p = tl.arange(0, BLOCK_N)
    o_n = n + o_p // (tile.TILE_H * tile.TILE_W)
    o_h = q_h + o_p // tile.TILE_W % tile.TILE_H
    o_w = q_w + o_p % tile.TILE_W
    m_row = (o_n < outputs.N) & (o_h < outputs.QH) & (o_w < outputs.QW)
    o_row = o_n.to(tl.int64) * outputs.OH + outputs.out_h + o_h * taps.OUT_STEP_H
    o_row = o_row * outputs.OW + outputs.out_w + o_w * taps.OUT_STEP_W
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
    h, v = problem.at.h, problem.at.v
    return (
        (problem.pool is None or Unsupported("a pool"))
        and ((problem.C % 32 == 0 and problem.groups * problem.C * problem.dtype.itemsize % 16 == 0)
             or Unsupported("input channels that are not a multiple of 32"))
        and (h.in_step == v.in_step == 1 or Unsupported("a stride, or outputs without taps"))
        and ((problem.x_boxes and problem.w_boxes) or NO_BOXES)
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """Estimate microseconds, including the pixels of boxes that lie outside an image."""
    return costs.at_least(problem, microseconds(problem, _tile(problem)))


def prepare(problem: Problem, pairs: bool = False) -> launch.Prepared:
    """Prepare the launch; with `pairs`, outputs of the problem are pairs of pixels and inputs single pixels."""
    h, v = problem.at.h, problem.at.v
    (H, W), (OH, OW) = problem.read, problem.written
    N, M, C, groups = problem.N, problem.M, problem.C, problem.groups
    chosen = _tile(problem)
    options = chosen.launch_options
    block = min(chosen["BLOCK_K"], C & -C)  # boxes end where a group's channels end
    box = shape_of_box(N, h.count, v.count, chosen["BLOCK_N"])
    pieces = chosen["PIECES"]
    if problem.beside and chosen.num_warps == 8:
        pieces = SMALL_PIECES
    elif problem.beside and chosen.num_warps == 4 and chosen["BLOCK_M"] > LEAST:
        pieces = max(SMALL_PIECES, pieces)  # forced tiles; `_tile` chooses none such
    tiles = launch.cdiv(M, chosen["BLOCK_M"]) * groups
    tiles *= math.prod(launch.cdiv(size, extent) for size, extent in zip((N, h.count, v.count), box, strict=True))
    programs = chosen["PER_PROCESSOR"] * problem.processors
    persistent = tiles > programs > 0  # persistent programs of one tile each start later than others
    if persistent and problem.added and chosen["PER_PROCESSOR"] == 1 and problem.taps * C == block:
        # With a single step the loop over tiles also prefetches the added tensor, into shared memory.
        options["num_stages"] = min(chosen.num_stages, 3)
    stores_y = stores_boxes(problem)
    tile = chosen.record(
        BoxTile, BLOCK_K=block, TILE_N=box[0], TILE_H=box[1], TILE_W=box[2], PIECES=pieces,
        PER_PROCESSOR=chosen["PER_PROCESSOR"] * persistent, FLATTEN=chosen["FLATTEN"] * persistent,
        TURN=problem.in_place, STORE_BOX=stores_y, PAIRS=pairs, PART=problem.part, **problem.constants,
    )  # fmt: skip
    piece = max(tile.BLOCK_M // pieces, 16 // problem.result.itemsize)
    descriptors = (
        concat_pair_box(N, H, W, C, [*box, block], pairs)
        if problem.concat_pair
        else pairs_box(N, H, W, C, [*box, 1, block])
        if pairs
        else images_box(N, H, W, groups * C, [*box, block], problem.pitches),
        batch_tiled.weights(problem, tile.TURN, block, tile.BLOCK_M),
        images_box(N, OH, OW, M, [*box, piece]) if stores_y else None,
    )
    grid = programs if persistent else tiles
    scalars = Outputs.of(problem), Weights.of(problem), tiles, grid
    meta = {"taps": Taps.of(problem), "epilogue": problem.epilogue, "tile": tile, **options}
    return launch.Prepared(conv_box_kernel, (grid,), scalars, meta, descriptors)


def run(prepared: launch.Prepared, t: Tensors) -> None:
    y_descriptor = None if prepared.boxes[2] is None else t.y
    prepared.run(t.x, t.w, y_descriptor, t.bias, t.scale, t.y, t.z, t.swapped)


def reads_concat_pair(problem: Problem) -> bool:
    """Return whether every block of channels lies in one half."""
    block = min(_tile(problem)["BLOCK_K"], problem.C & -problem.C)
    return problem.groups == 1 and not problem.pitches and problem.part % block == 0


def _tile(problem: Problem) -> launch.Tile:
    h, v, C = problem.at.h, problem.at.v, problem.C
    tiles = problem.tiles("conv_box", M=problem.M, N=problem.images * h.count * v.count, K=C & -C)
    if len(tiles) == 1:
        return tiles[0]
    # Four warps lack registers for two results of a large tile.
    fitting = [tile for tile in tiles if not problem.beside or tile.num_warps == 8 or tile["BLOCK_M"] <= LEAST]
    return min(fitting, key=lambda tile: microseconds(problem, tile))


def microseconds(problem: Problem, tile: launch.Tile | None = None) -> float:
    """Return the microseconds with a tile, by default the best one."""
    tile = tile or _tile(problem)
    sizes = problem.images, problem.at.h.count, problem.at.v.count
    box = shape_of_box(*sizes, tile["BLOCK_N"])
    boxes = math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))
    block = min(tile["BLOCK_K"], problem.C & -problem.C)
    tiles = boxes * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    steps = tile_throughput.steps(problem, problem.taps * problem.C / block, block, boxes=True)
    throughput = tile_throughput.of_boxes(problem, tile)
    return costs.microseconds(problem, costs.Work(tiles, steps, throughput, "box"))
