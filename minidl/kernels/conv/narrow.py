"""The decomposition of a convolution of narrow groups into programs: vectors of channels, rows, phases and taps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from minidl.kernels.conv.geometry import Axis, Phase
from minidl.kernels.conv.problem import INT32_LIMIT, TRANSPOSED, Problem
from minidl.runtime import launch

FAMILY = "conv_depthwise"
# Up to this many products weights are read in place, VEC_DIRECT at once, to save the launch that reorders them.
DIRECT = 3 * 2**20
VEC_DIRECT = 2
# Target number of programs per multiprocessor when rows are split; also for weights that are read in place.
PROGRAMS = 2
PROGRAMS_DIRECT = 0.25
# Programs per multiprocessor, and taps, up to which columns are unrolled, so that all loads are in flight at once.
FEW_PROGRAMS = 16
FEW_TAPS = 25
# Limits of a thread's registers (float32): sums and weights, and products in unrolled columns.
MOST_VALUES = 96
MOST_PRODUCTS = 320
# Rows of taps that are unrolled in one iteration.
MOST_ROWS = 8


class Cut(NamedTuple):
    """The decomposition of a problem into programs.

    axes, first    axes without taps that never read inside the image, and the first remaining taps
    read, written  sizes of the images, as `image_sizes` returns them
    phases         number of backward phases, down and across
    periods        distance between taps of a phase
    counts         maximum number of output rows and columns of a phase
    rows           output rows of a program
    direct, vec    whether weights are read in place, and values per load
    taps           rows and columns of taps of a phase
    step, unroll   rows of taps per iteration, and unrolled columns of taps
    """

    axes: tuple[Axis, Axis]
    first: tuple[int, int]
    read: tuple[int, int]
    written: tuple[int, int]
    phases: tuple[int, int]
    periods: tuple[int, int]
    counts: tuple[int, int]
    tile: launch.Tile
    rows: int
    direct: bool
    vec: int
    taps: tuple[int, int]
    step: int
    unroll: int
    grid: int


class AxisTaps(NamedTuple):
    """Constants of an axis: phases of a transposed convolution (else 1), the convolution, and steps as in `Taps`.

    Taps of a phase are PERIOD apart; INVERSE is that of the dilation, see `phase_of`.
    """

    PHASES: int
    KERNEL: int
    STRIDE: int
    PERIOD: int
    INVERSE: int
    DILATION: int
    IN_STEP: int
    IN_TAP: int
    OUT_STEP: int

    @staticmethod
    def of(axis: Axis, phases: int, period: int, back: bool) -> AxisTaps:
        """Return the constants of an axis, forward or backward."""
        # Backward, taps first, first + period, ... solve tap * dilation = remainder (mod stride).
        inverse = pow(axis.dilation // math.gcd(axis.stride, axis.dilation), -1, period)
        steps = (1, -(axis.dilation * period // axis.stride), axis.stride) if back else (axis.stride, axis.dilation, 1)
        return AxisTaps(phases, axis.kernel, axis.stride, period, inverse, axis.dilation, *steps)


class SliceSizes(NamedTuple):
    """Images are slices of volumes: QD outputs of D slices, the first of which reads in_d and is out_d of OD."""

    D: int
    QD: int
    OD: int
    in_d: int
    out_d: int


class DepthTaps(NamedTuple):
    """Constants of the depth axis, as in `records.Taps`."""

    JD: int
    IN_STEP_D: int
    IN_TAP_D: int
    OUT_STEP_D: int


class Depth(NamedTuple):
    """The depth axis: slices of a volume that is read (`size`) and written, one phase, and the kernel size."""

    size: int
    written: int
    phase: Phase
    kernel: int

    def with_depth(self, problem: Problem) -> Problem:
        """Return the problem with all slices of the kernel stacked as rows."""
        at = problem.geometry
        return problem._replace(geometry=at._replace(h=at.h._replace(kernel=at.h.kernel * self.kernel)))

    @property
    def sizes(self) -> SliceSizes:
        """Return the run-time numbers of a kernel on slices."""
        phase = self.phase
        return SliceSizes(self.size, phase.count, self.written, phase.in_start, phase.out_start)

    @property
    def constants(self) -> DepthTaps:
        """Return the constants of a kernel on slices."""
        phase = self.phase
        return DepthTaps(len(phase.taps), phase.in_step, phase.in_tap, phase.out_step)


def cut(problem: Problem) -> Cut:
    """Return the decomposition of a forward or transposed problem (all phases)."""
    (down, height), (across, width) = cropped(problem.geometry.h), cropped(problem.geometry.w)
    back, out = problem.direction == TRANSPOSED, problem.groups * problem.M
    read, (OH, OW) = image_sizes(problem, (height, width))
    phases = (min(height.stride, height.size), min(width.stride, width.size)) if back else (1, 1)
    QH, QW = (launch.cdiv(OH, height.stride), launch.cdiv(OW, width.stride)) if back else (OH, OW)
    periods = (_period(height), _period(width)) if back else (1, 1)
    JH, JW = launch.cdiv(height.kernel, periods[0]), launch.cdiv(width.kernel, periods[1])
    tile = problem.tile(
        FAMILY,
        floor=1,
        R=QH,
        K=problem.images * QW * out,
        T=height.kernel * width.kernel,
        S=1 if back else height.stride,
    )
    # The weights of single taps lie in order.
    single = problem.geometry.h.kernel * problem.geometry.w.kernel * problem.C == 1
    direct = single or problem.images * OH * OW * out * problem.C * JH * JW <= DIRECT
    # With several channels per group every input has its own address.
    most = tile["VEC"] if problem.M == problem.C == 1 else min(4, tile["VEC"])
    vec = vector(out, problem, min(VEC_DIRECT, most) if direct and not single else most)
    per_row = max(1, math.prod(phases) * launch.cdiv(problem.images * QW * (out // vec), tile["BLOCK_K"]))
    target = int((PROGRAMS_DIRECT if direct and not single else PROGRAMS) * problem.processors) // per_row
    step = launch.cdiv(JH, launch.cdiv(JH, MOST_ROWS))
    compiled = problem.target != "interpreted"
    per_thread = vec * max(1, tile["BLOCK_K"] // (32 * tile.num_warps)) * max(1, problem.dtype.itemsize // 4)
    most = max(1, min(tile["BLOCK_R"], MOST_VALUES // per_thread - step)) if compiled else tile["BLOCK_R"]
    rows = launch.cdiv(QH, max(launch.cdiv(QH, most), min(QH, target)))
    unrolled = launch.cdiv(QH, rows) * per_row <= FEW_PROGRAMS * problem.processors
    unrolled = unrolled and JH * JW <= FEW_TAPS and rows * JH * JW * per_thread <= MOST_PRODUCTS
    tiles = launch.cdiv(QH, rows) * launch.cdiv(problem.N * QW * (out // vec), tile["BLOCK_K"])
    return Cut(
        (height, width), (down, across), read, (OH, OW), phases, periods, (QH, QW), tile, rows, direct, vec, (JH, JW),
        step, JW if unrolled else 1, math.prod(phases) * tiles,
    )  # fmt: skip


def vector(channels: int, problem: Problem, most: int = 16) -> int:
    """Return the number of channels per load: a divisor of `channels`, at most 16 bytes."""
    return math.gcd(channels, min(most, 16 // problem.dtype.itemsize))


def image_sizes(problem: Problem, axes: Iterable[Axis]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of the images that are read and written; flattened to one row for stride-1 1x1 kernels."""
    (H, W), (OH, OW) = problem.read, problem.written
    pointwise = all((axis.kernel, axis.stride, axis.padding) == (1, 1, 0) and axis.size == axis.output for axis in axes)
    if pointwise and problem.N * H * W * problem.groups * max(problem.C, problem.M) < INT32_LIMIT:
        return (1, H * W), (1, OH * OW)
    return (H, W), (OH, OW)


def cropped(axis: Axis) -> tuple[int, Axis]:
    """Return the first remaining tap, and the axis without outer taps that never read inside the image.

    Of 31 taps on 10 pixels with a padding of 15, 19 remain."""
    inside = [tap for tap in range(axis.kernel) if _reads_inside(axis, tap * axis.dilation - axis.padding)] or [0]
    # The padding stays at 0 or above.
    first = min(inside[0], axis.padding // axis.dilation)
    return first, axis._replace(kernel=inside[-1] + 1 - first, padding=axis.padding - first * axis.dilation)


class Overlap(NamedTuple):
    """The COUNT inputs that some outputs and taps of an axis read, UNIT pixels apart; outputs are STEP and taps TAP of
    these apart."""

    UNIT: int
    STEP: int
    TAP: int
    COUNT: int


def overlap(axis: Axis, outputs: int, taps: int) -> Overlap:
    """Return the inputs that some outputs and taps read."""
    unit = math.gcd(axis.stride, axis.dilation)
    if outputs == 1:
        unit = axis.dilation
    elif taps == 1:
        unit = axis.stride
    step, tap = max(1, axis.stride // unit), max(1, axis.dilation // unit)
    return Overlap(unit, step, tap, (outputs - 1) * step + (taps - 1) * tap + 1)


def always_inside(axis: Axis, W: int, QW: int, columns: int, taps: int) -> tuple[int, int]:
    """Return (first, end) of the columns read by a set of outputs that lie inside the image for every set."""
    unit, _, _, count = overlap(axis, columns, taps)
    starts = [tap * axis.dilation - axis.padding for tap in range(0, axis.kernel, taps)]
    last = starts[-1] + (QW - columns) * axis.stride
    inside = [v for v in range(count) if starts[0] + v * unit >= 0 and last + v * unit < W] or [0, -1]
    return inside[0], inside[-1] + 1


def _reads_inside(axis: Axis, start: int) -> bool:
    """Return whether one of start, start + stride, ... (one per output) is inside."""
    o = max(0, -(start // axis.stride))
    return o < axis.output and start + o * axis.stride < axis.size


def _period(axis: Axis) -> int:
    return axis.stride // math.gcd(axis.stride, axis.dilation)
