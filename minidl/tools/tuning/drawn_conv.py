"""Drawn convolutions: their tensors, their problems, and minidl's calls.

Both kinds are seen as one: a pair of images, a large one and a small one, and the weights [small channels, large
channels of a group, R, S] of the convolution from the large to the small one ("down"). Its way back ("up") is the
transposed convolution, and each is the other's gradient of the input.
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
    """The tensors of a drawn convolution, channels-last: as many sets as exceed the L2 cache.

    Without `values` there is one set, with any values: for a rehearsal, or to see how long something takes.
    """

    def __init__(self, shape: Conv, dtype: torch.dtype, device: str, seed: str, values: bool = True) -> None:
        self.shape, self.dtype, self.seed, self.device, self.values = shape, dtype, seed, device, values
        generator = torch.Generator(device).manual_seed(Random(seed).getrandbits(63))
        large, small = _pair(shape)
        self.geometry = self.of_axes(*_axes(shape))
        self.pixels = shape.images * math.prod(small[1:])
        sets = input_sets(float(dtype.itemsize) * sum(shape.elements)) if values else 1

        def made(images: int, size: tuple[int, ...], scale: float) -> torch.Tensor:
            channels, *sizes = size
            if not values:
                return torch.empty(images, *sizes, channels, device=device, dtype=dtype).movedim(-1, 1)
            drawn = torch.randn(images, *sizes, channels, device=device, dtype=dtype, generator=generator)
            return drawn.mul_(scale).movedim(-1, 1)

        # The gradient of the output is the large one of a transposed convolution.
        scale = min(1.0, LARGEST / math.sqrt(self.pixels))
        of_large, of_small = (scale, 1.0) if shape.transposed else (1.0, scale)
        self.large = [made(shape.images, large, of_large) for _ in range(sets)]
        self.small = [made(shape.images, small, of_small) for _ in range(sets)]
        weights = large[0] // shape.groups, *shape.kernel
        self.w = made(small[0], weights, math.prod(weights) ** -0.5)

    def of_axes(self, *axes: Axis) -> Any:
        """The geometry with these axes."""
        return Geometry(axes[0], axes[1], self.shape.groups)

    def of_images(self, count: int) -> Self:
        """Return the same layer with fewer images and any values."""
        return type(self)(self.shape._replace(images=count), self.dtype, self.device, self.seed, values=False)

    def ours(self, direction: str, form: str | None = None) -> list[Call]:
        """Our calls, in a form or in the one taken for the shape."""
        kind = kind_of(self.shape, direction)
        if _is_column(self.shape):
            return [partial(_back, call) for call in self._turned().ours(direction, form)]
        if kind == "weight":
            pairs = zip(self.large, self.small, strict=True)
            return [partial(conv.grad_weight, x, dy, self.geometry, form=form) for x, dy in pairs]
        function, images = (conv.forward, self.large) if kind == "down" else (conv.transposed, self.small)
        return [partial(_first, function, x, self.w, self.geometry, form=form) for x in images]

    def _turned(self) -> Layer:
        """The same with rows as columns."""
        turned = copy.copy(self)
        turned.shape = _turned(self.shape)
        turned.w = self.w.permute(0, 2, 3, 1).reshape(-1, *turned.shape.kernel, 1).permute(0, 3, 1, 2)
        turned.large, turned.small = ([t.transpose(2, 3) for t in images] for images in (self.large, self.small))
        turned.geometry = turned.of_axes(*_axes(turned.shape))
        return turned

    def problem(self, direction: str) -> Problem:
        """What our call looks up its plan by."""
        return problem(self.shape, direction, self.dtype, launch.target(), launch.processors())


def kind_of(shape: Conv, direction: str) -> str:
    """What is computed: "down", "up" or "weight"."""
    if direction == DIRECTIONS[2]:
        return "weight"
    return "up" if shape.transposed == (direction == DIRECTIONS[0]) else "down"


def problem(shape: Conv, direction: str, dtype: torch.dtype, target: str, processors: int) -> Problem:
    """What a call on the tensors of a `Layer` looks up its plan by, on such a device."""
    if _is_column(shape):
        shape = _turned(shape)
    (large, *_), (small, *_) = _pair(shape)
    M, C, (R, S) = small // shape.groups, large // shape.groups, shape.kernel
    h, w = _axes(shape)
    made = Problem(
        FORWARD, Geometry(h, w, shape.groups), shape.images, C, M, dtype, launch.precision(dtype),
        target=target, processors=processors,
    )  # fmt: skip
    kind = kind_of(shape, direction)
    if kind == "down":
        return made
    if kind == "weight":
        return made._replace(direction=GRAD_WEIGHT)
    return made._replace(direction=TRANSPOSED, C=M, M=C, strides=(R * S * C, 1, S * C, C))


def _pair(shape: Conv) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channels, rows and columns of the large image and of the small one."""
    x, y = (shape.channels, *shape.size), (shape.outputs, *shape.out)
    return (y, x) if shape.transposed else (x, y)


def _axes(shape: Conv) -> tuple[Axis, ...]:
    large, small = _pair(shape)
    settings = zip(large[1:], shape.kernel, small[1:], shape.stride, shape.padding, shape.dilation, strict=True)
    return tuple(Axis(*each) for each in settings)


def _is_column(shape: Conv) -> bool:
    """Whether conv1d sees a sequence as a column: where each channel has a group of its own."""
    return shape.sequence and _pair(shape)[0][0] == shape.groups


def _turned(shape: Conv) -> Conv:
    """A row as a column."""
    names = "size", "kernel", "stride", "padding", "dilation", "ends"
    return shape._replace(**{name: getattr(shape, name)[::-1] for name in names}, sequence=False)


def _first(function: Callable[..., tuple[torch.Tensor, Any]], *args: Any, **how: Any) -> torch.Tensor:
    return function(*args, **how)[0]


def _back(call: Call) -> torch.Tensor:
    """A column as a row."""
    return call().transpose(2, 3)
