"""Gather from and scatter to positions along a dimension.

Sums at one position follow the order of the index; the kernel of an embedding's gradient computes them.
"""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import check, lookup
from minidl.kernels import elementwise as kernels
from minidl.ops import elementwise, indexing
from minidl.ops.lookup import Embedding
from minidl.ops.shape import clone, permute, reshape
from minidl.tensors import Scalar, Tensor

__all__ = ["gather", "index_add", "index_select", "scatter", "scatter_add"]


@recordable(look_up=lambda at, dy: Embedding.apply(at, dy, -1))
class Summed(Function):
    """The sum of rows [B, H] at positions [B] of [V, H]: the gradient of an embedding. Its gradient is an embedding."""

    look_up = staticmethod(lookup.embedding)

    @staticmethod
    def forward(ctx: Any, at: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        if at.is_cuda:  # reading would wait for the device: a position out of range, -1, makes the first row NaN
            rows = kernels.where((at >= 0).unsqueeze(1), rows, math.nan)
            at = at.clamp(0)
        ctx.save(at)
        return lookup.embedding_grad(rows, at, count)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        (at,) = ctx.saved
        return None, cls.look_up(at, dy), None


class Put(Function):
    """x with values of the index's shape, or one number, at the index along `dim`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, index: torch.Tensor, values: Any) -> torch.Tensor:
        ctx.dim = dim
        ctx.save(index)
        return x.scatter(dim, index, values)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        (index,) = ctx.saved
        values = dy.gather(ctx.dim, index) if ctx.needs[3] else None
        return dy.scatter(ctx.dim, index, 0), None, None, values

    recorded_backward = backward


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return a copy of the positions `index` (int64 or int32, [K] or one) along `dim`. The gradient sums equal
    positions
    in order.

    Raises IndexError for a dimension or, on the CPU, an index out of range; ValueError for an index of more dimensions.
    """
    if index.ndim > 1:
        raise ValueError(f"index_select: index has shape {list(index.shape)}, expected [K]")
    at = check.axis("index_select", dim, max(input.ndim, 1))
    source = input if input.ndim else reshape(input, 1)
    selected = indexing.getitem(
        source, (*[slice(None)] * at, Tensor(_nonnegative_index("index_select", index).reshape(-1)))
    )
    return selected if input.ndim else reshape(selected)


def gather(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return input at `index` along `dim`, and at the same position along the others: index (int64) of as many
    dimensions,
    none larger than input's but `dim`. The gradient sums equal positions in order.

    Raises IndexError for a dimension or, on the CPU, an index out of range; ValueError for an index that does not fit.
    """
    at = check.axis("gather", dim, max(input.ndim, 1))
    if input.ndim == 0:
        return reshape(gather(reshape(input, 1), 0, reshape(index, index.numel())), *index.shape)
    if index.numel() == 0:  # of any shape
        return reshape(indexing.getitem(reshape(input, input.numel()), slice(0, 0)), *index.shape)
    fits = input.ndim == index.ndim and not builtins.any(
        mine < size for i, (mine, size) in enumerate(zip(input.shape, index.shape, strict=True)) if i != at
    )
    if not fits:
        raise ValueError(f"gather: index has shape {list(index.shape)}, which does not fit {list(input.shape)}")
    raw = _nonnegative_index("gather", index)
    _check_in_range("gather", raw, input.shape[at])
    return indexing.getitem(input, tuple(map(Tensor, _index_tensors(raw, at))))


def _index_tensors(index: torch.Tensor, at: int) -> list[torch.Tensor]:
    """Return an index of each dimension: `index`, and the element's own position along the others."""
    sizes = enumerate(index.shape)
    along = [
        torch.arange(n, device=index.device).view(*(n if k == i else 1 for k in range(index.dim()))) for i, n in sizes
    ]
    return [index if i == at else each for i, each in enumerate(along)]


def scatter(
    input: Tensor, dim: int, index: Tensor, src: Tensor | Scalar | None = None, *, value: Scalar | None = None,
    reduce: str | None = None,
) -> Tensor:  # fmt: skip
    """Return input with src, or one number, at `index` along `dim` and at the same position along the others: index
    (int64) of as many dimensions, src at least as large. Of equal positions one value stays; reduce "add" adds
    all.

    Raises IndexError for a dimension or, on the CPU, an index out of range; ValueError for shapes that do not fit,
    TypeError for two dtypes.
    """
    values = value if src is None else src
    if values is None or reduce not in (None, "add"):
        raise ValueError(f'scatter: reduce is {reduce!r}; expected a source or value, and None or "add"')
    if reduce is None:
        raw, at = _checked_index("scatter", input, dim, index, values)
        return Put.apply(input, at, raw, _crop(values, raw) if isinstance(values, Tensor) else values)
    if not isinstance(values, Tensor):
        values = Tensor(torch.full(index.shape, values, dtype=input.dtype, device=input.device))
    return scatter_add(input, dim, index, values)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Return input with src added at `index` along `dim`, as `scatter`; equal positions add up in the order of the
    index."""
    raw, at = _checked_index("scatter_add", input, dim, index, src)
    if not raw.numel():
        return clone(input)
    sizes = input.shape or torch.Size([1])
    rows = indexing.flat_index(_index_tensors(raw.reshape(raw.shape or (1,)), at), sizes).reshape(-1)
    added = Summed.apply(rows, reshape(_crop(src, raw), raw.numel(), 1), input.numel())
    return elementwise.add(input, reshape(added, *input.shape))


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Scalar = 1) -> Tensor:
    """Return input with alpha times source added at `index` [K] along `dim`; source has input's shape but [K] there."""
    at = check.axis("index_add", dim, max(input.ndim, 1))
    check.same("index_add", input=input, source=source)
    raw = _nonnegative_index("index_add", index).reshape(-1)
    target, added = (t if t.ndim else reshape(t, 1) for t in (input, source))
    shape = [len(raw) if i == at else size for i, size in enumerate(target.shape)]
    if list(added.shape) != shape:
        raise ValueError(f"index_add: source has shape {list(source.shape)}, expected {shape}")
    _check_in_range("index_add", raw, target.shape[at])
    first = [at, *(i for i in range(target.ndim) if i != at)]
    # Positions outside the index keep their values, even with an alpha of NaN.
    input, added = elementwise.scale_operand("index_add", input, added, alpha)
    rows = permute(added, *first)
    raw = torch.where(raw < target.shape[at], raw.to(torch.int64), -1)
    total = Summed.apply(raw, reshape(rows, len(raw), rows[:1].numel()), target.shape[at])
    total = reshape(total, target.shape[at], *rows.shape[1:])
    inverse = [first.index(i) for i in range(target.ndim)]
    return elementwise.add(input, reshape(permute(total, *inverse), *input.shape))


def _checked_index(name: str, x: Tensor, dim: int, index: Tensor, src: Any) -> tuple[torch.Tensor, int]:
    """Return the index, int64, and the dimension. Raises as `scatter`."""
    at = check.axis(name, dim, max(x.ndim, 1))
    shapes = [tuple(t.shape) or (1,) for t in (index, x, *([src] if isinstance(src, Tensor) else []))]
    least_shapes = [(*shapes[0][:at], 0, *shapes[0][at + 1 :]), shapes[0]]  # of x, and of src
    if index.numel() and not all(
        len(shape) == len(least) and all(map(operator.ge, shape, least))
        for shape, least in zip(shapes[1:], least_shapes, strict=False)
    ):
        others = " and ".join(str(list(shape)) for shape in shapes[1:])
        raise ValueError(f"{name}: index has shape {list(index.shape)}, which does not fit {others}")
    if isinstance(src, Tensor):
        check.same(name, input=x, src=src)
    raw = _nonnegative_index(name, index)
    if index.numel():
        _check_in_range(name, raw, shapes[1][at])
    return raw.to(torch.int64), at


def _crop(src: Tensor, index: torch.Tensor) -> Tensor:
    """Return the part of src that the index refers to."""
    if src.shape == index.shape:
        return src
    if not index.numel():
        return reshape(indexing.getitem(reshape(src, src.numel()), slice(0, 0)), *index.shape)
    return indexing.getitem(src, tuple(slice(0, n) for n in index.shape))


def _check_in_range(name: str, index: torch.Tensor, size: int) -> None:
    """Raise IndexError on the CPU for an index out of range."""
    if not index.is_cuda and bool((index >= size).any()):
        raise IndexError(f"{name}: index {int(index.max())} is out of range for a dimension of size {size}")


def _nonnegative_index(name: str, index: Tensor) -> torch.Tensor:
    """Return the index after a check that it has no negative values."""
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: index has dtype {index.dtype}, expected int64 or int32")
    raw = index.data
    if raw.is_cuda:  # reading would wait for the device: an index that selects NaN
        return torch.where(raw < 0, torch.iinfo(torch.int64).max, raw.long())
    if bool((raw < 0).any()):
        raise IndexError(f"{name}: index {int(raw.min())} is negative")
    return raw
