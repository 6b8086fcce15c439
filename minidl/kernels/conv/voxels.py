"""The decomposition of volumes into boxes of voxels, and the addressing of their inputs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import torch

from minidl.kernels.conv.geometry import Axis, Phase
from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch
from minidl.runtime.descriptors import Box

# Strides added before a division, more than padding and taps reach before an image, so that it rounds down.
AHEAD = 2**16
LEAST_BLOCK = 32  # minimum channels of a step


class Cubes(NamedTuple):
    """One launch from volumes of size `read` to volumes of size `written`, [D, H, W] each.

    problem  supplies channels, dtype, epilogue and device (its images are slices)
    phases   one per axis; backward the longest one of each axis, with the largest count
    back     the axes of the convolution if the launch computes all backward phases; None forward
    turn     whether weights are read in place, as [groups * C, taps, M]
    """

    problem: Problem
    volumes: int
    phases: tuple[Phase, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    back: tuple[Axis, ...] | None = None
    turn: bool = False

    @property
    def taps(self) -> int:
        """Return the number of taps of the kernel."""
        if self.back is not None:
            return math.prod(axis.kernel for axis in self.back)
        return math.prod(len(phase.taps) for phase in self.phases)

    @property
    def each(self) -> float:
        """Return the mean number of taps of an output over all phases."""
        if self.back is None:
            return self.taps
        return math.prod(axis.kernel / axis.stride for axis in self.back)

    @property
    def phase_count(self) -> int:
        """Return the number of phases."""
        return 1 if self.back is None else math.prod(axis.stride for axis in self.back)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the stride per axis, 1 for an axis with a single output."""
        return tuple(phase.in_step if phase.count > 1 else 1 for phase in self.phases)

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.volumes, *(phase.count for phase in self.phases))


def forward(problem: Problem, volumes: int, axes: tuple[Axis, ...]) -> Cubes:
    """Return the launch of a convolution."""
    sizes = tuple(axis.size for axis in axes), tuple(axis.output for axis in axes)
    return Cubes(problem, volumes, tuple(axis.forward() for axis in axes), *sizes)


def backward(problem: Problem, volumes: int, axes: tuple[Axis, ...], turn: bool) -> Cubes:
    """Return the launch of the gradient of its input."""
    sizes = tuple(axis.output for axis in axes), tuple(axis.size for axis in axes)
    phases = (max(axis.backward(), key=lambda phase: phase.in_step * len(phase.taps)) for axis in axes)
    longest = (
        dataclasses.replace(phase.rising, count=launch.cdiv(axis.size, axis.stride))
        for phase, axis in zip(phases, axes, strict=True)
    )
    return Cubes(problem, volumes, tuple(longest), *sizes, axes, turn)


def in_boxes(cubes: Cubes) -> bool:
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


def starts(cubes: Cubes) -> tuple[int, ...]:
    """Return the input of the first output's first tap per axis; for several backward phases the padding."""
    if cubes.phase_count > 1:
        return tuple(axis.padding for axis in cubes.back or ())
    return tuple(phase.in_start for phase in cubes.phases)


def phase_constants(cubes: Cubes) -> dict[str, int]:
    """Return the constants by which a program determines its backward phase."""
    result = {}
    for i, name in enumerate("DHW"):
        stride, dilation = (1, 1) if cubes.back is None else (cubes.back[i].stride, cubes.back[i].dilation)
        common = math.gcd(stride, dilation)
        constants = {
            "STRIDE": stride, "PERIOD": stride // common,
            "INVERSE": pow(dilation // common, -1, stride // common), "DILATION": dilation,
        }  # fmt: skip
        result |= {f"{key}_{name}": value for key, value in constants.items()}
    return result


def taps_read(cubes: Cubes, box: tuple[int, ...]) -> dict[str, int | bool]:
    """Return the constants by which a kernel addresses the inputs of a box of outputs."""
    result: dict[str, int | bool] = {"C": cubes.problem.C, "STRIDED": max(cubes.strides) > 1}
    kernel = (len(phase.taps) for phase in cubes.phases) if cubes.back is None else (axis.kernel for axis in cubes.back)
    for name, phase, step, taps in zip("DHW", cubes.phases, cubes.strides, kernel, strict=True):
        result |= {f"J{name}": taps, f"IN_STEP_{name}": step, f"IN_TAP_{name}": phase.in_tap}
    return result | dict(zip(("TILE_N", "TILE_D", "TILE_H", "TILE_W"), box, strict=True))


def box_of(cubes: Cubes, box: tuple[int, ...], channels: int) -> Box:
    """Return the descriptor of x for blocks of `channels` channels."""
    N, (D, H, W), width = cubes.volumes, cubes.read, cubes.problem.groups * cubes.problem.C
    sizes: tuple[int, ...] = (N, D, H, W, width)
    if max(cubes.strides) > 1:
        _, h, w = cubes.strides
        sizes, box = (N * D, H // h, h, W // w, w * width), (1, box[2], 1, box[3])
    return Box(sizes, [math.prod(sizes[i + 1 :]) for i in range(5)], [*box, channels])


def box_shape(cubes: Cubes, voxels: int) -> tuple[int, ...]:
    """Return the shape of boxes of `voxels` voxels that cover the outputs."""
    return cube_shape(cubes.counts, voxels, max(cubes.strides) > 1)


def moved(cubes: Cubes) -> int:
    """Return the bytes that are read and written."""
    problem = cubes.problem
    values = cubes.volumes * math.prod(cubes.read) * problem.C + math.prod(cubes.counts) * problem.M
    return values * problem.groups * problem.dtype.itemsize


def count_boxes(sizes: tuple[int, ...], box: tuple[int, ...]) -> int:
    """Return the number of boxes that cover outputs of `sizes`."""
    return math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))


def cube_shape(sizes: tuple[int, ...], voxels: int, one_slice: bool = False) -> tuple[int, ...]:
    """Return (volumes, slices, rows, columns): powers of two with product `voxels` whose boxes cover `sizes` best.

    Ties prefer fewer volumes, then the shape nearest to a cube.
    """
    sides = [2**i for i in range(9) if 2**i <= voxels]  # a side of a box is 256 at most
    shapes = [
        (voxels // math.prod(inner), *inner)
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


def weights_in_place(w: torch.Tensor, groups: int) -> bool:
    """Return whether backward weights can be read in place: tensor cores read 16-bit operands in either order."""
    any_order = w.dtype.itemsize == 2 or launch.INTERPRETED
    ordered = w.is_contiguous(memory_format=torch.channels_last_3d)
    return ordered and any_order and w.shape[1] % 8 == 0 and w.data_ptr() % 16 == 0
