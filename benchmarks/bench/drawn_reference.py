"""A float64 reference of a sample of a convolution's results: the products of one tap after another.

Images are [n, groups, channels, H, W] and weights [groups, M, C, R, S], of the convolution from images with C channels
to a group to smaller ones with M: "down". "up" is its way back, the transposed convolution. Volumes have D before H.
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

# Products in float64 that a check takes, and values of images at a time.
BUDGET = 4e9
CHUNK = 2**25
# From so many pixels on, each image's products are summed by themselves: a sum that is one block's takes long.
LONG = 1024


class Sample(NamedTuple):
    """The images, the groups, and the channels of a group that are checked or read."""

    images: list[int]
    groups: list[int]
    Ms: list[int]
    Cs: list[int]


At = Geometry | Volume
Place = tuple[EllipsisType | int | slice, ...]


def axes_of(at: At) -> tuple[Axis, ...]:
    """Those along which a convolution goes."""
    return at.axes if isinstance(at, Volume) else at[:2]


def sample(kind: str, geometry: At, N: int, M: int, C: int, random: Random) -> Sample:
    """All positions of as many images, groups and channels as BUDGET allows.

    A result of "down" and "up" takes all channels read, one of "weight" all images.
    """
    axes = axes_of(geometry)
    taps, small, large = (math.prod(getattr(a, name) for a in axes) for name in ("kernel", "output", "size"))
    groups = geometry.groups
    left = BUDGET / (small * taps)
    if kind == "weight":
        images, left = N, left / N
        of_groups = _between(left / (M * C), groups)
        Ms = _between(left / (of_groups * C), M)
        Cs = _between(left / (of_groups * Ms), C)
    else:
        # Whole images first, then whole groups.
        values = CHUNK / (max(large, small) * (M + C))
        each = min(left / (M * C), values)
        images = _between(each / groups, N)
        of_groups = _between(each / images, groups)
        read, made = (C, M) if kind == "down" else (M, C)
        made = _between(left / (images * of_groups * read), made)
        Ms, Cs = (made, C) if kind == "down" else (M, made)
    counts = zip((images, of_groups, Ms, Cs), (N, groups, M, C), strict=True)
    return Sample(*(_picked(random, count, of) for count, of in counts))


def part(t: torch.Tensor, *wanted: Sequence[int]) -> torch.Tensor:
    """The wanted indices of the first dimensions."""
    for dim, indices in enumerate(wanted):
        if len(indices) < t.shape[dim]:
            t = t.index_select(dim, torch.tensor(indices, device=t.device))
    return t


def down(x: torch.Tensor, w: torch.Tensor, geometry: At) -> torch.Tensor:
    """The convolution of x with C channels to a group."""
    y = x.new_zeros(*x.shape[:2], w.shape[1], *(axis.output for axis in axes_of(geometry)))
    x = _padded(x, geometry)
    for tap, at in _taps(geometry):
        y += torch.einsum("ngc...,gmc->ngm...", x[at], w[tap])
    return y


def up(y: torch.Tensor, w: torch.Tensor, geometry: At) -> torch.Tensor:
    """The transposed convolution of y with M channels to a group."""
    axes = axes_of(geometry)
    x = _padded(y.new_zeros(*y.shape[:2], w.shape[2], *(axis.size for axis in axes)), geometry)
    for tap, at in _taps(geometry):
        x[at] += torch.einsum("ngm...,gmc->ngc...", y, w[tap])
    return x[_middle(geometry)]


def weight(x: torch.Tensor, y: torch.Tensor, geometry: At) -> torch.Tensor:
    """The gradient of the weights, from x and the gradient of "down"'s result."""
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


def _taps(geometry: At) -> Iterator[tuple[Place, Place]]:
    """Where in weights each tap is, and where in padded images it reads."""
    axes = axes_of(geometry)
    for tap in itertools.product(*(range(axis.kernel) for axis in axes)):
        yield (..., *tap), (..., *map(_reads, axes, tap))


def _reads(axis: Axis, tap: int) -> slice:
    first = tap * axis.dilation
    return slice(first, first + (axis.output - 1) * axis.stride + 1, axis.stride)


def _middle(geometry: At) -> Place:
    """Where in padded images the images are."""
    return (..., *(slice(axis.padding, axis.padding + axis.size) for axis in axes_of(geometry)))


def _padded(x: torch.Tensor, geometry: At) -> torch.Tensor:
    """x with zeros around it, at least up to what the last tap reads."""
    sizes = (
        max(axis.padding + axis.size, (axis.kernel - 1) * axis.dilation + (axis.output - 1) * axis.stride + 1)
        for axis in axes_of(geometry)
    )
    wide = x.new_zeros(*x.shape[:3], *sizes)
    wide[_middle(geometry)] = x
    return wide


def _between(wanted: float, most: int) -> int:
    return max(1, min(most, int(wanted)))


def _picked(random: Random, count: int, of: int) -> list[int]:
    """So many indices in order, the first and the last among two or more."""
    if count >= of:
        return list(range(of))
    if count < 3:
        return sorted(random.sample((0, of - 1), count) if count == 2 else [random.randrange(of)])
    return sorted([0, of - 1, *random.sample(range(1, of - 1), count - 2)])
