"""Convolutions of square images, depthwise ones among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from minidl.kernels.conv.geometry import Geometry
from minidl.testing.specs.base import images
from minidl.testing.specs.make import Make

Argument = Callable[[Make], torch.Tensor]


class Conv(NamedTuple):
    """A convolution of N images [C, size, size] with M filters [C / groups, kernel, kernel]."""

    N: int
    C: int
    M: int
    size: int
    kernel: int
    padding: int = 0
    stride: int = 1
    groups: int = 1

    def with_images(self, most: int) -> Conv:
        """Return the convolution of `most` images at most."""
        return self._replace(N=min(self.N, most))

    @property
    def geometry(self) -> Geometry:
        """Return both axes and the number of groups."""
        pads = ((self.padding,) * 2,) * 2
        return Geometry.of((self.size,) * 2, (self.kernel,) * 2, (self.stride,) * 2, pads, (1, 1), self.groups)

    @property
    def inputs(self) -> tuple[Argument, Argument, Argument]:
        """Return the functions that make x, the weights and the result's gradient, all in channels-last memory."""
        dy = images(self.N, self.M, self.geometry.h.output)
        return images(self.N, self.C, self.size), images(self.M, self.C // self.groups, self.kernel), dy

    def tensors(self, make: Make) -> tuple[torch.Tensor, ...]:
        """Return x [N, C, size, size], w [M, C / groups, kernel, kernel], dy [N, M, H, W] and a bias [M]."""
        return *(argument(make) for argument in self.inputs), make.tensor(self.M)

    def __str__(self) -> str:
        side = f"{self.kernel}x{self.kernel}"
        channels = f"{self.C}->{self.M} {side}"
        if self.groups == self.C > 1:
            channels = f"depthwise {side}, {self.C} channels"
        elif self.groups > 1:
            channels = f"{self.groups} x {self.C // self.groups}->{self.M // self.groups} {side}"
        return f"{channels} at {self.size}, {self.N} images" + (f", stride {self.stride}" if self.stride > 1 else "")


def depthwise(N: int, C: int, size: int, kernel: int, stride: int, each: int = 1) -> Conv:
    """Return a convolution with one group per channel and `each` outputs per group."""
    return Conv(N, C, each * C, size, kernel, kernel // 2, stride, C)


# The layers of the ECE 408 network and LeNet, then those of ResNet and VGG, by the names of their rows.
BENCHMARK = {
    "1->12 7x7 72x72": Conv(10000, 1, 12, 72, 7),
    "12->24 7x7 33x33": Conv(10000, 12, 24, 33, 7),
    "1->32 5x5 28x28": Conv(10000, 1, 32, 28, 5),
    "32->64 5x5 12x12": Conv(10000, 32, 64, 12, 5),
    "3x3 64@56": Conv(128, 64, 64, 56, 3, 1),
    "3x3 128@28": Conv(128, 128, 128, 28, 3, 1),
    "3x3 256@14": Conv(128, 256, 256, 14, 3, 1),
    "3x3 512@7": Conv(128, 512, 512, 7, 3, 1),
    "3x3 256@56": Conv(64, 256, 256, 56, 3, 1),
}
TUNED = (
    *(case.with_images(2000) for case in BENCHMARK.values()),
    Conv(32, 64, 64, 56, 3, 1), Conv(32, 256, 256, 14, 3, 1), Conv(8, 128, 128, 28, 3, 1),
    Conv(128, 64, 128, 56, 3, 1, 2), Conv(512, 64, 32, 14, 3, 1), Conv(16, 512, 512, 7, 3, 1),
    Conv(8, 64, 64, 56, 3, 1), Conv(2000, 1, 8, 28, 5), Conv(2000, 3, 8, 28, 3, 1), Conv(64, 64, 12, 28, 3, 1),
    Conv(64, 8, 64, 28, 3, 1), Conv(64, 96, 256, 14, 1), Conv(64, 96, 48, 14, 1), Conv(64, 48, 48, 14, 1),
)  # fmt: skip
FFT_TUNED = (*TUNED[:6], TUNED[13])
INTERPRETED = (
    Conv(16, 1, 8, 12, 3, 1), Conv(16, 3, 8, 12, 3, 1), Conv(16, 16, 32, 8, 3, 1), Conv(16, 32, 32, 8, 3, 1),
    Conv(4, 32, 320, 4, 3, 1),
)  # fmt: skip
COMPILED = (
    *(case._replace(N=256 if case.M < 64 else 128, padding=int(case.kernel != 5)) for case in BENCHMARK.values()),
    Conv(2, 3, 16, 32, 3, 1), Conv(128, 64, 128, 28, 3, 1, 2), Conv(2, 24, 40, 9, 3, 1),
)  # fmt: skip

# Channels that no copy by boxes can read: odd numbers of them, and groups of few.
FILL_TUNED = Conv(64, 201, 64, 28, 3, 1), Conv(64, 256, 256, 28, 3, 1, 1, 32)
FILL_INTERPRETED = Conv(4, 201, 64, 8, 3, 1), Conv(4, 256, 256, 8, 3, 1, 1, 32)
FILL_COMPILED = Conv(8, 256, 256, 28, 3, 1, 1, 32)
# First layers of networks: few channels and a stride.
FIRST_TUNED = Conv(64, 3, 64, 224, 7, 3, 2), Conv(64, 3, 64, 224, 3, 1, 2)
FIRST_INTERPRETED = Conv(2, 3, 64, 16, 7, 3, 2), Conv(2, 3, 64, 16, 3, 1, 2)
FIRST_COMPILED = (*(case.with_images(8) for case in FIRST_TUNED), Conv(8, 3, 64, 224, 11, 5, 4))
# Few outputs of many channels.
TAPS_TUNED = Conv(16, 512, 4, 16, 3, 1), Conv(16, 256, 8, 64, 3, 1)
TAPS_INTERPRETED = (Conv(2, 40, 3, 8, 3, 1),)
# Convolutions that are matrix products.
PRODUCTS_COMPILED = (
    Conv(128, 64, 256, 28, 1), Conv(1, 1024, 256, 7, 1), Conv(32, 30, 41, 9, 1), Conv(64, 64, 128, 4, 4),
)  # fmt: skip
FLOAT8_COMPILED = (
    Conv(256, 512, 512, 7, 3, 1), Conv(128, 32, 64, 14, 3, 1, 2), Conv(256, 1024, 2048, 7, 1), Conv(20, 256, 64, 1, 1),
)  # fmt: skip

# MobileNetV2, ConvNeXt and EfficientNet.
DEPTHWISE_TUNED = tuple(
    depthwise(*sizes)
    for sizes in (
        (128, 32, 112, 3, 1), (128, 96, 112, 3, 2), (128, 144, 56, 3, 1), (128, 384, 14, 3, 1), (64, 96, 56, 7, 1),
        (128, 240, 28, 5, 1), (128, 672, 14, 5, 2), (256, 56, 13, 1, 1), (256, 8, 28, 3, 1), (102, 168, 128, 5, 1),
        (256, 96, 28, 5, 2), (128, 96, 28, 7, 2), (64, 32, 56, 9, 1),
    )
)  # fmt: skip
DEPTHWISE_INTERPRETED = depthwise(4, 16, 8, 3, 1), depthwise(4, 16, 9, 5, 2)
DEPTHWISE_COMPILED = (
    depthwise(64, 32, 112, 3, 1), depthwise(64, 144, 56, 3, 2), depthwise(64, 96, 56, 7, 1),
    depthwise(64, 240, 28, 5, 1, 2), depthwise(64, 24, 9, 11, 1),
)  # fmt: skip
SEQUENCE = 1, 1536, 2048, 4  # N, C, length and kernel, which lie down a column (Mamba)
