"""All backward phases of a strided convolution in the batch-tiled form, in one launch.

A stride of 2 has four phases, one per remainder of row and column. In separate launches each would end with idle
processors; here tiles of the phases with most taps run first, and shorter ones fill the gaps. A tile derives its phase
from its index: with rho = (input + padding) mod stride along one axis, the taps are rho, rho + stride ... below R, so a
smaller rho has as many taps or one more.
"""

import triton
import triton.language as tl

from minidl.kernels.conv import batch_tiled, phase_weights
from minidl.kernels.conv.batch_tiled import BatchTile, Inputs, conv_batch_tile
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import NO_BOXES, TRANSPOSED, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Outputs, Taps, Weights
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "batch"
DIRECTIONS = (TRANSPOSED,)
FAMILIES = ("conv_back", "conv_batch_narrow", "conv_reorder")


@triton.jit
def phase_of(rho, size, R, PADDING: tl.constexpr, STRIDE: tl.constexpr):
    """Return (out_start, count, in_start, taps) of the phase of remainder rho, over inputs of `size`."""
    first = (rho + (STRIDE - PADDING % STRIDE)) % STRIDE
    count = (tl.maximum(size - first, 0) + (STRIDE - 1)) // STRIDE
    taps = (tl.maximum(R - rho, 0) + (STRIDE - 1)) // STRIDE
    return first, count, (first + PADDING - rho) // STRIDE - (taps - 1), taps


@triton.jit
def phase_at(
    i_tile, N, across, OH, OW, R, S, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return (remainders as one index, number of preceding tiles) of a tile's phase; phases with most taps come first.

    A phase has `across` tiles for every ROWS of the pixels of N images.
    """
    rho = 0
    before = 0
    end = 0
    for i in tl.static_range(STRIDE_H * STRIDE_W):
        _, rows, _, _ = phase_of(i // STRIDE_W, OH, R, PADDING_H, STRIDE_H)
        _, columns, _, _ = phase_of(i % STRIDE_W, OW, S, PADDING_W, STRIDE_W)
        beyond = i_tile >= end
        rho = tl.where(beyond, i, rho)
        before = tl.where(beyond, end, before)
        end += tl.cdiv(N * rows * columns, ROWS) * across
    return rho, before


@triton.jit
def conv_back_kernel(
    d_x, d_w, p_bias, p_scale, p_y, p_z, inputs, outputs, weights,
    padding: tl.constexpr, taps: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the phase that its index falls into; inputs and weights are those of all taps."""
    wait(EARLY)
    PADDING_H: tl.constexpr = padding[0]
    PADDING_W: tl.constexpr = padding[1]
    STRIDE_H: tl.constexpr = taps.OUT_STEP_H
    STRIDE_W: tl.constexpr = taps.OUT_STEP_W
    N, _, _, OH, OW, M, GROUPS, _, _, _, _ = outputs
    R = inputs.taps_h
    S = inputs.taps_w
    i_tile = tl.program_id(0)
    across = tl.cdiv(M, tile.BLOCK_N) * GROUPS * tl.cdiv(N, tile.BLOCK_M)
    # Tiles are runs of images, so phases are counted in pixels of one image.
    rho, before = phase_at(i_tile, 1, across, OH, OW, R, S, PADDING_H, PADDING_W, STRIDE_H, STRIDE_W, 1)
    out_h, _, in_h, taps_h = phase_of(rho // STRIDE_W, OH, R, PADDING_H, STRIDE_H)
    out_w, columns, in_w, taps_w = phase_of(rho % STRIDE_W, OW, S, PADDING_W, STRIDE_W)
    last_h = rho // STRIDE_W + (taps_h - 1) * STRIDE_H
    last_w = rho % STRIDE_W + (taps_w - 1) * STRIDE_W
    first = last_h * weights.tap_h + last_w * weights.tap_w
    conv_batch_tile(
        i_tile - before, d_x, d_w, p_bias, p_scale, p_y, p_z, Inputs(inputs.H, inputs.W, taps_h, taps_w),
        Outputs(N, 0, columns, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w),
        Weights(first, -STRIDE_H * weights.tap_h, -STRIDE_W * weights.tap_w),
        taps, epilogue, tile, tile.BLOCK_N, tile.PIECES,
    )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    down, across = problem.geometry.h, problem.geometry.w
    return (
        (down.stride * across.stride > 1 or Unsupported("a stride of 1"))
        and (
            (down.dilation == across.dilation == 1 and max(down.stride, across.stride) <= 4)
            or Unsupported("a dilation, or a stride above 4")
        )
        and (problem.C % 32 == 0 or Unsupported("input channels that are not a multiple of 32"))
        and ((problem.x_boxes and problem.M > 0) or NO_BOXES)
    )


def estimate(problem: Problem) -> float:
    return batch_tiled.estimate(problem)


def prepare(problem: Problem) -> Product:
    down, across, groups = problem.geometry
    N, M, C = problem.N, problem.M, problem.C
    H, W = problem.read
    chosen = batch_tiled.family_tile(problem, "conv_back", down.size * across.size)
    options = chosen.launch_options
    if problem.preactivation:
        options["num_warps"] = 8  # with 4, two results and their addresses would spill
    in_place = problem.in_place
    tile = chosen.record(
        BatchTile, BLOCK_K=problem.block(chosen), W_IN_PLACE=in_place, ALL_TAPS=True, PER_PROCESSOR=0,
        FLATTEN=False, DOUBLE=False, **problem.constants,
    )  # fmt: skip
    tiles = launch.cdiv(M, tile.BLOCK_N) * groups * launch.cdiv(N, tile.BLOCK_M) * down.size * across.size
    # Weights are [.., R, S, last].
    last = M if in_place else C
    meta = {
        "taps": Taps(C, 0, 0, 1, 1, 1, 1, down.stride, across.stride),  # each phase has its own number of taps
        "padding": (down.padding, across.padding), "epilogue": problem.epilogue, "tile": tile,
        **dependent_launch.options(target=problem.target), **options,
    }  # fmt: skip
    outputs = Outputs(N, 0, 0, down.size, across.size, M, groups, 0, 0, 0, 0)
    scalars = Inputs(H, W, down.kernel, across.kernel), outputs, Weights(0, across.kernel * last, last)
    descriptors = (
        Box.of_rows(N, H * W * groups * C, (tile.BLOCK_M, tile.BLOCK_K)),
        batch_tiled.weights(problem, in_place, tile.BLOCK_K, tile.BLOCK_N),
    )
    return Product(
        None if in_place or not problem.strides else phase_weights.prepare(problem, down.forward(), across.forward()),
        launch.Prepared(conv_back_kernel, (tiles,), scalars, meta, descriptors),
    )


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)
