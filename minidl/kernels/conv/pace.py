"""How long the tiles of a tensor-core kernel take: in rounds of as many as run on the device together.

Measured on an H100 in float16 (`benchmarks/notes.md`, "Pixels of any image"). What bounds them is how fast blocks come
out of the second cache, 7 to 11e12 bytes a second, so the time of a step is that of a tile's edges, not of its area.
"""

from __future__ import annotations

from typing import NamedTuple

from minidl.runtime import launch

# What a round takes beside its steps, in us: the first blocks, the epilogue.
ROUND = 3.0
SHORT_ROUND = 1.0
# A step of programs that have a multiprocessor for themselves, where more could run.
ALONE = 0.6
# Of a step, what does not depend on the length of its block of K.
STEP = 0.3
FULL_BLOCK = 64
# Steps over taps and channels as one axis, whose addresses are found value by value; of channels that fill no 16 bytes.
FLAT = 3.2
FLAT_VALUES = 5.5
FLAT_GRAD_WEIGHT = 1.3
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
    (128, 64, 3): Pace(1, 0.8), (128, 64, 2): Pace(1, 0.6), (128, 128, 1): Pace(2, 1.05), (64, 64, 3): Pace(2, 1.1),
    (64, 64, 2): Pace(2, 0.8), (64, 64, 1): Pace(3, 0.7), (64, 128, 1): Pace(2, 0.7), (64, 32, 1): Pace(2, 0.6),
    (32, 64, 3): Pace(2, 1.2), (16, 64, 3): Pace(2, 1.0),
}  # fmt: skip
OTHER = Pace(2, 1.0)
# Tiles that are read in boxes.
BOXES = {**TILES, (128, 128): Pace(2, 0.74)}


def of(tile: launch.Tile) -> Pace:
    """The pace of a tile."""
    return TILES.get((tile["BLOCK_M"], tile["BLOCK_N"]), OTHER)


def of_boxes(rows: int, columns: int) -> Pace:
    """That of a tile that is read in boxes."""
    return BOXES.get((rows, columns), OTHER)


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
    """Of writing partial sums in float32 and adding them, which stay in the second cache."""
    return 2.0 + 2 * 4 * shares * values / 5e6 if shares > 1 else 0.0
