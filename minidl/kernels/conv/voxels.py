"""How volumes are cut into boxes of voxels, and where these find what they read."""

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

# Beyond what padding and taps reach before an image, in strides.
AHEAD = 2**16
LEAST_BLOCK = 32  # channels of a step


class Cubes(NamedTuple):
    """One launch: walks down to the size `written` from `read`, [D, H, W] each; the rest as a problem has it.

    problem  of images that are the slices; only its channels, dtype, epilogue and device count
    walks    one along each axis; back the longest of each, with the most outputs
    back     the axes of the convolution, whose walks back these all are; None forward
    turn     whether weights are read in place, [groups * C, taps, M]
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
        """Of the kernel."""
        if self.back is not None:
            return math.prod(axis.kernel for axis in self.back)
        return math.prod(len(phase.taps) for phase in self.phases)

    @property
    def each(self) -> float:
        """Taps of an output, in the mean over walks."""
        if self.back is None:
            return self.taps
        return math.prod(axis.kernel / axis.stride for axis in self.back)

    @property
    def number(self) -> int:
        """Of walks."""
        return 1 if self.back is None else math.prod(axis.stride for axis in self.back)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of outputs, of which one alone has none."""
        return tuple(phase.in_step if phase.count > 1 else 1 for phase in self.phases)

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.volumes, *(phase.count for phase in self.phases))


def forward(problem: Problem, volumes: int, axes: tuple[Axis, ...]) -> Cubes:
    """Of a convolution."""
    sizes = tuple(axis.size for axis in axes), tuple(axis.output for axis in axes)
    return Cubes(problem, volumes, tuple(axis.forward() for axis in axes), *sizes)


def backward(problem: Problem, volumes: int, axes: tuple[Axis, ...], turn: bool) -> Cubes:
    """Of the gradient of its input."""
    sizes = tuple(axis.output for axis in axes), tuple(axis.size for axis in axes)
    phases = (max(axis.backward(), key=lambda phase: phase.in_step * len(phase.taps)) for axis in axes)
    longest = (
        dataclasses.replace(phase.rising, count=launch.cdiv(axis.size, axis.stride))
        for phase, axis in zip(phases, axes, strict=True)
    )
    return Cubes(problem, volumes, tuple(longest), *sizes, axes, turn)


def in_boxes(cubes: Cubes) -> bool:
    """Whether what a tap reads is boxes of x."""
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
    """Where the first tap of the first output reads, or of walks back the padding."""
    if cubes.number > 1:
        return tuple(axis.padding for axis in cubes.back or ())
    return tuple(phase.in_start for phase in cubes.phases)


def phase_constants(cubes: Cubes) -> dict[str, int]:
    """The constants by which a program finds its walk back."""
    found = {}
    for i, name in enumerate("DHW"):
        stride, dilation = (1, 1) if cubes.back is None else (cubes.back[i].stride, cubes.back[i].dilation)
        common = math.gcd(stride, dilation)
        constants = {
            "STRIDE": stride, "PERIOD": stride // common,
            "INVERSE": pow(dilation // common, -1, stride // common), "DILATION": dilation,
        }  # fmt: skip
        found |= {f"{key}_{name}": value for key, value in constants.items()}
    return found


def taps_read(cubes: Cubes, box: tuple[int, ...]) -> dict[str, int | bool]:
    """The constants by which a kernel finds the inputs of a box of outputs."""
    found: dict[str, int | bool] = {"C": cubes.problem.C, "STRIDED": max(cubes.strides) > 1}
    kernel = (len(phase.taps) for phase in cubes.phases) if cubes.back is None else (axis.kernel for axis in cubes.back)
    for name, phase, step, taps in zip("DHW", cubes.phases, cubes.strides, kernel, strict=True):
        found |= {f"J{name}": taps, f"IN_STEP_{name}": step, f"IN_TAP_{name}": phase.in_tap}
    return found | dict(zip(("TILE_N", "TILE_D", "TILE_H", "TILE_W"), box, strict=True))


def box_of(cubes: Cubes, box: tuple[int, ...], channels: int) -> Box:
    """Boxes of x, of so many channels."""
    N, (D, H, W), width = cubes.volumes, cubes.read, cubes.problem.groups * cubes.problem.C
    sizes: tuple[int, ...] = (N, D, H, W, width)
    if max(cubes.strides) > 1:
        _, h, w = cubes.strides
        sizes, box = (N * D, H // h, h, W // w, w * width), (1, box[2], 1, box[3])
    return Box(sizes, [math.prod(sizes[i + 1 :]) for i in range(5)], [*box, channels])


def shape_of(cubes: Cubes, voxels: int) -> tuple[int, ...]:
    """Of the boxes of so many voxels that cover the outputs."""
    return shape_of_cube(cubes.counts, voxels, max(cubes.strides) > 1)


def moved(cubes: Cubes) -> int:
    """Bytes that are read and written."""
    problem = cubes.problem
    values = cubes.volumes * math.prod(cubes.read) * problem.C + math.prod(cubes.counts) * problem.M
    return values * problem.groups * problem.dtype.itemsize


def number(sizes: tuple[int, ...], box: tuple[int, ...]) -> int:
    """Of boxes that cover so many outputs."""
    return math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))


def shape_of_cube(sizes: tuple[int, ...], voxels: int, one_slice: bool = False) -> tuple[int, ...]:
    """Volumes, slices, rows and columns, powers of two of product `voxels`, whose boxes cover `sizes` with least waste.

    Of equals the one of fewest volumes, and of those the nearest to a cube.
    """
    sides = [2**i for i in range(9) if 2**i <= voxels]  # a side of a box is 256 at most
    whole = [
        (voxels // math.prod(inner), *inner)
        for inner in itertools.product(sides, repeat=3)
        if math.prod(inner) <= voxels <= (1 if one_slice else 256) * math.prod(inner)
        and (inner[0] == 1 or not one_slice)
    ]
    return min(whole, key=lambda box: (number(sizes, box), box[0], max(box)))


def width(problem: Problem, block: int) -> int:
    """Channels of a tap in a row of weights that are not read in place."""
    return launch.cdiv(problem.C, block) * block


def block_of(problem: Problem, tile: launch.Tile) -> int:
    """Channels of a step: they end where a group's end, or beyond the last one where zeros are read."""
    whole, largest = min(tile["BLOCK_K"], problem.C & -problem.C), tile["BLOCK_K"]
    if whole >= LEAST_BLOCK or problem.groups > 1:
        return whole
    return min((largest, max(LEAST_BLOCK, largest // 2)), key=lambda block: (width(problem, block), -block))


def lie(w: torch.Tensor, groups: int) -> bool:
    """Whether the weights of a way back can be read in place: tensor cores take 16 bits either way round."""
    either = w.dtype.itemsize == 2 or launch.INTERPRETED
    ordered = w.is_contiguous(memory_format=torch.channels_last_3d)
    return ordered and either and w.shape[1] % 8 == 0 and w.data_ptr() % 16 == 0
