"""Estimated microseconds of a convolution: the work of its launches, and the constants of a device.

    time = launch + rounds * (fixed + steps * step) + sum of shares, and at least the time of the bytes that are moved

Tiles run in rounds of as many as fit on all multiprocessors (`tile_throughput`); the steps of a last round that leaves
some idle are shorter by the factor `alone` or `last`. A step is 64 values of K; if K is split, the partial sums of its
shares are added. In the interpreter programs run one after another, each as long:

    time = form's share * (launch * (1 + programs) + operations / rate)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.cost_model.schema import Constants, Throughput

MOST_ROUNDS = 13  # shares are tried for fewer rounds than this
BOTH = 0.02  # share of the shorter of memory and product time that does not overlap
ODD = 1.3  # time of rows of many values that are not aligned to 16 bytes and so stored one by one
SOONEST = 1 / 3  # smallest part of a round's fixed time, for a few programs
BAND = 1e5  # values of a band that are computed per us
POOLED = 1.25  # time of a pool relative to a copy of its input
# Time of a form in the interpreter relative to boxes.
INTERPRETED = {
    "few": 0.9, "product": 0.9, "box": 1.0, "depthwise": 1.0, "banded": 1.35, "pixel": 1.9, "unfolded": 1.9,
    "batch": 2.5, "fft": 2.5, "pair": 1000.0,
}  # fmt: skip


class Work(NamedTuple):
    """The work of a launch.

    tiles, steps  the number of tiles, and the steps of each
    throughput    of a tile
    kind          of its rounds: how long the first blocks and the epilogue take; a key of `schema.Steps.rounds`
    shares        the shares of K, and the `values` of the result that they add
    """

    tiles: int
    steps: float
    throughput: Throughput
    kind: str
    shares: int = 1
    values: float = 0


def constants(problem: Problem) -> Constants:
    """Return the constants of the problem's device."""
    return selection.of(problem.target)


def microseconds(problem: Problem, work: Work) -> float:
    """Return the microseconds of the rounds of all tiles and of the sum of shares."""
    times, (slots, step) = constants(problem).steps, work.throughput
    rounds, left = divmod(work.tiles * work.shares, problem.processors * slots)
    each = work.steps / work.shares * step
    fixed = times.rounds[work.kind]
    time = rounds * (fixed + each)
    if rounds == 0:  # a few programs start sooner
        fixed *= max(SOONEST, min(1.0, math.sqrt(left / problem.processors)))
    if left:
        alone = times.last if rounds else times.alone[work.kind]
        time += fixed + each * (alone if slots > 1 and left <= problem.processors else 1.0)
    return time + shares_time(problem, work.shares, work.values)


def shares_time(problem: Problem, shares: int, values: float) -> float:
    """Return the microseconds of writing partial sums in float32 and adding them, in L2 or, if too large, in memory."""
    size, times = 4 * shares * values, constants(problem).steps
    return times.shares + 2 * size / (times.cached if size < times.cache else times.uncached) if shares > 1 else 0.0


class Split(NamedTuple):
    """The number of shares of a sum, and the microseconds of the rounds and of adding the shares."""

    shares: int
    microseconds: float


def in_shares(problem: Problem, work: Work, blocks: int, least: int) -> Split:
    """Return the fastest split of a weight gradient's `blocks` into shares of at least `least` blocks.

    Candidates fill the device once or several times: 72 tiles alone leave half of 132 multiprocessors idle.
    """
    device = problem.processors * work.throughput.slots
    most = max(1, blocks // least)
    counts = {1} | {min(most, max(1, rounds * device // max(work.tiles, 1))) for rounds in range(1, MOST_ROUNDS)}
    options = []
    for count in sorted({launch.cdiv(blocks, launch.cdiv(blocks, count)) for count in counts}):
        # `microseconds` divides the steps by the shares, and the longest share has the rounded-up number of blocks.
        longest = work.steps * launch.cdiv(blocks, count) / blocks * count
        options.append(Split(count, microseconds(problem, work._replace(steps=longest, shares=count))))
    return min(options, key=lambda option: option.microseconds)


def launch_time(problem: Problem, time: float, size: int | None = None) -> float:
    """Return the microseconds of a launch with rounds of `time`, which moves `size` bytes (default: the problem's).

    That is the launch itself and its rounds (longer if rows are stored value by value), but at least the time of the
    bytes. A share of the shorter one is added, so that of two memory-bound launches the one with less work is cheaper.
    """
    device = constants(problem)
    time *= ODD if odd_rows(problem) and problem.M > 64 and problem.direction != GRAD_WEIGHT else 1.0
    time += device.steps.launch
    memory = device.launch + (moved(problem) if size is None else size) / (device.reached * device.copy)
    return max(time, memory) + BOTH * min(time, memory)


def interpreted(problem: Problem, name: str, programs: Callable[[Problem], float]) -> float:
    """Return the microseconds of a form of INTERPRETED in the interpreter."""
    device = constants(problem)
    operations = 2 * outputs(problem) * problem.groups * taps(problem) * problem.C * problem.M
    return INTERPRETED[name] * (device.launch * (1 + programs(problem)) + operations / device.products["ieee"])


def outputs(problem: Problem) -> int:
    """Return the number of output pixels of all images."""
    if problem.direction == TRANSPOSED:
        return problem.N * problem.geometry.h.size * problem.geometry.w.size
    return problem.N * problem.at.down.count * problem.at.across.count


def taps(problem: Problem) -> float:
    """Return the mean number of taps of an output pixel."""
    if problem.direction == TRANSPOSED:
        both = [(axis.size, axis.backward()) for axis in (problem.geometry.h, problem.geometry.w)]
        return math.prod(sum(phase.count * phase.reached for phase in phases) / size for size, phases in both)
    return problem.taps


def taps_inside(problem: Problem) -> float:
    """Return the mean number of taps of an output pixel with an input inside the image; for a PHASE all taps."""
    axes = problem.geometry.h, problem.geometry.w
    if problem.phases:
        return problem.taps
    back = problem.direction == TRANSPOSED
    return math.prod(sum(axis.inside()) / (axis.size if back else axis.output) for axis in axes)


def written(problem: Problem) -> int:
    """Return the bytes of the output before a pool."""
    return outputs(problem) * problem.groups * problem.M * problem.result.itemsize


def moved(problem: Problem) -> int:
    """Return the bytes of images that are read and written; a PHASE reads all of x and writes a part of y."""
    H, W = problem.read
    if problem.direction in (FORWARD, GRAD_WEIGHT):
        H, W = _read_size(problem.geometry.h), _read_size(problem.geometry.w)
    row = problem.pitches[0] if problem.pitches else W * problem.C
    read = problem.N * H * row * problem.groups * problem.dtype.itemsize
    return read + written(problem) // (4 if problem.pool else 1) * (1 + problem.preactivation)


def _read_size(axis: Axis) -> int:
    """Return the number of inputs of an axis that some output reads; a stride may skip others."""
    return min(axis.size, axis.output * min(axis.kernel, axis.stride)) if axis.dilation == 1 else axis.size


def copy_time(problem: Problem, size: float) -> float:
    """Return the microseconds of a launch that reads and writes `size` bytes in all."""
    return constants(problem).launch + size / constants(problem).copy


def band_time(problem: Problem, values: int) -> float:
    """Return the microseconds of computing a band of weights."""
    return constants(problem).launch + values / BAND


def odd_rows(problem: Problem) -> bool:
    """Return whether rows of the result are not aligned to 16 bytes and so stored value by value."""
    return problem.groups * problem.M * problem.result.itemsize % 16 > 0


def pool_time(problem: Problem) -> float:
    """Return the microseconds of a separate 2x2 pool; its launch overlaps the convolution's last programs."""
    return copy_time(problem, POOLED * written(problem)) - constants(problem).launch / 2


def sum_time(problem: Problem, separate: bool = False) -> float:
    """Return the microseconds of reading the added tensor; a `separate` launch also reads and writes the outputs."""
    if not problem.added:
        return 0.0
    time = copy_time(problem, (3 if separate else 1) * written(problem))
    return time - constants(problem).launch * (0.5 if separate else 1)


def join_time(problem: Problem) -> float:
    """Return the microseconds of concatenating a `ConcatPair`."""
    return copy_time(problem, 2 * problem.N * problem.image_bytes)
