"""Transposed convolutions of square images: the layers of generators of pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.testing.specs.base import images
from minidl.testing.specs.make import Make


class Transposed(NamedTuple):
    """A transposed convolution of N images [C, size, size], whose result has `stride` times their size."""

    N: int
    C: int
    M: int
    size: int
    kernel: int = 5
    stride: int = 2

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of the convolution whose gradient of the input this is."""
        padding = (self.kernel - self.stride + 1) // 2
        axis = Axis(self.stride * self.size, self.kernel, self.size, self.stride, padding, 1)
        return Geometry(axis, axis)

    @property
    def x(self) -> Callable[[Make], torch.Tensor]:
        """Return the function that makes the input [N, C, size, size] in channels-last memory."""
        return images(self.N, self.C, self.size)

    @property
    def weights_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the weights."""
        return self.C, self.M, self.kernel, self.kernel

    def __str__(self) -> str:
        name = f"transposed {self.C}->{self.M} {self.kernel}x{self.kernel} stride {self.stride}"
        return f"{name} at {self.size}, {self.N} images"


# The layers of a generator of 64x64 pictures.
BENCHMARK = (
    Transposed(1000, 512, 256, 4), Transposed(1000, 256, 128, 8), Transposed(1000, 128, 64, 16),
    Transposed(1000, 64, 3, 32),
)  # fmt: skip
TUNED = (*BENCHMARK, Transposed(64, 256, 128, 8), Transposed(64, 128, 64, 16))
INTERPRETED = Transposed(8, 32, 16, 4), Transposed(8, 16, 3, 4)
# With the activations of their results.
COMPILED = {
    Transposed(256, 512, 256, 4): "relu", Transposed(256, 128, 64, 16): "relu",
    Transposed(256, 96, 40, 7, 4): "gelu_tanh", Transposed(256, 64, 3, 32): "tanh",
    Transposed(256, 64, 1, 14, 4): "tanh", Transposed(256, 32, 4, 7, 3): "gelu_tanh",
}  # fmt: skip
PATCHES_COMPILED = {
    Transposed(6, 256, 128, 64, 2, 2): "gelu_tanh", Transposed(6, 768, 3, 14, 16, 16): "tanh",
    Transposed(6, 64, 24, 4, 3, 3): "relu",
}  # fmt: skip
