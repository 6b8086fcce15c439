"""A float64 reference for a sample of a convolution's results, computed tap by tap.

Images are [n, groups, channels, H, W] and weights [groups, M, C, R, S]. "down" is the convolution from images with C
channels per group to smaller ones with M, "up" the transposed convolution. Volumes have D before H.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random
from types import EllipsisType
from typing import NamedTuple

import torch

from minidl.kernels.conv.geometry import Axis, Geometry, Volume

# The number of float64 products of a check, and of image values at a time.
BUDGET = 4e9
CHUNK = 2**25
# From this number of pixels, each image is summed separately: one long sum per block is slow.
LONG = 1024


class Sample(NamedTuple):
    """The images, the groups, and the channels of a group in a sample."""

    images: list[int]
    groups: list[int]
    Ms: list[int]
    Cs: list[int]


At = Geometry | Volume
Index = tuple[EllipsisType | int | slice, ...]


def axes_of(at: At) -> tuple[Axis, ...]:
    """Return the axes of a convolution."""
    return at.axes if isinstance(at, Volume) else at[:2]


def sample(kind: str, geometry: At, N: int, M: int, C: int, random: Random) -> Sample:
    """Return a sample with all positions of as many images, groups and channels as BUDGET allows.

    A result of "down" and "up" needs all input channels, a result of "weight" all images.
    """
    axes = axes_of(geometry)
    taps, small, large = (math.prod(getattr(a, name) for a in axes) for name in ("kernel", "output", "size"))
    groups = geometry.groups
    budget = BUDGET / (small * taps)
    if kind == "weight":
        images, budget = N, budget / N
        of_groups = _between(budget / (M * C), groups)
        Ms = _between(budget / (of_groups * C), M)
        Cs = _between(budget / (of_groups * Ms), C)
    else:
        # Complete images first, then complete groups.
        values = CHUNK / (max(large, small) * (M + C))
        each = min(budget / (M * C), values)
        images = _between(each / groups, N)
        of_groups = _between(each / images, groups)
        inputs, outputs = (C, M) if kind == "down" else (M, C)
        outputs = _between(budget / (images * of_groups * inputs), outputs)
        Ms, Cs = (outputs, C) if kind == "down" else (M, outputs)
    counts = zip((images, of_groups, Ms, Cs), (N, groups, M, C), strict=True)
    return Sample(*(_picked(random, count, of) for count, of in counts))


def part(t: torch.Tensor, *indices_by_dim: Sequence[int]) -> torch.Tensor:
    """Return the part of a tensor with these indices of the first dimensions."""
    for dim, indices in enumerate(indices_by_dim):
        if len(indices) < t.shape[dim]:
            t = t.index_select(dim, torch.tensor(indices, device=t.device))
    return t


def down(x: torch.Tensor, w: torch.Tensor, geometry: At) -> torch.Tensor:
    """Return the convolution of x with C channels per group."""
    y = x.new_zeros(*x.shape[:2], w.shape[1], *(axis.output for axis in axes_of(geometry)))
    x = _padded(x, geometry)
    for tap, at in _taps(geometry):
        y += torch.einsum("ngc...,gmc->ngm...", x[at], w[tap])
    return y


def up(y: torch.Tensor, w: torch.Tensor, geometry: At) -> torch.Tensor:
    """Return the transposed convolution of y with M channels per group."""
    axes = axes_of(geometry)
    x = _padded(y.new_zeros(*y.shape[:2], w.shape[2], *(axis.size for axis in axes)), geometry)
    for tap, at in _taps(geometry):
        x[at] += torch.einsum("ngm...,gmc->ngc...", y, w[tap])
    return x[_middle(geometry)]


def weight(x: torch.Tensor, y: torch.Tensor, geometry: At) -> torch.Tensor:
    """Return the gradient of the weights, from x and the gradient of the result of "down"."""
    dw = x.new_zeros(x.shape[1], y.shape[2], x.shape[2], *(axis.kernel for axis in axes_of(geometry)))
    x = _padded(x, geometry)
    y = y.flatten(3)
    for tap, at in _taps(geometry):
        read = x[at].flatten(3)
        if dw.shape[1:3] == (1, 1):
            dw[tap] = (read * y).sum((0, 3))[..., None]
        elif y.shape[3] >= LONG:
            dw[tap] = torch.einsum("ngcp,ngmp->ngmc", read, y).sum(0)
        else:
            dw[tap] = torch.einsum("ngcp,ngmp->gmc", read, y)
    return dw


def _taps(geometry: At) -> Iterator[tuple[Index, Index]]:
    """Yield, for each tap, its index in the weights and the index of its inputs in padded images."""
    axes = axes_of(geometry)
    for tap in itertools.product(*(range(axis.kernel) for axis in axes)):
        yield (..., *tap), (..., *map(_reads, axes, tap))


def _reads(axis: Axis, tap: int) -> slice:
    first = tap * axis.dilation
    return slice(first, first + (axis.output - 1) * axis.stride + 1, axis.stride)


def _middle(geometry: At) -> Index:
    """Return the index of the images in padded images."""
    return (..., *(slice(axis.padding, axis.padding + axis.size) for axis in axes_of(geometry)))


def _padded(x: torch.Tensor, geometry: At) -> torch.Tensor:
    """Return x with zeros around it, at least as far as the last tap reads."""
    sizes = (
        max(axis.padding + axis.size, (axis.kernel - 1) * axis.dilation + (axis.output - 1) * axis.stride + 1)
        for axis in axes_of(geometry)
    )
    padded = x.new_zeros(*x.shape[:3], *sizes)
    padded[_middle(geometry)] = x
    return padded


def _between(value: float, most: int) -> int:
    return max(1, min(most, int(value)))


def _picked(random: Random, count: int, of: int) -> list[int]:
    """Return `count` indices in order; two or more include the first and the last."""
    if count >= of:
        return list(range(of))
    if count < 3:
        return sorted(random.sample((0, of - 1), count) if count == 2 else [random.randrange(of)])
    return sorted([0, of - 1, *random.sample(range(1, of - 1), count - 2)])
