"""Index arithmetic of convolutions: which inputs each output reads, forward and backward.

Along one axis, output o of a convolution with kernel size R reads input o * stride - padding + r * dilation at tap
r = 0 .. R - 1 if that input exists (Dumoulin and Visin, A guide to convolution arithmetic, arXiv 1603.07285).

The gradient of the input inverts this mapping: input i contributes to output o at tap r if i + padding - r * dilation
= o * stride. Inputs with the same remainder (i + padding) mod stride use the same taps, and o grows by 1 from one such
input to the next. So each remainder is a convolution with stride 1 over the output's gradient, with a subset of the
taps in reverse order. It is called a `Phase`; the forward convolution has a single phase. Kernels handle only phases.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

# An input index outside every image: a phase without taps reads zeros there.
NOWHERE = -(2**30)


@dataclass(frozen=True)
class Phase:
    """Outputs out_start + q * out_step for q < count; tap j < len(taps) of q reads in_start + q * in_step + j * in_tap.

    `taps` lists the indices of the weights in the order of j.
    """

    out_start: int
    out_step: int
    count: int
    in_start: int
    in_step: int
    in_tap: int
    taps: tuple[int, ...]

    @property
    def reached(self) -> int:
        """Return the number of taps, 0 if no output has an input."""
        return 0 if self.in_start == NOWHERE else len(self.taps)

    @property
    def tap_step(self) -> int:
        """Return the distance in the kernel from one tap to the next."""
        return self.taps[1] - self.taps[0] if len(self.taps) > 1 else 0

    def all_inside(self, size: int) -> bool:
        """Return whether every tap of every output reads inside [0, size)."""
        last = self.in_start + (self.count - 1) * self.in_step + (len(self.taps) - 1) * self.in_tap
        return self.in_start >= 0 and last < size

    @property
    def rising(self) -> Phase:
        """Return the phase with its taps in ascending order."""
        if len(self.taps) == 1:
            return self
        start = self.in_start + (len(self.taps) - 1) * self.in_tap
        return dataclasses.replace(self, in_start=start, in_tap=-self.in_tap, taps=self.taps[::-1])


class Axis(NamedTuple):
    """One axis of a convolution: sizes of input, kernel and output, stride, padding at the low end, and dilation."""

    size: int
    kernel: int
    output: int
    stride: int
    padding: int
    dilation: int

    @staticmethod
    def of(op: str, name: str, size: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int) -> Axis:
        """Return the axis of an input with (low, high) padding. Raises ValueError if the kernel does not fit."""
        low, high = padding
        reach = dilation * (kernel - 1) + 1
        room = size + low + high - reach
        if room < 0:
            raise ValueError(
                f"{op}: the kernel's {name} {reach} (dilation included) is larger than that of the padded input, "
                f"{size + low + high}; pad more, or use a smaller kernel"
            )
        return Axis(size, kernel, room // stride + 1, stride, low, dilation)

    def forward(self) -> Phase:
        """Return the phase from outputs to inputs."""
        return Phase(0, 1, self.output, -self.padding, self.stride, self.dilation, tuple(range(self.kernel)))

    def inside(self) -> list[int]:
        """Return, for each tap, the number of outputs whose input lies inside the image."""
        starts = [tap * self.dilation - self.padding for tap in range(self.kernel)]
        return [sum(0 <= start + o * self.stride < self.size for o in range(self.output)) for start in starts]

    def backward(self) -> list[Phase]:
        """Return the phases from inputs to outputs, one per remainder of an input."""
        return _backward(self)


@functools.lru_cache(maxsize=4096)
def _backward(axis: Axis) -> list[Phase]:
    common = math.gcd(axis.stride, axis.dilation)
    period = axis.stride // common
    phases = []
    for first in range(min(axis.stride, axis.size)):
        count = -(-(axis.size - first) // axis.stride)
        remainder = (first + axis.padding) % axis.stride
        taps = [r for r in range(axis.kernel) if (r * axis.dilation - remainder) % axis.stride == 0]
        if not taps:
            phases.append(Phase(first, axis.stride, count, NOWHERE, 0, 1, (0,)))
            continue
        assert all(b - a == period for a, b in itertools.pairwise(taps))
        start = (first + axis.padding - taps[-1] * axis.dilation) // axis.stride
        phases.append(
            Phase(first, axis.stride, count, start, 1, axis.dilation // common, tuple(reversed(taps)))
        )  # fmt: skip
    return phases


class Geometry(NamedTuple):
    """A 2-D convolution: both axes and the number of channel groups."""

    h: Axis
    w: Axis
    groups: int = 1

    @staticmethod
    def of(
        size: tuple[int, int],
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[tuple[int, int], tuple[int, int]],
        dilation: tuple[int, int],
        groups: int = 1,
    ) -> Geometry:
        """Return the geometry for an input of `size`; padding is ((top, bottom), (left, right)).

        Raises ValueError if the kernel does not fit into the padded input.
        """
        axes = [
            Axis.of("conv2d", name, size[i], kernel[i], stride[i], padding[i], dilation[i])
            for i, name in enumerate(("height", "width"))
        ]
        return Geometry(axes[0], axes[1], groups)


class Volume(NamedTuple):
    """A 3-D convolution: the depth axis, and the geometry of the slices."""

    d: Axis
    plane: Geometry

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return self.d, self.plane.h, self.plane.w

    @property
    def groups(self) -> int:
        return self.plane.groups

    @property
    def flat(self) -> bool:
        """Return whether each pixel reads only the same pixel of other slices (a kernel of Q x 1 x 1)."""
        return all((a.kernel, a.stride, a.padding) == (1, 1, 0) and a.size == a.output for a in self.axes[1:])

    @property
    def dense(self) -> Volume | None:
        """Return the stride-1 convolution over the voxels that a strided 1 x 1 x 1 kernel reads; None for others."""
        one = all((axis.kernel, axis.padding) == (1, 0) for axis in self.axes)
        if not one or all(axis.stride == 1 for axis in self.axes):
            return None
        d, h, w = (Axis(axis.output, 1, axis.output, 1, 0, 1) for axis in self.axes)
        return Volume(d, Geometry(h, w, self.groups))

    def read_by(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of the voxels of x [N, C, D, H, W] that `dense` reads."""
        d, h, w = (axis.stride for axis in self.axes)
        # What a transposed convolution adds at the end may be longer than a stride.
        return x[:, :, ::d, ::h, ::w][:, :, : self.d.output, : self.plane.h.output, : self.plane.w.output]

    @property
    def columns(self) -> Geometry:
        """Return the equivalent convolution of images [D, H * W], for a `flat` volume."""
        pixels = self.plane.h.size * self.plane.w.size
        return Geometry(self.d, Axis(pixels, 1, pixels, 1, 0, 1), self.plane.groups)
