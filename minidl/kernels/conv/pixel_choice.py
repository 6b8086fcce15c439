"""Which tile the pixel-tiled form takes, in how many shares, and how long that takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.problem import FORWARD, INT32_LIMIT, PHASE, TRANSPOSED, Problem, all_inside
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "pixel"
FAMILIES = ("conv", "conv_flat")
# Taps of an axis that have a bit each.
BITS = 31
MANY_OUTPUTS = 64
# Columns of a tile with which strided pixels are read as fast as neighbours.
WIDE_TILE = 256
# Channels of groups that have a cost of their own.
GROUP = 17, 32
# Channels from which on taps are added first.
MANY_CHANNELS = 256
ALONE = 1 / 3  # of what a round takes to begin, for a few programs


class Chosen(NamedTuple):
    """A tile, the channels and columns of taps it is for, shares of them, and how long it takes where that is known."""

    tile: launch.Tile
    C: int
    JW: int
    split: int
    microseconds: float | None


def chosen(problem: Problem) -> Chosen:
    """The tile and the number of shares that are estimated to take the least time, for `problem.images`."""
    C, JW = run_of_taps(problem)
    taps = len(problem.at.h.taps) * JW
    joined = flat(C, taps)
    pixels = problem.images * image(problem)
    tiles = problem.tiles("conv_flat" if joined else "conv", M=pixels, N=problem.M, K=taps * C if joined else C)
    found = [_with_shares(problem, tile, C, JW, pixels, joined) for tile in tiles]
    return min(found, key=lambda at: at.microseconds or 0.0)


def _with_shares(problem: Problem, tile: launch.Tile, C: int, JW: int, pixels: int, joined: bool) -> Chosen:
    BLOCK_K, taps = tile["BLOCK_K"], len(problem.at.h.taps) * JW
    blocks = launch.cdiv(taps * C, BLOCK_K) if joined else taps * max(1, C // BLOCK_K)
    across = launch.cdiv(problem.M, tile["BLOCK_N"]) * problem.groups
    count = launch.cdiv(pixels, tile["BLOCK_M"]) * across
    tempo = tile_throughput.of(tile)
    split = 1
    if not problem.pool and problem.at.h.out_step == problem.at.v.out_step == 1:
        slots = tempo.slots if problem.paced else 1
        wanted = max(1, min(slots * problem.processors // max(count, 1), blocks // 8))
        split = launch.cdiv(blocks, launch.cdiv(blocks, wanted))
    if not problem.paced:
        return Chosen(tile, C, JW, split, None)
    steps, kind = steps_of(problem, Chosen(tile, C, JW, 1, None), taps)
    values = pixels * problem.groups * problem.M
    time = [
        tile_throughput.microseconds(
            count * shares, steps / shares, tempo, problem.processors, kind, _begun(problem, count * shares)
        )
        + tile_throughput.of_shares(shares, values)
        for shares in (1, split)
    ]
    known = tile_throughput.known()
    least = known.launch + min(time)
    if problem.direction == PHASE and not problem.in_place:
        least += known.turn
    if problem.in_place and least > known.turns_from:
        least = max(known.turns_from, least / known.turned)
    return Chosen(tile, C, JW, split if time[1] < time[0] else 1, least)


def _begun(problem: Problem, programs: int) -> float:
    """How long programs take to begin, beside as many as there are multiprocessors: 60 launches of up to 15 took 1 us,
    44 of up to 63 two (H200)."""
    return max(ALONE, min(1.0, math.sqrt(programs / problem.processors)))


def steps_of(problem: Problem, at: Chosen, taps: float) -> tuple[float, str]:
    """Steps of a tile for so many taps, and of which kind their rounds are."""
    C, BLOCK_K, known = at.C, at.tile["BLOCK_K"], tile_throughput.known()
    if flat(C, len(problem.at.h.taps) * at.JW if problem.direction != TRANSPOSED else math.ceil(taps)):
        of_a_pixel = C * problem.dtype.itemsize
        flat_ = known.flat if of_a_pixel % 16 == 0 else known.flat_values
        # The inputs of neighbouring outputs are not neighbours. 11x11 stride 4, 3->64 at 224x224, 76 images: 217 us.
        if problem.at.v.in_step > 1:
            flat_ *= costs.relative(problem, "pixel, strided taps")
        blocks = math.ceil(taps * C / BLOCK_K)
        # Copies to shared memory have 4 bytes at least: what is read in twos is waited for in each step but the first.
        # 13->768 4x4 at 13x13 of 3 images: 21 us, filled 5; 9->872 of 393: 12 ms. On H200s, 129 shapes.
        if of_a_pixel % 8:
            blocks = 1 + (blocks - 1) * costs.relative(problem, "pixel, twos" if of_a_pixel % 4 else "pixel, fours")
        return flat_ * tile_throughput.steps(blocks, BLOCK_K), "flat"
    rest = tile_throughput.steps(taps, rest_of(C, at.tile)) if C % BLOCK_K else 0.0
    # Rows that are no pixels cost no reading.
    full = min(1.0, problem.images * image(problem) / at.tile["BLOCK_M"])
    times = 1 + (tile_throughput.narrow(C, problem.dtype.itemsize) - 1) * full
    times *= known.turned if problem.in_place else 1.0
    # 512->512 3x3 stride 2, 81 images of 33x33: 165 us with 256 columns, 192 with 128; alike at a stride of 1.
    if problem.direction == FORWARD and problem.at.v.in_step > 1 and at.tile["BLOCK_N"] < WIDE_TILE:
        times *= costs.relative(problem, "pixel, strided")
    return (tile_throughput.steps(taps * (C // BLOCK_K), BLOCK_K) + rest) * times, "pixel"


def turns(problem: Problem, microseconds: float) -> bool:
    """Whether a launch is so long that the weights of a way back are turned before it.

    256->256 at 14x14, 506 images: 211 us in place of 180.
    """
    return microseconds >= selection.of(problem.target).steps.turns_from


def options(problem: Problem, at: Chosen) -> dict[str, int]:
    """Of a launch: the tile's, the block of what channels are left, and in how many pieces results are stored."""
    made = at.tile.options
    # Rows that no 16 bytes divide are stored value by value, whose addresses take many registers.
    piece = 64 if problem.M * problem.dtype.itemsize % 16 == 0 else 16
    made["PIECES"] = 1 if problem.target == "interpreted" else max(1, at.tile["BLOCK_N"] // piece)
    made["BLOCK_REST"] = rest_of(at.C, at.tile)
    return made


def estimate(problem: Problem) -> float:
    at = chosen(problem)
    if at.microseconds is not None:
        time = at.microseconds
        # Rows that no 16 bytes divide are stored value by value: 832->221 3x3 at 40x35, 29 images, 349 us.
        if problem.M > MANY_OUTPUTS and problem.M * problem.dtype.itemsize % 16:
            time *= costs.relative(problem, "pixel, odd" if problem.M % 2 else "pixel, even")
        # 3x3 in 32 groups of 32 channels at 7x7, 23 to 230 images: 0.54 to 0.81.
        if of_narrow_groups(problem):
            time *= costs.relative(problem, "pixel, groups")
        # With a 2x2 pool in the kernel, four pixels are rows of one tile.
        return costs.at_least(problem, costs.tile_time(problem, "pixel, pooled", time) if problem.pool else time)
    return costs.microseconds(problem, NAME, costs.outputs(problem) * products(problem), programs(problem))


def of_narrow_groups(problem: Problem) -> bool:
    """Whether there are groups of 17 to 32 channels on both sides, in whole pieces of 16 bytes. Others were not timed
    as they are: groups that `filled` joins have more."""
    sizes = problem.C, problem.M
    return (
        problem.groups > 1
        and GROUP[0] <= min(sizes) <= max(sizes) <= GROUP[1]
        and not any(size * problem.dtype.itemsize % 16 for size in sizes)
    )


def programs(problem: Problem) -> int:
    """What the interpreter runs one after another: each group, of few channels as long as eight others.

    64 groups of one channel, 3x3, 2 images of 9x9: 268 ms.
    """
    return 8 * problem.groups if problem.groups > 1 and flat(problem.C, problem.taps) else 1


def products(problem: Problem) -> int:
    """Of one output pixel, blocks of 16 channels or taps filled up."""
    C, taps = problem.C, problem.taps
    K = 16 * launch.cdiv(C * taps, 16) if flat(C, taps) else taps * 16 * launch.cdiv(C, 16)
    return problem.groups * max(K, costs.LEAST_VALUES) * costs.columns(problem)


def image(problem: Problem) -> int:
    """Pixels of an image, of those that are pooled the whole windows."""
    h, v = problem.at.h, problem.at.v
    return (h.count // 2 * 2) * (v.count // 2 * 2) if problem.pool else h.count * v.count


def rest_of(C: int, tile: launch.Tile) -> int:
    """BLOCK_K of the channels that fill none."""
    rest = C % tile["BLOCK_K"]
    return max(16, 1 << (rest - 1).bit_length()) if rest else 16


def run_of_taps(problem: Problem) -> tuple[int, int]:
    """Channels and columns of taps: a row of taps whose inputs are all inside and side by side counts as one tap."""
    v, columns = problem.at.v, len(problem.at.v.taps)
    whole = problem.groups == 1 == v.in_tap and all_inside(v, problem.read[1]) and not problem.in_place
    return (columns * problem.C, 1) if whole else (problem.C, columns)


def wide(problem: Problem) -> bool:
    """Whether 32 bits do not count the values of a tensor, or places beside it where a tap would be."""
    H, W = problem.read
    ends = [
        max(size, phase.in_start + (phase.count - 1) * phase.in_step + (len(phase.taps) - 1) * phase.in_tap)
        for phase, size in ((problem.at.h, H), (problem.at.v, W))
    ]
    values = ((problem.N - 1) * H + ends[0] + 1) * W + ends[1]
    return max(values * problem.groups * problem.C, problem.N * problem.at.h.count * problem.at.v.count) >= INT32_LIMIT


def flat(C: int, taps: int) -> bool:
    """Whether taps and channels are one axis: where a tap's channels would leave most of a block empty."""
    return taps > 1 and C < 16


def taps_inner(problem: Problem) -> bool:
    """Whether all taps of a block of channels are added before those of the next one: the second cache holds what they
    share. Of 2048 channels at 33x33 with a dilation of 6, 5.6 ms in place of 6.4; with 128 at 28x28 nothing was gained.
    """
    return problem.direction == FORWARD and problem.groups * problem.C >= MANY_CHANNELS
