"""The decomposition of the weight gradient of narrow groups into programs, and its estimated time."""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.kernels.conv import costs, narrow
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch

FAMILY = "conv_depthwise_grad_weight"
# Maximum unrolled rows of taps of a program.
MOST_ROWS = 11
# Maximum sums and gradients in registers of a thread; with several channels half as many, for addresses.
MOST_VALUES = 140
# The same with the inputs of a row, which are loaded together.
MOST_LIVE = 168


class Cut(NamedTuple):
    """The decomposition: `taps` (rows, columns) and output `rows` and `columns` of a program, `parts` of the gradient,
    and for each part the number of full `tiles` and of tiles with the remaining rows, `rest`."""

    tile: launch.Tile
    taps: tuple[int, int]
    rows: int
    columns: int
    parts: int
    tiles: int
    rest: int

    def in_shares(self, processors: int) -> tuple[int, int]:
        """Return (tiles per share, number of shares)."""
        programs = self.tile["PER_PROCESSOR"] * processors // self.parts
        share = launch.cdiv(self.tiles, max(1, min(programs, self.tiles + self.rest)))
        return share, launch.cdiv(self.tiles, share)


def cut(problem: Problem) -> Cut:
    height, width = problem.geometry[:2]
    _, (QH, QW) = narrow.image_sizes(problem, (height, width))
    pairs, JH, JW = problem.groups * problem.M * problem.C, height.kernel, width.kernel
    tile = problem.tile(FAMILY, floor=1, R=QH, P=problem.N * QW, C=pairs, T=JH * JW, S=height.stride)
    compiled = problem.target != "interpreted"
    per_thread = max(1, tile["BLOCK_P"] * tile["BLOCK_C"] // (32 * tile.num_warps)) if compiled else 1
    most = MOST_VALUES // per_thread // (1 if problem.M == problem.C == 1 else 2)
    down = launch.cdiv(JH, launch.cdiv(JH, max(1, min(MOST_ROWS, most // 2))))
    across = launch.cdiv(JW, launch.cdiv(JW, max(1, min(tile["SUMS"], most - 1) // down)))

    def live(columns: int) -> int:
        """Return the live values of a thread: sums, the rows of dy that use a row of x, and that row."""
        _, step, tap, _ = narrow.overlap(height, 2, down)
        rows = min(tile["BLOCK_R"], (down - 1) * tap // step + 1)
        return per_thread * (down * across + rows * columns + narrow.overlap(width, columns, across)[3])

    columns = max(n for n in range(1, tile["BLOCK_W"] + 1) if n == 1 or (QW % n == 0 and live(n) <= MOST_LIVE))
    rows = rows_of(height, width, QH, tile["BLOCK_R"], columns, (down, across))
    parts = launch.cdiv(pairs, tile["BLOCK_C"]) * launch.cdiv(JH, down) * launch.cdiv(JW, across)
    blocks = launch.cdiv(problem.N * (QW // columns), tile["BLOCK_P"])
    rest = blocks if QH % rows else 0
    return Cut(tile, (down, across), rows, columns, parts, blocks * (QH // rows), rest)


def rows_of(height: Axis, width: Axis, QH: int, most: int, columns: int, taps: tuple[int, int]) -> int:
    """Return the rows of a tile with the fewest loads and products; QH may leave a smaller last tile."""
    across = narrow.overlap(width, columns, taps[1])[3]

    def cost(rows: int) -> float:
        if rows == 0:
            return 0.0
        return rows * columns * (math.prod(taps) + 1.5) + 1.5 * across * narrow.overlap(height, rows, taps[0])[3]

    return min(range(1, most + 1), key=lambda rows: (QH // rows * cost(rows) + cost(QH % rows), rows))


def estimate(problem: Problem) -> float:
    """Estimate microseconds; off by a factor of 1.26 in the geometric mean of 160 drawn layers on H100s and H200s.

    A warp loads the rows of dy and x of a tile, in vectors if each channel has one output.
    """
    cut_ = cut(problem)
    times, tile = costs.constants(problem).channels, cut_.tile
    down, across = problem.geometry[:2]
    pairs = problem.groups * problem.M * problem.C
    per_thread = max(1, tile["BLOCK_P"] * tile["BLOCK_C"] // (32 * tile.num_warps))
    vec = min(per_thread, narrow.vector(pairs, problem)) if problem.M == problem.C == 1 else 1
    inputs = narrow.overlap(down, cut_.rows, cut_.taps[0])[3] * narrow.overlap(across, cut_.columns, cut_.taps[1])[3]
    loads = per_thread * (cut_.rows * cut_.columns + inputs) / vec
    products = per_thread * cut_.rows * cut_.columns * math.prod(cut_.taps)
    share, shares = cut_.in_shares(problem.processors)
    share += launch.cdiv(cut_.rest, shares)
    programs = cut_.parts * shares
    tiles = share * tile.num_warps * (times.load * loads + times.product * products)
    memory = costs.moved(problem) / costs.constants(problem).copy
    time = times.launch + max(memory, programs * (times.program + tiles) / problem.processors) + times.tile * share
    return time + (times.sum + shares * pairs * problem.taps / times.joined if shares > 1 else 0.0)


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter, where each step along taps and rows takes as long as one."""
    cut_, QH = cut(problem), narrow.image_sizes(problem, problem.geometry[:2])[1][0]
    rows = cut_.tiles * cut_.rows + cut_.rest * (QH % cut_.rows)
    return 1 + cut_.parts * math.prod(cut_.taps) * rows * cut_.columns
