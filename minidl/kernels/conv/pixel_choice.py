"""The choice of tile and number of shares for the pixel-tiled form, and its estimated time."""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.problem import FORWARD, INT32_LIMIT, PHASE, TRANSPOSED, Problem
from minidl.runtime import launch

NAME = "pixel"
FAMILIES = ("conv", "conv_flat")
BITS = 31  # maximum taps of an axis with one mask bit per tap
MANY_CHANNELS = 256  # channels from which on taps are the inner loop
POOLED = 3.0  # time with a pool, relative to that without
# Channels of groups that share the cache lines of a pixel, and their time relative to that of one group.
NARROW_GROUP, NARROW_GROUP_TIME = (17, 32), 0.65


class Chosen(NamedTuple):
    """A tile, its channels and columns of taps, the shares of K, and microseconds."""

    tile: launch.Tile
    C: int
    JW: int
    split: int
    microseconds: float


def chosen(problem: Problem) -> Chosen:
    """Return the tile and number of shares with the lowest estimated time, for `problem.images`."""
    C, JW = run_of_taps(problem)
    taps = len(problem.at.down.taps) * JW
    is_flat = flat(C, taps)
    pixels = problem.images * image(problem)
    tiles = problem.tiles("conv_flat" if is_flat else "conv", M=pixels, N=problem.M, K=taps * C if is_flat else C)
    options = [_with_shares(problem, tile, C, JW, pixels, is_flat) for tile in tiles]
    return min(options, key=lambda at: at.microseconds)


def _with_shares(problem: Problem, tile: launch.Tile, C: int, JW: int, pixels: int, is_flat: bool) -> Chosen:
    BLOCK_K, taps = tile["BLOCK_K"], len(problem.at.down.taps) * JW
    blocks = launch.cdiv(taps * C, BLOCK_K) if is_flat else taps * max(1, C // BLOCK_K)
    across = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups
    count = launch.cdiv(pixels, tile["BLOCK_M"]) * across
    work = work_of(problem, Chosen(tile, C, JW, 1, 0.0), taps)._replace(tiles=count)
    split = 1
    if not problem.pool and problem.at.down.out_step == problem.at.across.out_step == 1:
        target = max(1, min(work.throughput.slots * problem.processors // max(count, 1), blocks // 8))
        split = launch.cdiv(blocks, launch.cdiv(blocks, target))
    options = []
    for shares in {1, split}:
        cut = work._replace(shares=shares, values=pixels * problem.groups * problem.M)
        options.append((costs.microseconds(problem, cut), shares))
    time, split = min(options)
    steps = costs.constants(problem).steps
    if problem.direction == PHASE and not problem.in_place:
        time += steps.reorder
    return Chosen(tile, C, JW, split, time)


def work_of(problem: Problem, at: Chosen, taps: float) -> costs.Work:
    """Return the work of one tile for `taps` taps."""
    C, BLOCK_K, times = at.C, at.tile["BLOCK_K"], costs.constants(problem).steps
    rows, columns = at.tile["BLOCK_M"], at.tile["BLOCK_N"]
    if flat(C, len(problem.at.down.taps) * at.JW if problem.direction != TRANSPOSED else math.ceil(taps)):
        blocks: float = math.ceil(taps * C / BLOCK_K)
        size = C * problem.dtype.itemsize
        # Asynchronous copies need 4 bytes or more: loads of 2 are waited for in every step but the first.
        if problem.dtype.itemsize < 4 and size % 8:
            blocks = 1 + (blocks - 1) * times.waited
        loads = times.flat if size % 16 else 1.0
        loads *= times.strided if problem.at.across.in_step > 1 else 1.0
        throughput = tile_throughput.of_pixels(problem, rows, columns, loads)
        return costs.Work(1, tile_throughput.steps(problem, blocks, BLOCK_K), throughput, "flat")
    rest = tile_throughput.steps(problem, taps, rest_of(C, at.tile)) if C % BLOCK_K else 0.0
    # Rows of a tile beyond the last pixel read nothing.
    full = min(1.0, problem.images * image(problem) / rows)
    loads = 1 + (tile_throughput.narrow(problem, C) - 1) * full
    steps = tile_throughput.steps(problem, taps * (C // BLOCK_K), BLOCK_K) + rest
    return costs.Work(1, steps, tile_throughput.of_pixels(problem, rows, columns, loads), "pixel")


def pays_to_reorder(problem: Problem, microseconds: float) -> bool:
    """Return whether a launch is long enough to reorder backward weights first.

    256->256 at 14x14, 506 images: 211 us in place of 180.
    """
    return problem.target == "interpreted" or microseconds >= costs.constants(problem).steps.reorder_from


def estimate(problem: Problem) -> float:
    time, sizes = chosen(problem).microseconds, (problem.C, problem.M)
    if problem.groups > 1 and NARROW_GROUP[0] <= min(sizes) <= max(sizes) <= NARROW_GROUP[1]:
        time *= NARROW_GROUP_TIME
    return costs.launch_time(problem, POOLED * time if problem.pool else time)


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter, per group; a group of few channels counts as eight.

    64 groups of one channel, 3x3, 2 images of 9x9: 268 ms.
    """
    return 8 * problem.groups if problem.groups > 1 and flat(problem.C, problem.taps) else 1


def image(problem: Problem) -> int:
    """Return the output pixels of an image; with a pool only those of complete windows."""
    down, across = problem.at.down, problem.at.across
    return (down.count // 2 * 2) * (across.count // 2 * 2) if problem.pool else down.count * across.count


def rest_of(C: int, tile: launch.Tile) -> int:
    """Return the block size of the channels beyond a multiple of BLOCK_K."""
    rest = C % tile["BLOCK_K"]
    return max(16, 1 << (rest - 1).bit_length()) if rest else 16


def run_of_taps(problem: Problem) -> tuple[int, int]:
    """Return channels and columns of taps; a row of taps with contiguous inputs inside the image counts as one tap."""
    across, columns = problem.at.across, len(problem.at.across.taps)
    contiguous = problem.groups == 1 == across.in_tap and across.all_inside(problem.read[1]) and not problem.in_place
    return (columns * problem.C, 1) if contiguous else (problem.C, columns)


def wide(problem: Problem) -> bool:
    """Return whether 32 bits cannot count the values of a tensor and the offsets of taps outside it."""
    H, W = problem.read
    ends = [
        max(size, phase.in_start + (phase.count - 1) * phase.in_step + (len(phase.taps) - 1) * phase.in_tap)
        for phase, size in ((problem.at.down, H), (problem.at.across, W))
    ]
    values = ((problem.N - 1) * H + ends[0] + 1) * W + ends[1]
    return (
        max(values * problem.groups * problem.C, problem.N * problem.at.down.count * problem.at.across.count)
        >= INT32_LIMIT
    )


def flat(C: int, taps: int) -> bool:
    """Return whether taps and channels form one axis, because a tap's channels would leave most of a block empty.

    On a CPU single elements of an image cost more than an empty block.
    """
    least_channels = 2 if launch.COMPILED_CPU else 16
    return taps > 1 and least_channels > C


def taps_inner(problem: Problem) -> bool:
    """Return whether taps are the inner loop and blocks of channels the outer one, so that L2 holds shared inputs."""
    return problem.direction == FORWARD and problem.groups * problem.C >= MANY_CHANNELS
