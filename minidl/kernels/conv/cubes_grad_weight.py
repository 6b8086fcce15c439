"""The weight gradient of volumes in boxes of voxels: the K of the GEMM is a box, of one volume or of several.

    dw[m, j, c] = sum over voxels of dy[n, q, m] x[n, at(q, j), c]

As `boxed_grad_weight`, with an axis more, and with strides as `cubes` reads them. The output's gradient is the left
operand, read through pointers. A program sums one tap of a block of output and input channels over its share of the
boxes; shares are interleaved, and their partial sums are added in order. Zeros outside are multiplied with the output's
gradient: one that is not finite makes NaN of border taps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, pace, voxels
from minidl.kernels.conv.cubes import AHEAD
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import MANY
from minidl.kernels.conv.voxels import Cubes
from minidl.runtime import early, estimates, launch
from minidl.runtime.early import wait

FAMILY = "conv_box_grad_weight"
LEAST = 8  # boxes of a share


@triton.jit
def conv_cube_grad_weight_kernel(
    p_dy, d_x, p_partial, boxes, N, D, QD, QH, QW, M, GROUPS, in_d, in_h, in_w, SHARES,
    C: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    STRIDED: tl.constexpr, IN_STEP_D: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_D: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """partial [shares, groups * M, JD * JH * JW * C]: a tap of BLOCK_M x BLOCK_N channels, a box of voxels a step."""
    wait(EARLY)
    VOXELS: tl.constexpr = TILE_N * TILE_D * TILE_H * TILE_W
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = JD * JH * JW
    tiles_m = tl.cdiv(M, BLOCK_M)
    c = tl.program_id(0) % tiles_c * BLOCK_N
    m = tl.program_id(0) // tiles_c % tiles_m * BLOCK_M
    i_group = tl.program_id(0) // (tiles_c * tiles_m) % GROUPS
    j = tl.program_id(0) // (tiles_c * tiles_m * GROUPS) % J
    i_share = tl.program_id(0) // (tiles_c * tiles_m * GROUPS * J)
    tap_d = in_d + j // (JH * JW) * IN_TAP_D
    tap_h = in_h + j // JW % JH * IN_TAP_H
    tap_w = in_w + j % JW * IN_TAP_W
    o_c = i_group * C + c
    phase = 0
    if STRIDED:
        # Divided so that what is below 0 is rounded down.
        h = (tap_h + AHEAD * IN_STEP_H) // IN_STEP_H - AHEAD
        w = (tap_w + AHEAD * IN_STEP_W) // IN_STEP_W - AHEAD
        phase = tap_h - h * IN_STEP_H
        o_c += (tap_w - w * IN_STEP_W) * (GROUPS * C)
        tap_h = h
        tap_w = w
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    tiles_d = tl.cdiv(QD, TILE_D)
    # The voxels of a box, and where they lie from its first one.
    o_v = tl.arange(0, VOXELS)
    v_n = o_v // (TILE_D * TILE_H * TILE_W)
    v_d = o_v // (TILE_H * TILE_W) % TILE_D
    v_h = o_v // TILE_W % TILE_H
    v_w = o_v % TILE_W
    o_dy = ((v_n * QD + v_d) * QH + v_h) * QW + v_w
    r_m = m + tl.arange(0, BLOCK_M)
    p_dy += i_group * M
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(i_share < boxes)
    for i in range(i_share, boxes, SHARES):
        q_w = i % tiles_w * TILE_W
        row = i // tiles_w
        q_h = row % tiles_h * TILE_H
        row = row // tiles_h
        q_d = row % tiles_d * TILE_D
        n = row // tiles_d * TILE_N
        m_dy = (n + v_n < N) & (q_d + v_d < QD) & (q_h + v_h < QH) & (q_w + v_w < QW)
        o_row = ((n.to(tl.int64) * QD + q_d) * QH + q_h) * QW + q_w + o_dy
        b_dy = tl.load(
            p_dy + (o_row * (GROUPS * M))[:, None] + r_m[None, :], mask=m_dy[:, None] & (r_m < M)[None, :], other=0.0
        )  # [VOXELS, BLOCK_M]
        x_d = tap_d + q_d * IN_STEP_D
        if STRIDED:
            i_slice = tl.where((x_d >= 0) & (x_d < D), n * D + x_d, N * D)
            b_x = d_x.load([i_slice, tap_h + q_h, phase, tap_w + q_w, o_c])
        else:
            b_x = d_x.load([n, x_d, tap_h + q_h, tap_w + q_w, o_c])
        b_x = tl.reshape(b_x, (VOXELS, BLOCK_N))
        b_acc = tl.dot(b_dy.T, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
    r_c = c + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (J * C)
    p_partial += (i_group * M + r_m).to(tl.int64)[:, None] * (J * C) + j * C + r_c[None, :]
    tl.store(p_partial, b_acc, mask=(r_m < M)[:, None] & (r_c < C)[None, :])


def able(cubes_: Cubes) -> bool:
    """Whether strides, channels, dtype and device suit it."""
    problem = cubes_.problem
    size = problem.dtype.itemsize
    return (
        (size == 2 or problem.target == "interpreted")
        and problem.M > 0 and problem.C * size % 16 == 0 == problem.M * size % 16 and voxels.in_boxes(cubes_)
        and voxels.shape_of(cubes_, _tile(cubes_)["BLOCK_K"])[0] * math.prod(cubes_.counts[1:]) < MANY
    )  # fmt: skip


def estimate(cubes_: Cubes) -> float:
    """As that of `boxed_grad_weight`."""
    at = _cut(cubes_)
    if cubes_.problem.paced:
        return costs.at_least(cubes_.problem, at.shares.microseconds, voxels.moved(cubes_))
    return estimates.of(cubes_.problem.target).launch * at.tiles * at.shares.count


@launch.cached
def prepare(cubes_: Cubes) -> Shares:
    """The launches, on dy and x."""
    problem, (N, QD, QH, QW) = cubes_.problem, cubes_.counts
    at = _cut(cubes_)
    shares = at.shares.count
    options = at.tile.options
    del options["BLOCK_K"], options["PER_PROCESSOR"], options["TAPS"]
    starts = (walk.in_start for walk in cubes_.walks)
    scalars = (at.boxes, N, cubes_.read[0], QD, QH, QW, problem.M, problem.groups, *starts, shares)
    meta = {**voxels.taps_read(cubes_, at.box), **problem.constants, **early.options(target=problem.target), **options}
    of_boxes = (None, voxels.box_of(cubes_, at.box, at.tile["BLOCK_N"]))
    made = launch.Prepared(conv_cube_grad_weight_kernel, (at.tiles * shares,), scalars, meta, of_boxes)
    taps = (len(walk.taps) for walk in cubes_.walks)
    return Shares(made, shares, (problem.groups * problem.M, *taps, problem.C))


def _tile(cubes_: Cubes) -> launch.Tile:
    return cubes_.problem.tile(FAMILY, M=cubes_.problem.M, N=cubes_.problem.C, T=0)


class _Cut(NamedTuple):
    """A box of voxels and how many there are, tiles of the gradient, and the shares of the boxes."""

    tile: launch.Tile
    box: tuple[int, ...]
    boxes: int
    tiles: int
    shares: pace.Shares


def _cut(cubes_: Cubes) -> _Cut:
    problem, tile = cubes_.problem, _tile(cubes_)
    box = voxels.shape_of(cubes_, tile["BLOCK_K"])
    boxes = voxels.number(cubes_.counts, box)
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= cubes_.taps
    if not problem.paced:
        shares = max(1, min(tile["PER_PROCESSOR"] * problem.processors // tiles, boxes // LEAST))
        return _Cut(tile, box, boxes, tiles, pace.Shares(shares, 0.0))
    values = problem.groups * problem.M * cubes_.taps * problem.C
    tempo = pace.of_grad_weight(tile, 1)._replace(slots=tile["PER_PROCESSOR"])
    shares_ = pace.in_shares(tiles, boxes, tile["BLOCK_K"], tempo, problem.processors, values, 1.0, LEAST)
    return _Cut(tile, box, boxes, tiles, shares_)


def run(prepared: Shares, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient [groups * M, C, Q, R, S] of x and dy, [N, D, H, W, channels]."""
    return prepared.run(dy, x).movedim(-1, 1)
