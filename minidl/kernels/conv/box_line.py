"""The boxes of all tiles of a weight gradient as one line, divided equally among programs (`even_parts`): its
decomposition, its estimated time and the sum of the partial results."""

from __future__ import annotations

from typing import NamedTuple

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.even_parts import prepare_sum
from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch

LEAST = 8  # minimum boxes of a program
PAUSE = 6  # idle steps at the start of a tile; 0, 3 and 10 take as long
SLOT = 0.25  # us of adding a slot. 2x2 stride 2, 128->256 at 112x112, 34 slots: 47 us


class Line(NamedTuple):
    """Tiles of the gradient with `taps` taps and `boxes` steps; a program runs `each` of the `total` steps.

    `together` programs run at once; a tile has at most `slots` programs.
    """

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

    @property
    def blocks(self) -> dict[str, int]:
        """Return the constants of the kernels."""
        return {"BLOCK_M": self.tile["BLOCK_M"], "BLOCK_N": self.tile["BLOCK_N"], "TAPS": self.taps}


def in_line(problem: Problem, tile: launch.Tile, boxes: int, taps: int, together: int) -> Line:
    """Return the line of all taps and channels, in tiles of `together` taps.

    Each tile has one program, or as many programs as fit on the device divide the line equally."""
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= taps // together
    device = tile["PER_PROCESSOR"] * problem.processors
    programs = max(1, min(device, tiles * boxes // LEAST))
    even = Line(tile, together, boxes, tiles, launch.cdiv(tiles * (PAUSE + boxes), programs), device)
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


def prepare_slot_sum(problem: Problem, taps: int, line: Line) -> launch.Prepared | None:
    """Return the launch that adds the slots of tiles; None if each has one."""
    if line.one_slot:
        return None
    return prepare_sum(problem, taps, line.tiles, line.boxes, line.each, PAUSE, line.blocks)
