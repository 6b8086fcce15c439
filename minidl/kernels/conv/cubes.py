"""The "cube" form of 3-D convolutions: an implicit GEMM whose column tiles are boxes of voxels, read by descriptors.

As in `boxed`, with one more axis: for one tap and a block of channels, the inputs of TILE_N x TILE_D x TILE_H x TILE_W
neighbouring outputs are one descriptor block of x [N, D, H, W, channels] (TMA on sm_90), with zeros outside the volume.
Taps in depth are the outer loop of a tile.

All backward phases are one launch, in which a program determines its phase (STRIDE_*); channels-last weights are read
in place (TURN). With a forward stride (STRIDED), which must divide H and W, a tile lies in one slice, and slices are
viewed as [H / stride, stride, W / stride, stride * channels], where the inputs of a tap are contiguous. Slices outside
are read beyond the end.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, tile_throughput, voxels
from minidl.kernels.conv.depthwise import phase_of
from minidl.kernels.conv.epilogue import finish
from minidl.kernels.conv.geometry import NOWHERE
from minidl.kernels.conv.voxels import Cubes
from minidl.runtime import launch
from minidl.runtime.descriptors import Box

FAMILY = "conv_box"
MOST_IN_PHASES = 64 * 128  # maximum outputs of a tile, in launches of several phases
AHEAD = tl.constexpr(voxels.AHEAD)
FAR_AWAY = tl.constexpr(NOWHERE)


@triton.jit
def taps_of_phase(
    i, pad,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PERIOD: tl.constexpr, INVERSE: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """Return (first tap, its input, number of taps) of backward phase i; without taps, one that reads far outside."""
    first, start, _ = phase_of(i, 0, pad, KERNEL, STRIDE, PERIOD, INVERSE, DILATION)
    none = first >= KERNEL
    first = tl.where(none, 0, first)
    return first, tl.where(none, FAR_AWAY, start), tl.where(none, 1, (KERNEL - first + PERIOD - 1) // PERIOD)


@triton.jit
def conv_cube_tile(
    i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z,
    N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w,
    C: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    STRIDED: tl.constexpr, IN_STEP_D: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_D: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PERIOD_D: tl.constexpr, PERIOD_H: tl.constexpr, PERIOD_W: tl.constexpr,
    INVERSE_D: tl.constexpr, INVERSE_H: tl.constexpr, INVERSE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M channels of a box of outputs. The weights are the left operand, as in `boxed`: [GROUPS * M, taps,
    C], with TURN [GROUPS * C, taps, M]. JD, JH, JW: taps of the kernel, in several phases a subset, PERIOD apart."""
    VOXELS: tl.constexpr = TILE_N * TILE_D * TILE_H * TILE_W
    BLOCKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    WALKS: tl.constexpr = STRIDE_D * STRIDE_H * STRIDE_W
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    tiles_d = tl.cdiv(QD, TILE_D)
    i_d = 0
    i_h = 0
    i_w = 0
    taps_d = JD
    taps_h = JH
    taps_w = JW
    o_w = 0 * i_tile
    # Distance between taps in a row of the weights.
    row_w = M if TURN else BLOCKS * BLOCK_K if GROUPS == 1 else C
    if WALKS > 1:
        i_w = i_tile % STRIDE_W
        i_h = i_tile // STRIDE_W % STRIDE_H
        i_d = i_tile // (STRIDE_W * STRIDE_H) % STRIDE_D
        i_tile = i_tile // WALKS
        first_d, in_d, taps_d = taps_of_phase(i_d, in_d, JD, STRIDE_D, PERIOD_D, INVERSE_D, DILATION_D)
        first_h, in_h, taps_h = taps_of_phase(i_h, in_h, JH, STRIDE_H, PERIOD_H, INVERSE_H, DILATION_H)
        first_w, in_w, taps_w = taps_of_phase(i_w, in_w, JW, STRIDE_W, PERIOD_W, INVERSE_W, DILATION_W)
        o_w = ((first_d * JH + first_h) * JW + first_w) * row_w
    m = i_tile % tiles_m * BLOCK_M
    i_group = i_tile // tiles_m % GROUPS
    i_box = i_tile // (tiles_m * GROUPS)
    q_w = i_box % tiles_w * TILE_W
    q_h = i_box // tiles_w % tiles_h * TILE_H
    q_d = i_box // (tiles_w * tiles_h) % tiles_d * TILE_D
    n = i_box // (tiles_w * tiles_h * tiles_d) * TILE_N
    if TURN:
        o_w += m
    c = i_group * C
    j_w = 0
    j_h = 0
    x_d = in_d + q_d * IN_STEP_D
    x_h = in_h + q_h * IN_STEP_H
    x_w = in_w + q_w * IN_STEP_W
    b_acc = tl.zeros((BLOCK_M, VOXELS), dtype=ACC)
    steps = taps_d * taps_h * taps_w * BLOCKS
    if WALKS > 1:
        tl.assume(steps > 0)
    for _ in range(steps):
        b_w = d_w.load([c, o_w]).T if TURN else d_w.load([i_group * M + m, o_w])  # [BLOCK_M, BLOCK_K]
        if STRIDED:
            i_slice = tl.where((x_d >= 0) & (x_d < D), n * D + x_d, N * D)
            # Division that rounds negative values down.
            h = (x_h + AHEAD * IN_STEP_H) // IN_STEP_H - AHEAD
            w = (x_w + AHEAD * IN_STEP_W) // IN_STEP_W - AHEAD
            o_c = c + (x_w - w * IN_STEP_W) * (GROUPS * C)
            b_x = d_x.load([i_slice, h, x_h - h * IN_STEP_H, w, o_c])
        else:
            b_x = d_x.load([n, x_d, x_h, x_w, c])
        b_x = tl.reshape(b_x, (VOXELS, BLOCK_K)).T  # [BLOCK_K, VOXELS]
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
        # Taps are the inner loop, as in `boxed`.
        j_w += 1
        row = j_w == taps_w
        x_w += IN_TAP_W - tl.where(row, taps_w * IN_TAP_W, 0)
        j_w = tl.where(row, 0, j_w)
        j_h += tl.where(row, 1, 0)
        plane = j_h == taps_h
        x_h += tl.where(row, IN_TAP_H, 0) - tl.where(plane, taps_h * IN_TAP_H, 0)
        j_h = tl.where(plane, 0, j_h)
        x_d += tl.where(plane, IN_TAP_D, 0)
        every = x_d == in_d + q_d * IN_STEP_D + taps_d * IN_TAP_D
        x_d -= tl.where(every, taps_d * IN_TAP_D, 0)
        if WALKS > 1:
            o_w += (PERIOD_W - tl.where(row, taps_w * PERIOD_W, 0)) * row_w
            o_w += (tl.where(row, PERIOD_H, 0) - tl.where(plane, taps_h * PERIOD_H, 0)) * (JW * row_w)
            o_w += (tl.where(plane, PERIOD_D, 0) - tl.where(every, taps_d * PERIOD_D, 0)) * (JH * JW * row_w)
        else:
            o_w += row_w - tl.where(every, JD * JH * JW * row_w, 0)
        if not TURN:
            o_w += tl.where(every, BLOCK_K, 0)
        c += tl.where(every, BLOCK_K, 0)
    o_v = tl.arange(0, VOXELS)
    o_n = n + o_v // (TILE_D * TILE_H * TILE_W)
    o_d = q_d + o_v // (TILE_H * TILE_W) % TILE_D
    o_h = q_h + o_v // TILE_W % TILE_H
    o_w = q_w + o_v % TILE_W
    m_row = (o_n < N) & (o_d < QD) & (o_h < QH) & (o_w < QW)
    if WALKS > 1:
        o_d = i_d + o_d * STRIDE_D
        o_h = i_h + o_h * STRIDE_H
        o_w = i_w + o_w * STRIDE_W
        m_row = m_row & (o_d < OD) & (o_h < OH) & (o_w < OW)
    o_row = ((o_n.to(tl.int64) * OD + o_d) * OH + o_h) * OW + o_w
    finish(
        b_acc.T, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, GROUPS,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES,
    )  # fmt: skip


@triton.jit
def conv_cube_kernel(
    d_x, d_w, p_bias, p_scale, p_y, p_z,
    N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w, tiles, programs,
    C: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    STRIDED: tl.constexpr, IN_STEP_D: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_D: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PERIOD_D: tl.constexpr, PERIOD_H: tl.constexpr, PERIOD_W: tl.constexpr,
    INVERSE_D: tl.constexpr, INVERSE_H: tl.constexpr, INVERSE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    PER_PROCESSOR: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Run one tile per program if PER_PROCESSOR is 0, else that many persistent programs per multiprocessor."""
    if PER_PROCESSOR == 0:
        conv_cube_tile(
            tl.program_id(0), d_x, d_w, p_bias, p_scale, p_y, p_z,
            N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w,
            C, JD, JH, JW, STRIDED, IN_STEP_D, IN_STEP_H, IN_STEP_W, IN_TAP_D, IN_TAP_H, IN_TAP_W,
            STRIDE_D, STRIDE_H, STRIDE_W, PERIOD_D, PERIOD_H, PERIOD_W,
            INVERSE_D, INVERSE_H, INVERSE_W, DILATION_D, DILATION_H, DILATION_W, TURN,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_K, PIECES,
            TILE_N, TILE_D, TILE_H, TILE_W,
        )  # fmt: skip
    else:
        for i_tile in tl.range(tl.program_id(0), tiles, programs, flatten=FLATTEN):
            conv_cube_tile(
                i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z,
                N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w,
                C, JD, JH, JW, STRIDED, IN_STEP_D, IN_STEP_H, IN_STEP_W, IN_TAP_D, IN_TAP_H, IN_TAP_W,
                STRIDE_D, STRIDE_H, STRIDE_W, PERIOD_D, PERIOD_H, PERIOD_W,
                INVERSE_D, INVERSE_H, INVERSE_W, DILATION_D, DILATION_H, DILATION_W, TURN,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_K, PIECES,
                TILE_N, TILE_D, TILE_H, TILE_W,
            )  # fmt: skip


def able(cubes: Cubes) -> bool:
    """Return whether strides, channels, dtype and device are supported; weights are reordered if necessary.

    A partial block of channels is padded with zeros, except with a stride along W, where the next voxel follows.
    """
    problem = cubes.problem
    padded = problem.groups == 1 and problem.C > voxels.LEAST_BLOCK and cubes.strides[2] == 1
    multiple = problem.C % voxels.LEAST_BLOCK == 0 or padded
    row = cubes.taps * (problem.M if cubes.turn else voxels.width(problem, voxels.LEAST_BLOCK))
    return multiple and problem.M > 0 and voxels.in_boxes(cubes) and problem.boxes(row)


def estimate(cubes: Cubes) -> float:
    """Estimate microseconds, as `boxed` does."""
    return costs.at_least(cubes.problem, microseconds(cubes, _tile(cubes)), voxels.moved(cubes))


def microseconds(cubes: Cubes, tile: launch.Tile) -> float:
    """Return the microseconds with a tile."""
    problem, block = cubes.problem, voxels.block_of(cubes.problem, tile)
    blocks = cubes.each * voxels.width(problem, block) / block
    steps = tile_throughput.steps(problem, blocks, block, boxes=True)
    throughput = tile_throughput.of_boxes(problem, tile)
    return costs.microseconds(problem, costs.Work(_count_tiles(cubes, tile), steps, throughput, "box"))


@launch.cached
def prepare(cubes: Cubes) -> launch.Prepared:
    """Prepare the launch, which takes x, w [groups * M, taps, C], bias, scale, y and z."""
    problem, N = cubes.problem, cubes.volumes
    M, C, groups = problem.M, problem.C, problem.groups
    tile = _tile(cubes)
    options = tile.options
    box = voxels.box_shape(cubes, tile["BLOCK_N"])
    del options["BLOCK_N"]
    options["BLOCK_K"] = block = voxels.block_of(problem, tile)
    tiles = _count_tiles(cubes, tile)
    # Persistent programs with one tile each start later, as in `boxed`.
    persistent = tile["PER_PROCESSOR"] * problem.processors
    if tiles <= persistent:
        persistent = options["PER_PROCESSOR"] = options["FLATTEN"] = 0
    programs = persistent or tiles
    scalars = N, cubes.read[0], *cubes.counts[1:], *cubes.written, M, groups, *voxels.starts(cubes), tiles, programs
    meta = {
        **voxels.taps_read(cubes, box), **problem.constants, **problem.flags("POOL"), **options, "TURN": cubes.turn,
        **voxels.phase_constants(cubes),
    }  # fmt: skip
    w_descriptor = Box.of_rows(groups * M, cubes.taps * voxels.width(problem, block), (tile["BLOCK_M"], block))
    if cubes.turn:
        w_descriptor = Box.of_rows(groups * C, cubes.taps * M, (block, tile["BLOCK_M"]))
    descriptors = voxels.box_of(cubes, box, block), w_descriptor
    return launch.Prepared(conv_cube_kernel, (programs,), scalars, meta, descriptors)


def weights(w: torch.Tensor, cubes: Cubes) -> torch.Tensor:
    """Return the weights [groups * M, C, Q, R, S] of a convolution in the order that the launch reads."""
    problem = cubes.problem
    if cubes.turn:
        return w.permute(0, 2, 3, 4, 1)
    if cubes.back is None:
        ordered = w.permute(0, 2, 3, 4, 1)
    else:
        ordered = w.unflatten(0, (problem.groups, -1)).permute(0, 2, 3, 4, 5, 1).flatten(0, 1)
    channels = voxels.width(problem, voxels.block_of(problem, _tile(cubes)))
    if channels == problem.C:
        return ordered.contiguous()
    padded = torch.zeros(*ordered.shape[:-1], channels, dtype=w.dtype, device=w.device)
    padded[..., : problem.C].copy_(ordered)
    return padded


def _count_tiles(cubes: Cubes, tile: launch.Tile) -> int:
    boxes = voxels.count_boxes(cubes.counts, voxels.box_shape(cubes, tile["BLOCK_N"]))
    return boxes * launch.cdiv(cubes.problem.M, tile["BLOCK_M"]) * cubes.problem.groups * cubes.phase_count


def _tile(cubes: Cubes) -> launch.Tile:
    problem = cubes.problem
    divisor = problem.C & -problem.C
    K = problem.C if divisor < voxels.LEAST_BLOCK and problem.groups == 1 else divisor
    tiles = problem.tiles(FAMILY, M=problem.M, N=math.prod(cubes.counts), K=K)
    if cubes.phase_count > 1:
        # Persistent programs that change phases are slow: 64->128 at 16x56x56 backward 120 us, else 67.
        tiles = tuple(
            launch.Tile({**tile.sizes, "PER_PROCESSOR": 0, "PIECES": 1, "FLATTEN": 0}, tile.num_warps, tile.num_stages)
            for tile in tiles
            if tile["BLOCK_M"] * tile["BLOCK_N"] <= MOST_IN_PHASES or len(tiles) == 1
        )
    return min(tiles, key=lambda tile: microseconds(cubes, tile)) if len(tiles) > 1 else tiles[0]
