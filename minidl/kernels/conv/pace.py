"""How long the tiles of a tensor-core kernel take: in rounds of as many as run on the device together.

Measured on an H100 in float16 (`benchmarks/notes.md`, "Pixels of any image"). What bounds them is how fast blocks come
out of the second cache, 7 to 11e12 bytes a second, so the time of a step is that of a tile's edges, not of its area.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.runtime import launch

# What a round takes beside its steps, in us: the first blocks, the epilogue.
ROUND = 3.0
LAUNCH = 0.5
SHORT_ROUND = 1.0
# A step of programs that have a multiprocessor for themselves, where more could run.
ALONE = 0.6
# Of a step, what does not depend on the length of its block of K.
STEP = 0.3
FULL_BLOCK = 64
# Bytes of partial sums that stay in the second cache, and bytes per us there and in memory.
CACHE = 30e6
CACHED = 5e6
UNCACHED = 2.6e6
# Rounds that shares of a sum are made for, fewer than these.
MOST_ROUNDS = 13
# Steps over taps and channels as one axis, whose addresses are found value by value; of channels that fill no 16 bytes.
FLAT = 3.2
FLAT_VALUES = 4.2
FLAT_GRAD_WEIGHT = 2.0
# Steps that read values of so many bytes at once.
NARROW = {16: 1.0, 8: 1.2, 4: 2.0, 2: 5.0}
# Of rows that begin within a line of the cache, 128 bytes.
ACROSS_LINES = 1.3
LINE = 128
# Weights of a way back as they lie, whose channels that are written are neighbours.
TURNED = 1.15


class Pace(NamedTuple):
    """slots: programs of a multiprocessor that run together. step: us of a step of all of them, of 64 along K."""

    slots: int
    step: float


# By BLOCK_M and BLOCK_N, of rows that are pixels or images and columns that are channels.
TILES = {
    (128, 256): Pace(1, 0.75), (64, 256): Pace(1, 0.5), (128, 128): Pace(2, 0.85), (64, 128): Pace(2, 0.45),
    (128, 64): Pace(2, 0.45), (64, 64): Pace(3, 0.42), (128, 32): Pace(2, 0.5), (128, 16): Pace(2, 0.48),
}  # fmt: skip
# Of the gradient of the weight, by TAPS too.
GRAD_WEIGHT = {
    (128, 256, 1): Pace(1, 0.76), (128, 64, 3): Pace(1, 0.8), (128, 64, 2): Pace(1, 0.6), (128, 128, 1): Pace(2, 1.05),
    (64, 64, 3): Pace(2, 1.1),
    (64, 64, 2): Pace(2, 0.8), (64, 64, 1): Pace(3, 0.7), (64, 128, 1): Pace(2, 0.7), (64, 32, 1): Pace(2, 0.6),
    (32, 64, 3): Pace(2, 1.2), (16, 64, 3): Pace(2, 1.0),
}  # fmt: skip
OTHER = Pace(2, 1.0)
# Of the boxed form, by BLOCK_M channels, BLOCK_N pixels and warps. 256->256 at 56x56, 64 images, 331 to 395 us.
BOXED = {
    (64, 64, 4): Pace(3, 0.42), (64, 128, 4): Pace(2, 0.58), (128, 128, 4): Pace(2, 0.7), (128, 128, 8): Pace(2, 0.78),
    (256, 128, 8): Pace(1, 0.69), (128, 256, 8): Pace(1, 0.71),
}  # fmt: skip
# Where pixels of so many channels a warpgroup lie far apart, a box takes longer: by a quarter with twice as many.
FAR, FARTHER = 512, 0.25
# Tiles that are read in boxes.
BOXES = {**TILES, (128, 128): Pace(2, 0.74)}


def of(tile: launch.Tile) -> Pace:
    """The pace of a tile."""
    return TILES.get((tile["BLOCK_M"], tile["BLOCK_N"]), OTHER)


def of_boxes(rows: int, columns: int) -> Pace:
    """That of a tile that is read in boxes."""
    return BOXES.get((rows, columns), OTHER)


def of_boxed(tile: launch.Tile, channels: int) -> Pace:
    """That of a tile of the boxed form, with so many channels of x."""
    slots, step = BOXED.get((tile["BLOCK_M"], tile["BLOCK_N"], tile.num_warps), OTHER)
    return Pace(slots, step * (1 + FARTHER * max(0.0, math.log2(4 * channels / (tile.num_warps * FAR)))))


def of_grad_weight(tile: launch.Tile, taps: int) -> Pace:
    """That of a tile with so many taps."""
    return GRAD_WEIGHT.get((tile["BLOCK_M"], tile["BLOCK_N"], taps), OTHER)


def steps(blocks: float, block: int) -> float:
    """So many blocks of `block` along K, counted in steps of 64."""
    return blocks * (STEP + (1 - STEP) * block / FULL_BLOCK)


def narrow(channels: int, itemsize: int) -> float:
    """What steps cost beside those with 16 bytes at once, of rows with so many values."""
    size = channels * itemsize
    return NARROW[min(16, size & -size)] * (ACROSS_LINES if size > LINE and size % LINE else 1.0)


def microseconds(tiles: int, steps: float, pace: Pace, processors: int, fixed: float = ROUND) -> float:
    """Of a launch of so many tiles of so many steps."""
    rounds, left = divmod(tiles, processors * pace.slots)
    time = rounds * (fixed + steps * pace.step)
    if left:
        alone = pace.slots > 1 and left <= processors
        time += fixed + steps * pace.step * (ALONE if alone else 1.0)
    return time


def of_shares(shares: int, values: int) -> float:
    """Of writing partial sums in float32 and adding them: in the second cache, or in memory where it is too small."""
    size = 4 * shares * values
    return 2.0 + 2 * size / (CACHED if size < CACHE else UNCACHED) if shares > 1 else 0.0


class Shares(NamedTuple):
    """Of a sum: how many shares, and the us of all."""

    count: int
    microseconds: float


def in_shares(
    tiles: int, blocks: int, block: int, pace: Pace, processors: int, values: int, factor: float = 1.0, least: int = 1
) -> Shares:
    """The shares of `blocks` of a gradient of the weight that take the least time, of `least` blocks each at least.

    As many as fill the device once, or some times: 72 tiles leave half of 132 multiprocessors without work.
    """
    device = processors * pace.slots
    most = max(1, blocks // least)
    counts = {1} | {min(most, max(1, rounds * device // max(tiles, 1))) for rounds in range(1, MOST_ROUNDS)}
    found = []
    for count in sorted({-(-blocks // -(-blocks // count)) for count in counts}):
        time = microseconds(tiles * count, factor * steps(-(-blocks // count), block), pace, processors, SHORT_ROUND)
        found.append(Shares(count, time + of_shares(count, values)))
    return min(found, key=lambda one: one.microseconds)
