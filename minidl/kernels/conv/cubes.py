"""The "cube" form of 3-D convolutions: an implicit GEMM whose column tiles are boxes of voxels, read by descriptors.

    y [voxels of a box, BLOCK_M channels] = sum over taps and blocks of BLOCK_K channels of
        x [the box, moved to the tap, BLOCK_K channels]  w [BLOCK_M, tap, BLOCK_K channels]^T

As in `boxed`, with one more axis (`voxels` has a drawing): blocks are zero outside the volume. Taps are the inner loop,
channels the outer one. All backward phases are one launch, in which a program determines its phase (`taps_of_phase`);
channels-last weights are read in place (W_IN_PLACE).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, tile_throughput, voxels
from minidl.kernels.conv.depthwise import phase_of
from minidl.kernels.conv.geometry import NOWHERE
from minidl.kernels.conv.problem import Tensors
from minidl.kernels.conv.voxels import Sizes, Taps, VolumeProblem, voxels_of
from minidl.kernels.epilogue import finish
from minidl.runtime import launch
from minidl.runtime.descriptors import Box

NAME = "cube"
FAMILY = "conv_box"
MOST_IN_PHASES = 64 * 128  # maximum outputs of a tile, in launches of several phases
AHEAD = tl.constexpr(voxels.AHEAD)
FAR_AWAY = tl.constexpr(NOWHERE)


class Outputs(NamedTuple):
    """OD x OH x OW voxels of GROUPS * M channels in each volume, in `tiles` tiles of `programs` programs."""

    OD: int
    OH: int
    OW: int
    M: int
    GROUPS: int
    tiles: int
    programs: int


class Tile(NamedTuple):
    """Constants of a tile: BLOCK_M channels of a box, in steps of BLOCK_K channels of x, stored in PIECES.

    PER_PROCESSOR, FLATTEN  0, or persistent programs per multiprocessor, and whether their loops are one
    W_IN_PLACE              whether weights are [GROUPS * C, taps, M], in place of [GROUPS * M, taps, C]
    """

    BLOCK_M: int
    BLOCK_K: int
    PIECES: int
    PER_PROCESSOR: int
    FLATTEN: int
    W_IN_PLACE: bool
    ACC: Any
    PRECISION: str


@triton.jit
def taps_of_phase(i, pad, axis: tl.constexpr):
    """Return (first tap, its input, number of taps) of backward phase i; without taps, one that reads far outside."""
    first, start, _ = phase_of(i, 0, pad, axis.J, axis.STRIDE, axis.PERIOD, axis.INVERSE, axis.DILATION)
    none = first >= axis.J
    first = tl.where(none, 0, first)
    return first, tl.where(none, FAR_AWAY, start), tl.where(none, 1, (axis.J - first + axis.PERIOD - 1) // axis.PERIOD)


@triton.jit
def conv_cube_tile(
    i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z, sizes, out,
    taps: tl.constexpr, box: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M channels of a box of outputs. The weights are the left operand, as in `boxed`."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    VOXELS: tl.constexpr = box.TILE_N * box.TILE_D * box.TILE_H * box.TILE_W
    BLOCKS: tl.constexpr = (taps.C + BLOCK_K - 1) // BLOCK_K
    PHASES: tl.constexpr = taps.D.STRIDE * taps.H.STRIDE * taps.W.STRIDE
    tiles_m = tl.cdiv(out.M, BLOCK_M)
    tiles_w = tl.cdiv(sizes.QW, box.TILE_W)
    tiles_h = tl.cdiv(sizes.QH, box.TILE_H)
    tiles_d = tl.cdiv(sizes.QD, box.TILE_D)
    in_d = sizes.in_d
    in_h = sizes.in_h
    in_w = sizes.in_w
    i_d = 0
    i_h = 0
    i_w = 0
    taps_d = taps.D.J
    taps_h = taps.H.J
    taps_w = taps.W.J
    o_w = 0 * i_tile
    # Distance between taps in a row of the weights.
    row_w = out.M if tile.W_IN_PLACE else BLOCKS * BLOCK_K if out.GROUPS == 1 else taps.C
    if PHASES > 1:
        # Triton 3.6 takes no field of a record that is a record itself as an argument.
        D: tl.constexpr = taps.D
        H: tl.constexpr = taps.H
        W: tl.constexpr = taps.W
        i_w = i_tile % taps.W.STRIDE
        i_h = i_tile // taps.W.STRIDE % taps.H.STRIDE
        i_d = i_tile // (taps.W.STRIDE * taps.H.STRIDE) % taps.D.STRIDE
        i_tile = i_tile // PHASES
        first_d, in_d, taps_d = taps_of_phase(i_d, in_d, D)
        first_h, in_h, taps_h = taps_of_phase(i_h, in_h, H)
        first_w, in_w, taps_w = taps_of_phase(i_w, in_w, W)
        o_w = ((first_d * taps.H.J + first_h) * taps.W.J + first_w) * row_w
    m = i_tile % tiles_m * BLOCK_M
    i_group = i_tile // tiles_m % out.GROUPS
    i_box = i_tile // (tiles_m * out.GROUPS)
    q_w = i_box % tiles_w * box.TILE_W
    q_h = i_box // tiles_w % tiles_h * box.TILE_H
    q_d = i_box // (tiles_w * tiles_h) % tiles_d * box.TILE_D
    n = i_box // (tiles_w * tiles_h * tiles_d) * box.TILE_N
    if tile.W_IN_PLACE:
        o_w += m
    c = i_group * taps.C
    j_w = 0
    j_h = 0
    x_d = in_d + q_d * taps.D.IN_STEP
    x_h = in_h + q_h * taps.H.IN_STEP
    x_w = in_w + q_w * taps.W.IN_STEP
    b_acc = tl.zeros((BLOCK_M, VOXELS), dtype=tile.ACC)
    steps = taps_d * taps_h * taps_w * BLOCKS
    if PHASES > 1:
        tl.assume(steps > 0)
    for _ in range(steps):
        b_w = d_w.load([c, o_w]).T if tile.W_IN_PLACE else d_w.load([i_group * out.M + m, o_w])  # [BLOCK_M, BLOCK_K]
        if taps.STRIDED:
            i_slice = tl.where((x_d >= 0) & (x_d < sizes.D), n * sizes.D + x_d, sizes.N * sizes.D)
            # Division that rounds negative values down.
            h = (x_h + AHEAD * taps.H.IN_STEP) // taps.H.IN_STEP - AHEAD
            w = (x_w + AHEAD * taps.W.IN_STEP) // taps.W.IN_STEP - AHEAD
            o_c = c + (x_w - w * taps.W.IN_STEP) * (out.GROUPS * taps.C)
            b_x = d_x.load([i_slice, h, x_h - h * taps.H.IN_STEP, w, o_c])
        else:
            b_x = d_x.load([n, x_d, x_h, x_w, c])
        b_x = tl.reshape(b_x, (VOXELS, BLOCK_K)).T  # [BLOCK_K, VOXELS]
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
        j_w += 1
        row = j_w == taps_w
        x_w += taps.W.IN_TAP - tl.where(row, taps_w * taps.W.IN_TAP, 0)
        j_w = tl.where(row, 0, j_w)
        j_h += tl.where(row, 1, 0)
        plane = j_h == taps_h
        x_h += tl.where(row, taps.H.IN_TAP, 0) - tl.where(plane, taps_h * taps.H.IN_TAP, 0)
        j_h = tl.where(plane, 0, j_h)
        x_d += tl.where(plane, taps.D.IN_TAP, 0)
        every = x_d == in_d + q_d * taps.D.IN_STEP + taps_d * taps.D.IN_TAP
        x_d -= tl.where(every, taps_d * taps.D.IN_TAP, 0)
        if PHASES > 1:
            o_w += (taps.W.PERIOD - tl.where(row, taps_w * taps.W.PERIOD, 0)) * row_w
            row_h = taps.W.J * row_w
            o_w += (tl.where(row, taps.H.PERIOD, 0) - tl.where(plane, taps_h * taps.H.PERIOD, 0)) * row_h
            row_d = taps.H.J * row_h
            o_w += (tl.where(plane, taps.D.PERIOD, 0) - tl.where(every, taps_d * taps.D.PERIOD, 0)) * row_d
        else:
            o_w += row_w - tl.where(every, taps.D.J * taps.H.J * taps.W.J * row_w, 0)
        if not tile.W_IN_PLACE:
            o_w += tl.where(every, BLOCK_K, 0)
        c += tl.where(every, BLOCK_K, 0)
    v_n, v_d, v_h, v_w = voxels_of(box)
    o_n = n + v_n
    o_d = q_d + v_d
    o_h = q_h + v_h
    o_w = q_w + v_w
    m_row = (o_n < sizes.N) & (o_d < sizes.QD) & (o_h < sizes.QH) & (o_w < sizes.QW)
    if PHASES > 1:
        o_d = i_d + o_d * taps.D.STRIDE
        o_h = i_h + o_h * taps.H.STRIDE
        o_w = i_w + o_w * taps.W.STRIDE
        m_row = m_row & (o_d < out.OD) & (o_h < out.OH) & (o_w < out.OW)
    o_row = ((o_n.to(tl.int64) * out.OD + o_d) * out.OH + o_h) * out.OW + o_w
    finish(
        b_acc.T, p_bias, p_scale, p_y, p_z, o_row, m_row, m, out.M, i_group, out.GROUPS, epilogue, tile.PIECES
    )  # fmt: skip


@triton.jit
def conv_cube_kernel(
    d_x, d_w, p_bias, p_scale, p_y, p_z, sizes, out,
    taps: tl.constexpr, box: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr,
):  # fmt: skip
    """Run one tile per program if PER_PROCESSOR is 0, else that many persistent programs per multiprocessor."""
    if tile.PER_PROCESSOR == 0:
        conv_cube_tile(
            tl.program_id(0), d_x, d_w, p_bias, p_scale, p_y, p_z, sizes, out, taps, box, tile, epilogue
        )  # fmt: skip
    else:
        for i_tile in tl.range(tl.program_id(0), out.tiles, out.programs, flatten=tile.FLATTEN):
            conv_cube_tile(i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z, sizes, out, taps, box, tile, epilogue)


def able(cubes: VolumeProblem) -> bool:
    """Return whether strides, channels, dtype and device are supported; weights are reordered if necessary.

    A partial block of channels is padded with zeros, except with a stride along W, where the next voxel follows.
    """
    problem = cubes.problem
    padded = problem.groups == 1 and problem.C > voxels.LEAST_BLOCK and cubes.strides[2] == 1
    multiple = problem.C % voxels.LEAST_BLOCK == 0 or padded
    row = cubes.taps * (problem.M if cubes.in_place else voxels.width(problem, voxels.LEAST_BLOCK))
    return multiple and problem.M > 0 and voxels.in_boxes(cubes) and problem.boxes(row)


def estimate(cubes: VolumeProblem) -> float:
    """Estimate microseconds, as `boxed` does."""
    return costs.launch_time(cubes.problem, microseconds(cubes, _tile(cubes)), voxels.moved(cubes))


def microseconds(cubes: VolumeProblem, tile: launch.Tile) -> float:
    """Return the microseconds with a tile."""
    problem, block = cubes.problem, voxels.block_of(cubes.problem, tile)
    steps = tile_throughput.steps(problem, cubes.each * voxels.width(problem, block) / block, block, boxes=True)
    work = costs.Work(_count_tiles(cubes, tile), steps, tile_throughput.of_boxes(problem, tile), "box")
    return costs.microseconds(problem, work)


def prepare(cubes: VolumeProblem) -> launch.Prepared:
    """Prepare the launch, which takes x, w [groups * M, taps, C], bias, scale, y and z."""
    problem, tile = cubes.problem, _tile(cubes)
    M, C, groups = problem.M, problem.C, problem.groups
    box, block = voxels.box_shape(cubes, tile["BLOCK_N"]), voxels.block_of(problem, tile)
    tiles = _count_tiles(cubes, tile)
    persistent = tile["PER_PROCESSOR"] * problem.processors
    if tiles <= persistent:
        persistent = 0  # persistent programs with one tile each start later, as in `boxed`
    per_processor, flatten = (tile["PER_PROCESSOR"], tile["FLATTEN"]) if persistent else (0, 0)
    OD, OH, OW = cubes.written
    out = Outputs(OD, OH, OW, M, groups, tiles, persistent or tiles)
    constants = Tile(
        tile["BLOCK_M"], block, tile["PIECES"], per_processor, flatten, cubes.in_place, **problem.constants
    )
    meta = {
        "taps": Taps.of(cubes), "box": box, "tile": constants, "epilogue": problem.epilogue, **tile.launch_options,
    }  # fmt: skip
    d_w = Box.of_rows(groups * M, cubes.taps * voxels.width(problem, block), (tile["BLOCK_M"], block))
    if cubes.in_place:
        d_w = Box.of_rows(groups * C, cubes.taps * M, (block, tile["BLOCK_M"]))
    descriptors = voxels.descriptor(cubes, box, block), d_w
    return launch.Prepared(conv_cube_kernel, (out.programs,), (Sizes.of(cubes), out), meta, descriptors)


def run(cubes: VolumeProblem, prepared: launch.Prepared, t: Tensors) -> None:
    """Write y, and z if there is one."""
    prepared.run(t.x, weights(t.w, cubes), t.bias, t.scale, t.y, t.z)


def weights(w: torch.Tensor, cubes: VolumeProblem) -> torch.Tensor:
    """Return the weights [groups * M, C, Q, R, S] of a convolution in the order that the launch reads."""
    problem = cubes.problem
    if cubes.back and not cubes.in_place:
        ordered = w.unflatten(0, (problem.groups, -1)).permute(0, 2, 3, 4, 5, 1).flatten(0, 1)
    else:
        ordered = w.permute(0, 2, 3, 4, 1)
    channels = voxels.width(problem, voxels.block_of(problem, _tile(cubes)))
    if cubes.in_place or channels == problem.C:
        return ordered.contiguous()
    padded = torch.zeros(*ordered.shape[:-1], channels, dtype=w.dtype, device=w.device)
    padded[..., : problem.C].copy_(ordered)
    return padded


def _count_tiles(cubes: VolumeProblem, tile: launch.Tile) -> int:
    boxes = voxels.count_boxes(cubes.counts, voxels.box_shape(cubes, tile["BLOCK_N"]))
    return boxes * launch.cdiv(cubes.problem.M, tile["BLOCK_M"]) * cubes.problem.groups * cubes.phase_count


def _tile(cubes: VolumeProblem) -> launch.Tile:
    problem = cubes.problem
    divisor = problem.C & -problem.C
    K = problem.C if divisor < voxels.LEAST_BLOCK and problem.groups == 1 else divisor
    tiles = problem.tiles(FAMILY, M=problem.M, N=math.prod(cubes.counts), K=K)
    if cubes.phase_count > 1:
        # Persistent programs that change phases are slow.
        tiles = tuple(
            launch.Tile({**tile.sizes, "PER_PROCESSOR": 0, "PIECES": 1, "FLATTEN": 0}, tile.num_warps, tile.num_stages)
            for tile in tiles
            if tile["BLOCK_M"] * tile["BLOCK_N"] <= MOST_IN_PHASES or len(tiles) == 1
        )
    return min(tiles, key=lambda tile: microseconds(cubes, tile)) if len(tiles) > 1 else tiles[0]
