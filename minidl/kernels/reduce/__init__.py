"""Reductions over any axes: sum, mean, 2-norm, maximum, minimum, their positions, sorting, and the k largest elements.

    x   any shape and strides          y   x's shape without the reduced axes (or with size 1 there)

The kernels view x as a matrix [K, R], output index by reduced index (`layout`). Each index has at most two strides, so
sums over N, H and W of an [N, C, H, W] tensor need no copy; other layouts are copied first. A program accumulates
BLOCK_K x BLOCK_R lanes over its share of R and reduces the lanes at the end. If K gives too few programs, R is split
into shares, and a second launch joins them in order. Up to 2^18 numbers, columns are summed in one launch, in narrow
strips. Results do not depend on scheduling. `depth` is the longest chain of additions, for error bounds.

Floating sums are accumulated in float32 (float64 for float64). Norms are accumulated in float64, in which squares
of narrower types neither overflow nor underflow. Sums of integers and bools are int64. As in torch, an empty sum is 0,
an empty mean is NaN, a maximum propagates NaN, and `argmax` returns the first of equal positions.

Read `layout` and `sums` first, then `positions`; `sorting` and `ranked` are for sort and top-k.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.division import as_multiple
from minidl.kernels.reduce import positions
from minidl.kernels.reduce.layout import offsets, opaque
from minidl.kernels.reduce.positions import spread
from minidl.kernels.reduce.ranked import leading
from minidl.kernels.reduce.sorting import sort
from minidl.kernels.reduce.sums import EQUAL, MAX, MIN, OVER_COUNT, ROOT, SQUARES, depth, fill
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

__all__ = [
    "amax", "amin", "argmax", "argmin", "as_multiple", "band", "count_equal", "depth", "extreme", "kept_shape",
    "leading", "mean", "norm", "offsets", "opaque", "sort", "spread", "sum", "sum_rows", "sum_to",
]  # fmt: skip

Dims = Sequence[int] | int | None  # None: all


@replayed
def sum(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Return the sum over `dims` (all if None), in x's dtype; int64 for integers and bools. An empty sum is 0."""
    return _reduced("sum", x, dims, keepdim)


@replayed
def mean(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Return the mean over `dims` (all if None) of a floating tensor. An empty mean is NaN."""
    check.floating("mean", x=x)
    return _reduced("mean", x, dims, keepdim, finish=OVER_COUNT)


@replayed
def norm(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Return sqrt(sum of x^2) over `dims` (all if None) of a floating tensor."""
    check.floating("norm", x=x)
    return _reduced("norm", x, dims, keepdim, op=SQUARES, finish=ROOT)


def sum_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return x summed to `shape`: the gradient of a broadcast from `shape` to x's shape."""
    return x if x.shape == tuple(shape) else _sum_to(x, tuple(shape))


@replayed
def _sum_to(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    new = x.dim() - len(shape)
    axes = [i for i, size in enumerate(x.shape) if i < new or (shape[i - new] == 1 and size != 1)]
    y = torch.empty(shape, dtype=_sum_dtype(x), device=x.device)
    return fill(x, axes, y)


@replayed
def sum_rows(x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of the rows of x [M, N], added in a fixed order, as [N] in `out_dtype` (default: x's dtype)."""
    y = torch.empty(x.shape[1:], dtype=out_dtype or x.dtype, device=x.device)
    return fill(x, (0,), y)


@replayed
def count_equal(x: torch.Tensor, y: torch.Tensor, dims: Dims = None) -> torch.Tensor:
    """Count the elements of x along `dims` that equal y, which has size 1 there; NaN equals NaN. Returns y's shape in
    the accumulation dtype."""
    axes = _axes("count_equal", dims, x.dim())
    counts = torch.empty(y.shape, dtype=launch.acc_torch(x.dtype), device=x.device)
    return fill(x, axes, counts, op=EQUAL, m=y.contiguous())


@replayed
def amax(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Return the maximum over `dims` (all if None); NaN if any element is NaN.

    Raises ValueError if a reduced dimension is empty.
    """
    return _extremum("amax", x, dims, keepdim, MAX)


@replayed
def amin(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Return the minimum over `dims`, as `amax`."""
    return _extremum("amin", x, dims, keepdim, MIN)


def _extremum(name: str, x: torch.Tensor, dims: Dims, keepdim: bool, op: tl.constexpr) -> torch.Tensor:
    axes = _filled_axes(name, x, dims)
    y = torch.empty(_shape(x, axes, keepdim), dtype=x.dtype, device=x.device)
    return y if x.numel() == 0 else fill(x, axes, y, op=op)


def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """Return the first position of the maximum (or NaN) along `dim`, or in x flattened if it is None, as int64.

    Raises ValueError if a reduced dimension is empty.
    """
    return _positions("argmax", x, dim, keepdim, False, False)[1]


def argmin(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """Return the first position of the minimum, as `argmax`."""
    return _positions("argmin", x, dim, keepdim, True, False)[1]


def extreme(
    x: torch.Tensor, dim: int, keepdim: bool = False, smallest: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum along `dim`, or the minimum, and its first position, from one launch."""
    y, positions = _positions("min" if smallest else "max", x, dim, keepdim, smallest, True)
    assert y is not None
    return y, positions


@replayed
def _positions(
    name: str, x: torch.Tensor, dim: int | None, keepdim: bool, smallest: bool, values: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    axes = _filled_axes(name, x, dim)
    shape = _shape(x, axes, keepdim)
    result = torch.empty(shape, dtype=torch.int64, device=x.device)
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if values else None
    if result.numel() == x.numel():
        return None if y is None else y.copy_(x.reshape(shape)), result.zero_()
    positions.fill(x, axes, result, y, smallest)
    return y, result


def kept_shape(x: torch.Tensor, dims: Dims) -> list[int]:
    """Return x's shape with size 1 in `dims` (all if None)."""
    return _shape(x, _axes("kept_shape", dims, x.dim()), keepdim=True)


def band(rows: int, tiles: int, block: int) -> int:
    """Return the rows per program, a multiple of `block`, for at most 8 programs per multiprocessor."""
    bands = max(1, 8 * launch.processors() // max(tiles, 1))
    return max(1, launch.cdiv(launch.cdiv(rows, block), bands)) * block


def _reduced(name: str, x: torch.Tensor, dims: Dims, keepdim: bool, **how: tl.constexpr) -> torch.Tensor:
    axes = _axes(name, dims, x.dim())
    y = torch.empty(_shape(x, axes, keepdim), dtype=_sum_dtype(x), device=x.device)
    return fill(x, axes, y, **how)


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.int64


@check.cached
def _axes(name: str, dims: Dims, rank: int) -> tuple[int, ...]:
    """Return the sorted non-negative axes to reduce. Raises IndexError, or ValueError for a repeated one."""
    listed = () if dims is None else check.integers(name, "dim", dims)
    if not listed:  # an empty list means all dimensions, as in torch
        return tuple(range(rank))
    # As in torch, a scalar accepts dimension 0.
    axes = tuple(sorted(check.axes(name, listed, max(rank, 1))))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: dims {list(listed)} name a dimension twice")
    return axes if rank else ()


def _shape(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> list[int]:
    return [1 if i in axes else size for i, size in enumerate(x.shape) if keepdim or i not in axes]


def _filled_axes(name: str, x: torch.Tensor, dims: Dims) -> tuple[int, ...]:
    """Return `_axes`. Raises ValueError if one is empty."""
    axes = _axes(name, dims, x.dim())
    if any(x.shape[i] == 0 for i in axes):
        result = "minimum" if "min" in name else "maximum"
        raise ValueError(
            f"{name}: no {result} along dims {list(axes)} of a tensor of shape {list(x.shape)}: it is empty there"
        )
    return axes
