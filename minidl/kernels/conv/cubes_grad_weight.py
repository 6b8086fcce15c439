"""The weight gradient of volumes in the "cube" form: the K of the GEMM is a box of voxels of one or several volumes.

    dw[m, j, c] = sum over voxels of dy[n, q, m] x[n, at(q, j), c]

    partial [slots, groups * M, taps, C]         dy [voxels of a box, BLOCK_M channels]^T, the left operand, times
      BLOCK_M x TAPS x BLOCK_N     <-----        x [the box, moved to each of TAPS taps of a row, BLOCK_N channels]

Strides are as in `voxels`. The boxes of all tiles form a line, divided equally among programs (`even_parts`). Zeros
outside are multiplied by dy, and zeros beyond the outputs by x, so a non-finite value gives NaN for taps that do not
read it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, even_parts, voxels
from minidl.kernels.conv.cubes import AHEAD, NAME
from minidl.kernels.conv.even_parts import Line, slots_of, step_at, tile_at
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import INT32_LIMIT, Tensors
from minidl.kernels.conv.voxels import Sizes, Taps, VolumeProblem, voxels_of
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

__all__ = ["NAME", "able", "estimate", "prepare", "run"]

FAMILY = "conv_box_grad_weight"
THIN_X, THIN_Y = 2.9, 1.6  # factors for voxels of at most 32 bytes, and for outputs that fill half a tile


@triton.jit
def conv_cube_grad_weight_kernel(
    p_dy, d_x, swapped, p_partial, parts, sizes,
    taps: tl.constexpr, box: tl.constexpr, tile: tl.constexpr,
    PART: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write partial [slots, groups * M, J * C]: the sums of this program's Q steps, per tile.

    With PART > 0, the channels of a half, d_x has an axis for the halves of one volume, exchanged if `swapped`.
    """
    wait(EARLY)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    TAPS: tl.constexpr = tile.TAPS
    VOXELS: tl.constexpr = box.TILE_N * box.TILE_D * box.TILE_H * box.TILE_W
    tiles_c: tl.constexpr = (tile.C + BLOCK_N - 1) // BLOCK_N
    # Tell the compiler that rows of dy have a multiple of 16 bytes, so that it loads 16 bytes at once.
    VALUES: tl.constexpr = 128 // p_dy.dtype.element_ty.primitive_bitwidth
    M = parts.M // VALUES * VALUES
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(sizes.QW, box.TILE_W)
    tiles_h = tl.cdiv(sizes.QH, box.TILE_H)
    tiles_d = tl.cdiv(sizes.QD, box.TILE_D)
    v_n, v_d, v_h, v_w = voxels_of(box)
    o_dy = (((v_n * sizes.QD + v_d) * sizes.QH + v_h) * sizes.QW + v_w) * (parts.GROUPS * M)
    steps = parts.boxes + parts.PAUSE
    start = tl.program_id(0) * parts.Q
    end = tl.minimum(start + parts.Q, tiles_c * tiles_m * parts.GROUPS * (tile.J // TAPS) * steps)
    i_tile = start // steps
    first = i_tile * steps
    while first < end:
        m, c, i_group, j = tile_at(i_tile, parts, tile)
        tap_d = sizes.in_d + j // (taps.H.J * taps.W.J) * taps.D.IN_TAP
        tap_h = sizes.in_h + j // taps.W.J % taps.H.J * taps.H.IN_TAP
        tap_w = sizes.in_w + j % taps.W.J * taps.W.IN_TAP
        o_c = i_group * tile.C + c
        # Division that rounds negative values down.
        x_h = (tap_h + AHEAD * taps.H.IN_STEP) // taps.H.IN_STEP - AHEAD
        phase = tap_h - x_h * taps.H.IN_STEP
        r_m = m + tl.arange(0, BLOCK_M)
        before, slots, opening, closing = slots_of(first + parts.PAUSE, parts)
        slot = tl.program_id(0) - before
        begin = tl.maximum(start, first + parts.PAUSE) - start
        stop = tl.minimum(first + steps, end) - start
        b_accs = ()
        for _ in tl.static_range(TAPS):
            b_accs += (tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC),)
        for step in range(begin, stop):
            i = step_at(step, slot, slots, opening, closing)
            q_w = i % tiles_w * box.TILE_W
            row = i // tiles_w
            q_h = row % tiles_h * box.TILE_H
            row = row // tiles_h
            q_d = row % tiles_d * box.TILE_D
            n = row // tiles_d * box.TILE_N
            m_dy = (n + v_n < sizes.N) & (q_d + v_d < sizes.QD) & (q_h + v_h < sizes.QH) & (q_w + v_w < sizes.QW)
            # Offsets within a box need 32 bits only.
            o_box = ((tl.cast(n, tl.int64) * sizes.QD + q_d) * sizes.QH + q_h) * sizes.QW + q_w
            p_box = p_dy + o_box * (parts.GROUPS * M) + i_group * M
            b_dy = tl.load(
                p_box + o_dy[:, None] + r_m[None, :], mask=m_dy[:, None] & (r_m < M)[None, :], other=0.0
            )  # [VOXELS, BLOCK_M]
            x_d = tap_d + q_d * taps.D.IN_STEP
            b_next = ()
            for t in tl.static_range(TAPS):
                at_w = tap_w + t * taps.W.IN_TAP
                if taps.STRIDED:
                    x_w = (at_w + AHEAD * taps.W.IN_STEP) // taps.W.IN_STEP - AHEAD
                    i_slice = tl.where((x_d >= 0) & (x_d < sizes.D), n * sizes.D + x_d, sizes.N * sizes.D)
                    o_x = (at_w - x_w * taps.W.IN_STEP) * (parts.GROUPS * tile.C) + o_c
                    b_x = d_x.load([i_slice, x_h + q_h, phase, x_w + q_w, o_x])
                elif PART:
                    b_x = d_x.load([(c // PART) ^ swapped, x_d, tap_h + q_h, at_w + q_w, c % PART])
                else:
                    b_x = d_x.load([n, x_d, tap_h + q_h, at_w + q_w, o_c])
                b_x = tl.reshape(b_x, (VOXELS, BLOCK_N))
                b_next += (tl.dot(b_dy.T, b_x, b_accs[t], input_precision=PRECISION, out_dtype=ACC),)
            b_accs = b_next
        r_c = c + tl.arange(0, BLOCK_N)
        p_tile = p_partial + (tl.cast(slot * parts.GROUPS + i_group, tl.int64) * M + m) * (tile.J * tile.C) + j * tile.C
        p_tile += tl.arange(0, BLOCK_M).to(tl.int64)[:, None] * (tile.J * tile.C) + r_c[None, :]
        m_tile = (r_m < M)[:, None] & (r_c < tile.C)[None, :] & (begin < stop)
        for t in tl.static_range(TAPS):
            tl.store(p_tile + t * tile.C, b_accs[t], mask=m_tile)
        first += steps
        i_tile += 1


def able(cubes: VolumeProblem) -> bool:
    """Return whether strides, channels, dtype and device are supported."""
    problem = cubes.problem
    size = problem.dtype.itemsize
    aligned = problem.C * size % 16 == 0 == problem.M * size % 16
    if (size > 2 and problem.target != "interpreted") or problem.M == 0 or not aligned or not voxels.in_boxes(cubes):
        return False
    # Slices, values of a box of dy, and steps are counted in 32 bits.
    line, slices = _line(cubes), problem.N * max(cubes.counts[1], cubes.read[0])
    reach = (line.box.TILE_N - 1) * cubes.counts[1] + line.box.TILE_D
    values = reach * math.prod(cubes.counts[2:]) * problem.groups * problem.M
    return max(values, line.total, slices) < INT32_LIMIT


def estimate(cubes: VolumeProblem) -> float:
    """Estimate microseconds."""
    problem, line = cubes.problem, _line(cubes)
    if problem.target == "interpreted":
        return costs.constants(problem).launch * (line.tiles + line.programs)
    factor = THIN_X if problem.C < 32 else THIN_Y if problem.M <= 32 else 1.0
    return costs.launch_time(problem, factor * even_parts.microseconds(problem, line), voxels.moved(cubes))


def _line(cubes: VolumeProblem) -> Line:
    """Return the line of all boxes with the fastest tile."""
    problem, row = cubes.problem, cubes.axes[2].kernel
    lines = []
    for tile in problem.tiles(FAMILY, M=problem.M, N=problem.part or problem.C, T=row):
        box = voxels.box_shape(cubes, tile["BLOCK_K"])
        together = tile["TAPS"] if row % tile["TAPS"] == 0 else 1
        boxes = voxels.count_boxes(cubes.counts, box)
        lines.append(even_parts.in_line(problem, box, tile, boxes, cubes.taps, together))
    return min(lines, key=lambda line: even_parts.microseconds(problem, line))


def prepare(cubes: VolumeProblem) -> Shares:
    """Prepare the launches, which take dy and x and return dw [groups * M, Q, R, S, C]."""
    problem, line = cubes.problem, _line(cubes)
    scalars = line.parts(problem), Sizes.of(cubes)
    meta = {
        "taps": Taps.of(cubes), "box": line.box, "tile": line.constants(problem, cubes.taps),
        "PART": problem.part, **problem.constants,
        **dependent_launch.options(target=problem.target), **line.tile.launch_options,
    }  # fmt: skip
    descriptors = (None, voxels.descriptor(cubes, line.box, line.tile["BLOCK_N"]))
    product = launch.Prepared(conv_cube_grad_weight_kernel, (line.programs,), scalars, meta, descriptors)
    shape = problem.groups * problem.M, *(axis.kernel for axis in cubes.axes), problem.C
    return even_parts.prepare(problem, line, product, shape)


def run(cubes: VolumeProblem, prepared: Shares, t: Tensors) -> torch.Tensor:
    """Return dw from x and dy, [N, D, H, W, channels]."""
    return prepared.run(t.w, t.x, None)


def reads_concat_pair(cubes: VolumeProblem) -> bool:
    """Return whether the channels of a tile are of one half of a `ConcatPair`, which is one volume without strides."""
    problem = cubes.problem
    aligned = problem.part * problem.dtype.itemsize % 16 == 0 == problem.part % _line(cubes).tile["BLOCK_N"]
    return aligned and problem.N == problem.groups == max(cubes.strides) == 1
