"""Drawn convolutions: their tensors, their problems, and minidl's calls.

Both kinds are treated as one: a pair of images, a large one and a small one, and the weights [small channels, large
channels of a group, R, S] of the convolution from the large to the small one ("down"). "up" is the transposed
convolution, and each is the other's gradient of the input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Self

import torch

from minidl.kernels import conv
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.tools.bench.measure import input_sets
from minidl.tools.bench.sides import Call
from minidl.tools.tuning.shapes import Conv

DIRECTIONS = "forward", "gradient of the input", "gradient of the weight"
# A gradient of a weight stays below what float16 holds.
LARGEST = 1000.0


class Layer:
    """The tensors of a drawn convolution, channels-last: enough sets to exceed the L2 cache.

    Without `values` there is one uninitialised set, for a rehearsal or a first timing.
    """

    def __init__(self, shape: Conv, dtype: torch.dtype, device: str, seed: str, values: bool = True) -> None:
        self.shape, self.dtype, self.seed, self.device, self.values = shape, dtype, seed, device, values
        generator = torch.Generator(device).manual_seed(Random(seed).getrandbits(63))
        large, small = _pair(shape)
        self.geometry = self.of_axes(*_axes(shape))
        self.pixels = shape.images * math.prod(small[1:])
        sets = input_sets(float(dtype.itemsize) * sum(shape.elements)) if values else 1

        def tensor(images: int, size: tuple[int, ...], scale: float) -> torch.Tensor:
            channels, *sizes = size
            if not values:
                return torch.empty(images, *sizes, channels, device=device, dtype=dtype).movedim(-1, 1)
            values_ = torch.randn(images, *sizes, channels, device=device, dtype=dtype, generator=generator)
            return values_.mul_(scale).movedim(-1, 1)

        # A transposed convolution's gradient of the output is the large image.
        scale = min(1.0, LARGEST / math.sqrt(self.pixels))
        of_large, of_small = (scale, 1.0) if shape.transposed else (1.0, scale)
        self.large = [tensor(shape.images, large, of_large) for _ in range(sets)]
        self.small = [tensor(shape.images, small, of_small) for _ in range(sets)]
        weights = large[0] // shape.groups, *shape.kernel
        self.w = tensor(small[0], weights, math.prod(weights) ** -0.5)

    def of_axes(self, *axes: Axis) -> Any:
        """Return the geometry with these axes."""
        return Geometry(axes[0], axes[1], self.shape.groups)

    def of_images(self, count: int) -> Self:
        """Return the same layer with fewer, uninitialised images."""
        return type(self)(self.shape._replace(images=count), self.dtype, self.device, self.seed, values=False)

    def ours(self, direction: str, form: str | None = None) -> list[Call]:
        """Return minidl's calls, in a form or (by default) in the form of the plan."""
        kind = kind_of(self.shape, direction)
        if _is_column(self.shape):
            return [partial(_as_row, call) for call in self._as_column().ours(direction, form)]
        if kind == "weight":
            pairs = zip(self.large, self.small, strict=True)
            return [partial(conv.grad_weight, x, dy, self.geometry, form=form) for x, dy in pairs]
        function, images = (conv.forward, self.large) if kind == "down" else (conv.transposed, self.small)
        return [partial(_first, function, x, self.w, self.geometry, form=form) for x in images]

    def _as_column(self) -> Layer:
        """Return the same layer with rows as columns."""
        column = copy.copy(self)
        column.shape = _as_column(self.shape)
        column.w = self.w.permute(0, 2, 3, 1).reshape(-1, *column.shape.kernel, 1).permute(0, 3, 1, 2)
        column.large, column.small = ([t.transpose(2, 3) for t in images] for images in (self.large, self.small))
        column.geometry = column.of_axes(*_axes(column.shape))
        return column

    def problem(self, direction: str) -> Problem:
        """Return the problem of minidl's call."""
        return problem(self.shape, direction, self.dtype, launch.target(), launch.processors())


def kind_of(shape: Conv, direction: str) -> str:
    """Return what a direction computes: "down", "up" or "weight"."""
    if direction == DIRECTIONS[2]:
        return "weight"
    return "up" if shape.transposed == (direction == DIRECTIONS[0]) else "down"


def problem(shape: Conv, direction: str, dtype: torch.dtype, target: str, processors: int) -> Problem:
    """Return the problem of a call on the tensors of a `Layer`, on a device with these properties."""
    if _is_column(shape):
        shape = _as_column(shape)
    (large, *_), (small, *_) = _pair(shape)
    M, C, (R, S) = small // shape.groups, large // shape.groups, shape.kernel
    h, w = _axes(shape)
    down = Problem(
        FORWARD, Geometry(h, w, shape.groups), shape.images, C, M, dtype, launch.precision(dtype),
        target=target, processors=processors,
    )  # fmt: skip
    kind = kind_of(shape, direction)
    if kind == "down":
        return down
    if kind == "weight":
        return down._replace(direction=GRAD_WEIGHT)
    return down._replace(direction=TRANSPOSED, C=M, M=C, strides=(R * S * C, 1, S * C, C))


def _pair(shape: Conv) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return channels, rows and columns of the large image and of the small one."""
    x, y = (shape.channels, *shape.size), (shape.outputs, *shape.out)
    return (y, x) if shape.transposed else (x, y)


def _axes(shape: Conv) -> tuple[Axis, ...]:
    large, small = _pair(shape)
    settings = zip(large[1:], shape.kernel, small[1:], shape.stride, shape.padding, shape.dilation, strict=True)
    return tuple(Axis(*each) for each in settings)


def _is_column(shape: Conv) -> bool:
    """Return whether conv1d treats a sequence as a column: if each channel is a group."""
    return shape.sequence and _pair(shape)[0][0] == shape.groups


def _as_column(shape: Conv) -> Conv:
    """Return the shape with rows as columns."""
    names = "size", "kernel", "stride", "padding", "dilation", "ends"
    return shape._replace(**{name: getattr(shape, name)[::-1] for name in names}, sequence=False)


def _first(function: Callable[..., tuple[torch.Tensor, Any]], *args: Any, **how: Any) -> torch.Tensor:
    return function(*args, **how)[0]


def _as_row(call: Call) -> torch.Tensor:
    """Return the result of a call with columns as rows."""
    return call().transpose(2, 3)
