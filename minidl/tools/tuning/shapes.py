"""Shapes of operations for benchmarks."""

from __future__ import annotations

import math
from typing import NamedTuple

Pair = tuple[int, int]
Sizes = tuple[int, ...]


class Conv(NamedTuple):
    """A convolution of images or, with three sizes, of volumes; a `transposed` one has an output padding, `ends`. A
    `sequence` is an image of one row."""

    images: int
    channels: int
    outputs: int
    size: Sizes
    kernel: Sizes
    stride: Sizes = (1, 1)
    padding: Sizes = (0, 0)
    dilation: Sizes = (1, 1)
    groups: int = 1
    source: str = ""
    transposed: bool = False
    ends: Sizes = (0, 0)
    sequence: bool = False

    @property
    def out(self) -> Sizes:
        """Return the sizes of the result; below 1 if the kernel does not fit."""
        return tuple(
            (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + end + 1
            if self.transposed
            else (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation, end in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, self.ends, strict=True
            )
        )

    @property
    def valid(self) -> bool:
        """Return whether the sizes are those of a convolution."""
        return min(self.out) > 0 and self.channels % self.groups == 0 == self.outputs % self.groups

    @property
    def elements(self) -> tuple[int, int, int]:
        """Return the numbers of elements of the images, the weights and the result."""
        weights = self.channels * self.outputs // self.groups * math.prod(self.kernel)
        return (
            self.images * self.channels * math.prod(self.size), weights,
            self.images * self.outputs * math.prod(self.out),
        )  # fmt: skip

    @property
    def group(self) -> str:
        """Return the kind for statistics: "depthwise", "grouped", "1x1" or "other"."""
        if self.groups > 1:
            return "depthwise" if self.groups == min(self.channels, self.outputs) else "grouped"
        return "1x1" if math.prod(self.kernel) == 1 else "other"

    def __str__(self) -> str:
        of = "volumes" if len(self.size) == 3 else "images"
        text = f"{_by(self.kernel)} {self.channels}->{self.outputs}, {self.images} {of} of {_by(self.size)}"
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("ends", 0)):
            value = getattr(self, name)
            text += "" if set(value) == {usual} else f", {'output padding' if name == 'ends' else name} {_by(value)}"
        return text + (f", {self.groups} groups" if self.groups > 1 else "") + _from(self.source)


class Gemm(NamedTuple):
    """A product [M, K] x [K, N]; `kind` says which operand is stored transposed."""

    M: int
    N: int
    K: int
    kind: str = "AB"
    source: str = ""

    @property
    def elements(self) -> tuple[int, ...]:
        return self.M * self.K, self.K * self.N, self.M * self.N

    @property
    def valid(self) -> bool:
        return True

    @property
    def group(self) -> str:
        """Return "thin" (a size below 64), "unaligned" (16-bit rows not of a multiple of 16 bytes) or "aligned"."""
        if min(self.M, self.N, self.K) < 64:
            return "thin"
        return "unaligned" if self.N % 8 or self.K % 8 or (self.kind == "A^TB" and self.M % 8) else "aligned"

    def __str__(self) -> str:
        return f"{self.kind} {self.M}x{self.N}x{self.K}{_from(self.source)}"


class Rows(NamedTuple):
    """A matrix whose rows are independent."""

    rows: int
    columns: int
    source: str = ""

    @property
    def elements(self) -> tuple[int, ...]:
        return (2 * self.rows * self.columns,)

    @property
    def valid(self) -> bool:
        return True

    @property
    def group(self) -> str:
        return ""

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}{_from(self.source)}"


class Images(NamedTuple):
    """Images for a batch norm or a pool."""

    images: int
    channels: int
    size: Pair
    what: str
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    source: str = ""

    @property
    def out(self) -> Pair:
        down, across = ((size + 2 * self.padding - self.kernel) // self.stride + 1 for size in self.size)
        return down, across

    @property
    def elements(self) -> tuple[int, ...]:
        return self.images * self.channels * math.prod(self.size), self.images * self.channels * math.prod(self.out)

    @property
    def valid(self) -> bool:
        return min(self.out) > 0 and self.images * math.prod(self.size) > 1

    @property
    def group(self) -> str:
        return self.what

    def __str__(self) -> str:
        window = f" {self.kernel}x{self.kernel} stride {self.stride}" if self.kernel > 1 else ""
        padding = f" padding {self.padding}" if self.padding else ""
        sizes = f"{self.images}x{self.channels}x{_by(self.size)}"
        return f"{self.what}{window}{padding} of {sizes}{_from(self.source)}"


class Reduced(NamedTuple):
    """A tensor [outer, along, inner] that is reduced over `along`."""

    outer: int
    along: int
    inner: int
    what: str

    @property
    def elements(self) -> tuple[int, ...]:
        return self.outer * self.along * self.inner, self.outer * self.inner

    @property
    def valid(self) -> bool:
        return True

    @property
    def group(self) -> str:
        return self.what

    def __str__(self) -> str:
        return f"{self.what} of {self.outer}x{self.along}x{self.inner} over the middle"


Shape = Conv | Gemm | Rows | Images | Reduced


def _by(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def _from(source: str) -> str:
    return f" ({source})" if source else ""
