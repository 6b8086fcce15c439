"""The batch-tiled weight gradient in equal parts: every program runs the same number of steps, in one or more tiles.

The steps of all tiles form a sequence, tile after tile, of which a program runs Q consecutive ones. Several programs,
its slots, sum a tile; their partial sums are added in order of the slots. At its step t every program reads near the
fraction t / Q of its tile's pixels, so that all programs read one neighbourhood at a time: the steps of a tile that its
slots run at the same t are adjacent. Changing tiles takes time, too, so each tile starts with a PAUSE of idle steps.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import batch_grad_weight, costs, tile_throughput
from minidl.kernels.conv.batch_grad_weight import parts_of, tile_of
from minidl.kernels.conv.batch_tiled import inside
from minidl.kernels.conv.even_parts import slots_of, step_at
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "batch"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_batch_grad_weight",)

SLOTS = 16  # maximum slots of a tile, which are added serially
# Idle steps of a program that starts a tile. On an H200 512 channels at 7x7, 128 images: 0.979 of cuDNN with 0, 1.003
# with 3, 1.008 with 4 and 5, 1.015 with 6, 0.95 with 8.
PAUSE = tl.constexpr(6)


@triton.jit
def steps_of(
    j, runs, H, W, QH, QW, in_h, in_w,
    JW: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
):  # fmt: skip
    """Return (first row, rows, first column, columns, steps) of the outputs whose tap j is inside the image.

    The steps are those of a tile, including PAUSE; at least one.
    """
    q_h, rows = inside(in_h + j // JW * IN_TAP_H, H, IN_STEP_H, QH)
    q_w, columns = inside(in_w + j % JW * IN_TAP_W, W, IN_STEP_W, QW)
    return q_h, rows, q_w, columns, PAUSE + tl.maximum(rows * columns * runs, 1)


@triton.jit
def tile_at(
    step, tiles, runs, H, W, QH, QW, in_h, in_w,
    J: tl.constexpr, JW: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
):  # fmt: skip
    """Return (tap, index among the tap's tiles, first step) of the tile that contains a step of the sequence."""
    tap = 0
    first = 0
    end = 0
    each = 1
    for j in tl.static_range(J):  # unrolled: a loop over taps takes 0.5 us
        _, _, _, _, steps = steps_of(
            j, runs, H, W, QH, QW, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W
        )  # fmt: skip
        beyond = step >= end
        tap = tl.where(beyond, j, tap)
        first = tl.where(beyond, end, first)
        each = tl.where(beyond, steps, each)
        end += steps * tiles
    i_tile = (step - first) // each
    return tap, i_tile, first + i_tile * each


@triton.jit
def conv_even_grad_weight_kernel(
    d_dy, d_x, p_partial, N, H, W, QH, QW, M, GROUPS, in_h, in_w, Q, total,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write partial [slots, groups * M, J * C]: the sums of this program's Q steps, for each tile they are in."""
    wait(EARLY)
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = JH * JW
    tiles_m = tl.cdiv(M, BLOCK_M)
    runs = tl.cdiv(N, BLOCK_K)
    channels = GROUPS * C
    start = tl.program_id(0) * Q
    end = tl.minimum(start + Q, total)
    tiles = tiles_c * tiles_m * GROUPS
    j, i_tile, first = tile_at(
        start, tiles, runs, H, W, QH, QW, in_h, in_w, J, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W
    )  # fmt: skip
    while first < end:
        q_h, rows, q_w, columns, steps = steps_of(
            j, runs, H, W, QH, QW, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W
        )  # fmt: skip
        nothing = rows * columns == 0  # then one step outside, which reads zeros
        places = tl.maximum(rows * columns, 1)
        columns = tl.maximum(columns, 1)
        c = i_tile % tiles_c * BLOCK_N
        m = i_tile // tiles_c % tiles_m * BLOCK_M
        i_group = i_tile // (tiles_c * tiles_m)
        tap_h = in_h + j // JW * IN_TAP_H
        tap_w = in_w + j % JW * IN_TAP_W
        o_m = i_group * M + m
        o_c = i_group * C + c
        before, slots, opening, closing = slots_of(first + PAUSE, steps - PAUSE, Q)
        slot = tl.program_id(0) - before
        begin = tl.maximum(start, first + PAUSE) - start
        stop = tl.minimum(first + steps, end) - start
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for t in range(begin, stop):
            k = step_at(t, slot, slots, opening, closing)
            n = tl.where(nothing, N, k // places * BLOCK_K)
            q = k % places
            h = q_h + q // columns
            w = q_w + q % columns
            b_dy = d_dy.load([n, (h * QW + w) * (GROUPS * M) + o_m]).T  # [BLOCK_M, BLOCK_K]
            # [BLOCK_K, BLOCK_N]
            b_x = d_x.load([n, ((tap_h + h * IN_STEP_H) * W + tap_w + w * IN_STEP_W) * channels + o_c])
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
        r_m = m + tl.arange(0, BLOCK_M)
        r_c = c + tl.arange(0, BLOCK_N)
        p_tile = p_partial + slot.to(tl.int64) * (GROUPS * M) * (J * C)
        p_tile += (i_group * M + r_m).to(tl.int64)[:, None] * (J * C) + j * C + r_c[None, :]
        tl.store(p_tile, b_acc, mask=(r_m < M)[:, None] & (r_c < C)[None, :] & (begin < stop))
        first += steps
        i_tile += 1
        if i_tile == tiles:
            i_tile = 0
            j += 1


@triton.jit
def conv_even_sum_kernel(
    p_partial, p_total, N, H, W, QH, QW, M, GROUPS, in_h, in_w, Q,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write total [groups * M, J * C]: for ROWS rows of a tile, the sum of its slots (at most MOST) in order."""
    wait(EARLY)
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    PIECES: tl.constexpr = BLOCK_M // ROWS
    J: tl.constexpr = JH * JW
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles = tiles_c * tiles_m * GROUPS
    runs = tl.cdiv(N, BLOCK_K)
    i_tile = tl.program_id(0) // PIECES % tiles
    j = tl.program_id(0) // (PIECES * tiles)
    first = 0
    for i in tl.static_range(J):
        _, _, _, _, steps = steps_of(
            i, runs, H, W, QH, QW, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W
        )  # fmt: skip
        first += tl.where(i < j, steps * tiles, 0)
    _, _, _, _, steps = steps_of(j, runs, H, W, QH, QW, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W)
    _, slots, _, _ = slots_of(first + i_tile * steps + PAUSE, steps - PAUSE, Q)
    r_c = i_tile % tiles_c * BLOCK_N + tl.arange(0, BLOCK_N)
    r_m = i_tile // tiles_c % tiles_m * BLOCK_M + tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    i_group = i_tile // (tiles_c * tiles_m)
    m_mc = (r_m < M)[:, None] & (r_c < C)[None, :]
    o_mc = (i_group * M + r_m).to(tl.int64)[:, None] * (J * C) + j * C + r_c[None, :]
    o_slot = o_mc
    b_total = tl.load(p_partial + o_mc, mask=m_mc, other=0.0)
    for slot in tl.static_range(1, MOST):
        o_slot += GROUPS * M * (J * C)
        b_total += tl.load(p_partial + o_slot, mask=m_mc & (slot < slots), other=0.0)
    tl.store(p_total + o_mc, b_total.to(p_total.dtype.element_ty), mask=m_mc)


def able(problem: Problem) -> bool | Unsupported:
    supported = batch_grad_weight.able(problem)
    if not supported:
        return supported
    tile = tile_of(problem)
    # Without tensor cores the accumulators would not fit into registers.
    single_tap = not (tile["TAPS"] == 3 == len(problem.at.v.taps)) and parts_of(problem) == 1
    return (
        (tile["EVEN"] == 1 or Unsupported("a tile without EVEN in the table"))
        and (single_tap or Unsupported("several taps in a tile, or images in parts"))
        and (
            (problem.dtype, problem.precision) != (torch.float32, "ieee") or Unsupported("float32 without tensor cores")
        )
        and (_parts(problem).slots <= SLOTS or Unsupported("too many programs for one tile"))
    )


def estimate(problem: Problem) -> float:
    """Estimate microseconds; 512@7: 0.97 of cuDNN, in shares 0.89."""
    if problem.paced:
        parts, tile = _parts(problem), tile_of(problem)
        steps = costs.page_factor(problem) * tile_throughput.steps(parts.each, tile["BLOCK_K"])
        throughput = tile_throughput.of_grad_weight(tile, 1)
        # A program ends one tile and may start another: both partial sums are written and added.
        written = launch.cdiv(parts.total, parts.each) + parts.tiles * problem.taps
        values = tile["BLOCK_M"] * tile["BLOCK_N"]
        time = (
            tile_throughput.rates().rounds["even"]
            + steps * throughput.step
            + tile_throughput.of_shares(written, values)
        )
        return costs.at_least(problem, time)
    return costs.relative(problem, "even") * batch_grad_weight.estimate(problem)


class Parts(NamedTuple):
    """Tiles of a tap, the steps of all tiles (`total`), steps of `each` program, and maximum slots of a tile."""

    tiles: int
    total: int
    each: int
    slots: int


def _parts(problem: Problem) -> Parts:
    tile = tile_of(problem)
    h, v = problem.geometry.h, problem.geometry.w
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    runs = launch.cdiv(problem.N, tile["BLOCK_K"])
    steps = [PAUSE.value + max(1, rows * columns * runs) for rows in h.inside() for columns in v.inside()]
    total = tiles * sum(steps)
    each = launch.cdiv(total, problem.processors)
    return Parts(tiles, total, each, launch.cdiv(max(steps) - PAUSE.value - 1, each) + 1)


class Prepared(NamedTuple):
    """The product, the launch that adds its slots, and the shapes of both results."""

    launch: launch.Prepared
    partial: tuple[int, ...]
    sum: launch.Prepared
    shape: tuple[int, ...]


def prepare(problem: Problem) -> Prepared:
    h, v = problem.at.h, problem.at.v
    (H, W), (QH, QW) = problem.read, problem.written
    N, M, C, taps, groups = problem.N, problem.M, problem.C, problem.taps, problem.groups
    tile = tile_of(problem)
    parts = _parts(problem)
    blocks = {name: tile[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    sizes = (N, H, W, h.count, v.count, M, groups, h.in_start, v.in_start, parts.each)
    shared = {
        **problem.taps_read, **dependent_launch.options(target=problem.target), **blocks,
    }  # fmt: skip
    warps = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    rows = max(1, min(2048 // tile["BLOCK_N"], tile["BLOCK_M"]))
    descriptors = (
        Box.of_rows(N, QH * QW * groups * M, (tile["BLOCK_K"], tile["BLOCK_M"])),
        Box.of_rows(N, H * W * groups * C, (tile["BLOCK_K"], tile["BLOCK_N"])),
    )
    return Prepared(
        launch.Prepared(
            conv_even_grad_weight_kernel, (launch.cdiv(parts.total, parts.each),), (*sizes, parts.total),
            {**shared, **problem.constants, **warps}, descriptors,
        ),
        (parts.slots, groups * M, taps * C),
        launch.Prepared(
            conv_even_sum_kernel, (taps * parts.tiles * tile["BLOCK_M"] // rows,), sizes,
            {**shared, "MOST": parts.slots, "ROWS": rows},
        ),
        problem.shape,
    )  # fmt: skip


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    partial = torch.empty(prepared.partial, dtype=launch.acc_torch(t.x.dtype), device=t.x.device)
    prepared.launch.run(t.w, t.x, partial)
    dw = torch.empty(prepared.shape, dtype=t.x.dtype, device=t.x.device)
    prepared.sum.run(partial, dw)
    return dw
