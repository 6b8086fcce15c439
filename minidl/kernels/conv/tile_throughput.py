"""The throughput of a tile: measured in 16 bits, otherwise the longer of its products and of its edges, read from L2.

    step = max(slots * 2 * rows * columns * 64 / rate + wait, slots * (rows + columns) * 64 * bytes / edges)

in microseconds, with the operations (rate) and bytes (edges) per microsecond of one multiprocessor. Kernels that split
float32 blocks into tf32 parts (`tf32x3`) take `splits` times as long, a measured factor of their kind, and those that
transpose blocks in "tf32" `tf32` times. With 16 bits the bandwidth of L2, 7 to 11e12 bytes per second of a whole H100,
is the bottleneck, so the time of a step depends on the edges of a tile, not on its area. Measured tiles take 0.8 to 1.2
times this estimate.
"""

from __future__ import annotations

import math

from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem
from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.cost_model.schema import Throughput

FULL_BLOCK = 64  # values of K of a step
LINE = 128  # bytes of a cache line
WGMMA_ROWS, LEAST_COLUMNS = 64, 32  # least rows of `wgmma`, and columns that take as long as fewer
LARGE = 2**14  # accumulators of a tile, above which only one runs on a multiprocessor
FAR, FARTHER = 512, 0.25  # channels per warpgroup from which on loads of boxes take longer, per factor of 2
ACROSS = 1.4  # time of loads across K, relative to loads along K


def of(problem: Problem, rows: int, columns: int, *names: str, loads: float = 1.0) -> Throughput:
    """Return the throughput of a tile, measured under the first of `names` that has it.

    loads: how much longer its loads take than aligned ones of 16 bytes: a factor of a measured step, or of an estimated
    step's reads."""
    device = selection.of(problem.target)
    for name in names if problem.has_measured_tiles else ():
        if name in device.tiles:
            slots, step = device.tiles[name]
            return Throughput(slots, loads * step)
    slots = 1 if rows * columns > LARGE else 2
    rate = selection.rate(problem.target, problem.dtype, problem.precision) / problem.processors
    # Tensor cores multiply tiles of fewer rows by `mma`, at half the rate of `wgmma`; float32 across K by `mma` alone.
    by_mma = problem.dtype.itemsize <= 2 or (problem.precision != "ieee" and problem.direction != GRAD_WEIGHT)
    halved = rows < WGMMA_ROWS and by_mma
    products = slots * 2 * rows * (2 if halved else 1) * max(columns, LEAST_COLUMNS) * FULL_BLOCK / rate
    read = slots * (rows + columns) * FULL_BLOCK * problem.dtype.itemsize / device.steps.edges
    kind = names[0].rpartition(" ")[0] if names else ""
    if problem.splits:
        return Throughput(
            slots, device.steps.splits.get(kind, 1.0) * loads * max(products + device.gemm.gemm.wait, read)
        )
    factor = device.steps.tf32.get(kind, 1.0) if problem.on_tf32_cores else 1.0
    return Throughput(slots, factor * max(products + device.gemm.gemm.wait, loads * read))


def of_pixels(problem: Problem, rows: int, columns: int, loads: float = 1.0, kind: str = "pixel") -> Throughput:
    """Return the throughput of a tile whose rows are pixels, in a form of a kind of its own or of any kind."""
    return of(problem, rows, columns, *(f"{each} {rows}x{columns}" for each in (kind, "pixel")), loads=loads)


def of_runs(problem: Problem, tile: launch.Tile) -> Throughput:
    """Return the throughput of a tile whose rows are images, read by descriptors."""
    rows, columns = tile["BLOCK_M"], tile["BLOCK_N"]
    return of(problem, rows, columns, f"run {rows}x{columns}", f"pixel {rows}x{columns}")


def of_boxes(problem: Problem, tile: launch.Tile) -> Throughput:
    """Return the throughput of a tile whose columns are boxes of pixels."""
    rows, columns, warps = max(WGMMA_ROWS, tile["BLOCK_M"]), tile["BLOCK_N"], tile.num_warps
    loads = 1 + FARTHER * max(0.0, math.log2(4 * problem.groups * problem.C / (warps * FAR)))
    return of(problem, rows, columns, f"box {rows}x{columns}x{warps}", loads=loads)


def of_split(problem: Problem, tile: launch.Tile) -> Throughput:
    """Return the throughput of a tile whose operands are in parts (`split`)."""
    rate = selection.rate(problem.target, problem.dtype, problem.precision) / problem.processors
    rows, columns = max(WGMMA_ROWS, tile["BLOCK_M"]), max(LEAST_COLUMNS, tile["BLOCK_N"])
    products = 2 * rows * columns * FULL_BLOCK / rate
    return Throughput(1, products + selection.of(problem.target).gemm.gemm.wait)


def of_weight(problem: Problem, tile: launch.Tile, taps: int, *kinds: str, loads: float = 1.0) -> Throughput:
    """Return the throughput of a weight gradient's tile with `taps` taps, whose operands lie across K."""
    rows, columns = tile["BLOCK_M"], tile["BLOCK_N"]
    names = (f"weight {kind}{rows}x{columns}x{taps}" for kind in (*kinds, ""))
    loads *= 1.0 if problem.has_measured_tiles else ACROSS
    return of(problem, rows, columns * taps, *names, "weight", loads=loads)


def steps(problem: Problem, blocks: float, block: int, boxes: bool = False) -> float:
    """Return the number of steps of 64 along K that take as long as `blocks` of length `block`."""
    fixed = 0.0 if boxes else selection.of(problem.target).steps.per_block
    return blocks * (fixed + (1 - fixed) * block / FULL_BLOCK)


def narrow(problem: Problem, channels: int) -> float:
    """Return the time of a step relative to one with 16-byte loads, for rows of `channels` values."""
    size, times = channels * problem.dtype.itemsize, selection.of(problem.target).steps
    return times.narrow[min(16, size & -size)] * (times.across_lines if size > LINE and size % LINE else 1.0)
