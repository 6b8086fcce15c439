"""Images and volumes sampled at positions of a grid: rows of a sparse matrix of weights times the pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import in_operations
from minidl.kernels import check
from minidl.kernels import sparse as kernels
from minidl.ops import creation, reduce, unary
from minidl.ops.compare import gt, logical_and, lt
from minidl.ops.conditional import clamp, where
from minidl.ops.elementwise import add, mul, remainder, sub
from minidl.ops.join import cat, stack
from minidl.ops.linalg import matmul
from minidl.ops.lookup import embedding
from minidl.ops.shape import movedim, reshape, to, unsqueeze, wide
from minidl.tensors import Tensor

__all__ = ["affine_grid", "grid_sample"]


@in_operations
class SparseProduct(Function):
    """y[i] [rows, C], the sum of val[e] dense[col[e]] over entries e [E] with row[e] = i, in the order of entries.

    Entries with a row or col behind the last count as 0. each: the entries of every row if these are sorted, else 0.
    """

    @staticmethod
    def forward(ctx: Any, val: torch.Tensor, dense: torch.Tensor, row: Any, col: Any, rows: int, each: int) -> Any:
        ctx.save(val, dense, row, col)
        starts = torch.arange(rows + 1, device=row.device)
        order = starts[:-1]
        if each:
            starts = starts * each
        else:
            at = torch.argsort(row, stable=True)
            val, col, starts = val[at], col[at], torch.searchsorted(row[at], starts)
            order = torch.argsort(starts.diff(), descending=True, stable=True)
        dense = torch.cat([dense, dense.new_zeros(1, dense.shape[1])])
        return kernels.csr_matmul(starts.int(), col.int(), val, order.int(), dense)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        val, dense, row, col = ctx.saved
        zeros = Tensor(torch.zeros(1, dense.shape[1], dtype=dense.dtype, device=dense.device))
        factors = (embedding(index, cat([rows, zeros])) for index, rows in ((row, dy), (col, dense)))
        dval = reduce.sum(mul(*factors), -1) if ctx.needs[0] else None
        ddense = SparseProduct.apply(val, dy, col, row, len(dense), 0) if ctx.needs[1] else None
        return dval, ddense, None, None, None, None


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Return the pixels of images or volumes at the positions of a grid (Jaderberg et al., Spatial transformer
    networks, 2015), as torch.nn.functional.grid_sample.

    Shapes: input [N, C, H, W] and grid [N, OH, OW, 2] -> [N, C, OH, OW], or [N, C, D, H, W] and [N, OD, OH, OW, 3].
    A position is x, y (and z), from -1 to 1: of the outer pixels' centres with align_corners, else of their edges.
    mode: "bilinear", of volumes trilinear, or "nearest", which gives the grid no gradient. padding_mode for positions
    outside: "zeros", "border" (the nearest pixel) or "reflection". Sums and the gradient of input have a fixed order.
    Raises ValueError for other modes or shapes that do not fit, TypeError for integers or two dtypes.
    """
    name, sizes = "grid_sample", tuple(input.shape[2:])
    check.floating(name, input=input.data, grid=grid.data)
    check.same(name, input=input, grid=grid)
    if mode not in ("bilinear", "nearest"):
        raise ValueError(f'{name}: mode is {mode!r}, expected "bilinear" or "nearest"; interpolate has "bicubic"')
    if padding_mode not in ("zeros", "border", "reflection"):
        raise ValueError(f'{name}: padding_mode is {padding_mode!r}, expected "zeros", "border" or "reflection"')
    D = len(sizes)
    if D not in (2, 3) or grid.ndim != D + 2 or grid.shape[:: D + 1] != (len(input), D) or 0 in sizes:
        expected = "[N, C, H, W] and [N, OH, OW, 2], or [N, C, D, H, W] and [N, OD, OH, OW, 3], with pixels"
        raise ValueError(f"{name}: got input {list(input.shape)} and grid {list(grid.shape)}, expected {expected}")
    N, C, V, P = len(input), input.shape[1], len(input) * math.prod(sizes), grid.numel() // D
    at = torch.arange(N, device=grid.device).repeat_interleave(P // max(N, 1)).unsqueeze(1)  # [P, taps]
    inside = torch.ones_like(at, dtype=torch.bool)
    weights = Tensor(torch.ones(at.shape, dtype=wide(grid).dtype, device=grid.device))
    positions = reshape(wide(grid), P, D)
    for axis, size in enumerate(sizes):
        index, weight = _taps(positions[:, D - 1 - axis], size, mode, padding_mode, bool(align_corners))
        at = (at.unsqueeze(2) * size + index.unsqueeze(1)).flatten(1)
        inside = (inside.unsqueeze(2) & ((index >= 0) & (index < size)).unsqueeze(1)).flatten(1)
        weights = reshape(mul(unsqueeze(weights, 2), unsqueeze(weight, 1)), *at.shape)
    pixels = reshape(movedim(wide(input), 1, -1), V, C)
    col = torch.where(inside, at, V).flatten()
    row = torch.arange(P, device=col.device).repeat_interleave(at.shape[1])
    y = SparseProduct.apply(reshape(weights, len(col)), pixels, row, col, P, at.shape[1])
    return movedim(reshape(to(y, input.dtype), *grid.shape[:-1], C), -1, 1)


def _taps(x: Tensor, size: int, mode: str, padding_mode: str, corners: bool) -> tuple[torch.Tensor, Tensor]:
    """Return the pixels along an axis, [P, 1] or [P, 2], and their weights for positions x [P]."""
    x = mul(add(x, 1), (size - 1) / 2) if corners else sub(mul(add(x, 1), size / 2), 0.5)
    if padding_mode == "reflection" and size > corners:
        edge, span = (0.0, size - 1) if corners else (-0.5, size)
        x = sub(edge + span, unary.abs(sub(span, remainder(sub(x, edge), 2 * span))))
    if padding_mode != "zeros":
        # As in torch, the derivative at the outer pixels is 0, as it is outside of them.
        x = where(logical_and(gt(x, 0), lt(x, size - 1)), x, clamp(x.detach(), 0, size - 1))
    first = (unary.round if mode == "nearest" else unary.floor)(x.detach())
    index = clamp(first, -2, size).data.long().unsqueeze(1)
    if mode == "nearest":
        return index, add(mul(unsqueeze(first, 1), 0), 1)
    share = sub(x, first)
    return torch.cat([index, index + 1], 1), stack([sub(1, share), share], 1)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Return the points [N, H, W, 2] to which each matrix of theta [N, 2, 3] moves those of images of the size [N, C,
    H, W]; for volumes theta is [N, 3, 4] and the points are [N, D, H, W, 3].

    x, along W, comes first. The points of an axis reach from -1 to 1, which with align_corners are the centres of the
    outer pixels, else (None too) their outer edges. Raises TypeError for integers, ValueError for other shapes.
    """
    check.floating("affine_grid", theta=theta.data)
    sizes, axes = check.sizes("affine_grid", (size,)), len(size) - 2
    if axes not in (2, 3) or list(theta.shape) != [sizes[0], axes, axes + 1] or min(sizes) < 1:
        raise ValueError(
            f"affine_grid: theta has shape {list(theta.shape)} and size is {list(sizes)}, expected [N, 2, 3] and "
            "[N, C, H, W], or [N, 3, 4] and [N, C, D, H, W], with sizes of 1 or more"
        )
    kind: Any = {"dtype": theta.dtype, "device": theta.device}
    ends = [0.0 if n == 1 else 1.0 if align_corners else (n - 1) / n for n in sizes[2:]]
    lines = [creation.linspace(-end, end, n, **kind).data for end, n in zip(ends, sizes[2:], strict=True)]
    points = [*reversed(torch.meshgrid(*lines, indexing="ij")), torch.ones(sizes[2:], **kind)]
    return reshape(matmul(Tensor(torch.stack(points, -1).flatten(0, -2)), theta.mT), sizes[0], *sizes[2:], axes)
