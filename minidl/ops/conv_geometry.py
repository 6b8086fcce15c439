"""The geometry of a convolution from its arguments, for any number of axes, and the checks of these arguments."""

from __future__ import annotations

from typing import Any

from minidl.kernels.check import SEVERAL, Pair, cached, numbers
from minidl.kernels.conv.geometry import Axis, Geometry, Volume

__all__: list[str] = []  # no public operations

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
SHAPES = {1: "L", 2: "H, W", 3: "D, H, W"}
KERNELS = {1: "K", 2: "R, S", 3: "Q, R, S"}
Shape = tuple[int, ...]
ONE = Axis(1, 1, 1, 1, 0, 1)
ROW, COLUMN = 2, 3  # the dimension of size 1 that is added to a sequence


def sizes_of(op: str, x: Shape, weight: Shape, groups: int) -> tuple[Shape, Shape]:
    """Return sizes of image and kernel along the axes from the shapes of x and weight. Raises ValueError for other
    ranks, sizes of 0, bad groups and channels that do not fit."""
    axes, transposed = axes_in(op), "transpose" in op
    if len(x) != axes + 2 or len(weight) != axes + 2:
        channels = "C, M / groups" if transposed else "M, C / groups"
        raise ValueError(
            f"{op}: input has shape {list(x)}, weight {list(weight)}; expected [N, C, {SHAPES[axes]}] and "
            f"weight [{channels}, {KERNELS[axes]}]"
        )
    # 1.0 and True are refused here: a cache of plans cannot tell them from 1.
    if isinstance(groups, bool) or not hasattr(groups, "__index__") or groups < 1:
        raise ValueError(f"{op}: groups is {groups!r}, expected a whole number of 1 or more")
    size, kernel = tuple(x[2:]), tuple(weight[2:])
    if 0 in kernel or 0 in size:
        raise ValueError(f"{op}: an image of {size} with a kernel of {kernel}: neither may have a size of 0")
    first, second = weight[:2]
    if first % groups or x[1] != (first if transposed else second * groups):
        expected = (
            f"its channels to be weight's first size, {first}, and a multiple of groups"
            if transposed
            else f"its channels to be groups * {second} and weight's {first} outputs a multiple of groups"
        )
        raise ValueError(
            f"{op}: input has {x[1]} channels, weight {list(weight)}, groups {groups}; expected {expected}"
        )
    return size, kernel


def axes_in(op: str) -> int:
    """Return the number of axes of an operation that is named by it, as conv2d."""
    return int(op[-2])


def check_vectors(op: str, channels: int, **vectors: Shape | None) -> None:
    """Raise ValueError unless bias and scale, of these shapes, have a value per output channel."""
    for name, shape in vectors.items():
        if shape is not None and list(shape) != [channels]:
            raise ValueError(f"{op}: {name} has shape {list(shape)}, expected [{channels}]")


@cached
def geometry_of(
    op: str, x: Shape, weight: Shape, bias: Shape | None, scale: Shape | None, stride: Pair, padding: Pair | str,
    dilation: Pair, groups: int,
) -> Any:  # fmt: skip
    """Return the `arranged` geometry for the shapes of x [N, C, ...], weight [M, C / groups, ...], bias and scale.
    Raises ValueError if they do not fit."""
    size, kernel = sizes_of(op, x, weight, groups)
    axes = len(size)
    strides, dilations = numbers(op, "stride", stride, 1, axes), numbers(op, "dilation", dilation, 1, axes)
    paddings = _padding(op, padding, kernel, strides, dilations)
    settings = zip(AXES[axes], size, kernel, strides, paddings, dilations, strict=True)
    along = tuple(Axis.of(op, *values) for values in settings)
    check_vectors(op, weight[0], bias=bias, scale=scale)
    return arranged(along, int(groups), added_dim(weight))


def arranged(axes: tuple[Axis, ...], groups: int, at: int) -> Geometry | Volume:
    """Return the geometry of one, two or three axes; a sequence is an image with dimension `at` added."""
    if len(axes) == 1:
        axes = (ONE, *axes) if at == ROW else (*axes, ONE)
    plane = Geometry(axes[-2], axes[-1], groups)
    return plane if len(axes) == 2 else Volume(axes[0], plane)


def added_dim(weight: Shape) -> int:
    """Return COLUMN if each channel has a group: the depthwise form reads an input once for all rows that need it."""
    return COLUMN if weight[1] == 1 else ROW


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
