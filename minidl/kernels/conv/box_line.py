"""The boxes of all tiles of a weight gradient in one line, of which every program takes as many: how it is cut, what it
takes, and the sum of what the programs found (`even_parts`)."""

from __future__ import annotations

from typing import NamedTuple

from minidl.kernels.conv import tile_throughput
from minidl.kernels.conv.even_parts import prepare_sum
from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch

LEAST = 8  # boxes of a program
PAUSE = 6  # at the head of a tile, as in `even_grad_weight`; 0, 3 and 10 take as long
SLOT = 0.25  # us of adding a slot to those before. 2x2 stride 2, 128->256 at 112x112, 34 slots: 47 us


class Line(NamedTuple):
    """Tiles of the gradient with so many taps each, of `boxes` steps; the steps of all stand in a line, `total`, of
    which a program takes `each`; `together` programs run at once; slots that a tile has at most."""

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
    def whole(self) -> bool:
        """Whether each program sums one tile, and nothing is added afterwards."""
        return self.each == PAUSE + self.boxes

    @property
    def programs(self) -> int:
        return launch.cdiv(self.total, self.each)

    @property
    def slots(self) -> int:
        return 1 if self.whole else launch.cdiv(self.boxes - 1, self.each) + 1

    @property
    def blocks(self) -> dict[str, int]:
        """Constants of the kernels."""
        return {"BLOCK_M": self.tile["BLOCK_M"], "BLOCK_N": self.tile["BLOCK_N"], "TAPS": self.taps}


def in_line(problem: Problem, tile: launch.Tile, boxes: int, taps: int, together: int) -> Line:
    """All taps of all channels in tiles, of which one has `together` taps: a program for each, or as many as fit, which
    take equal parts."""
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= taps // together
    device = tile["PER_PROCESSOR"] * problem.processors
    programs = max(1, min(device, tiles * boxes // LEAST))
    even = Line(tile, together, boxes, tiles, launch.cdiv(tiles * (PAUSE + boxes), programs), device)
    return min(even, even._replace(each=PAUSE + boxes), key=microseconds) if problem.paced else even


def microseconds(at: Line) -> float:
    """Of the products and the sums. A program ends a tile and may begin another: so many are written and added."""
    step, fixed = tile_throughput.of_box_weight(at.tile, at.taps).step, tile_throughput.rates().rounds["even"]
    time = tile_throughput.steps(at.each, at.tile["BLOCK_K"]) * step
    if at.whole:
        return fixed + launch.cdiv(at.tiles, at.together) * time
    values = at.tile["BLOCK_M"] * at.tile["BLOCK_N"] * at.taps
    return fixed + time + tile_throughput.of_shares(at.programs + at.tiles, values) + SLOT * at.slots


def sum_of(problem: Problem, taps: int, line: Line) -> launch.Prepared | None:
    """What adds the slots of tiles; None where each has one."""
    if line.whole:
        return None
    return prepare_sum(problem, taps, line.tiles, line.boxes, line.each, PAUSE, line.blocks)
