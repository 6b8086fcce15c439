"""Weight gradients in equal parts: the steps of all tiles form a line, divided equally among programs.

    tile 0                    tile 1                    tile 2                       `boxes` steps each
    ..--------------------    ..--------------------    ..--------------------       after PAUSE idle steps (.)
    |  program 0      |  program 1      |  program 2      |  program 3       |       of Q steps each

The pause stands for the time of changing tiles. The programs of a tile are its slots; their partial sums are added in
order of the slots. At its step t a program reads near the fraction t / Q of its tile's steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import Problem
from minidl.kernels.conv.voxels import BoxShape
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

LEAST = 8  # minimum boxes of a program
PAUSE = 6  # idle steps at the start of a tile; 0, 3 and 10 take as long
SLOT = 0.25  # us of adding a slot
TOGETHER = tl.constexpr(4)  # slots whose sums are read at once
VALUES = 2048  # values that a program adds


class Parts(NamedTuple):
    """The line: `boxes` steps of a tile after PAUSE idle ones, Q steps of a program, GROUPS groups of M channels."""

    boxes: int
    M: int
    GROUPS: int
    Q: int
    PAUSE: int


class GradTile(NamedTuple):
    """Constants: TAPS taps of BLOCK_M x BLOCK_N channels, of gradients of J taps with C channels."""

    C: int
    J: int
    TAPS: int
    BLOCK_M: int
    BLOCK_N: int


@triton.jit
def tile_at(i_tile, parts, tile: tl.constexpr):
    """Return (first channel of dy and of x, group, first tap) of a tile."""
    tiles_c: tl.constexpr = (tile.C + tile.BLOCK_N - 1) // tile.BLOCK_N
    tiles_m = tl.cdiv(parts.M, tile.BLOCK_M)
    i_group = i_tile // (tiles_c * tiles_m) % parts.GROUPS
    j = i_tile // (tiles_c * tiles_m * parts.GROUPS) * tile.TAPS
    return i_tile // tiles_c % tiles_m * tile.BLOCK_M, i_tile % tiles_c * tile.BLOCK_N, i_group, j


@triton.jit
def slots_of(first, parts):
    """Return (first program, number of programs, its step at the tile's start, the last one's step at the tile's end).

    `first` is the tile's first step after its pause.
    """
    before = first // parts.Q
    last = (first + parts.boxes - 1) // parts.Q
    return before, last - before + 1, first - before * parts.Q, first + parts.boxes - last * parts.Q


@triton.jit
def step_at(t, slot, slots, opening, closing):
    """Return the step of the tile that a slot runs at its step t, given the result of `slots_of`.

    It is the number of steps that all slots run before t, plus those of earlier slots at t.
    """
    k = tl.maximum(t - opening, 0) + tl.maximum(slots - 2, 0) * t + tl.where(slots > 1, tl.minimum(t, closing), 0)
    return k + slot - tl.where((t < opening) & (slot > 0), 1, 0)


@triton.jit
def conv_even_parts_sum_kernel(
    p_partial, p_total, parts, tile: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Write total [groups * M, J * C]: for ROWS rows of a tile, the sum of its slots in order."""
    wait(EARLY)
    PIECES: tl.constexpr = tile.BLOCK_M // ROWS
    i_tile = tl.program_id(0) // (PIECES * tile.TAPS)
    m, c, i_group, j = tile_at(i_tile, parts, tile)
    j += tl.program_id(0) // PIECES % tile.TAPS
    _, slots, _, _ = slots_of(i_tile * (parts.boxes + parts.PAUSE) + parts.PAUSE, parts)
    r_c = c + tl.arange(0, tile.BLOCK_N)
    r_m = m + tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    m_mc = (r_m < parts.M)[:, None] & (r_c < tile.C)[None, :]
    o_mc = (i_group * parts.M + r_m).to(tl.int64)[:, None] * (tile.J * tile.C) + j * tile.C + r_c[None, :]
    o_slot = o_mc
    b_total = tl.load(p_partial + o_slot, mask=m_mc, other=0.0)
    for first in range(1, slots, TOGETHER):
        for i in tl.static_range(TOGETHER):
            o_slot += parts.GROUPS * parts.M * (tile.J * tile.C)
            b_total += tl.load(p_partial + o_slot, mask=m_mc & (first + i < slots), other=0.0)
    tl.store(p_total + o_mc, b_total.to(p_total.dtype.element_ty), mask=m_mc)


class Line(NamedTuple):
    """How the steps of all tiles are divided among programs.

    box, tile        the box of a step, and the tile
    taps             taps of a tile
    boxes            steps of a tile, after PAUSE idle ones
    tiles            tiles of the gradient
    each             steps of a program
    together         programs that run at once
    """

    box: BoxShape
    tile: launch.Tile
    taps: int
    boxes: int
    tiles: int
    each: int
    together: int

    @property
    def total(self) -> int:
        return self.tiles * (PAUSE + self.boxes)

    @property
    def one_slot(self) -> bool:
        """Return whether each program sums one tile, so that nothing is added afterwards."""
        return self.each == PAUSE + self.boxes

    @property
    def programs(self) -> int:
        return launch.cdiv(self.total, self.each)

    @property
    def slots(self) -> int:
        return 1 if self.one_slot else launch.cdiv(self.boxes - 1, self.each) + 1

    def parts(self, problem: Problem) -> Parts:
        return Parts(self.boxes, problem.M, problem.groups, self.each, PAUSE)

    def constants(self, problem: Problem, taps: int) -> GradTile:
        """Return the constants of the kernels for a gradient with `taps` taps."""
        return GradTile(problem.C, taps, self.taps, self.tile["BLOCK_M"], self.tile["BLOCK_N"])


def in_line(problem: Problem, box: BoxShape, tile: launch.Tile, boxes: int, taps: int, together: int) -> Line:
    """Return the line of all taps and channels, in tiles of `together` taps.

    Each tile has one program, or as many programs as fit on the device divide the line equally."""
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= taps // together
    device = max(1, tile["PER_PROCESSOR"]) * problem.processors
    programs = max(1, min(device, tiles * boxes // LEAST))
    even = Line(box, tile, together, boxes, tiles, launch.cdiv(tiles * (PAUSE + boxes), programs), device)
    return min(even, even._replace(each=PAUSE + boxes), key=lambda line: microseconds(problem, line))


def microseconds(problem: Problem, at: Line) -> float:
    """Return the microseconds of the products and sums; a program may write partial sums of two tiles."""
    step = tile_throughput.of_weight(problem, at.tile, at.taps, "box ").step
    fixed = costs.constants(problem).steps.rounds["even"]
    time = tile_throughput.steps(problem, at.each, at.tile["BLOCK_K"]) * step
    if at.one_slot:
        return fixed + launch.cdiv(at.tiles, at.together) * time
    values = at.tile["BLOCK_M"] * at.tile["BLOCK_N"] * at.taps
    return fixed + time + costs.shares_time(problem, at.programs + at.tiles, values) + SLOT * at.slots


def prepare(problem: Problem, line: Line, product: launch.Prepared, shape: tuple[int, ...]) -> Shares:
    """Return the product and the sum of its slots, for a gradient of `shape`, [groups * M, taps..., C]."""
    if line.slots == 1:
        return Shares(product, 1, shape)
    # A program adds fewer values if there are few, so that there are enough programs.
    values = min(VALUES, max(VALUES // 16, launch.cdiv(math.prod(shape), 8 * problem.processors)))
    tile = line.constants(problem, math.prod(shape[1:-1]))
    rows = max(1, min((1 << values.bit_length() - 1) // tile.BLOCK_N, tile.BLOCK_M))
    grid = (line.tiles * tile.TAPS * tile.BLOCK_M // rows,)
    meta = {"tile": tile, "ROWS": rows, **dependent_launch.options(target=problem.target)}
    total = launch.Prepared(conv_even_parts_sum_kernel, grid, (line.parts(problem),), meta)
    return Shares(product, line.slots, shape, total)
