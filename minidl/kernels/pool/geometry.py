"""The windows of a pooling operation: positions, divisors, and properties that select kernels and constants."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from minidl.kernels.check import Pair, cached, numbers, pair
from minidl.runtime import launch


class Windows(NamedTuple):
    """The windows of one pooling over images of H x W, from torch's arguments; all pairs are (height, width).

    size      of the image             output    of the result
    divisor   the divisor of every window; 0 for the window's size (with its padding if `padded`)
    adaptive  windows follow from size and output alone; kernel is the largest window
    """

    size: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    divisor: int = 0
    padded: bool = True
    adaptive: bool = False

    @property
    def reach(self) -> tuple[int, int]:
        """The extent of a window in pixels, including dilation."""
        (R, S), (d_h, d_w) = self.kernel, self.dilation
        return (R - 1) * d_h + 1, (S - 1) * d_w + 1

    @property
    def inside(self) -> bool:
        """Whether every window lies in the image."""
        return self.padding == (0, 0) and self._within(self.size)

    @property
    def full(self) -> bool:
        """Whether every mean divides by the full window size."""
        padded = self.size[0] + self.padding[0], self.size[1] + self.padding[1]
        return self.inside or (self.padded and self._within(padded))

    def _within(self, end: tuple[int, int]) -> bool:
        """Return whether no window reaches beyond pixel `end`."""
        along = zip(self.output, self.stride, self.padding, self.reach, end, strict=True)
        return not self.adaptive and all((o - 1) * s - p + r <= e for o, s, p, r, e in along)

    @property
    def disjoint(self) -> bool:
        """Whether windows do not overlap: then each pixel belongs to one of `blocks`."""
        return not self.adaptive and self.reach[0] <= self.stride[0] and self.reach[1] <= self.stride[1]

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks of stride x stride pixels that cover the image and the padding before it."""
        (H, W), (pad_h, pad_w), (s_h, s_w) = self.size, self.padding, self.stride
        return launch.cdiv(H + pad_h, s_h), launch.cdiv(W + pad_w, s_w)

    @property
    def exact(self) -> bool:
        """Whether the blocks cover exactly the image and each belongs to a window."""
        covered = all(o * s == size for o, s, size in zip(self.output, self.stride, self.size, strict=True))
        return self.padding == (0, 0) and covered

    @property
    def near(self) -> tuple[int, int]:
        """The most windows along each axis that contain one pixel."""
        if self.adaptive:
            return largest_window(self.output[0], self.size[0]), largest_window(self.output[1], self.size[1])
        return launch.cdiv(self.reach[0], self.stride[0]), launch.cdiv(self.reach[1], self.stride[1])


@cached
def windows(
    op: str,
    size: tuple[int, int],
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    divisor: int | None = None,
    padded: bool = True,
    names: tuple[str, str] = ("height", "width"),
) -> Windows:
    """Return the windows for torch's arguments. stride None means kernel_size; errors tell of the axes by `names`.

    With ceil_mode the last window may reach beyond the padding if it starts before the padding after the image.
    Raises ValueError if padding is above half of the kernel, or a window does not fit.
    """
    kernel = pair(op, "kernel_size", kernel_size, 1)
    step = kernel if stride is None or (isinstance(stride, tuple) and not stride) else pair(op, "stride", stride, 1)
    pad, dil = pair(op, "padding", padding, 0), pair(op, "dilation", dilation, 1)
    if divisor == 0:
        raise ValueError(f"{op}: divisor_override is 0, expected another number, or None for the size of the window")
    output, steps = [], []
    for axis, name in enumerate(names):
        reach = (kernel[axis] - 1) * dil[axis] + 1
        if pad[axis] > kernel[axis] // 2:
            raise ValueError(
                f"{op}: padding {pad[axis]} is above half of the kernel's {name} {kernel[axis]}; "
                f"use at most {kernel[axis] // 2}"
            )
        free = size[axis] + 2 * pad[axis] - reach
        count = (free + (step[axis] - 1 if ceil_mode else 0)) // step[axis] + 1
        if ceil_mode and (count - 1) * step[axis] >= size[axis] + pad[axis]:
            count -= 1
        if count < 1 or size[axis] < 1:
            raise ValueError(
                f"{op}: a kernel of {name} {reach} does not fit into an image of {name} {size[axis]} with padding "
                f"{pad[axis]}; use a smaller kernel or a larger image"
            )
        output.append(count)
        # Gradients loop over the pixels of a stride, so cap it: beyond the image there is no second window.
        steps.append(min(step[axis], max(reach, size[axis] + pad[axis])))
    return Windows(size, (output[0], output[1]), kernel, (steps[0], steps[1]), pad, dil, divisor or 0, padded)


@cached
def adaptive_windows(op: str, size: tuple[int, int], output_size: int | tuple[int | None, int | None]) -> Windows:
    """Return adaptive windows; None in output_size means the image's size. Raises ValueError for an empty image."""
    sizes = tuple(output_size) if isinstance(output_size, list | tuple) else (output_size, output_size)
    if len(sizes) != 2:
        raise TypeError(f"{op}: output_size is {output_size!r}, expected an integer or a pair")
    requested: Any = output_size
    if None in sizes:
        requested = tuple(extent if value is None else value for value, extent in zip(sizes, size, strict=True))
    output = pair(op, "output_size", requested, 0)
    if 0 in size:
        raise ValueError(f"{op}: the image is {size[0]} x {size[1]}, expected a height and width of 1 or more")
    kernel = largest_window(size[0], output[0]), largest_window(size[1], output[1])
    return Windows(size, output, kernel, adaptive=True)


@cached
def volume_windows(
    op: str, size: tuple[int, int, int], kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair,
    ceil_mode: bool, divisor: int | None = None, padded: bool = True,
) -> tuple[Windows, Windows]:  # fmt: skip
    """Return the windows of slices [H, W], and along the depth of images [D, OH * OW]; arguments as of `windows`."""
    kernel = numbers(op, "kernel_size", kernel_size, 1, 3)
    if stride is None or stride == ():
        stride = kernel
    settings = {
        "kernel_size": kernel,
        "stride": numbers(op, "stride", stride, 1, 3),
        "padding": numbers(op, "padding", padding, 0, 3),
        "dilation": numbers(op, "dilation", dilation, 1, 3),
    }
    in_slice: Any = {name: values[1:] for name, values in settings.items()}
    in_depth: Any = {name: (values[0], int(name != "padding")) for name, values in settings.items()}
    plane = windows(op, size[1:], **in_slice, ceil_mode=ceil_mode, divisor=divisor, padded=padded)
    in_depth |= {"divisor": None if divisor is None else 1, "names": ("depth", "width")}
    image = size[0], plane.output[0] * plane.output[1]
    return plane, windows(op, image, **in_depth, ceil_mode=ceil_mode, padded=padded)


@cached
def adaptive_volume_windows(op: str, size: tuple[int, int, int], output_size: Any) -> tuple[Windows, Windows]:
    """Return adaptive windows of slices and along the depth, as `volume_windows`; None means the volume's size."""
    sizes = tuple(output_size) if isinstance(output_size, list | tuple) else (output_size,) * 3
    if len(sizes) == 3:
        sizes = tuple(extent if value is None else value for value, extent in zip(sizes, size, strict=True))
    depth, *plane = numbers(op, "output_size", sizes, 0, 3)
    if 0 in size:
        raise ValueError(f"{op}: the volume is {' x '.join(map(str, size))}, expected sizes of 1 or more")
    pixels = plane[0] * plane[1]
    along = Windows((size[0], pixels), (depth, pixels), (largest_window(size[0], depth), 1), adaptive=True)
    return adaptive_windows(op, size[1:], (plane[0], plane[1])), along


@functools.lru_cache(maxsize=1024)
def largest_window(size: int, outputs: int) -> int:
    """Return the largest of `outputs` adaptive windows over `size` inputs."""
    return max((-(-(o + 1) * size // outputs) - o * size // outputs for o in range(outputs)), default=1)
