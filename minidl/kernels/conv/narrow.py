"""How a convolution of narrow groups is cut into programs: vectors of channels, rows, walks, taps that count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from minidl.kernels.conv.geometry import Axis, Phase
from minidl.kernels.conv.problem import INT32_LIMIT, TRANSPOSED, Problem
from minidl.runtime import launch

FAMILY = "conv_depthwise"
# Products up to which weights are read as they lie, few of them side by side, for ordering them is another launch.
# 144 channels 3x3 at 7x7, 144 images, on an H100: 3.0 us, ordered 3.6; 15 images of 960 channels: 3.9, ordered 3.4.
DIRECT = 3 * 2**20
VEC_DIRECT = 2
# Programs of each multiprocessor that rows are cut for, if there are as many; as many read the same weights as they lie
# at a time.
PROGRAMS = 2
PROGRAMS_DIRECT = 0.25
# Programs of each multiprocessor, and taps, up to which columns are unrolled: all loads are then under way at once.
FEW_PROGRAMS = 16
FEW_TAPS = 25
# Sums and weights of a thread, and its products in unrolled columns, that registers hold (float32).
MOST_VALUES = 96
MOST_PRODUCTS = 320
# Rows of taps in a step of the loop, which are unrolled.
MOST_ROWS = 8
NO_DEPTH = {"JD": 0, "IN_STEP_D": 0, "IN_TAP_D": 0, "OUT_STEP_D": 0}


class Cut(NamedTuple):
    """How a problem is cut into programs.

    axes, first    without the taps that find no input inside, and the first taps that are left
    read, written  sizes of the images; a single row where no tap reads another pixel than its own
    walks          of the way back, down and across
    periods        from one tap of a walk to the next
    count          rows of a walk, and pixels of a row, at most
    rows           of a program
    direct, vec    whether weights are read as they lie, and values that are read at once
    taps           rows and columns of a walk's
    step, unroll   rows of taps in a step of the loop, and columns of them that are unrolled
    """

    axes: tuple[Axis, Axis]
    first: tuple[int, int]
    read: tuple[int, int]
    written: tuple[int, int]
    phases: tuple[int, int]
    periods: tuple[int, int]
    count: tuple[int, int]
    tile: launch.Tile
    rows: int
    direct: bool
    vec: int
    taps: tuple[int, int]
    step: int
    unroll: int
    grid: int


class Depth(NamedTuple):
    """The third axis, of slices: `size` of a volume that is read and `written`, one walk, and the kernel's taps."""

    size: int
    written: int
    phase: Phase
    kernel: int

    def seen(self, problem: Problem) -> Problem:
        """With the rows of all slices of the kernel one below the other."""
        at = problem.geometry
        return problem._replace(geometry=at._replace(h=at.h._replace(kernel=at.h.kernel * self.kernel)))

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel of slices takes."""
        phase = self.phase
        return {
            "JD": len(phase.taps),
            "IN_STEP_D": phase.in_step,
            "IN_TAP_D": phase.in_tap,
            "OUT_STEP_D": phase.out_step,
        }


def cut(problem: Problem) -> Cut:
    """Of the forward direction, or of the transposed one with all its walks."""
    (down, h), (across, v) = cropped(problem.geometry.h), cropped(problem.geometry.w)
    back, out = problem.direction == TRANSPOSED, problem.groups * problem.M
    read, (OH, OW) = joined(problem, (h, v))
    phases = (min(h.stride, h.size), min(v.stride, v.size)) if back else (1, 1)
    QH, QW = (launch.cdiv(OH, h.stride), launch.cdiv(OW, v.stride)) if back else (OH, OW)
    periods = (_period(h), _period(v)) if back else (1, 1)
    JH, JW = launch.cdiv(h.kernel, periods[0]), launch.cdiv(v.kernel, periods[1])
    tile = problem.tile(
        FAMILY, floor=1, R=QH, K=problem.images * QW * out, T=h.kernel * v.kernel, S=1 if back else h.stride
    )
    # The weights of single taps lie in order.
    single = problem.geometry.h.kernel * problem.geometry.w.kernel * problem.C == 1
    direct = single or problem.images * OH * OW * out * problem.C * JH * JW <= DIRECT
    # Inputs of several channels have an address each.
    most = tile["VEC"] if problem.M == problem.C == 1 else min(4, tile["VEC"])
    vec = vector(out, problem, min(VEC_DIRECT, most) if direct and not single else most)
    of_a_row = max(1, math.prod(phases) * launch.cdiv(problem.images * QW * (out // vec), tile["BLOCK_K"]))
    wanted = int((PROGRAMS_DIRECT if direct and not single else PROGRAMS) * problem.processors) // of_a_row
    step = launch.cdiv(JH, launch.cdiv(JH, MOST_ROWS))
    compiled = problem.target != "interpreted"
    of_a_thread = vec * max(1, tile["BLOCK_K"] // (32 * tile.num_warps)) * max(1, problem.dtype.itemsize // 4)
    most = max(1, min(tile["BLOCK_R"], MOST_VALUES // of_a_thread - step)) if compiled else tile["BLOCK_R"]
    rows = launch.cdiv(QH, max(launch.cdiv(QH, most), min(QH, wanted)))
    few = launch.cdiv(QH, rows) * of_a_row <= FEW_PROGRAMS * problem.processors
    few = few and JH * JW <= FEW_TAPS and rows * JH * JW * of_a_thread <= MOST_PRODUCTS
    tiles = launch.cdiv(QH, rows) * launch.cdiv(problem.N * QW * (out // vec), tile["BLOCK_K"])
    return Cut(
        (h, v), (down, across), read, (OH, OW), phases, periods, (QH, QW), tile, rows, direct, vec, (JH, JW),
        step, JW if few else 1, math.prod(phases) * tiles,
    )  # fmt: skip


def vector(channels: int, problem: Problem, most: int = 16) -> int:
    """Channels that are read at once: a divisor of their number, at most 16 bytes."""
    return math.gcd(channels, min(most, 16 // problem.dtype.itemsize))


def joined(problem: Problem, axes: Iterable[Axis]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes of the images that are read and written; a single row where no tap reads another pixel than its own."""
    (H, W), (OH, OW) = problem.read, problem.written
    own = all((axis.kernel, axis.stride, axis.padding) == (1, 1, 0) and axis.size == axis.output for axis in axes)
    if own and problem.N * H * W * problem.groups * max(problem.C, problem.M) < INT32_LIMIT:
        return (1, H * W), (1, OH * OW)
    return (H, W), (OH, OW)


def cropped(axis: Axis) -> tuple[int, Axis]:
    """The first tap that is left, and the axis without the taps before it and after the last that find no input inside:
    of 31 by images of 10 pixels, padded by 15, 19 are left."""
    inside = [tap for tap in range(axis.kernel) if _finds(axis, tap * axis.dilation - axis.padding)] or [0]
    # The padding stays at 0 or above.
    first = min(inside[0], axis.padding // axis.dilation)
    return first, axis._replace(kernel=inside[-1] + 1 - first, padding=axis.padding - first * axis.dilation)


def met(axis: Axis, outputs: int, taps: int) -> tuple[int, int, int, int]:
    """How so many outputs and taps meet inputs that are (the first number) apart: from one output to the next, from one
    tap to the next, and how many inputs."""
    apart = math.gcd(axis.stride, axis.dilation)
    if outputs == 1:
        apart = axis.dilation
    elif taps == 1:
        apart = axis.stride
    step, tap = max(1, axis.stride // apart), max(1, axis.dilation // apart)
    return apart, step, tap, (outputs - 1) * step + (taps - 1) * tap + 1


def met_constants(name: str, axis: Axis, outputs: int, taps: int) -> dict[str, int]:
    """What `met` finds as a kernel takes it."""
    return dict(zip((f"UNIT_{name}", f"STEP_{name}", f"TAP_{name}"), met(axis, outputs, taps), strict=False))


def always_inside(axis: Axis, W: int, QW: int, columns: int, taps: int) -> tuple[int, int]:
    """Of the columns of x that a set of outputs reads, the first one and the end of those that are in every image."""
    apart, _, _, count = met(axis, columns, taps)
    starts = [tap * axis.dilation - axis.padding for tap in range(0, axis.kernel, taps)]
    last = starts[-1] + (QW - columns) * axis.stride
    inside = [v for v in range(count) if starts[0] + v * apart >= 0 and last + v * apart < W] or [0, -1]
    return inside[0], inside[-1] + 1


def _finds(axis: Axis, start: int) -> bool:
    """Whether one of start, start + stride, ... (one for each output) is inside."""
    o = max(0, -(start // axis.stride))
    return o < axis.output and start + o * axis.stride < axis.size


def _period(axis: Axis) -> int:
    return axis.stride // math.gcd(axis.stride, axis.dilation)
