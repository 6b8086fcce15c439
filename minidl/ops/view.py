"""Views and copies: the same values in another shape. No arithmetic, except the sums that undo a broadcast or a choice
of one place several times."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from minidl.autograd import Function
from minidl.kernels import reduce
from minidl.ops import places
from minidl.ops.join import joined
from minidl.ops.lookup import Embedding
from minidl.runtime import check, order
from minidl.tensors import Tensor, device_of

__all__ = [
    "cat",
    "clone",
    "contiguous",
    "expand",
    "flatten",
    "getitem",
    "permute",
    "reshape",
    "squeeze",
    "stack",
    "to",
    "transpose",
    "transposed",
    "unsqueeze",
]


F = TypeVar("F", bound=Callable[..., Any])


class _View(Function):
    """A view of x, given by two functions: `there` of x and what says how, `back` of dy, x's shape and the same."""

    there: Callable[..., torch.Tensor]
    back: Callable[..., torch.Tensor]

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, how: Any) -> torch.Tensor:
        ctx.shape, ctx.how = x.shape, how
        return cls.there(x, how)

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        return cls.back(dy, ctx.shape, ctx.how), None


def _view(name: str, there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]) -> type[Function]:
    return type(name, (_View,), {"there": staticmethod(there), "back": staticmethod(back)})


def _permuted_back(dy: torch.Tensor, _: torch.Size, dims: tuple[int, ...]) -> torch.Tensor:
    """By the inverse permutation."""
    return dy.permute(order.back(dims))


Reshape = _view("Reshape", torch.reshape, lambda dy, shape, _: dy.reshape(shape))
Permute = _view("Permute", torch.permute, _permuted_back)
Expand = _view("Expand", torch.Tensor.expand, lambda dy, shape, _: reduce.sum_to(dy, shape))


class GetItem(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: Any) -> torch.Tensor:
        ctx.shape, ctx.index, ctx.dims = x.shape, index, order.dims(x)
        return x[index]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx = torch.zeros([ctx.shape[dim] for dim in ctx.dims], dtype=dy.dtype, device=dy.device)
        dx = dx.permute(order.back(ctx.dims))
        dx[ctx.index].copy_(dy)
        return dx, None


class To(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ctx.device, ctx.dtype = x.device, x.dtype
        return x.to(device, dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy.to(ctx.device, ctx.dtype), None, None


class Clone(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy


class Contiguous(Clone):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


def unpacked(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes that a function was given one by one, or as one sequence."""
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)


def one_or_many(rank: int) -> Callable[[F], F]:
    """A decorator: an operation on a batch of `rank` dimensions that takes one example, without the first, as well."""

    def of(function: F) -> F:
        first = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def either(*args: Any, **named: Any) -> Any:
            x = args[0] if args else named.get(first)
            if x is None or x.ndim != rank - 1:
                return function(*args, **named)
            rest = {name: value for name, value in named.items() if name != first}
            y = function(unsqueeze(x, 0), *args[1:], **rest)
            return tuple(squeeze(each, 0) for each in y) if isinstance(y, tuple) else squeeze(y, 0)

        return either  # type: ignore[return-value]

    return of


def reshape(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """x in another shape with as many elements; one size may be -1. A view where strides allow, else a copy.

    Raises ValueError when the sizes do not fit.
    """
    sizes = unpacked(shape)
    known = math.prod(size for size in sizes if size != -1)
    fits = x.numel() == known if -1 not in sizes else sizes.count(-1) == 1 and known > 0 and x.numel() % known == 0
    if not fits or any(size < -1 for size in sizes):
        raise ValueError(f"reshape: {list(x.shape)} has {x.numel()} elements, which do not fit {list(sizes)}")
    return Reshape.apply(x, sizes)


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """x with the dimensions from start_dim to end_dim (inclusive) merged into one. A scalar becomes [1]."""
    if x.ndim == 0:
        return reshape(x, 1)
    start, end = check.axis("flatten", start_dim, x.ndim), check.axis("flatten", end_dim, x.ndim)
    if start > end:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(x, *x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def permute(x: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """A view of x with its dimensions in the given order. Raises ValueError unless each is named once."""
    order = tuple(check.axis("permute", d, x.ndim) for d in unpacked(dims))
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"permute: {list(order)} does not name each of {x.ndim} dimensions once")
    return Permute.apply(x, order)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """A view of x with two dimensions swapped. Raises IndexError for a dimension out of range."""
    rank = max(x.ndim, 1)  # torch lets a scalar have a dimension 0
    order = list(range(rank))
    a, b = check.axis("transpose", dim0, rank), check.axis("transpose", dim1, rank)
    order[a], order[b] = order[b], order[a]
    return Permute.apply(x, tuple(order[: x.ndim]))


def transposed(x: Tensor) -> Tensor:
    """A view of x with all its dimensions in reverse order (`x.T`)."""
    return Permute.apply(x, tuple(reversed(range(x.ndim))))


def expand(x: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """A view of x broadcast to `shape` (-1 keeps a size). Raises ValueError when it does not broadcast."""
    sizes = unpacked(shape)
    try:
        view = x.data.expand(sizes)
    except RuntimeError as error:
        raise ValueError(f"expand: {list(x.shape)} does not broadcast to {list(sizes)}") from error
    return Expand.apply(x, tuple(view.shape))


def squeeze(x: Tensor, dim: int | None = None) -> Tensor:
    """x without its dimensions of size 1, or without `dim` when that has size 1."""
    drop = None if dim is None else check.axis("squeeze", dim, x.ndim)
    return Reshape.apply(x, tuple(s for i, s in enumerate(x.shape) if s != 1 or (drop is not None and i != drop)))


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """x with a new dimension of size 1 at `dim`."""
    at = check.axis("unsqueeze", dim, x.ndim + 1)
    return Reshape.apply(x, (*x.shape[:at], 1, *x.shape[at:]))


def getitem(x: Tensor, index: Any) -> Tensor:
    """What an index selects: by integers, slices, None and ... a view, by masks and tensors of integers a copy.

    The gradient adds up equal places in their order. Raises TypeError for any other index, IndexError out of range; on
    a GPU, where looking would wait for the device, what a tensor selects out of range is NaN.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if all(map(places.is_basic, parts)):
        return GetItem.apply(x, index)
    basic, dims, tensors = places.parsed(x.shape, parts, x.device)
    y = x if all(part == slice(None) for part in basic) else GetItem.apply(x, basic)
    if not dims:
        return y
    rest = [dim for dim in range(y.ndim) if dim not in dims]
    sizes, kept = [y.shape[dim] for dim in dims], [y.shape[dim] for dim in rest]
    at = places.rows(tensors, sizes)
    table = reshape(permute(y, *dims, *rest), math.prod(sizes), math.prod(kept))
    found = Embedding.apply(at, table, -1) if table.dtype.is_floating_point else Tensor(table.data[at])
    found = reshape(found, *at.shape, *kept)
    if dims[0] == 0 or dims[-1] - dims[0] >= len(dims):
        return found
    moved = list(range(at.dim(), at.dim() + dims[0])), list(range(at.dim()))
    return permute(found, *moved[0], *moved[1], *range(at.dim() + dims[0], found.ndim))


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors joined along `dim`. Raises ValueError for sizes that differ elsewhere, TypeError for different dtypes."""
    if not parts:
        raise ValueError("cat: got no tensors, expected at least one")
    first = parts[0]
    at = check.axis("cat", dim, first.ndim)
    check.same("cat", **{f"parts[{i}]": part for i, part in enumerate(parts)})
    for i, part in enumerate(parts):
        if (*part.shape[:at], *part.shape[at + 1 :]) != (*first.shape[:at], *first.shape[at + 1 :]):
            raise ValueError(
                f"cat: parts[{i}] has shape {list(part.shape)}, which does not fit {list(first.shape)} along dim {dim}"
            )
    return joined(parts, at)


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return cat([unsqueeze(part, dim) for part in parts], dim)


def clone(x: Tensor) -> Tensor:
    """A copy of x, in memory of its own; gradients flow through (`x.detach().clone()` has none)."""
    return Clone.apply(x)


def contiguous(x: Tensor) -> Tensor:
    """x with its elements in row-major order in memory; copied only where they are not."""
    return Contiguous.apply(x)


def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x on another device or in another dtype: to(dtype), to(device), to(device, dtype). Values are rounded."""
    device, dtype = x.device, x.dtype
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.dtype):
            dtype = arg
        else:
            device = device_of(arg)
    if x.requires_grad and not dtype.is_floating_point:
        raise TypeError(f"to: a tensor with a gradient cannot become {dtype}; use .detach() first")
    return To.apply(x, device, dtype)
