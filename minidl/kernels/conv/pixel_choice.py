"""The choice of tile and number of shares for the pixel-tiled form, and its estimated time."""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.problem import FORWARD, INT32_LIMIT, PHASE, TRANSPOSED, Problem, all_inside
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "pixel"
FAMILIES = ("conv", "conv_flat")
# Maximum taps of an axis with one mask bit per tap.
BITS = 31
MANY_OUTPUTS = 64
# Columns of a tile from which on strided pixels are read as fast as adjacent ones.
WIDE_TILE = 256
# Channels of groups with a separate cost factor.
GROUP = 17, 32
# Channels from which on taps are the inner loop.
MANY_CHANNELS = 256
ALONE = 1 / 3  # share of a round's start-up time, for a few programs


class Chosen(NamedTuple):
    """A tile, its channels and columns of taps, the shares of K, and microseconds if the tile was measured."""

    tile: launch.Tile
    C: int
    JW: int
    split: int
    microseconds: float | None


def chosen(problem: Problem) -> Chosen:
    """Return the tile and number of shares with the lowest estimated time, for `problem.images`."""
    C, JW = run_of_taps(problem)
    taps = len(problem.at.h.taps) * JW
    is_flat = flat(C, taps)
    pixels = problem.images * image(problem)
    tiles = problem.tiles("conv_flat" if is_flat else "conv", M=pixels, N=problem.M, K=taps * C if is_flat else C)
    options = [_with_shares(problem, tile, C, JW, pixels, is_flat) for tile in tiles]
    return min(options, key=lambda at: at.microseconds or 0.0)


def _with_shares(problem: Problem, tile: launch.Tile, C: int, JW: int, pixels: int, is_flat: bool) -> Chosen:
    BLOCK_K, taps = tile["BLOCK_K"], len(problem.at.h.taps) * JW
    blocks = launch.cdiv(taps * C, BLOCK_K) if is_flat else taps * max(1, C // BLOCK_K)
    across = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups
    count = launch.cdiv(pixels, tile["BLOCK_M"]) * across
    throughput = tile_throughput.of(tile)
    split = 1
    if not problem.pool and problem.at.h.out_step == problem.at.v.out_step == 1:
        slots = throughput.slots if problem.paced else 1
        target = max(1, min(slots * problem.processors // max(count, 1), blocks // 8))
        split = launch.cdiv(blocks, launch.cdiv(blocks, target))
    if not problem.paced:
        return Chosen(tile, C, JW, split, None)
    steps, kind = steps_of(problem, Chosen(tile, C, JW, 1, None), taps)
    values = pixels * problem.groups * problem.M
    time = [
        tile_throughput.microseconds(
            count * shares, steps / shares, throughput, problem.processors, kind, _start_factor(problem, count * shares)
        )
        + tile_throughput.of_shares(shares, values)
        for shares in (1, split)
    ]
    rates = tile_throughput.rates()
    total = rates.launch + min(time)
    if problem.direction == PHASE and not problem.in_place:
        total += rates.turn
    if problem.in_place and total > rates.turns_from:
        total = max(rates.turns_from, total / rates.turned)
    return Chosen(tile, C, JW, split if time[1] < time[0] else 1, total)


def _start_factor(problem: Problem, programs: int) -> float:
    """Return the start-up time of `programs`, relative to one per multiprocessor.

    60 launches of up to 15 programs took 1 us, 44 of up to 63 two (H200)."""
    return max(ALONE, min(1.0, math.sqrt(programs / problem.processors)))


def steps_of(problem: Problem, at: Chosen, taps: float) -> tuple[float, str]:
    """Return the steps of a tile for `taps` taps, and the kind of its rounds."""
    C, BLOCK_K, rates = at.C, at.tile["BLOCK_K"], tile_throughput.rates()
    if flat(C, len(problem.at.h.taps) * at.JW if problem.direction != TRANSPOSED else math.ceil(taps)):
        pixel_bytes = C * problem.dtype.itemsize
        flat_ = rates.flat if pixel_bytes % 16 == 0 else rates.flat_values
        # Inputs of adjacent outputs are not adjacent. 11x11 stride 4, 3->64 at 224x224, 76 images: 217 us.
        if problem.at.v.in_step > 1:
            flat_ *= costs.relative(problem, "pixel, strided taps")
        blocks = math.ceil(taps * C / BLOCK_K)
        # Asynchronous copies need 4 bytes or more: 2-byte loads are waited for in every step but the first.
        # 13->768 4x4 at 13x13 of 3 images: 21 us, padded 5; 9->872 of 393: 12 ms. On H200s, 129 shapes.
        if pixel_bytes % 8:
            blocks = 1 + (blocks - 1) * costs.relative(problem, "pixel, twos" if pixel_bytes % 4 else "pixel, fours")
        return flat_ * tile_throughput.steps(blocks, BLOCK_K), "flat"
    rest = tile_throughput.steps(taps, rest_of(C, at.tile)) if C % BLOCK_K else 0.0
    # Rows of a tile beyond the last pixel read nothing.
    full = min(1.0, problem.images * image(problem) / at.tile["BLOCK_M"])
    times = 1 + (tile_throughput.narrow(C, problem.dtype.itemsize) - 1) * full
    times *= rates.turned if problem.in_place else 1.0
    # 512->512 3x3 stride 2, 81 images of 33x33: 165 us with 256 columns, 192 with 128; alike at a stride of 1.
    if problem.direction == FORWARD and problem.at.v.in_step > 1 and at.tile["BLOCK_N"] < WIDE_TILE:
        times *= costs.relative(problem, "pixel, strided")
    return (tile_throughput.steps(taps * (C // BLOCK_K), BLOCK_K) + rest) * times, "pixel"


def turns(problem: Problem, microseconds: float) -> bool:
    """Return whether a launch is long enough to reorder backward weights first.

    256->256 at 14x14, 506 images: 211 us in place of 180.
    """
    return microseconds >= selection.of(problem.target).steps.turns_from


def estimate(problem: Problem) -> float:
    at = chosen(problem)
    if at.microseconds is not None:
        time = at.microseconds
        # Rows not aligned to 16 bytes are stored value by value: 832->221 3x3 at 40x35, 29 images, 349 us.
        if problem.M > MANY_OUTPUTS and problem.M * problem.dtype.itemsize % 16:
            time *= costs.relative(problem, "pixel, odd" if problem.M % 2 else "pixel, even")
        # 3x3 in 32 groups of 32 channels at 7x7, 23 to 230 images: 0.54 to 0.81.
        if has_narrow_groups(problem):
            time *= costs.relative(problem, "pixel, groups")
        return costs.at_least(problem, costs.tile_time(problem, "pixel, pooled", time) if problem.pool else time)
    return costs.microseconds(problem, NAME, costs.outputs(problem) * products(problem), programs(problem))


def has_narrow_groups(problem: Problem) -> bool:
    """Return whether groups have 17 to 32 channels on both sides, in multiples of 16 bytes; `filled` merges others."""
    sizes = problem.C, problem.M
    return (
        problem.groups > 1
        and GROUP[0] <= min(sizes) <= max(sizes) <= GROUP[1]
        and not any(size * problem.dtype.itemsize % 16 for size in sizes)
    )


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter, per group; a group of few channels counts as eight.

    64 groups of one channel, 3x3, 2 images of 9x9: 268 ms.
    """
    return 8 * problem.groups if problem.groups > 1 and flat(problem.C, problem.taps) else 1


def products(problem: Problem) -> int:
    """Return the products of one output pixel, with channels or taps padded to blocks of 16."""
    C, taps = problem.C, problem.taps
    K = 16 * launch.cdiv(C * taps, 16) if flat(C, taps) else taps * 16 * launch.cdiv(C, 16)
    return problem.groups * max(K, costs.LEAST_VALUES) * costs.columns(problem)


def image(problem: Problem) -> int:
    """Return the output pixels of an image; with a pool only those of complete windows."""
    h, v = problem.at.h, problem.at.v
    return (h.count // 2 * 2) * (v.count // 2 * 2) if problem.pool else h.count * v.count


def rest_of(C: int, tile: launch.Tile) -> int:
    """Return the block size of the channels beyond a multiple of BLOCK_K."""
    rest = C % tile["BLOCK_K"]
    return max(16, 1 << (rest - 1).bit_length()) if rest else 16


def run_of_taps(problem: Problem) -> tuple[int, int]:
    """Return channels and columns of taps; a row of taps with contiguous inputs inside the image counts as one tap."""
    v, columns = problem.at.v, len(problem.at.v.taps)
    contiguous = problem.groups == 1 == v.in_tap and all_inside(v, problem.read[1]) and not problem.in_place
    return (columns * problem.C, 1) if contiguous else (problem.C, columns)


def wide(problem: Problem) -> bool:
    """Return whether 32 bits cannot count the values of a tensor and the offsets of taps outside it."""
    H, W = problem.read
    ends = [
        max(size, phase.in_start + (phase.count - 1) * phase.in_step + (len(phase.taps) - 1) * phase.in_tap)
        for phase, size in ((problem.at.h, H), (problem.at.v, W))
    ]
    values = ((problem.N - 1) * H + ends[0] + 1) * W + ends[1]
    return max(values * problem.groups * problem.C, problem.N * problem.at.h.count * problem.at.v.count) >= INT32_LIMIT


def flat(C: int, taps: int) -> bool:
    """Return whether taps and channels form one axis, because a tap's channels would leave most of a block empty."""
    return taps > 1 and C < 16


def taps_inner(problem: Problem) -> bool:
    """Return whether taps are the inner loop and blocks of channels the outer one, so that L2 holds shared inputs."""
    return problem.direction == FORWARD and problem.groups * problem.C >= MANY_CHANNELS
