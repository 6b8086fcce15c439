"""The weight gradient of volumes in the "cube" form: the K of the GEMM is a box of voxels of one or several volumes.

    dw[m, j, c] = sum over voxels of dy[n, q, m] x[n, at(q, j), c]

Strides are as in `cubes`: several taps of a row share dy, the left operand, and the boxes of all tiles form a sequence,
divided equally among programs (`even_parts`). Zeros outside are multiplied by dy,
and zeros beyond the outputs by x, so a non-finite value gives NaN for taps that do not read it. With a stride of 1 x
and dy may be exchanged: dw[m, j, c] = sum over voxels of x[n, p, c] dy[n, p - j, m], with taps reversed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import box_line, costs, voxels
from minidl.kernels.conv.cubes import AHEAD
from minidl.kernels.conv.even_parts import Prepared, slots_of, step_at
from minidl.kernels.conv.phase_weights import conv_turn_kernel
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import INT32_LIMIT, Problem
from minidl.kernels.conv.voxels import Cubes
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

FAMILY = "conv_box_grad_weight"
MARGIN = 1.05  # least advantage of the exchanged problem; estimates are 0.9 to 1.1 times most measured times
THIN_X, THIN_Y = 2.9, 1.6  # factors for voxels of at most 32 bytes, and for outputs that fill half a tile


@triton.jit
def conv_cube_grad_weight_kernel(
    p_dy, d_x, p_partial, boxes, N, D, QD, QH, QW, M, GROUPS, in_d, in_h, in_w, Q, PAUSE,
    C: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    STRIDED: tl.constexpr, IN_STEP_D: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_D: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAPS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Write partial [slots, groups * M, JD * JH * JW * C]: the sums of this program's Q steps, per tile."""
    wait(EARLY)
    VOXELS: tl.constexpr = TILE_N * TILE_D * TILE_H * TILE_W
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = JD * JH * JW // TAPS
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    tiles_d = tl.cdiv(QD, TILE_D)
    # The voxels of a box, and their offsets from the first one.
    o_v = tl.arange(0, VOXELS)
    v_n = o_v // (TILE_D * TILE_H * TILE_W)
    v_d = o_v // (TILE_H * TILE_W) % TILE_D
    v_h = o_v // TILE_W % TILE_H
    v_w = o_v % TILE_W
    o_dy = (((v_n * QD + v_d) * QH + v_h) * QW + v_w) * (GROUPS * M)
    steps = boxes + PAUSE
    start = tl.program_id(0) * Q
    end = tl.minimum(start + Q, tiles_c * tiles_m * GROUPS * J * steps)
    i_tile = start // steps
    first = i_tile * steps
    while first < end:
        c = i_tile % tiles_c * BLOCK_N
        m = i_tile // tiles_c % tiles_m * BLOCK_M
        i_group = i_tile // (tiles_c * tiles_m) % GROUPS
        j = i_tile // (tiles_c * tiles_m * GROUPS) * TAPS
        tap_d = in_d + j // (JH * JW) * IN_TAP_D
        tap_h = in_h + j // JW % JH * IN_TAP_H
        tap_w = in_w + j % JW * IN_TAP_W
        o_c = i_group * C + c
        # Division that rounds negative values down.
        x_h = (tap_h + AHEAD * IN_STEP_H) // IN_STEP_H - AHEAD
        phase = tap_h - x_h * IN_STEP_H
        r_m = m + tl.arange(0, BLOCK_M)
        before, slots, opening, closing = slots_of(first + PAUSE, boxes, Q)
        slot = tl.program_id(0) - before
        begin = tl.maximum(start, first + PAUSE) - start
        stop = tl.minimum(first + steps, end) - start
        b_accs = ()
        for _ in tl.static_range(TAPS):
            b_accs += (tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC),)
        for step in range(begin, stop):
            i = step_at(step, slot, slots, opening, closing)
            q_w = i % tiles_w * TILE_W
            row = i // tiles_w
            q_h = row % tiles_h * TILE_H
            row = row // tiles_h
            q_d = row % tiles_d * TILE_D
            n = row // tiles_d * TILE_N
            m_dy = (n + v_n < N) & (q_d + v_d < QD) & (q_h + v_h < QH) & (q_w + v_w < QW)
            # Offsets within a box need 32 bits only.
            p_box = p_dy + (((tl.cast(n, tl.int64) * QD + q_d) * QH + q_h) * QW + q_w) * (GROUPS * M) + i_group * M
            b_dy = tl.load(
                p_box + o_dy[:, None] + r_m[None, :], mask=m_dy[:, None] & (r_m < M)[None, :], other=0.0
            )  # [VOXELS, BLOCK_M]
            x_d = tap_d + q_d * IN_STEP_D
            b_next = ()
            for t in tl.static_range(TAPS):
                at_w = tap_w + t * IN_TAP_W
                if STRIDED:
                    x_w = (at_w + AHEAD * IN_STEP_W) // IN_STEP_W - AHEAD
                    i_slice = tl.where((x_d >= 0) & (x_d < D), n * D + x_d, N * D)
                    o_x = (at_w - x_w * IN_STEP_W) * (GROUPS * C) + o_c
                    b_x = d_x.load([i_slice, x_h + q_h, phase, x_w + q_w, o_x])
                else:
                    b_x = d_x.load([n, x_d, tap_h + q_h, at_w + q_w, o_c])
                b_x = tl.reshape(b_x, (VOXELS, BLOCK_N))
                b_next += (tl.dot(b_dy.T, b_x, b_accs[t], input_precision=PRECISION, out_dtype=ACC),)
            b_accs = b_next
        r_c = c + tl.arange(0, BLOCK_N)
        p_tile = p_partial + slot.to(tl.int64) * (GROUPS * M) * (J * TAPS * C)
        p_tile += (i_group * M + r_m).to(tl.int64)[:, None] * (J * TAPS * C) + j * C + r_c[None, :]
        m_tile = (r_m < M)[:, None] & (r_c < C)[None, :] & (begin < stop)
        for t in tl.static_range(TAPS):
            tl.store(p_tile + t * C, b_accs[t], mask=m_tile)
        first += steps
        i_tile += 1


def able(cubes_: Cubes) -> bool:
    """Return whether strides, channels, dtype and device are supported."""
    problem = cubes_.problem
    size = problem.dtype.itemsize
    return (
        (size == 2 or problem.target == "interpreted")
        and problem.M > 0 and problem.C * size % 16 == 0 == problem.M * size % 16 and voxels.in_boxes(cubes_)
        and _counted(_cut(cubes_), cubes_) < INT32_LIMIT
    )  # fmt: skip


def _counted(at: _Cut, cubes_: Cubes) -> int:
    """Return the maximum of what 32 bits must count: slices, values of a box, and steps."""
    reach = at.box[0] * math.prod(cubes_.counts[1:])
    slices = cubes_.volumes * max(cubes_.counts[1], cubes_.read[0])
    return max(reach * cubes_.problem.groups * cubes_.problem.M, at.line.total, slices)


def estimate(cubes_: Cubes) -> float:
    """Estimate microseconds."""
    if cubes_.problem.target == "interpreted":
        line = _cut(cubes_).line
        return costs.constants(cubes_.problem).launch * (line.tiles + line.programs)
    return min(_microseconds(cubes_), _mirror_time(cubes_))


def _microseconds(cubes_: Cubes) -> float:
    problem = cubes_.problem
    factor = THIN_X if problem.C < 32 else THIN_Y if problem.M <= 32 else 1.0
    time = factor * box_line.microseconds(problem, _cut(cubes_).line)
    return costs.at_least(problem, time, voxels.moved(cubes_))


def _mirror_time(cubes_: Cubes) -> float:
    """Return the microseconds of the mirrored problem; infinite if there is none."""
    if not _can_mirror(cubes_):
        return math.inf
    return _microseconds(_mirror(cubes_)) * MARGIN + _transpose_time(cubes_)


def _transpose_time(cubes_: Cubes) -> float:
    """Return the microseconds of transposing the gradient."""
    problem = cubes_.problem
    values = problem.groups * problem.M * problem.C * cubes_.taps
    return costs.copy_time(problem, 2 * values * problem.dtype.itemsize)


def _transpose(problem: Problem, taps: int) -> Copy:
    """Return the copy from the exchanged gradient [groups * C, reversed taps, M] to [groups * M, taps, C]."""
    C, M, groups = problem.C, problem.M, problem.groups
    tile = problem.tile("conv_turn", floor=1, M=M, N=C)
    grid = launch.cdiv(C, tile["BLOCK_N"]) * launch.cdiv(M, tile["BLOCK_M"]) * taps * groups
    scalars = (C, M, taps * M, 1, 0, M, 0, 0, taps - 1, -1)
    launch_ = launch.Prepared(conv_turn_kernel, (grid,), scalars, {"JH": 1, "JW": taps, **tile.options})
    return Copy((groups * M, taps, C), launch_)


def _mirrors(cubes_: Cubes) -> bool:
    """Return whether the mirrored problem is faster."""
    return _mirror_time(cubes_) < _microseconds(cubes_)


def _can_mirror(cubes_: Cubes) -> bool:
    """Return whether the mirrored problem is supported."""
    return max(cubes_.strides) == 1 and able(_mirror(cubes_))


def _mirror(cubes_: Cubes) -> Cubes:
    """Return the launch with x and dy exchanged and taps reversed. An axis with one output counts as stride 1."""
    problem = cubes_.problem._replace(C=cubes_.problem.M, M=cubes_.problem.C)
    phases = [
        dataclasses.replace(
            phase, count=size, in_step=1, in_start=-phase.in_start - (len(phase.taps) - 1) * phase.in_tap
        )
        for phase, size in zip(cubes_.phases, cubes_.read, strict=True)
    ]
    return cubes_._replace(problem=problem, phases=tuple(phases), read=cubes_.written, written=cubes_.read)


class Weights(NamedTuple):
    """The launches, the copy that transposes a mirrored result, and the shape [groups * M, D, H, W, C] of dw."""

    sums: Prepared
    turn: Copy | None
    shape: tuple[int, ...]


@launch.cached
def prepare(cubes_: Cubes) -> Weights:
    """Prepare the launches, which take dy and x."""
    problem = cubes_.problem
    turn = None
    taps = tuple(len(phase.taps) for phase in cubes_.phases)
    shape = problem.groups * problem.M, *taps, problem.C
    if _mirrors(cubes_):
        turn = _transpose(problem, cubes_.taps)
        cubes_ = _mirror(cubes_)
    return Weights(_sums(cubes_), turn, shape)


def _sums(cubes_: Cubes) -> Prepared:
    problem, (N, QD, QH, QW), at = cubes_.problem, cubes_.counts, _cut(cubes_)
    line = at.line
    starts = (phase.in_start for phase in cubes_.phases)
    scalars = (line.boxes, N, cubes_.read[0], QD, QH, QW, problem.M, problem.groups, *starts, line.each, box_line.PAUSE)
    meta = {
        **voxels.taps_read(cubes_, at.box), **problem.constants,
        **dependent_launch.options(target=problem.target), **line.blocks,
        "num_warps": line.tile.num_warps, "num_stages": line.tile.num_stages,
    }  # fmt: skip
    descriptors = (None, voxels.box_of(cubes_, at.box, line.tile["BLOCK_N"]))
    product = launch.Prepared(conv_cube_grad_weight_kernel, (line.programs,), scalars, meta, descriptors)
    slot_sum = box_line.prepare_slot_sum(problem, cubes_.taps, line)
    shape = problem.groups * problem.M, cubes_.taps, problem.C
    return Prepared(product, (line.slots, math.prod(shape)), slot_sum, shape)


class _Cut(NamedTuple):
    """The shape of boxes of voxels, and the line of all boxes."""

    box: tuple[int, ...]
    line: box_line.Line


def _cut(cubes_: Cubes) -> _Cut:
    """Return the decomposition with the fastest tile."""
    problem, row = cubes_.problem, len(cubes_.phases[2].taps)
    options = []
    for tile in problem.tiles(FAMILY, M=problem.M, N=problem.C, T=row):
        box = voxels.box_shape(cubes_, tile["BLOCK_K"])
        together = tile["TAPS"] if row % tile["TAPS"] == 0 else 1
        boxes = voxels.count_boxes(cubes_.counts, box)
        options.append(_Cut(box, box_line.in_line(problem, tile, boxes, cubes_.taps, together)))
    return min(options, key=lambda at: box_line.microseconds(problem, at.line))


def run(prepared: Weights, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return the gradient [groups * M, C, Q, R, S] from x and dy, [N, D, H, W, channels]."""
    dw = prepared.sums.run(dy, x) if prepared.turn is None else prepared.turn.of(prepared.sums.run(x, dy))
    return dw.view(prepared.shape).movedim(-1, 1)
