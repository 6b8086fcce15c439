"""All backward phases of a strided convolution in the pixel-tiled form, in one launch.

       dy                 dx, stride 2          Each of the 4 phases of dx, one per remainder of row and column, is a
    | a b |   ------>    | 0 1 0 1 |            convolution of dy with its own taps of w. The tiles of phases with most
    | c d |              | 2 3 2 3 |            taps run first, and shorter ones fill the gaps.
                         | 0 1 0 1 |

In separate launches a stride of 4 would need 16. Inputs that no tap reaches form phases without steps.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels.conv import costs, phase_weights, pixel_choice
from minidl.kernels.conv.batch_back import phase_at, phase_of
from minidl.kernels.conv.pixel_steps import PixelSizes
from minidl.kernels.conv.pixel_tiled import conv_pixel_tile, tile_of
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import INT32_LIMIT, PHASE, TRANSPOSED, Problem, Unsupported, backward_phases
from minidl.kernels.conv.records import Taps
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = pixel_choice.NAME
DIRECTIONS = (TRANSPOSED,)
FAMILIES = (*pixel_choice.FAMILIES, "conv_reorder")
# Maximum number of phases, which the kernel enumerates.
MOST = 16
# Rows in float32 that are not aligned to 16 bytes take SCATTERED times as long (H200: 1.5, 1.5, 1.8 and 3.1; once 0.5).
SCATTERED = 1.5


class BackSizes(NamedTuple):
    """N images of H x W pixels, and R x S taps of w."""

    N: int
    H: int
    W: int
    R: int
    S: int


@triton.jit(do_not_specialize=["OH", "OW"])
def conv_pixel_back_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z, OH, OW, sizes,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    taps: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the phase that its index falls into; phases with most taps come first."""
    wait(EARLY)
    STRIDE_H: tl.constexpr = taps.OUT_STEP_H
    STRIDE_W: tl.constexpr = taps.OUT_STEP_W
    i_tile = tl.program_id(0)
    rho, before = phase_at(
        i_tile, sizes.N, tl.cdiv(tile.M, tile.BLOCK_N) * tile.GROUPS, OH, OW, sizes.R, sizes.S,
        PADDING_H, PADDING_W, STRIDE_H, STRIDE_W, tile.BLOCK_M,
    )  # fmt: skip
    out_h, rows, in_h, taps_h = phase_of(rho // STRIDE_W, OH, sizes.R, PADDING_H, STRIDE_H)
    out_w, columns, in_w, taps_w = phase_of(rho % STRIDE_W, OW, sizes.S, PADDING_W, STRIDE_W)
    last = (rho // STRIDE_W + (taps_h - 1) * STRIDE_H) * sizes.S + rho % STRIDE_W + (taps_w - 1) * STRIDE_W
    # One axis may have taps where the other has none.
    taps_h = tl.where(taps_w > 0, taps_h, 0)
    taps_w = tl.maximum(taps_w, 1)
    phase = PixelSizes(
        sizes.N * rows * columns, sizes.H, sizes.W, OH, OW, in_h, in_w, out_h, out_w,
        last, -STRIDE_H * sizes.S, -STRIDE_W, 0, taps_h * taps_w * taps.C,
    )  # fmt: skip
    conv_pixel_tile(
        i_tile - before, 0, p_x, p_w, p_bias, p_scale, p_y, p_z, rows, columns, taps_h, taps_w, phase,
        taps, tile, epilogue,
    )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    down, across = problem.geometry.h, problem.geometry.w
    return (
        (down.stride * across.stride > 1 or Unsupported("a stride of 1"))
        and (down.dilation == across.dilation == 1 or Unsupported("a dilation"))
        and (down.stride * across.stride <= MOST or Unsupported("more than 16 phases"))
        and (max(down.kernel, across.kernel) < pixel_choice.BITS or Unsupported("more taps than there are bits"))
        and (_values(problem) < INT32_LIMIT or Unsupported("more values than 32 bits count"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """Estimate microseconds by the tile of the phase with most taps, for the mean number of taps."""
    phase = _longest(problem)
    at = pixel_choice.chosen(phase)._replace(C=problem.C)  # undoes a merged row of taps
    work = pixel_choice.work_of(problem, at, costs.taps(problem))
    # Tiles of phases without taps only store: 1x1 stride 2, 256->512 backward to 56x56, 27 images, 27 us.
    with_taps, empty = (_tiles(problem, at.tile, taps) for taps in (True, False))
    time = 0.0
    if with_taps:
        steps = work.steps * (with_taps + empty) / with_taps
        time = costs.microseconds(problem, work._replace(tiles=with_taps, steps=steps))
    if with_taps + empty > work.throughput.slots * problem.processors:
        time += costs.microseconds(problem, work._replace(tiles=empty, steps=0.0))
    # 3x3 stride 2, 512->512 at 7x7, 2 images: one round, as long as its tiles of four taps, 14 us.
    time = max(time, costs.microseconds(problem, pixel_choice.work_of(problem, at, phase.taps)))
    if problem.splits and problem.C * problem.dtype.itemsize % 16:
        time *= SCATTERED
    return costs.launch_time(problem, time + (0.0 if problem.in_place else costs.constants(problem).steps.reorder))


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter."""
    return pixel_choice.programs(_longest(problem))


def prepare(problem: Problem) -> Product:
    down, across, _ = problem.geometry
    time = estimate(problem._replace(N=problem.images))
    in_place = problem.in_place and not pixel_choice.pays_to_reorder(problem, time)
    phase = _longest(problem)
    at = pixel_choice.chosen(phase)
    JH, JW = len(phase.at.down.taps), len(phase.at.across.taps)
    taps = Taps(problem.C, JH, JW, 1, 1, 1, 1, down.stride, across.stride)
    empty = down.kernel < down.stride or across.kernel < across.stride
    tile = tile_of(problem, at, taps, W_IN_PLACE=in_place, W_TAPS=down.kernel * across.kernel, PHASES=True, EMPTY=empty)
    sizes = BackSizes(problem.N, *problem.read, down.kernel, across.kernel)
    return Product(
        None if in_place else phase_weights.prepare(problem, down.forward(), across.forward()),
        launch.Prepared(
            conv_pixel_back_kernel, (_tiles(problem, at.tile),), (down.size, across.size, sizes),
            {
                "PADDING_H": down.padding, "PADDING_W": across.padding,
                "taps": taps, "tile": tile, "epilogue": problem.epilogue,
                **dependent_launch.options(target=problem.target), **at.tile.launch_options,
            },
        ),
    )  # fmt: skip


run = Product.run


def _values(problem: Problem) -> int:
    """Return the values of the larger tensor, including offsets outside it."""
    (H, W), (OH, OW) = problem.read, problem.written
    reach = problem.geometry.h.kernel * (W + problem.geometry.w.kernel)
    return problem.groups * max((problem.N * H * W + reach) * problem.C, problem.N * OH * OW * problem.M)


def _longest(problem: Problem) -> Problem:
    """Return the problem of the phase with most taps, with reordered weights."""
    phases = max(backward_phases(problem.geometry), key=lambda at: len(at.down.taps) * len(at.across.taps))
    return problem._replace(direction=PHASE, phases=phases, strides=())


def _tiles(problem: Problem, tile: launch.Tile, taps: bool | None = None) -> int:
    """Return the number of tiles of all phases, or of those with or without taps."""
    across = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups
    phases = [at for at in backward_phases(problem.geometry) if taps in (None, at.down.reached * at.across.reached > 0)]
    counts = [at.down.count * at.across.count for at in phases]
    return across * sum(launch.cdiv(problem.N * count, tile["BLOCK_M"]) for count in counts)
