"""A float64 reference of a sample of a convolution's results: the products of one tap after another.

Images are [n, groups, channels, H, W] and weights [groups, M, C, R, S], of the convolution from images with C channels
to a group to smaller ones with M: "down". "up" is its way back, the transposed convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random
from types import EllipsisType
from typing import NamedTuple

import torch

from minidl.kernels.conv.geometry import Axis, Geometry

# Products in float64 that a check takes, and values of images at a time.
BUDGET = 4e9
CHUNK = 2**25


class Sample(NamedTuple):
    """The images, the groups, and the channels of a group that are checked or read."""

    images: list[int]
    groups: list[int]
    Ms: list[int]
    Cs: list[int]


def sample(kind: str, geometry: Geometry, N: int, M: int, C: int, random: Random) -> Sample:
    """All positions of as many images, groups and channels as BUDGET allows.

    A result of "down" and "up" takes all channels read, one of "weight" all images.
    """
    h, w = geometry.h, geometry.w
    groups, taps = geometry.groups, h.kernel * w.kernel
    left = BUDGET / (h.output * w.output * taps)
    if kind == "weight":
        images, left = N, left / N
        of_groups = _between(left / (M * C), groups)
        Ms = _between(left / (of_groups * C), M)
        Cs = _between(left / (of_groups * Ms), C)
    else:
        # Whole images first, then whole groups.
        values = CHUNK / (max(h.size * w.size, h.output * w.output) * (M + C))
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


def down(x: torch.Tensor, w: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The convolution of x with C channels to a group."""
    h, v = geometry.h, geometry.w
    y = x.new_zeros(*x.shape[:2], w.shape[1], h.output, v.output)
    x = _padded(x, geometry)
    for r, s, at in _taps(geometry):
        y += torch.einsum("ngchw,gmc->ngmhw", x[at], w[..., r, s])
    return y


def up(y: torch.Tensor, w: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The transposed convolution of y with M channels to a group."""
    h, v = geometry.h, geometry.w
    x = _padded(y.new_zeros(*y.shape[:2], w.shape[2], h.size, v.size), geometry)
    for r, s, at in _taps(geometry):
        x[at] += torch.einsum("ngmhw,gmc->ngchw", y, w[..., r, s])
    return x[..., h.padding : h.padding + h.size, v.padding : v.padding + v.size]


def weight(x: torch.Tensor, y: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The gradient of the weights, from x and the gradient of "down"'s result."""
    h, v = geometry.h, geometry.w
    dw = x.new_zeros(x.shape[1], y.shape[2], x.shape[2], h.kernel, v.kernel)
    x = _padded(x, geometry)
    for r, s, at in _taps(geometry):
        dw[..., r, s] = torch.einsum("ngchw,ngmhw->gmc", x[at], y)
    return dw


def _taps(geometry: Geometry) -> Iterator[tuple[int, int, tuple[EllipsisType, slice, slice]]]:
    """Each tap, and where in padded images it reads."""
    h, v = geometry.h, geometry.w
    for r, s in itertools.product(range(h.kernel), range(v.kernel)):
        yield r, s, (..., _reads(h, r), _reads(v, s))


def _reads(axis: Axis, tap: int) -> slice:
    first = tap * axis.dilation
    return slice(first, first + (axis.output - 1) * axis.stride + 1, axis.stride)


def _padded(x: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """x with zeros around it, at least up to what the last tap reads."""
    h, v = geometry.h, geometry.w
    rows, columns = (
        max(axis.padding + axis.size, (axis.kernel - 1) * axis.dilation + (axis.output - 1) * axis.stride + 1)
        for axis in (h, v)
    )
    wide = x.new_zeros(*x.shape[:3], rows, columns)
    wide[..., h.padding : h.padding + h.size, v.padding : v.padding + v.size] = x
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
