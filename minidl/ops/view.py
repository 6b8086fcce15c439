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
from minidl.kernels import check, memory_layout, reduce
from minidl.ops import copies, indexing
from minidl.ops.join import joined
from minidl.ops.lookup import Embedding
from minidl.tensors import Tensor, device_of

__all__ = [
    "cat",
    "clone",
    "contiguous",
    "diagonal",
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
    """A view of x, or a copy, given by two functions: `there` of x and how, `back` of dy, x's shape and how."""

    there: Callable[..., torch.Tensor]
    back: Callable[..., torch.Tensor]

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, how: Any) -> torch.Tensor:
        ctx.shape, ctx.how = x.shape, how
        return cls.there(x, how)

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        return cls.back(dy, ctx.shape, ctx.how), None


def of(name: str, there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]) -> type[Function]:
    """The Function of one tensor and how, given by two functions that move values."""
    return type(name, (_View,), {"there": staticmethod(there), "back": staticmethod(back)})


def _permuted_back(dy: torch.Tensor, _: torch.Size, dims: tuple[int, ...]) -> torch.Tensor:
    """By the inverse permutation."""
    return dy.permute(memory_layout.back(dims))


Reshape = of("Reshape", lambda x, how: copies.note(x.reshape(how), x), lambda dy, shape, _: dy.reshape(shape))
Permute = of("Permute", lambda x, dims: copies.chosen(x.permute(dims)), _permuted_back)


def _diagonal_back(dy: torch.Tensor, shape: torch.Size, how: tuple[int, int, int]) -> torch.Tensor:
    dx = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    dx.diagonal(*how).copy_(dy)
    return dx


Diagonal = of("Diagonal", lambda x, how: x.diagonal(*how), _diagonal_back)
Expand = of("Expand", torch.Tensor.expand, lambda dy, shape, _: reduce.sum_to(dy, shape))


class GetItem(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: Any) -> torch.Tensor:
        ctx.shape, ctx.index, ctx.dims = x.shape, index, memory_layout.dims(x)
        return x[index]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx = torch.zeros([ctx.shape[dim] for dim in ctx.dims], dtype=dy.dtype, device=dy.device)
        dx = dx.permute(memory_layout.back(ctx.dims))
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


class Contiguous(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
        return copies.note(x.contiguous(memory_format=memory_format), x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, None


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


def reshape(input: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """input in another shape with as many elements; one size may be -1. A view where strides allow, else a copy.

    Raises ValueError when the sizes do not fit.
    """
    sizes = check.unpacked("reshape", "shape", shape)
    known = math.prod(size for size in sizes if size != -1)
    fits = (
        input.numel() == known if -1 not in sizes else sizes.count(-1) == 1 and known > 0 and input.numel() % known == 0
    )
    if not fits or any(size < -1 for size in sizes):
        raise ValueError(f"reshape: {list(input.shape)} has {input.numel()} elements, which do not fit {list(sizes)}")
    return Reshape.apply(input, sizes)


def viewed(input: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """`reshape`, of whose result torch's `view` would not be a copy."""
    made = reshape(input, *shape)
    copies.note(made.data, input.data, always=True)
    return made


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """input with the dimensions from start_dim to end_dim (inclusive) merged into one. A scalar becomes [1]."""
    if input.ndim == 0:
        return reshape(input, 1)
    start, end = check.axis("flatten", start_dim, input.ndim), check.axis("flatten", end_dim, input.ndim)
    if start > end:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(input, *input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :])


def permute(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """A view of input with its dimensions in the given order. Raises ValueError unless each is named once."""
    order = check.axes("permute", check.unpacked("permute", "dims", dims), input.ndim, "dims")
    if sorted(order) != list(range(input.ndim)):
        raise ValueError(f"permute: {list(order)} does not name each of {input.ndim} dimensions once")
    return Permute.apply(input, order)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """A view of input with two dimensions swapped. Raises IndexError for a dimension out of range."""
    rank = max(input.ndim, 1)  # torch lets a scalar have a dimension 0
    order = list(range(rank))
    a, b = check.axis("transpose", dim0, rank), check.axis("transpose", dim1, rank)
    order[a], order[b] = order[b], order[a]
    return Permute.apply(input, tuple(order[: input.ndim]))


def transposed(x: Tensor) -> Tensor:
    """A view of x with all its dimensions in reverse order (`x.T`)."""
    return Permute.apply(x, tuple(reversed(range(x.ndim))))


def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The view of the elements that are at one place along two dimensions, or `offset` further along dim2; it is the
    last dimension. Raises IndexError for a dimension out of range, ValueError for one twice.
    """
    first, second = check.axis("diagonal", dim1, input.ndim), check.axis("diagonal", dim2, input.ndim)
    if first == second:
        raise ValueError(f"diagonal: dim1 {dim1} and dim2 {dim2} are one dimension")
    return Diagonal.apply(input, (offset, first, second))


def expand(input: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """A view of input broadcast to `shape` (-1 keeps a size). Raises ValueError when it does not broadcast."""
    sizes = check.unpacked("expand", "shape", shape)
    try:
        view = input.data.expand(sizes)
    except RuntimeError as error:
        raise ValueError(f"expand: {list(input.shape)} does not broadcast to {list(sizes)}") from error
    return Expand.apply(input, tuple(view.shape))


def squeeze(input: Tensor, *dim: int | Sequence[int] | None) -> Tensor:
    """input without its dimensions of size 1, or without those of `dim`, one or several, that have size 1."""
    named = dim[0] if len(dim) == 1 else dim
    drop = range(input.ndim) if dim in ((), (None,)) else check.axes("squeeze", named, max(input.ndim, 1))
    return Reshape.apply(input, tuple(s for i, s in enumerate(input.shape) if s != 1 or i not in drop))


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """input with a new dimension of size 1 at `dim`."""
    at = check.axis("unsqueeze", dim, input.ndim + 1)
    return Reshape.apply(input, (*input.shape[:at], 1, *input.shape[at:]))


def getitem(x: Tensor, index: Any) -> Tensor:
    """What an index selects: by integers, slices, None and ... a view, by masks and tensors of integers a copy.

    The gradient adds up equal places in their order. Raises TypeError for any other index, IndexError out of range; on
    a GPU, where looking would wait for the device, what a tensor selects out of range is NaN.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if all(map(indexing.is_basic, parts)):
        return GetItem.apply(x, index)
    basic, dims, tensors = indexing.parsed(x.shape, parts, x.device)
    y = x if all(part == slice(None) for part in basic) else GetItem.apply(x, basic)
    if not dims:
        return y
    rest = [dim for dim in range(y.ndim) if dim not in dims]
    sizes, kept = [y.shape[dim] for dim in dims], [y.shape[dim] for dim in rest]
    at = indexing.rows(tensors, sizes)
    table = reshape(permute(y, *dims, *rest), math.prod(sizes), math.prod(kept))
    found = Embedding.apply(at, table, -1) if table.dtype.is_floating_point else Tensor(table.data[at])
    found = reshape(found, *at.shape, *kept)
    if dims[0] == 0 or dims[-1] - dims[0] >= len(dims):
        return found
    moved = list(range(at.dim(), at.dim() + dims[0])), list(range(at.dim()))
    return permute(found, *moved[0], *moved[1], *range(at.dim() + dims[0], found.ndim))


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors joined along `dim`, in the dtype that all of them promote to; those of shape [0] are left out, as torch
    does.

    Raises ValueError for sizes that differ elsewhere, and other devices.
    """
    if not tensors:
        raise ValueError("cat: got no tensors, expected at least one")
    if len(kinds := {part.dtype for part in tensors}) > 1:
        kind = functools.reduce(torch.promote_types, kinds)
        tensors = [to(part, kind) for part in tensors]
    tensors = [part for part in tensors if part.shape != (0,)] or tensors
    first = tensors[0]
    at = check.axis("cat", dim, first.ndim)
    check.same("cat", **{f"tensors[{i}]": part for i, part in enumerate(tensors)})
    for i, part in enumerate(tensors):
        if (*part.shape[:at], *part.shape[at + 1 :]) != (*first.shape[:at], *first.shape[at + 1 :]):
            raise ValueError(
                f"cat: tensors[{i}] has shape {list(part.shape)}, which does not fit "
                f"{list(first.shape)} along dim {dim}"
            )
    return joined(tensors, at)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return cat([unsqueeze(part, dim) for part in tensors], dim)


def clone(input: Tensor) -> Tensor:
    """A copy of input, in memory of its own; gradients flow through (`input.detach().clone()` has none)."""
    return Clone.apply(input)


def contiguous(input: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """input with its elements in row-major order in memory, or in that of images with their channels last; copied only
    where they are not."""
    return Contiguous.apply(input, memory_format)


def to(
    input: Tensor, *args: Any, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False,
    copy: bool = False, memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:  # fmt: skip
    """input on another device or in another dtype: to(dtype), to(device), to(device, dtype), to(tensor). Values are
    rounded.

    As in torch, what is there already is returned as it is, unless `copy`; `non_blocking` may follow, and then `copy`.
    Raises TypeError for a tensor with a gradient that would have integers.
    """
    rest = list(args)
    if rest and isinstance(rest[0], Tensor | torch.Tensor):
        like = rest.pop(0)
        device, dtype = like.device, like.dtype
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest:
        device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0)
    if len(rest) > 2 or any(not isinstance(flag, bool) for flag in rest):
        raise TypeError(f"to: got {args}, expected a dtype, a device, both, or a tensor; then non_blocking and copy")
    copy = rest[1] if len(rest) == 2 else copy
    dtype, device = dtype or input.dtype, input.device if device is None else device_of(device)
    if input.requires_grad and not dtype.is_floating_point:
        raise TypeError(f"to: a tensor with a gradient cannot become {dtype}; use .detach() first")
    if (input.device, input.dtype) != (device, dtype):
        input = To.apply(input, device, dtype)
    elif copy:
        input = Clone.apply(input)
    return input if memory_format == torch.preserve_format else contiguous(input, memory_format)
