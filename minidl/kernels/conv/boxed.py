"""The "box" form: an implicit GEMM whose column tiles are boxes of neighbouring pixels, read by tensor descriptors.

For one tap and a block of channels, the inputs of TILE_N x TILE_H x TILE_W neighbouring outputs are one descriptor
block of x [N, H, W, channels] (TMA on sm_90), with zeros outside the image. The form requires a stride of 1, which
every backward phase has, and fills tiles even for small batches. In large images a box touches few pages of memory,
whereas a tile of the batch-tiled form touches one page per image.

The weights are the left operand and the pixels the right one, so the accumulator is [channels, pixels]. (Triton 3.6
miscomputes a left operand that is a reshaped descriptor block.) The zeros outside the image are multiplied by the
weights, so a non-finite weight gives NaN at the border.

A `ConcatPair` of two tensors is read in place, through one descriptor with an axis for the half. The order of the sums
is that of the concatenated tensor.
"""

import math

import triton
import triton.language as tl

from minidl.kernels import float8
from minidl.kernels.activation import activate
from minidl.kernels.conv import batch_tiled, costs, tile_throughput
from minidl.kernels.conv.epilogue import affine, finish
from minidl.kernels.conv.pixel_boxes import concat_pair_box, images_box, pairs_box, shape_of_box, stores_boxes
from minidl.kernels.conv.problem import CORRELATIONS, NO_BOXES, Problem, Tensors, Unsupported, taps_of
from minidl.kernels.gemm.tiled import split_columns
from minidl.runtime import launch

NAME = "box"
IN_PLACE = True
FLOAT8 = True
ADDED = 16
OVERLAPS = True
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_box",)
LEAST = 64  # rows of a tile
SMALL_PIECES = 8  # of a tile whose two results would fill the registers


@triton.jit
def finish_box(
    b_acc, d_y, p_bias, p_scale, n, h, w, m, M,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a block [pixels, channels from m on] and store it by the descriptor of y, in PIECES."""
    WIDTH: tl.constexpr = b_acc.shape[1]
    if PIECES == 1:
        b_acc = affine(b_acc, p_bias, p_scale, m, M, 0, HAS_BIAS, HAS_SCALE)
        b_y = float8.stored(activate(b_acc, ACT, SLOPE), d_y.dtype)
        d_y.store([n, h, w, m], tl.reshape(b_y, (TILE_N, TILE_H, TILE_W, WIDTH)))
    else:
        b_left, b_right = split_columns(b_acc)
        finish_box(
            b_left, d_y, p_bias, p_scale, n, h, w, m, M,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, PIECES // 2, TILE_N, TILE_H, TILE_W,
        )  # fmt: skip
        finish_box(
            b_right, d_y, p_bias, p_scale, n, h, w, m + WIDTH // 2, M,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, PIECES // 2, TILE_N, TILE_H, TILE_W,
        )  # fmt: skip


@triton.jit
def conv_box_tile(
    i_tile, d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, turned,
    N, QH, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    STORE_BOX: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M channels of a box of outputs; with TURN d_w is [groups * C, taps * M].

    With PAIRS outputs are pairs of neighbouring pixels, and d_x has an axis for the two pixels (`paired_box`). With
    PART > 0, the channels of a half, d_x has an axis for the halves, exchanged if `turned`; the pixels of a pair then
    share the channel axis, as a descriptor has at most five axes.
    """
    PIXELS: tl.constexpr = TILE_N * TILE_H * TILE_W
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    m = i_tile % tiles_m * BLOCK_M
    i_group = i_tile // tiles_m % GROUPS
    i_box = i_tile // (tiles_m * GROUPS)
    q_w = i_box % tiles_w * TILE_W
    q_h = i_box // tiles_w % tiles_h * TILE_H
    n = i_box // (tiles_w * tiles_h) * TILE_N
    o_w = w_start + m if TURN else 0 * m
    c = i_group * C
    j_w = 0
    x_h = in_h + q_h
    x_w = in_w + q_w * (2 if PAIRS else 1)
    # Distance in columns of w to the next tap in its row, and to the tap below.
    step_w = w_tap_w if TURN else C
    step_h = w_tap_h if TURN else JW * C
    b_acc = tl.zeros((BLOCK_M, PIXELS), dtype=ACC)
    for _ in range(JH * JW * (C // BLOCK_K)):
        # [BLOCK_M, BLOCK_K]
        b_w = d_w.load([c, o_w]).T if TURN else d_w.load([i_group * M + m, o_w])
        if PART:
            half = c // PART
            at_c = c - half * PART
            if PAIRS:
                b_box = d_x.load([half ^ turned, n, x_h, x_w >> 1, (x_w & 1) * PART + at_c])
            else:
                b_box = d_x.load([half ^ turned, n, x_h, x_w, at_c])
        elif PAIRS:
            b_box = d_x.load([n, x_h, x_w >> 1, x_w & 1, c])
        else:
            b_box = d_x.load([n, x_h, x_w, c])
        b_x = tl.reshape(b_box, (PIXELS, BLOCK_K)).T  # [BLOCK_K, PIXELS]
        b_acc = float8.product(b_w, b_x, b_acc, ACC, PRECISION)
        # Taps are the inner loop, so that concurrent programs share inputs in L2.
        # 256->256 at 56x56, 64 images: 331 us in place of 366.
        j_w += 1
        row = j_w == JW
        x_w += IN_TAP_W - tl.where(row, JW * IN_TAP_W, 0)
        x_h += tl.where(row, IN_TAP_H, 0)
        o_w += step_w + tl.where(row, step_h - JW * step_w, 0)
        every = x_h == in_h + q_h + JH * IN_TAP_H
        x_h -= tl.where(every, JH * IN_TAP_H, 0)
        o_w -= tl.where(every, JH * step_h - (0 if TURN else BLOCK_K), 0)
        c += tl.where(every, BLOCK_K, 0)
        j_w = tl.where(row, 0, j_w)
    if STORE_BOX:
        finish_box(
            b_acc.T, d_y, p_bias, p_scale, n, q_h, q_w, m, M,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, PIECES, TILE_N, TILE_H, TILE_W,
        )  # fmt: skip
        return
    o_p = tl.arange(0, PIXELS)
    o_n = n + o_p // (TILE_H * TILE_W)
    o_h = q_h + o_p // TILE_W % TILE_H
    o_w = q_w + o_p % TILE_W
    m_row = (o_n < N) & (o_h < QH) & (o_w < QW)
    o_row = (o_n.to(tl.int64) * OH + out_h + o_h * OUT_STEP_H) * OW + out_w + o_w * OUT_STEP_W
    finish(
        b_acc.T, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, GROUPS,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["turned"])
def conv_box_kernel(
    d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, turned,
    N, QH, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w, tiles, programs,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    STORE_BOX: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    PER_PROCESSOR: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Run one tile per program if PER_PROCESSOR is 0, else that many persistent programs per multiprocessor."""
    if PER_PROCESSOR == 0:
        conv_box_tile(
            tl.program_id(0), d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, turned,
            N, QH, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
            C, JH, JW, IN_TAP_H, IN_TAP_W, OUT_STEP_H, OUT_STEP_W, TURN,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_K,
            PIECES, TILE_N, TILE_H, TILE_W, STORE_BOX, PAIRS, PART,
        )  # fmt: skip
    else:
        for i_tile in tl.range(tl.program_id(0), tiles, programs, flatten=FLATTEN):
            conv_box_tile(
                i_tile, d_x, d_w, d_y, p_bias, p_scale, p_y, p_z, turned,
                N, QH, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
                C, JH, JW, IN_TAP_H, IN_TAP_W, OUT_STEP_H, OUT_STEP_W, TURN,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_K,
                PIECES, TILE_N, TILE_H, TILE_W, STORE_BOX, PAIRS, PART,
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
    tile = _tile(problem)
    options = tile.options
    box = shape_of_box(N, h.count, v.count, options.pop("BLOCK_N"))
    options["BLOCK_K"] = block = min(tile["BLOCK_K"], C & -C)  # boxes end where a group's channels end
    if problem.beside and tile.num_warps == 4 and tile["BLOCK_M"] > LEAST:
        options["PIECES"] = max(SMALL_PIECES, options["PIECES"])  # forced tiles; `_tile` chooses none such
    tiles = launch.cdiv(M, tile["BLOCK_M"]) * groups
    for size, extent in zip((N, h.count, v.count), box, strict=True):
        tiles *= launch.cdiv(size, extent)
    # Persistent programs with one tile each start later: 256->256 at 56x56, 4 images, 31.9 us in place of 26.2.
    persistent = tile["PER_PROCESSOR"] * problem.processors
    if tiles <= persistent:
        persistent = options["PER_PROCESSOR"] = options["FLATTEN"] = 0
    programs = persistent or tiles
    if persistent and problem.added and options["PER_PROCESSOR"] == 1 and len(h.taps) * len(v.taps) * C == block:
        # With a single step the loop over tiles also prefetches the added tensor: 64->256 at 56x56 in tiles of 256x128
        # needs 256 KB of shared memory with four stages.
        options["num_stages"] = min(tile.num_stages, 3)
    if problem.beside and tile.num_warps == 8:
        options["PIECES"] = 8  # 96->312 with two pieces: 4 KB of spilled registers
    stores_y = stores_boxes(problem)
    piece = max(tile["BLOCK_M"] // options["PIECES"], 16 // problem.result.itemsize)
    turn = problem.in_place
    scalars = (
        N, h.count, v.count, OH, OW, M, groups, h.in_start, v.in_start, h.out_start, v.out_start, *taps_of(problem),
        tiles, programs,
    )  # fmt: skip
    meta = {
        "C": C, "JH": len(h.taps), "JW": len(v.taps), "IN_TAP_H": h.in_tap, "IN_TAP_W": v.in_tap,
        "OUT_STEP_H": h.out_step, "OUT_STEP_W": v.out_step, "TURN": turn, **problem.constants,
        "TILE_N": box[0], "TILE_H": box[1], "TILE_W": box[2], "STORE_BOX": stores_y, "PAIRS": pairs,
        "PART": problem.part, **problem.flags("POOL"), **options,
    }  # fmt: skip
    descriptors = (
        concat_pair_box(N, H, W, C, [*box, block], pairs)
        if problem.concat_pair
        else pairs_box(N, H, W, C, [*box, 1, block])
        if pairs
        else images_box(N, H, W, groups * C, [*box, block], problem.pitches),
        batch_tiled.weights(problem, turn, block, tile["BLOCK_M"]),
        images_box(N, OH, OW, M, [*box, piece]) if stores_y else None,
    )
    return launch.Prepared(conv_box_kernel, (programs,), scalars, meta, descriptors)


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
