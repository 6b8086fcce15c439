"""Estimated times of the forms, in microseconds, with the constants of a device (`runtime.cost_model`).

    time = launches * launch + bytes / copy + factor * products / rate, products in whole waves of the multiprocessors

Measured (`benchmarks/results/nvidia-h200.json`) and estimated, in us, float16: 3x3 64@56 70 / 63, 128@28 47 / 51,
256@14 43 / 45, 512@7 44 / 42, 256@56 370 / 367; 5x5 32->64 135 / 141, 1->32 127 / 123; 7x7 12->24 967 / 1044, 1->12
546 / 403; transposed 512->256@4 130 / 153, 256->128@8 156 / 160, 128->64@16 211 / 167, 64->3@32 95 / 80. For forms
never measured together, a factor keeps the choice of the last sweeps (`benchmarks/notes.md`), and says so.
"""

from __future__ import annotations

import math

from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, PHASE, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

# Images that fill the rows of a tile, or a step of the weight gradient, for which half as many are sufficient.
RUN = 64
HALF_RUN = RUN // 2
# Images of this many bytes or more spread a run over too many pages of memory. 256@56, 64 images: the weight gradient
# took 1.23 times as long, the forward 1.03 times as long as `box`, which is 1.1 times slower elsewhere.
LARGE = 2**20
# The same for long runs, measured as weight gradients: 2048->256 at 33x33 (4.4 MB) 145 images 1.6 times the estimate,
# 15 images 1.0; 416->88 at 90x90 (3.4 MB) 481 images 2.8 times; 1024->512 at 32x32 (2 MB) 1.1.
VAST = 3 * 2**20
# With fewer images a run is mostly empty. 128->32 at 14x14: 1 and 5 images took 2.9 times the estimate, 26 1.4.
FEWEST = 16
# Pixels of at most this many bytes read slowly: 32->64 5x5 0.172 ms, of which 0.04 are bytes, for products of 0.083.
NARROW = 64
# Minimum values per pixel in estimates of `pixel`; otherwise it would seem faster with a pool than other forms and a
# separate pool, whereas it took several times as long.
LEAST_VALUES = 128
# Minimum columns of a product: 64->32 channels took as long as 64->64.
LEAST_COLUMNS = 64
BOTH = 0.02  # share of the shorter of memory and product time that does not overlap
# Values of a band that are computed per microsecond. 208->1874 3x3, 90 images of 4x4: 9.4 million, 117 us for 18.
BAND = 1e5
# float8 products in the time of one 16-bit product on sm_90, by form. us with 256 images, H100, box / batch / product:
# 3x3 128->128 at 28x28 64 / 71, 256->256 at 14x14 56 / 59, 512->512 at 7x7 68 / 57 (fewer taps); 1x1 1024->256 at
# 14x14 37 / - / 37, 256->1024 50 / - / 53.
FLOAT8 = {"batch": 1.5, "box": 1.8, "product": 1.5}


def outputs(problem: Problem) -> int:
    """Return the number of output pixels of all images."""
    if problem.direction == TRANSPOSED:
        return problem.N * problem.geometry.h.size * problem.geometry.w.size
    return problem.N * problem.at.h.count * problem.at.v.count


def taps(problem: Problem) -> float:
    """Return the mean number of taps of an output pixel."""
    if problem.direction == TRANSPOSED:
        both = [(axis.size, axis.backward()) for axis in (problem.geometry.h, problem.geometry.w)]
        return math.prod(sum(phase.count * phase.reached for phase in phases) / size for size, phases in both)
    return problem.taps


def taps_inside(problem: Problem) -> float:
    """Return the mean number of taps of an output pixel with an input inside the image; for a PHASE all taps."""
    axes = problem.geometry.h, problem.geometry.w
    if problem.direction == PHASE:
        return problem.taps
    back = problem.direction == TRANSPOSED
    return math.prod(sum(axis.inside()) / (axis.size if back else axis.output) for axis in axes)


def columns(problem: Problem) -> int:
    """Return the output channels of a group that a tile computes."""
    return max(problem.M, LEAST_COLUMNS)


def dense(problem: Problem, channels: int | None = None) -> float:
    """Return the products of all taps and outputs, with at least LEAST_COLUMNS columns."""
    return outputs(problem) * problem.groups * taps(problem) * (channels or problem.C) * columns(problem)


def reading(problem: Problem) -> float:
    """Return the factor for `batch` and `box` to read pixels of few bytes (16-bit values or wider)."""
    narrow = selection.of(problem.target).images.narrow if problem.dtype.itemsize > 1 else 1.0
    return narrow if problem.C * problem.groups * problem.dtype.itemsize <= NARROW else 1.0


def pages(problem: Problem) -> float:
    """Return the factor for `batch` to read images of LARGE bytes or more."""
    return selection.of(problem.target).images.pages if problem.image_bytes >= LARGE else 1.0


def odd_rows(problem: Problem) -> bool:
    """Return whether rows of the result are not aligned to 16 bytes and so stored value by value."""
    return problem.groups * problem.M * problem.result.itemsize % 16 > 0


def page_factor(problem: Problem, in_parts: bool = False) -> float:
    """Return the factor of VAST images for batch-tiled weight gradients; `in_parts`: of parts of images.

    128->64 at 256x256 (16.8 MB), 126 images: 4.9 ms, with `box` 3.3, extrapolated from 10 images."""
    if problem.image_bytes < VAST or problem.images < RUN:
        return 1.0
    return 1.6 if in_parts else 1.8


def run_factor(problem: Problem, images: int, least: int = RUN) -> float:
    """Return the factor for short runs of images, or for the empty rows of the last tile.

    8 images took 2.0 to 6.5 times as long as with `box`, 64@56 to 512@7.
    """
    if images < least:
        return selection.of(problem.target).images.short_run
    rows = 2 * RUN if images > RUN else RUN
    return launch.cdiv(images, rows) * rows / images


def microseconds(problem: Problem, form: str, products: float, programs: float = 1) -> float:
    """Return the microseconds of one launch with `products` multiply-adds; in the interpreter `programs` run serially.

    Launches that prepare weights overlap the previous launch and are not counted."""
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
    """Return `time`, but at least the time of moving `size` bytes (default: the problem's).

    A share of the shorter time is added, so that of two memory-bound launches the one with less work is cheaper."""
    device = selection.of(problem.target)
    size = moved(problem) if size is None else size
    memory = device.launch + size / (device.reached * device.copy)
    return max(time, memory) + BOTH * min(time, memory)


def relative(problem: Problem, form: str) -> float:
    """Return the factor of a form relative to another form or to its usual case."""
    return selection.of(problem.target).relative[form]


def tile_time(problem: Problem, form: str, time: float, launches: float = 1) -> float:
    """Return an estimate of `microseconds` calibrated to those of measured tiles; unchanged if not `paced`."""
    if not problem.paced:
        return time
    times, more = selection.of(problem.target).whole[form]
    return times * time + more * launches


def channel_sums_time(problem: Problem, form: str, products: float, rounds: float) -> float:
    """Return the microseconds of per-channel sums on float32 units, overlapped with memory.

    In the interpreter each of the `rounds` takes as long as a program of another form, plus a launch for weights."""
    device = selection.of(problem.target)
    factor = device.forms[form]
    if problem.target == "interpreted":
        return factor * (device.launch * (2 + rounds) + 2 * products / device.products["ieee"])
    return device.launch + max(moved(problem) / device.copy, factor * 2 * products / device.products["ieee"])


def moved(problem: Problem) -> int:
    """Return the bytes of images that are read and written; a PHASE reads all of x and writes a part of y."""
    H, W = problem.read
    if problem.direction in (FORWARD, GRAD_WEIGHT):
        H, W = _read_size(problem.geometry.h), _read_size(problem.geometry.w)
    written = outputs(problem) // (4 if problem.pool else 1) * (1 + problem.preactivation)
    row = problem.pitches[0] if problem.pitches else W * problem.C
    read = problem.N * H * row * problem.dtype.itemsize
    return problem.groups * (read + written * problem.M * problem.result.itemsize)


def _read_size(axis: Axis) -> int:
    """Return the number of inputs of an axis that some output reads; a stride may skip others."""
    return min(axis.size, axis.output * min(axis.kernel, axis.stride)) if axis.dilation == 1 else axis.size


def band_time(problem: Problem, values: int) -> float:
    """Return the microseconds of computing `values` of a band of weights, without its launch."""
    return values / BAND if problem.paced else 0.0


def pool_time(problem: Problem) -> float:
    """Return the microseconds of a separate 2x2 pool, which reads the output and writes a quarter of it."""
    device = selection.of(problem.target)
    if problem.target == "interpreted":
        rate = device.products[_name(problem)] if problem.dtype.itemsize != 4 else device.products["ieee"]
        return device.forms["pool"] * (2 * device.launch + 2 * dense(problem) / rate)
    # Its launch overlaps the convolution's last programs.
    moved_ = outputs(problem) * problem.groups * problem.M * problem.dtype.itemsize
    return device.launch / 2 + device.forms["pool"] * moved_ / device.copy


def sum_time(problem: Problem, separate: bool = False) -> float:
    """Return the microseconds of reading the added tensor; a `separate` launch also reads and writes the outputs."""
    if not problem.added:
        return 0.0
    device = selection.of(problem.target)
    moved_ = outputs(problem) * problem.groups * problem.M * problem.result.itemsize
    return (3 * moved_ / device.copy + device.launch / 2) if separate else moved_ / device.copy


def join_time(problem: Problem) -> float:
    """Return the microseconds of concatenating a `ConcatPair`."""
    device = selection.of(problem.target)
    return device.launch + 2 * problem.N * problem.image_bytes / device.copy


def _name(problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")
