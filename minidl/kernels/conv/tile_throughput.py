"""Times of tiles of tensor-core kernels: tiles run in rounds of as many as fit on the device at once.

Measured on an H100 in float16 (`benchmarks/notes.md`, "Pixels of any image"). L2 bandwidth, 7 to 11e12 bytes a second,
is the bottleneck, so the time of a step depends on the edges of a tile, not on its area.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.cost_model.schema import Steps, Throughput

FULL_BLOCK = 64
LINE = 128  # bytes of a cache line
TARGET = "sm_90"  # the target whose tiles were measured
# Shares of a sum are tried for fewer rounds than this.
MOST_ROUNDS = 13
# A descriptor block takes longer if pixels have this many channels per warpgroup or more.
FAR = 512
LEAST_ROWS = 64  # minimum rows of a tensor-core instruction
LARGE = 2**14  # accumulators of a tile, above which only one runs on a multiprocessor


def rates() -> Steps:
    """Return the measured times of steps and rounds."""
    return selection.of(TARGET).steps


def of(tile: launch.Tile) -> Throughput:
    """Return the throughput of a tile whose rows are pixels or images and whose columns are channels."""
    return _measured("tiles", tile["BLOCK_M"], tile["BLOCK_N"]) or _from_edges(tile["BLOCK_M"], tile["BLOCK_N"])


def of_boxes(rows: int, columns: int) -> Throughput:
    """Return the throughput of a tile that is read by descriptors."""
    return _measured("boxes", rows, columns) or _measured("tiles", rows, columns) or _from_edges(rows, columns)


def of_boxed(tile: launch.Tile, channels: int) -> Throughput:
    """Return the throughput of a tile of `boxed`, for `channels` of x."""
    rows, columns, warps = max(LEAST_ROWS, tile["BLOCK_M"]), tile["BLOCK_N"], tile.num_warps
    slots, step = _measured("boxed", rows, columns, warps) or _from_edges(rows, columns)
    return Throughput(slots, step * (1 + rates().farther * max(0.0, math.log2(4 * channels / (warps * FAR)))))


def of_grad_weight(tile: launch.Tile, taps: int) -> Throughput:
    """Return the throughput of a tile of a gradient of the weight with `taps` taps."""
    throughput = _measured("weights", tile["BLOCK_M"], tile["BLOCK_N"], taps)
    return throughput or selection.of(TARGET).weights["other"]


def of_box_weight(tile: launch.Tile, taps: int) -> Throughput:
    """Return the throughput of such a tile that reads x by descriptors and dy through pointers."""
    return _measured("weights", "box", tile["BLOCK_M"], tile["BLOCK_N"], taps) or of_programs(tile, taps)


def of_unfolded(tile: launch.Tile) -> Throughput:
    """Return the throughput of a tile of `unfolded_grad_weight`."""
    rows, columns = tile["BLOCK_M"], tile["BLOCK_N"]
    return _measured("weights", "unfolded", rows, columns) or _from_edges(rows, columns)


def _measured(table: str, *sizes: int | str) -> Throughput | None:
    throughput: Throughput | None = getattr(selection.of(TARGET), table).get("x".join(map(str, sizes)))
    return throughput


def _from_edges(rows: int, columns: int) -> Throughput:
    """Return the estimated throughput of an unmeasured tile: the time of its edges in L2 or of its products.

    Measured tiles take 0.8 to 1.2 times this.
    """
    device = selection.of(TARGET)
    slots = 1 if rows * columns > LARGE else 2
    products = slots * 2 * max(rows, LEAST_ROWS) * max(columns, 32) * FULL_BLOCK / device.gemm.gemm.operations
    read = slots * (rows + columns) * FULL_BLOCK * 2 / device.steps.edges
    return Throughput(slots, max(products + device.gemm.gemm.wait, read))


def of_programs(tile: launch.Tile, taps: int) -> Throughput:
    """Return the throughput of `of_grad_weight` for the tile's PER_PROCESSOR programs; a lone program is faster."""
    slots, step = of_grad_weight(tile, taps)
    programs = tile["PER_PROCESSOR"]
    return Throughput(programs, step * (rates().alone["weight"] if programs == 1 < slots else 1.0))


def steps(blocks: float, block: int, fixed: float | None = None) -> float:
    """Return the number of steps of 64 along K that take as long as `blocks` of length `block`."""
    fixed = rates().apart if fixed is None else fixed
    return blocks * (fixed + (1 - fixed) * block / FULL_BLOCK)


def narrow(channels: int, itemsize: int) -> float:
    """Return the time of a step relative to one with 16-byte loads, for rows of `channels` values."""
    size, times = channels * itemsize, rates()
    return times.narrow[min(16, size & -size)] * (times.across_lines if size > LINE and size % LINE else 1.0)


def microseconds(
    tiles: int, steps: float, throughput: Throughput, processors: int, kind: str, part: float = 1.0
) -> float:
    """Return the microseconds of a launch of `tiles` tiles with `steps` steps each; rounds have a fixed time by `kind`,
    of which `part` applies."""
    times = rates()
    rounds, left = divmod(tiles, processors * throughput.slots)
    fixed = times.rounds[kind] * part
    time = rounds * (fixed + steps * throughput.step)
    if left:
        alone = times.last if rounds else times.alone[kind]
        time += fixed + steps * throughput.step * (alone if throughput.slots > 1 and left <= processors else 1.0)
    return time


def of_shares(shares: int, values: int) -> float:
    """Return the microseconds of writing partial sums in float32 and adding them, in L2 or, if too large, in memory."""
    size, times = 4 * shares * values, rates()
    return times.shares + 2 * size / (times.cached if size < times.cache else times.uncached) if shares > 1 else 0.0


class Shares(NamedTuple):
    """The number of shares of a sum, and their total microseconds."""

    count: int
    microseconds: float


def in_shares(
    tiles: int, blocks: int, block: int, throughput: Throughput, processors: int, values: int, factor: float = 1.0,
    least: int = 1, kind: str = "weight",
) -> Shares:  # fmt: skip
    """Return the fastest split of a weight gradient's `blocks` into shares of at least `least` blocks.

    Candidates fill the device once or several times: 72 tiles alone leave half of 132 multiprocessors idle.
    """
    device = processors * throughput.slots
    most = max(1, blocks // least)
    counts = {1} | {min(most, max(1, rounds * device // max(tiles, 1))) for rounds in range(1, MOST_ROUNDS)}
    options = []
    for count in sorted({-(-blocks // -(-blocks // count)) for count in counts}):
        time = microseconds(tiles * count, factor * steps(-(-blocks // count), block), throughput, processors, kind)
        options.append(Shares(count, time + of_shares(count, values)))
    return min(options, key=lambda option: option.microseconds)
