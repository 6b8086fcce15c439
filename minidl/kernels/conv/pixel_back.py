"""All backward phases of a strided convolution in the pixel-tiled form, in one launch, as in `batch_back`.

In separate launches a stride of 4 would need 16. Inputs that no tap reaches form phases without steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minidl.kernels.conv import costs, phase_weights, pixel_choice
from minidl.kernels.conv.batch_back import phase_at, phase_of
from minidl.kernels.conv.pixel_tiled import conv_pixel_tile
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import INT32_LIMIT, PHASE, TRANSPOSED, Problem, Tensors, Unsupported, backward_phases
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = pixel_choice.NAME
DIRECTIONS = (TRANSPOSED,)
FAMILIES = (*pixel_choice.FAMILIES, "conv_turn")
# Maximum number of phases, which the kernel enumerates.
MOST = 16


@triton.jit(do_not_specialize=["OH", "OW"])
def conv_pixel_back_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z, N, H, W, OH, OW, R, S,
    GROUPS: tl.constexpr, M: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr, W_TAPS: tl.constexpr,
    MOST_H: tl.constexpr, MOST_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    FLAT: tl.constexpr, EMPTY: tl.constexpr, TURN: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the phase that its index falls into; phases with most taps come first."""
    wait(EARLY)
    i_tile = tl.program_id(0)
    rho, before = phase_at(
        i_tile, N, tl.cdiv(M, BLOCK_N) * GROUPS, OH, OW, R, S, PADDING_H, PADDING_W, STRIDE_H, STRIDE_W, BLOCK_M
    )  # fmt: skip
    out_h, rows, in_h, taps_h = phase_of(rho // STRIDE_W, OH, R, PADDING_H, STRIDE_H)
    out_w, columns, in_w, taps_w = phase_of(rho % STRIDE_W, OW, S, PADDING_W, STRIDE_W)
    last = (rho // STRIDE_W + (taps_h - 1) * STRIDE_H) * S + rho % STRIDE_W + (taps_w - 1) * STRIDE_W
    # One axis may have taps where the other has none.
    taps_h = tl.where(taps_w > 0, taps_h, 0)
    taps_w = tl.maximum(taps_w, 1)
    conv_pixel_tile(
        i_tile - before, 0, p_x, p_w, p_bias, p_scale, p_y, p_z,
        N * rows * columns, H, W, rows, columns, OH, OW, in_h, in_w, out_h, out_w, taps_h, taps_w,
        last, -STRIDE_H * S, -STRIDE_W, 0, taps_h * taps_w * C,
        GROUPS, M, CHANNELS, C, W_TAPS, MOST_H, MOST_W, 1, 1, 1, 1, STRIDE_H, STRIDE_W,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, 0, False, False, FLAT, False, True, EMPTY, False, TURN, False, 1,
        ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_REST, PIECES,
    )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    h, v = problem.geometry.h, problem.geometry.w
    return (
        (h.stride * v.stride > 1 or Unsupported("a stride of 1"))
        and (h.dilation == v.dilation == 1 or Unsupported("a dilation"))
        and (h.stride * v.stride <= MOST or Unsupported("more than 16 phases"))
        and (max(h.kernel, v.kernel) < pixel_choice.BITS or Unsupported("more taps than there are bits"))
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
    return costs.at_least(problem, time + (0.0 if problem.in_place else costs.constants(problem).steps.turn))


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter."""
    return pixel_choice.programs(_longest(problem))


def prepare(problem: Problem) -> Product:
    h, v, groups = problem.geometry
    H, W = problem.read
    M = problem.M
    time = estimate(problem._replace(N=problem.images))
    turn = problem.in_place and not pixel_choice.turns(problem, time)
    phase = _longest(problem)
    at = pixel_choice.chosen(phase)._replace(C=problem.C)
    most_h, most_w = len(phase.at.h.taps), len(phase.at.v.taps)
    scalars = (problem.N, H, W, h.size, v.size, h.kernel, v.kernel)
    meta = {
        "GROUPS": groups, "M": M, "CHANNELS": groups * problem.C, "C": problem.C, "W_TAPS": h.kernel * v.kernel,
        "MOST_H": most_h, "MOST_W": most_w, "PADDING_H": h.padding, "PADDING_W": v.padding,
        "STRIDE_H": h.stride, "STRIDE_W": v.stride,
        "FLAT": pixel_choice.flat(problem.C, most_h * most_w), "TURN": turn,
        "EMPTY": h.kernel < h.stride or v.kernel < v.stride,
        **problem.constants, **dependent_launch.options(target=problem.target), **problem.flags("POOL"),
        **pixel_choice.options(problem, at),
    }  # fmt: skip
    return Product(
        None if turn else phase_weights.prepare(problem, h.forward(), v.forward()),
        launch.Prepared(conv_pixel_back_kernel, (_tiles(problem, at.tile),), scalars, meta),
    )


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def _values(problem: Problem) -> int:
    """Return the values of the larger tensor, including offsets outside it."""
    (H, W), (OH, OW) = problem.read, problem.written
    reach = problem.geometry.h.kernel * (W + problem.geometry.w.kernel)
    return problem.groups * max((problem.N * H * W + reach) * problem.C, problem.N * OH * OW * problem.M)


def _longest(problem: Problem) -> Problem:
    """Return the problem of the phase with most taps, with reordered weights."""
    phases = max(backward_phases(problem.geometry), key=lambda at: len(at.h.taps) * len(at.v.taps))
    return problem._replace(direction=PHASE, phases=phases, strides=())


def _tiles(problem: Problem, tile: launch.Tile, taps: bool | None = None) -> int:
    """Return the number of tiles of all phases, or of those with or without taps."""
    across = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups
    phases = [at for at in backward_phases(problem.geometry) if taps in (None, at.h.reached * at.v.reached > 0)]
    counts = [at.h.count * at.v.count for at in phases]
    return across * sum(launch.cdiv(problem.N * count, tile["BLOCK_M"]) for count in counts)
