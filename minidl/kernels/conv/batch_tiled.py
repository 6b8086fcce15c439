"""The "batch" form: an implicit GEMM whose row tile is BLOCK_M images at one output pixel.

In x as a matrix [N, H * W * channels], the inputs of consecutive images at one tap and a block of channels are one
descriptor block (TMA on sm_90). So padding only bounds the loops over taps, without masks, multiplications by zero or
index arithmetic per element; stride and dilation only change which blocks are read.

The channels per group must be a multiple of 32; batches should have 64 images or more. A block ends at a multiple of
BLOCK_K channels, so that values of neighbouring pixels are never multiplied.

Persistent programs may merge pairs of tiles into one of twice the output channels (WIDE), which reads a quarter less
for the same products (256 channels at 14x14: 392 tiles are three rounds of 132, of which two become one).
"""

import triton
import triton.language as tl

from minidl.kernels import float8
from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.epilogue import finish
from minidl.kernels.conv.problem import (
    CORRELATIONS,
    NO_BOXES,
    TRANSPOSED,
    Problem,
    Tensors,
    Unsupported,
    taps_of,
)
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "batch"
IN_PLACE = True
FLOAT8 = True
ADDED = 16
LARGE = 2**20  # bytes of an image from which on a run touches many pages of memory
RUN = 64  # images of a run; with fewer its rows are partly empty
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_batch", "conv_batch_narrow")


@triton.jit
def inside(start, size, STEP: tl.constexpr, COUNT):
    """Return (first, number) of the j < COUNT for which start + j * STEP is in [0, size)."""
    first = tl.cdiv(tl.maximum(-start, 0), STEP)
    last = tl.minimum(COUNT, tl.cdiv(tl.maximum(size - start, 0), STEP))
    return first, tl.maximum(last - first, 0)


@triton.jit
def conv_batch_tile(
    i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z,
    N, H, W, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
    C: tl.constexpr, JH, JW,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    ALL_TAPS: tl.constexpr = False,
):  # fmt: skip
    """Compute BLOCK_M images at one output pixel. With TURN d_w is [groups * C, taps * M]. With ALL_TAPS, as with TURN,
    d_w also has taps of other phases.
    """
    tiles_n = tl.cdiv(M, BLOCK_N)
    runs = tl.cdiv(N, BLOCK_M)
    m = i_tile % tiles_n * BLOCK_N
    i_group = i_tile // tiles_n % GROUPS
    n = i_tile // (tiles_n * GROUPS) % runs * BLOCK_M
    q = i_tile // (tiles_n * GROUPS * runs)
    q_w = q % QW
    q_h = q // QW
    start_h = in_h + q_h * IN_STEP_H
    start_w = in_w + q_w * IN_STEP_W
    j_h, taps_h = inside(start_h, H, IN_TAP_H, JH)
    j_w, taps_w = inside(start_w, W, IN_TAP_W, JW)
    channels = GROUPS * C
    nowhere = H * W * channels
    steps = taps_h * taps_w * (C // BLOCK_K)
    o_x = ((start_h + j_h * IN_TAP_H) * W + start_w + j_w * IN_TAP_W) * channels + i_group * C
    # Without a tap inside, run one step that reads zeros.
    o_x = tl.where(steps == 0, nowhere, o_x)
    steps = tl.maximum(steps, 1)
    if TURN:
        o_w = w_start + j_h * w_tap_h + j_w * w_tap_w + m
    elif ALL_TAPS:
        o_w = w_start + j_h * w_tap_h + j_w * w_tap_w
    else:
        o_w = (j_h * JW + j_w) * C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # Distance in columns of w to the next tap in its row, and to the tap below.
    step_w = w_tap_w if TURN or ALL_TAPS else C
    step_h = w_tap_h if TURN or ALL_TAPS else JW * C
    i_h = 0
    i_w = 0
    c = i_group * C
    tl.assume(steps > 0)
    for _ in range(steps):
        # [BLOCK_K, BLOCK_N]
        b_w = d_w.load([c, o_w]) if TURN else d_w.load([i_group * M + m, o_w]).T
        b_x = d_x.load([n, o_x])  # [BLOCK_M, BLOCK_K]
        b_acc = float8.product(b_x, b_w, b_acc, ACC, PRECISION)
        # Taps are the inner loop, so that concurrent programs share inputs in L2.
        i_w += 1
        row = i_w == taps_w
        i_w = tl.where(row, 0, i_w)
        i_h += tl.where(row, 1, 0)
        every = i_h == taps_h
        i_h = tl.where(every, 0, i_h)
        o_x += IN_TAP_W * channels + tl.where(row, (IN_TAP_H * W - taps_w * IN_TAP_W) * channels, 0)
        o_x += tl.where(every, BLOCK_K - taps_h * IN_TAP_H * W * channels, 0)
        o_w += step_w + tl.where(row, step_h - taps_w * step_w, 0)
        o_w += tl.where(every, (0 if TURN else BLOCK_K) - taps_h * step_h, 0)
        c += tl.where(every, BLOCK_K, 0)
    o_n = n + tl.arange(0, BLOCK_M)
    o_row = o_n.to(tl.int64) * (OH * OW) + (out_h + q_h * OUT_STEP_H) * OW + out_w + q_w * OUT_STEP_W
    finish(
        b_acc, p_bias, p_scale, p_y, p_z, o_row, o_n < N, m, M, i_group, GROUPS,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES,
    )  # fmt: skip


@triton.jit
def conv_batch_kernel(
    d_x, d_w, d_wide, p_bias, p_scale, p_y, p_z,
    N, H, W, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
    tiles, wide_tiles, programs,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr, PER_PROCESSOR: tl.constexpr, FLATTEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Run one tile per program if PER_PROCESSOR is 0, else that many persistent programs per multiprocessor.

    With WIDE the first 2 * wide_tiles tiles are merged in pairs, whose weights are blocks of d_wide.
    """
    wait(EARLY)
    if PER_PROCESSOR == 0:
        conv_batch_tile(
            tl.program_id(0), d_x, d_w, p_bias, p_scale, p_y, p_z,
            N, H, W, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
            C, JH, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, OUT_STEP_H, OUT_STEP_W, TURN,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, PIECES,
        )  # fmt: skip
    else:
        if WIDE:
            for i_tile in tl.range(tl.program_id(0), wide_tiles, programs):
                conv_batch_tile(
                    i_tile, d_x, d_wide, p_bias, p_scale, p_y, p_z,
                    N, H, W, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
                    C, JH, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, OUT_STEP_H, OUT_STEP_W, TURN,
                    HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
                    2 * PIECES,
                )  # fmt: skip
        for i_tile in tl.range(tl.program_id(0) + 2 * wide_tiles, tiles, programs, flatten=FLATTEN):
            conv_batch_tile(
                i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z,
                N, H, W, QW, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w, w_start, w_tap_h, w_tap_w,
                C, JH, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W, OUT_STEP_H, OUT_STEP_W, TURN,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                PIECES,
            )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    return (
        (problem.pool is None or Unsupported("a pool"))
        and (problem.C % 32 == 0 or Unsupported("input channels that are not a multiple of 32"))
        and ((problem.x_boxes and problem.w_boxes) or NO_BOXES)
    )


def estimate(problem: Problem) -> float:
    tile = tile_of(problem)
    block = min(tile["BLOCK_K"], problem.C & -problem.C)
    tiles = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups * launch.cdiv(problem.images, tile["BLOCK_M"])
    tiles *= costs.outputs(problem) // problem.images
    steps = tile_throughput.steps(problem, costs.taps_inside(problem) * problem.C / block, block, boxes=True)
    steps *= costs.constants(problem).steps.pages if problem.image_bytes >= LARGE else 1.0
    work = costs.Work(tiles, steps, tile_throughput.of_runs(problem, tile), "batch")
    short = costs.constants(problem).steps.short if problem.images < RUN else 1.0
    return costs.at_least(problem, short * costs.microseconds(problem, work))


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter."""
    return costs.outputs(problem)


def prepare(problem: Problem) -> launch.Prepared:
    h, v, (H, W), (OH, OW) = problem.at
    N, M, C, groups = problem.N, problem.M, problem.C, problem.groups
    tile = tile_of(problem)
    options = tile.options
    options["BLOCK_K"] = block = min(tile["BLOCK_K"], C & -C)  # a block must end at a pixel's last channel
    tiles = launch.cdiv(M, tile["BLOCK_N"]) * groups * launch.cdiv(N, tile["BLOCK_M"]) * h.count * v.count
    persistent = tile["PER_PROCESSOR"] * problem.processors
    programs = min(tiles, persistent) if persistent else tiles
    pairs = tile["WIDE"] and persistent and M % (2 * tile["BLOCK_N"]) == 0
    wide = tiles // 2 // persistent * persistent if pairs else 0
    options["WIDE"] = int(wide > 0)
    turn = problem.in_place
    scalars = (
        N, H, W, v.count, OH, OW, M, groups, h.in_start, v.in_start, h.out_start, v.out_start, *taps_of(problem),
        tiles, wide, programs,
    )  # fmt: skip
    meta = {
        **problem.taps_read, "OUT_STEP_H": h.out_step, "OUT_STEP_W": v.out_step,
        "TURN": turn, **problem.constants,
        **dependent_launch.options(target=problem.target), **problem.flags("POOL"), **options,
    }  # fmt: skip
    descriptors = (
        Box.of_rows(N, H * W * groups * C, (tile["BLOCK_M"], block)),
        weights(problem, turn, block, tile["BLOCK_N"]),
        weights(problem, turn, block, tile["BLOCK_N"] << options["WIDE"]),
    )
    return launch.Prepared(conv_batch_kernel, (programs,), scalars, meta, descriptors)


def tile_of(problem: Problem) -> launch.Tile:
    C = problem.C
    # A short K does not hide wide epilogues.
    family = "conv_batch_narrow" if problem.dtype.itemsize == 2 and C % 64 else "conv_batch"
    pixels = costs.outputs(problem) // max(problem.N, 1)
    return problem.tile(family, M=problem.images, N=problem.M, K=C & -C, pixels=pixels)


def weights(problem: Problem, turn: bool, block_k: int, block_n: int) -> Box:
    """Return the descriptor of w [groups * M, JH, JW, C] or, with `turn`, of all weights [groups * C, R, S, M]."""
    if turn:
        row = problem.geometry.h.kernel * problem.geometry.w.kernel * problem.M
        return Box.of_rows(problem.groups * problem.C, row, (block_k, block_n))
    taps = problem.taps if problem.direction != TRANSPOSED else problem.geometry.h.kernel * problem.geometry.w.kernel
    return Box.of_rows(problem.groups * problem.M, taps * problem.C, (block_n, block_k))


def run(prepared: launch.Prepared, t: Tensors) -> None:
    prepared.run(t.x, t.w, t.w, t.bias, t.scale, t.y, t.z)
