"""The geometry of a convolution from its arguments, for any number of axes, and the checks of these arguments."""

from __future__ import annotations

import functools
from typing import Any

from minidl.kernels.check import SEVERAL, Pair, numbers
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
SHAPES = {1: "L", 2: "H, W", 3: "D, H, W"}
KERNELS = {1: "K", 2: "R, S", 3: "Q, R, S"}


def sizes_of(op: str, x: Any, weight: Any, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes of image and kernel along the axes. Raises ValueError for other ranks, sizes of 0, bad groups and
    channels that do not fit."""
    axes, transposed = axes_in(op), "transpose" in op
    if x.ndim != axes + 2 or weight.ndim != axes + 2:
        channels = "C, M / groups" if transposed else "M, C / groups"
        raise ValueError(
            f"{op}: input has shape {list(x.shape)}, weight {list(weight.shape)}; expected [N, C, {SHAPES[axes]}] and "
            f"weight [{channels}, {KERNELS[axes]}]"
        )
    # 1.0 and True are refused here: a cache of plans cannot tell them from 1.
    if isinstance(groups, bool) or not hasattr(groups, "__index__") or groups < 1:
        raise ValueError(f"{op}: groups is {groups!r}, expected a whole number of 1 or more")
    size, kernel = tuple(x.shape[2:]), tuple(weight.shape[2:])
    if 0 in kernel or 0 in size:
        raise ValueError(f"{op}: an image of {size} with a kernel of {kernel}: neither may have a size of 0")
    first, second = weight.shape[:2]
    if first % groups or x.shape[1] != (first if transposed else second * groups):
        expected = (
            f"its channels to be weight's first size, {first}, and a multiple of groups"
            if transposed
            else f"its channels to be groups * {second} and weight's {first} outputs a multiple of groups"
        )
        raise ValueError(
            f"{op}: input has {x.shape[1]} channels, weight {list(weight.shape)}, groups {groups}; expected {expected}"
        )
    return size, kernel


def axes_in(op: str) -> int:
    """Return the number of axes of an operation that is named by it, as conv2d."""
    return int(op[-2])


def check_vectors(op: str, channels: int, **vectors: Any) -> None:
    """Raise ValueError unless bias and scale have a value per output channel."""
    for name, vector in vectors.items():
        if vector is not None and list(vector.shape) != [channels]:
            raise ValueError(f"{op}: {name} has shape {list(vector.shape)}, expected [{channels}]")


def geometry_of(x: Tensor, weight: Tensor, stride: Pair, padding: Pair | str, dilation: Pair, groups: int) -> Geometry:
    """Return the geometry for x [N, C, H, W] and weight [M, C / groups, R, S]. Raises ValueError if they do not fit."""
    h, w = axes_of("conv2d", x, weight, stride, padding, dilation, groups)
    return Geometry(h, w, int(groups))


def axes_of(
    op: str, x: Tensor, weight: Tensor, stride: Pair, padding: Pair | str, dilation: Pair, groups: int
) -> tuple[Axis, ...]:
    """Return the axes for x [N, C, ...] and weight [M, C / groups, ...]. Raises ValueError if they do not fit."""
    size, kernel = sizes_of(op, x, weight, groups)
    axes = len(size)
    strides, dilations = numbers(op, "stride", stride, 1, axes), numbers(op, "dilation", dilation, 1, axes)
    return _axes(op, size, kernel, strides, _padding(op, padding, kernel, strides, dilations), dilations)


@functools.lru_cache(maxsize=4096)
def _axes(op: str, *settings: tuple[Any, ...]) -> tuple[Axis, ...]:
    settings_by_axis = zip(AXES[axes_in(op)], *settings, strict=True)
    return tuple(Axis.of(op, *values) for values in settings_by_axis)


def check_settings(op: str, kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[int, ...]:
    """Return the sizes of a kernel. Raises ValueError for settings that fit no image and weight, TypeError for settings
    that are not whole numbers."""
    axes = axes_in(op)
    size = numbers(op, "kernel_size", kernel, 1, axes)
    _padding(op, padding, size, numbers(op, "stride", stride, 1, axes), numbers(op, "dilation", dilation, 1, axes))
    return size


def check_pool(pool: Any) -> None:
    """Raise ValueError for an unknown pool."""
    if pool not in (None, "max", "avg"):
        raise ValueError(f'conv2d: pool is {pool!r}, expected "max", "avg" or None')


def _padding(
    op: str, padding: Pair | str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return (before, after) of each axis."""
    if not isinstance(padding, str):
        return tuple((p, p) for p in numbers(op, "padding", padding, 0, len(kernel)))
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    if padding == "valid":
        return tuple((0, 0) for _ in reach)
    if padding == "causal" and len(kernel) == 1:
        return ((reach[0], 0),)
    if padding != "same":
        also = ', "causal"' if len(kernel) == 1 else ""
        raise ValueError(
            f'{op}: padding is {padding!r}, expected "same", "valid"{also}, a whole number or {SEVERAL[len(kernel)]}'
        )
    if any(s != 1 for s in stride):
        raise ValueError(f'{op}: padding "same" is for stride 1, got stride {stride}')
    return tuple((all_ // 2, all_ - all_ // 2) for all_ in reach)
