"""What the forms of a convolution cost, in microseconds, with the constants of a device (`runtime.estimates`).

    time = launches * launch + bytes / copy + factor * products / rate, products in whole waves of the multiprocessors

Measured (`benchmarks/results/nvidia-h200.json`) and estimated, in us, float16: 3x3 64@56 70 / 63, 128@28 47 / 51,
256@14 43 / 45, 512@7 44 / 42, 256@56 370 / 367; 5x5 32->64 135 / 141, 1->32 127 / 123; 7x7 12->24 967 / 1044, 1->12
546 / 403; transposed 512->256@4 130 / 153, 256->128@8 156 / 160, 128->64@16 211 / 167, 64->3@32 95 / 80. Where forms
were never measured side by side, a factor keeps the choice of the last sweeps (`benchmarks/notes.md`), and says so.
"""

from __future__ import annotations

import math

from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, PHASE, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

# Images that fill the rows of a tile, and of a step of the gradient of the weight, where half of them is still good.
RUN = 64
HALF_RUN = RUN // 2
# From so many bytes of an image on, its runs lie in too many pages of memory. 256@56, 64 images: the gradient of the
# weight took 1.23 times as long, the forward 1.03 times as long as boxes, which cost 1.1 elsewhere.
LARGE = 2**20
# The same of runs of many images on, measured as weight gradients: 2048->256 at 33x33 (4.4 MB) 145 images 1.6 times the
# estimate, 15 images 1.0; 416->88 at 90x90 (3.4 MB) 481 images 2.8 times; 1024->512 at 32x32 (2 MB) 1.1.
VAST = 3 * 2**20
# Of fewer images a run is all but empty. 128->32 at 14x14: of 1 and 5 images 2.9 times the estimate, of 26 1.4.
FEWEST = 16
# Of a pixel of so few bytes reading takes longer: 32->64 5x5 0.172 ms, of which 0.04 are bytes, for products of 0.083.
NARROW = 64
# Values of a pixel that the pixel-tiled form counts at least; with fewer it would seem to pool in less time than others
# take with a pool apart, and it took several times as long.
LEAST_VALUES = 128
# Columns of a product that are computed in any case: 64->32 channels took as long as 64->64.
LEAST_COLUMNS = 64
BOTH = 0.02  # of the shorter of the two that a launch does at the same time
# Values of a band that are made in a microsecond. 208->1874 3x3, 90 images of 4x4: 9.4 million, 117 us in place of 18.
BAND = 1e5
# Of float8 on sm_90, by form: products in the time of one of 16 bits. 256 images, H100, boxes / runs / product: 3x3
# 128->128 at 28x28 64 / 71, 256->256 at 14x14 56 / 59, 512->512 at 7x7 68 / 57 (fewer taps); 1x1 1024->256 at 14x14
# 37 / - / 37, 256->1024 50 / - / 53.
FLOAT8 = {"batch": 1.5, "box": 1.8, "product": 1.5}


def outputs(problem: Problem) -> int:
    """Pixels that are computed, of all images."""
    if problem.direction == TRANSPOSED:
        return problem.N * problem.geometry.h.size * problem.geometry.w.size
    return problem.N * problem.at.h.count * problem.at.v.count


def taps(problem: Problem) -> float:
    """Of one output pixel, in the mean."""
    if problem.direction == TRANSPOSED:
        both = [(axis.size, axis.backward()) for axis in (problem.geometry.h, problem.geometry.w)]
        return math.prod(sum(phase.count * phase.reached for phase in phases) / size for size, phases in both)
    return problem.taps


def taps_inside(problem: Problem) -> float:
    """Of one output pixel, in the mean, of those whose input is inside; of a walk back all."""
    axes = problem.geometry.h, problem.geometry.w
    if problem.direction == PHASE:
        return problem.taps
    back = problem.direction == TRANSPOSED
    return math.prod(sum(axis.inside()) / (axis.size if back else axis.output) for axis in axes)


def columns(problem: Problem) -> int:
    """Output channels of a group that are computed."""
    return max(problem.M, LEAST_COLUMNS)


def dense(problem: Problem, channels: int | None = None) -> float:
    """Products of all taps and outputs, with the columns that are computed in any case."""
    return outputs(problem) * problem.groups * taps(problem) * (channels or problem.C) * columns(problem)


def reading(problem: Problem) -> float:
    """What the products of runs or boxes of pixels cost for reading pixels of few bytes, of 16 bits or more."""
    narrow = selection.of(problem.target).images.narrow if problem.dtype.itemsize > 1 else 1.0
    return narrow if problem.C * problem.groups * problem.dtype.itemsize <= NARROW else 1.0


def pages(problem: Problem) -> float:
    """What the products of runs of images cost for reading them where they lie far apart."""
    return selection.of(problem.target).images.pages if problem.image_bytes >= LARGE else 1.0


def odd_rows(problem: Problem) -> bool:
    """Whether no 16 bytes divide the rows of results, which are then stored value by value."""
    return problem.groups * problem.M * problem.result.itemsize % 16 > 0


def far_apart(problem: Problem, in_parts: bool = False) -> float:
    """The same of the gradient of the weight, where it reads runs in equal parts or shares; or those of parts of an
    image: 128->64 at 256x256 (16.8 MB), 126 images, 4.9 ms, and in boxes by what 10 images take 3.3."""
    if problem.image_bytes < VAST or problem.images < RUN:
        return 1.0
    return 1.6 if in_parts else 1.8


def of_run(problem: Problem, images: int, least: int = RUN) -> float:
    """What runs of so many images cost beside long ones, and what their last tile computes in vain.

    8 images took 2.0 to 6.5 times as long as in boxes, 64@56 to 512@7.
    """
    if images < least:
        return selection.of(problem.target).images.short_run
    rows = 2 * RUN if images > RUN else RUN
    return launch.cdiv(images, rows) * rows / images


def microseconds(problem: Problem, form: str, products: float, programs: float = 1) -> float:
    """Of one launch with so many products, each a multiplication and an addition; those of `prepare`d weights begin
    before the last one ends and are not counted. The interpreter runs `programs` one after another."""
    device = selection.of(problem.target)
    factor = device.forms[form]
    if problem.dtype.itemsize == 1:
        rate = FLOAT8[form] * device.products["float16"]
    else:
        rate = device.products[problem.precision if problem.dtype.itemsize == 4 else _name(problem)]
    if problem.target == "interpreted":
        return factor * (device.launch * (1 + programs) + 2 * dense(problem) / rate)
    tiles = max(1, launch.cdiv(outputs(problem), 2 * RUN) * problem.groups * launch.cdiv(problem.M, RUN))
    waves = launch.cdiv(tiles, problem.processors) * problem.processors / tiles
    return device.launch + moved(problem) / device.copy + factor * waves * 2 * products / rate


def at_least(problem: Problem, time: float, size: int | None = None) -> float:
    """A launch that takes so many us, or as long as memory does for `size` bytes (those of the problem), of which tiles
    reach a part. Of two that memory bounds the one with less to do is estimated lower."""
    device = selection.of(problem.target)
    size = moved(problem) if size is None else size
    memory = device.launch + size / (device.reached * device.copy)
    return max(time, memory) + BOTH * min(time, memory)


def relative(problem: Problem, form: str) -> float:
    """What a form costs beside another one, or in a case beside the usual one."""
    return selection.of(problem.target).relative[form]


def tile_time(problem: Problem, form: str, time: float, launches: float = 1) -> float:
    """An estimate of `microseconds` that stands beside those of tiles whose pace is known; of others, as it is."""
    if not problem.paced:
        return time
    times, more = selection.of(problem.target).whole[form]
    return times * time + more * launches


def of_each_channel(problem: Problem, form: str, products: float, rounds: float) -> float:
    """Of sums that each channel has of its own, on float32 units, while memory moves. The interpreter takes as long for
    each of the `rounds` as for a program of another form, and the weights are another launch."""
    device = selection.of(problem.target)
    factor = device.forms[form]
    if problem.target == "interpreted":
        return factor * (device.launch * (2 + rounds) + 2 * products / device.products["ieee"])
    return device.launch + max(moved(problem) / device.copy, factor * 2 * products / device.products["ieee"])


def moved(problem: Problem) -> int:
    """Bytes of images that are read and written; a walk back reads all of x and writes a part."""
    H, W = problem.read
    if problem.direction in (FORWARD, GRAD_WEIGHT):
        H, W = _needed(problem.geometry.h), _needed(problem.geometry.w)
    written = outputs(problem) // (4 if problem.pool else 1) * (1 + problem.preactivation)
    row = problem.pitches[0] if problem.pitches else W * problem.C
    read = problem.N * H * row * problem.dtype.itemsize
    return problem.groups * (read + written * problem.M * problem.result.itemsize)


def _needed(axis: Axis) -> int:
    """Of an axis, the inputs that some output reads; a stride may pass over the others."""
    return min(axis.size, axis.output * min(axis.kernel, axis.stride)) if axis.dilation == 1 else axis.size


def of_band(problem: Problem, values: int) -> float:
    """Making so many values of a band of weights; its launch is not counted."""
    return values / BAND if problem.paced else 0.0


def pool_time(problem: Problem) -> float:
    """A 2x2 pool after the convolution: reads what it has written, and writes a quarter."""
    device = selection.of(problem.target)
    if problem.target == "interpreted":
        rate = device.products[_name(problem)] if problem.dtype.itemsize != 4 else device.products["ieee"]
        return device.forms["pool"] * (2 * device.launch + 2 * dense(problem) / rate)
    # It begins before the last program has ended.
    moved_ = outputs(problem) * problem.groups * problem.M * problem.dtype.itemsize
    return device.launch / 2 + device.forms["pool"] * moved_ / device.copy


def sum_time(problem: Problem, separate: bool = False) -> float:
    """Reading what is added to the outputs; apart they are read and written once more, in a launch."""
    if not problem.added:
        return 0.0
    device = selection.of(problem.target)
    moved_ = outputs(problem) * problem.groups * problem.M * problem.result.itemsize
    return (3 * moved_ / device.copy + device.launch / 2) if separate else moved_ / device.copy


def join_time(problem: Problem) -> float:
    """Joining halves of x in memory of their own: each is read and written."""
    device = selection.of(problem.target)
    return device.launch + 2 * problem.N * problem.image_bytes / device.copy


def _name(problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")
