"""The problem of a convolution of volumes, and its decomposition into boxes of voxels.

    x [N, D, H, W, groups * C]                          y [N, OD, OH, OW, groups * M]
      for each tap, the inputs of a box:     <-----     a box of TILE_N x TILE_D x TILE_H x TILE_W outputs
      one block of a descriptor

With a forward stride, which must divide H and W, a box lies in one slice, and x is viewed as
[N * D, H / stride, stride, W / stride, stride * channels], where the inputs of a tap are contiguous.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels.conv.geometry import Axis, Phase, Volume
from minidl.kernels.conv.problem import TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.runtime.descriptors import Box

# Strides added before a division, more than padding and taps reach before an image, so that it rounds down.
AHEAD = 2**16
LEAST_BLOCK = 32  # minimum channels of a step


class VolumeProblem(NamedTuple):
    """One call of `forward`, `grad_input` or `grad_weight` of volumes; the key of the plan cache.

    problem  direction, channels, dtype, epilogue and device; N counts volumes, and the geometry is that of slices
    d        the depth axis
    in_place whether weights of TRANSPOSED are read in place, as [groups * C, taps, M]
    form     name of the requested form; None for the fastest
    """

    problem: Problem
    d: Axis
    in_place: bool = False
    form: str | None = None

    @property
    def volume(self) -> Volume:
        return Volume(self.d, self.problem.geometry)

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return self.volume.axes

    @property
    def back(self) -> bool:
        return self.problem.direction == TRANSPOSED

    @property
    def read(self) -> tuple[int, ...]:
        """Return the sizes [D, H, W] of x."""
        return tuple(axis.output if self.back else axis.size for axis in self.axes)

    @property
    def written(self) -> tuple[int, ...]:
        """Return the sizes [D, H, W] of the output; of the output's gradient for GRAD_WEIGHT."""
        return tuple(axis.size if self.back else axis.output for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the output, [N, D, H, W, groups * M]."""
        return self.problem.N, *self.written, self.problem.groups * self.problem.M

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return one phase per axis; backward the longest one, with the largest count."""
        return tuple(_longest(axis) if self.back else axis.forward() for axis in self.axes)

    @property
    def depth_phases(self) -> list[Phase]:
        """Return all phases in depth."""
        return [phase.rising for phase in self.d.backward()] if self.back else [self.d.forward()]

    @property
    def taps(self) -> int:
        """Return the number of taps of the kernel."""
        return math.prod(axis.kernel for axis in self.axes)

    @property
    def phase_count(self) -> int:
        """Return the number of phases."""
        return math.prod(axis.stride for axis in self.axes) if self.back else 1

    @property
    def each(self) -> float:
        """Return the mean number of taps of an output over all phases."""
        return self.taps / self.phase_count

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the stride per axis, 1 for an axis with a single output."""
        return tuple(phase.in_step if phase.count > 1 else 1 for phase in self.phases)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of volumes, and of outputs of a phase per axis."""
        return self.problem.N, *(phase.count for phase in self.phases)


@functools.lru_cache(maxsize=4096)
def _longest(axis: Axis) -> Phase:
    phase = max(axis.backward(), key=lambda phase: phase.in_step * len(phase.taps))
    return dataclasses.replace(phase.rising, count=launch.cdiv(axis.size, axis.stride))


class Sizes(NamedTuple):
    """QD x QH x QW outputs of a phase in N volumes of D slices, and the input of the first output's first tap; with
    several phases, the padding."""

    N: int
    D: int
    QD: int
    QH: int
    QW: int
    in_d: int
    in_h: int
    in_w: int

    @staticmethod
    def of(cubes: VolumeProblem) -> Sizes:
        """Return the sizes of a problem."""
        starts = (phase.in_start for phase in cubes.phases)
        if cubes.phase_count > 1:
            starts = (axis.padding for axis in cubes.axes)
        return Sizes(cubes.problem.N, cubes.read[0], *cubes.counts[1:], *starts)


class AxisTaps(NamedTuple):
    """Constants of an axis: J taps of the kernel, the distances between inputs of outputs and of taps, and STRIDE
    backward phases, each with a tap in PERIOD (`depthwise.phase_of`)."""

    J: int
    IN_STEP: int
    IN_TAP: int
    STRIDE: int
    PERIOD: int
    INVERSE: int
    DILATION: int


class Taps(NamedTuple):
    """Constants: the channels of a group, the taps of each axis, and whether a box lies in one strided slice."""

    C: int
    D: AxisTaps
    H: AxisTaps
    W: AxisTaps
    STRIDED: bool

    @staticmethod
    def of(cubes: VolumeProblem) -> Taps:
        """Return the taps of a problem."""
        taps = []
        for axis, phase, step in zip(cubes.axes, cubes.phases, cubes.strides, strict=True):
            stride, dilation = (axis.stride, axis.dilation) if cubes.back else (1, 1)
            common = math.gcd(stride, dilation)
            inverse = pow(dilation // common, -1, stride // common)
            taps.append(AxisTaps(axis.kernel, step, phase.in_tap, stride, stride // common, inverse, dilation))
        d, h, w = taps
        return Taps(cubes.problem.C, d, h, w, max(cubes.strides) > 1)


class BoxShape(NamedTuple):
    """Constants: the volumes, slices, rows and columns of a box of voxels."""

    TILE_N: int
    TILE_D: int
    TILE_H: int
    TILE_W: int


@triton.jit
def voxels_of(box: tl.constexpr):
    """Return (volume, slice, row, column) in a box of its voxels, four vectors."""
    o_v = tl.arange(0, box.TILE_N * box.TILE_D * box.TILE_H * box.TILE_W)
    v_n = o_v // (box.TILE_D * box.TILE_H * box.TILE_W)
    return v_n, o_v // (box.TILE_H * box.TILE_W) % box.TILE_D, o_v // box.TILE_W % box.TILE_H, o_v % box.TILE_W


def in_boxes(cubes: VolumeProblem) -> bool:
    """Return whether the inputs of a tap are blocks of a descriptor of x."""
    problem = cubes.problem
    return (
        problem.C > 0 and math.prod(cubes.counts) > 0
        and problem.boxes(problem.groups * problem.C, problem.aligned)
        and all(phase.in_step > 0 for phase in cubes.phases)
        and all(
            step == 1 or (size % step == 0 and abs(phase.in_start) < step * AHEAD)
            for step, size, phase in list(zip(cubes.strides, cubes.read, cubes.phases, strict=True))[1:]
        )
    )  # fmt: skip


def descriptor(cubes: VolumeProblem, box: tuple[int, ...], channels: int) -> Box:
    """Return the descriptor of x for blocks of `channels` channels."""
    N, (D, H, W), width = cubes.problem.N, cubes.read, cubes.problem.groups * cubes.problem.C
    sizes: tuple[int, ...] = (N, D, H, W, width)
    if cubes.problem.part:
        sizes = (2, D, H, W, cubes.problem.part)
    if max(cubes.strides) > 1:
        _, h, w = cubes.strides
        sizes, box = (N * D, H // h, h, W // w, w * width), (1, box[2], 1, box[3])
    return Box(sizes, [math.prod(sizes[i + 1 :]) for i in range(5)], [*box, channels])


def box_shape(cubes: VolumeProblem, voxels: int) -> BoxShape:
    """Return the shape of boxes of `voxels` voxels that cover the outputs."""
    return cube_shape(cubes.counts, voxels, max(cubes.strides) > 1)


def moved(cubes: VolumeProblem) -> int:
    """Return the bytes that are read and written."""
    problem = cubes.problem
    values = cubes.problem.N * math.prod(cubes.read) * problem.C + math.prod(cubes.counts) * problem.M
    return values * problem.groups * problem.dtype.itemsize


def count_boxes(sizes: tuple[int, ...], box: tuple[int, ...]) -> int:
    """Return the number of boxes that cover outputs of `sizes`."""
    return math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))


def cube_shape(sizes: tuple[int, ...], voxels: int, one_slice: bool = False) -> BoxShape:
    """Return the box with powers of two as sides and product `voxels` that covers `sizes` best.

    Ties prefer fewer volumes, then the shape nearest to a cube.
    """
    sides = [2**i for i in range(9) if 2**i <= voxels]  # a side of a box is 256 at most
    shapes = [
        BoxShape(voxels // math.prod(inner), *inner)
        for inner in itertools.product(sides, repeat=3)
        if math.prod(inner) <= voxels <= (1 if one_slice else 256) * math.prod(inner)
        and (inner[0] == 1 or not one_slice)
    ]
    return min(shapes, key=lambda box: (count_boxes(sizes, box), box[0], max(box)))


def width(problem: Problem, block: int) -> int:
    """Return the padded channels of a tap in a row of weights that are not read in place."""
    return launch.cdiv(problem.C, block) * block


def block_of(problem: Problem, tile: launch.Tile) -> int:
    """Return the channels of a step: a divisor of a group's channels, or a block padded with zeros."""
    divisor, largest = min(tile["BLOCK_K"], problem.C & -problem.C), tile["BLOCK_K"]
    if divisor >= LEAST_BLOCK or problem.groups > 1:
        return divisor
    return min((largest, max(LEAST_BLOCK, largest // 2)), key=lambda block: (width(problem, block), -block))
