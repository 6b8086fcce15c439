"""How long the tiles of a tensor-core kernel take: in rounds of as many as run on the device together.

Measured on an H100 in float16 (`benchmarks/notes.md`, "Pixels of any image"). What bounds them is how fast blocks come
out of the second cache, 7 to 11e12 bytes a second, so the time of a step is that of a tile's edges, not of its area.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.cost_model.schema import Pace, Steps

FULL_BLOCK = 64
LINE = 128  # bytes of the cache
TARGET = "sm_90"  # whose tiles are known
# Rounds that shares of a sum are made for, fewer than these.
MOST_ROUNDS = 13
# Where pixels of so many channels a warpgroup lie far apart, a box takes longer.
FAR = 512
LEAST_ROWS = 64  # that a tensor core multiplies
LARGE = 2**14  # values of a tile, of which one runs on a multiprocessor


def known() -> Steps:
    """What steps and rounds take."""
    return selection.of(TARGET).steps


def of(tile: launch.Tile) -> Pace:
    """The pace of a tile, of rows that are pixels or images and columns that are channels."""
    return _known("tiles", tile["BLOCK_M"], tile["BLOCK_N"]) or _by_edges(tile["BLOCK_M"], tile["BLOCK_N"])


def of_boxes(rows: int, columns: int) -> Pace:
    """That of a tile that is read in boxes."""
    return _known("boxes", rows, columns) or _known("tiles", rows, columns) or _by_edges(rows, columns)


def of_boxed(tile: launch.Tile, channels: int) -> Pace:
    """That of a tile of the boxed form, with so many channels of x."""
    rows, columns, warps = max(LEAST_ROWS, tile["BLOCK_M"]), tile["BLOCK_N"], tile.num_warps
    slots, step = _known("boxed", rows, columns, warps) or _by_edges(rows, columns)
    return Pace(slots, step * (1 + known().farther * max(0.0, math.log2(4 * channels / (warps * FAR)))))


def of_grad_weight(tile: launch.Tile, taps: int) -> Pace:
    """That of a tile with so many taps, of the gradient of the weight."""
    found = _known("weights", tile["BLOCK_M"], tile["BLOCK_N"], taps)
    return found or selection.of(TARGET).weights["other"]


def of_box_weight(tile: launch.Tile, taps: int) -> Pace:
    """The same of a tile whose inputs are read in boxes, the output's gradient through pointers."""
    return _known("weights", "box", tile["BLOCK_M"], tile["BLOCK_N"], taps) or of_programs(tile, taps)


def of_unfolded(tile: launch.Tile) -> Pace:
    """That of a tile of `unfolded_grad_weight`."""
    rows, columns = tile["BLOCK_M"], tile["BLOCK_N"]
    return _known("weights", "unfolded", rows, columns) or _by_edges(rows, columns)


def _known(what: str, *sizes: int | str) -> Pace | None:
    found: Pace | None = getattr(selection.of(TARGET), what).get("x".join(map(str, sizes)))
    return found


def _by_edges(rows: int, columns: int) -> Pace:
    """Of a tile that was not measured: what its edges take through L2, or its products, as for matrix products.

    Those that were measured take 0.8 to 1.2 times as long.
    """
    found = selection.of(TARGET)
    slots = 1 if rows * columns > LARGE else 2
    products = slots * 2 * max(rows, LEAST_ROWS) * max(columns, 32) * FULL_BLOCK / found.gemm.gemm.operations
    read = slots * (rows + columns) * FULL_BLOCK * 2 / found.steps.edges
    return Pace(slots, max(products + found.gemm.gemm.wait, read))


def of_programs(tile: launch.Tile, taps: int) -> Pace:
    """As `of_grad_weight`, with as many programs of a multiprocessor as the tile says; alone they take less time."""
    slots, step = of_grad_weight(tile, taps)
    wanted = tile["PER_PROCESSOR"]
    return Pace(wanted, step * (known().alone["weight"] if wanted == 1 < slots else 1.0))


def steps(blocks: float, block: int, apart: float | None = None) -> float:
    """So many blocks of `block` along K, counted in steps of 64."""
    apart = known().apart if apart is None else apart
    return blocks * (apart + (1 - apart) * block / FULL_BLOCK)


def narrow(channels: int, itemsize: int) -> float:
    """What steps cost beside those with 16 bytes at once, of rows with so many values."""
    size, found = channels * itemsize, known()
    return found.narrow[min(16, size & -size)] * (found.across_lines if size > LINE and size % LINE else 1.0)


def microseconds(
    tiles: int, steps: float, tile_throughput: Pace, processors: int, kind: str, part: float = 1.0
) -> float:
    """Of a launch of so many tiles of so many steps, of a form whose rounds are of a kind; `part` is which part they
    take of what a round of that kind takes beside its steps."""
    found = known()
    rounds, left = divmod(tiles, processors * tile_throughput.slots)
    fixed = found.rounds[kind] * part
    time = rounds * (fixed + steps * tile_throughput.step)
    if left:
        alone = found.last if rounds else found.alone[kind]
        time += fixed + steps * tile_throughput.step * (
            alone if tile_throughput.slots > 1 and left <= processors else 1.0
        )
    return time


def of_shares(shares: int, values: int) -> float:
    """Of writing partial sums in float32 and adding them: in the second cache, or in memory where it is too small."""
    size, found = 4 * shares * values, known()
    return found.shares + 2 * size / (found.cached if size < found.cache else found.uncached) if shares > 1 else 0.0


class Shares(NamedTuple):
    """Of a sum: how many shares, and the us of all."""

    count: int
    microseconds: float


def in_shares(
    tiles: int, blocks: int, block: int, tile_throughput: Pace, processors: int, values: int, factor: float = 1.0,
    least: int = 1, kind: str = "weight",
) -> Shares:  # fmt: skip
    """The shares of `blocks` of a gradient of the weight that take the least time, of `least` blocks each at least.

    As many as fill the device once, or some times: 72 tiles leave half of 132 multiprocessors without work.
    """
    device = processors * tile_throughput.slots
    most = max(1, blocks // least)
    counts = {1} | {min(most, max(1, rounds * device // max(tiles, 1))) for rounds in range(1, MOST_ROUNDS)}
    found = []
    for count in sorted({-(-blocks // -(-blocks // count)) for count in counts}):
        time = microseconds(
            tiles * count, factor * steps(-(-blocks // count), block), tile_throughput, processors, kind
        )
        found.append(Shares(count, time + of_shares(count, values)))
    return min(found, key=lambda one: one.microseconds)
