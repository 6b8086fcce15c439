"""How the weight gradient of narrow groups is cut into programs, and what it takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.kernels.conv import costs, narrow
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

FAMILY = "conv_depthwise_grad_weight"
# Rows of taps of a program, unrolled.
MOST_ROWS = 11
# Sums and gradients of a thread that registers hold, with as many addresses of inputs of several channels.
MOST_VALUES = 140
# Those with inputs of a row, of which all are loaded together: 164 take 240 registers, and none spills.
MOST_LIVE = 168


class Cut(NamedTuple):
    """How a problem is cut: `taps` (rows, columns), `rows` and `columns` of outputs of a program, `parts` of the
    gradient, and of every part so many `tiles` and tiles of the rows that are left, the `rest`."""

    tile: launch.Tile
    taps: tuple[int, int]
    rows: int
    columns: int
    parts: int
    tiles: int
    rest: int

    def in_shares(self, processors: int) -> tuple[int, int]:
        """(tiles of a share, shares) of the tiles."""
        programs = self.tile["PER_PROCESSOR"] * processors // self.parts
        share = launch.cdiv(self.tiles, max(1, min(programs, self.tiles + self.rest)))
        return share, launch.cdiv(self.tiles, share)


def cut(problem: Problem) -> Cut:
    h, v = problem.geometry[:2]
    _, (QH, QW) = narrow.image_sizes(problem, (h, v))
    pairs, JH, JW = problem.groups * problem.M * problem.C, h.kernel, v.kernel
    tile = problem.tile(FAMILY, floor=1, R=QH, P=problem.N * QW, C=pairs, T=JH * JW, S=h.stride)
    compiled = problem.target != "interpreted"
    of_a_thread = max(1, tile["BLOCK_P"] * tile["BLOCK_C"] // (32 * tile.num_warps)) if compiled else 1
    held = MOST_VALUES // of_a_thread // (1 if problem.M == problem.C == 1 else 2)
    down = launch.cdiv(JH, launch.cdiv(JH, max(1, min(MOST_ROWS, held // 2))))
    across = launch.cdiv(JW, launch.cdiv(JW, max(1, min(tile["SUMS"], held - 1) // down)))

    def live(columns: int) -> int:
        """Values of a thread's: sums, the rows of dy that a row of x meets, and that row."""
        _, step, tap, _ = narrow.overlap(h, 2, down)
        rows = min(tile["BLOCK_R"], (down - 1) * tap // step + 1)
        return of_a_thread * (down * across + rows * columns + narrow.overlap(v, columns, across)[3])

    columns = max(n for n in range(1, tile["BLOCK_W"] + 1) if n == 1 or (QW % n == 0 and live(n) <= MOST_LIVE))
    rows = rows_of(h, v, QH, tile["BLOCK_R"], columns, (down, across))
    parts = launch.cdiv(pairs, tile["BLOCK_C"]) * launch.cdiv(JH, down) * launch.cdiv(JW, across)
    blocks = launch.cdiv(problem.N * (QW // columns), tile["BLOCK_P"])
    rest = blocks if QH % rows else 0
    return Cut(tile, (down, across), rows, columns, parts, blocks * (QH // rows), rest)


def rows_of(h: Axis, v: Axis, QH: int, most: int, columns: int, taps: tuple[int, int]) -> int:
    """Rows of a tile, of which QH may leave a rest that is a tile of its own: with the fewest loads and products."""
    across = narrow.overlap(v, columns, taps[1])[3]

    def cost(rows: int) -> float:
        if rows == 0:
            return 0.0
        return rows * columns * (math.prod(taps) + 1.5) + 1.5 * across * narrow.overlap(h, rows, taps[0])[3]

    return min(range(1, most + 1), key=lambda rows: (QH // rows * cost(rows) + cost(QH % rows), rows))


def estimate(problem: Problem) -> float:
    found = cut(problem)
    if problem.paced:
        return _paced(problem, found)
    products = costs.outputs(problem) * problem.groups * problem.M * problem.C * problem.taps
    QH = narrow.image_sizes(problem, problem.geometry[:2])[1][0]
    rows = found.tiles * found.rows + found.rest * (QH % found.rows)
    rounds = found.parts * math.prod(found.taps) * rows * found.columns
    return costs.of_each_channel(problem, "depthwise, weight", products, rounds)


def _paced(problem: Problem, found: Cut) -> float:
    """Of 160 drawn layers on H100s and H200s it is off by a factor of 1.26 in the geometric mean.

    A warp loads the rows of a tile, of dy and of x, in vectors where each channel has one output.
    """
    known, tile = selection.of(problem.target).channels, found.tile
    h, v = problem.geometry[:2]
    pairs = problem.groups * problem.M * problem.C
    each = max(1, tile["BLOCK_P"] * tile["BLOCK_C"] // (32 * tile.num_warps))
    vec = min(each, narrow.vector(pairs, problem)) if problem.M == problem.C == 1 else 1
    met = narrow.overlap(h, found.rows, found.taps[0])[3] * narrow.overlap(v, found.columns, found.taps[1])[3]
    loads = each * (found.rows * found.columns + met) / vec
    products = each * found.rows * found.columns * math.prod(found.taps)
    share, shares = found.in_shares(problem.processors)
    share += launch.cdiv(found.rest, shares)
    programs = found.parts * shares
    tiles = share * tile.num_warps * (known.load * loads + known.product * products)
    tiles *= 1.0 if problem.M == problem.C == 1 else known.several
    memory = known.weight_memory * costs.moved(problem) / selection.of(problem.target).copy
    time = known.launch + max(memory, programs * (known.program + tiles) / problem.processors) + known.tile * share
    return time + (known.sum + shares * pairs * problem.taps / known.joined if shares > 1 else 0.0)
