"""Views and copies of a tensor; no arithmetic, except the sum that undoes a broadcast."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear, recordable
from minidl.kernels import check, memory_layout, reduce
from minidl.ops import copies
from minidl.tensors import Tensor, device_of

__all__ = [
    "clone", "contiguous", "diagonal", "expand", "flatten", "movedim", "permute", "reshape", "squeeze", "swapaxes",
    "to", "transpose", "transposed", "unflatten", "unsqueeze",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


class _Move(Function):
    """A view or copy of x: `move` of x and its settings; its gradient is `move_back` of dy, x's shape, settings."""

    move: Callable[..., torch.Tensor]
    move_back: Callable[..., torch.Tensor]

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, settings: Any) -> torch.Tensor:
        ctx.shape, ctx.how = x.shape, settings
        return cls.move(x, settings)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return cls.move_back(dy, ctx.shape, ctx.how), None

    recorded_backward = backward


def move_function(name: str, move: Callable[..., Any], move_back: Callable[..., Any]) -> type[Function]:
    """Return the Function of a tensor and settings that moves values by these two functions (see `_Move`)."""
    return type(name, (_Move,), {"move": staticmethod(move), "move_back": staticmethod(move_back)})


Reshape = move_function(
    "Reshape", lambda x, how: copies.note(x.reshape(how), x), lambda dy, shape, _: dy.reshape(shape)
)
Permute = move_function(
    "Permute", lambda x, dims: copies.chosen(x.permute(dims)), lambda dy, _, dims: dy.permute(memory_layout.back(dims))
)


def _diagonal_gradient(dy: torch.Tensor, shape: torch.Size, how: tuple[int, int, int]) -> torch.Tensor:
    dx = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    dx.diagonal(*how).copy_(dy)
    return dx


Diagonal = move_function("Diagonal", lambda x, how: x.diagonal(*how), _diagonal_gradient)
linear(lambda ctx, x: Diagonal.apply(x, ctx.how))(Diagonal)


def sum_to(dy: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the sum that undoes a broadcast from `shape`."""
    if tuple(dy.shape) == tuple(shape):
        return dy
    new = dy.ndim - len(shape)
    dims = [i for i in range(dy.ndim) if i < new or (shape[i - new] == 1 and dy.shape[i] != 1)]
    return dy.sum(dims, keepdim=True).reshape(shape)


Expand = move_function("Expand", torch.Tensor.expand, lambda dy, shape, _: reduce.sum_to(dy, shape))
recordable(move_back=lambda dy, shape, _: sum_to(dy, shape))(Expand)


class To(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ctx.device, ctx.dtype = x.device, x.dtype
        return x.to(device, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy.to(ctx.device, ctx.dtype), None, None

    recorded_backward = backward


Clone = move_function("Clone", lambda x, order: x.clone(memory_format=order), lambda dy, *_: dy)
Contiguous = move_function(
    "Contiguous", lambda x, order: copies.note(x.contiguous(memory_format=order), x), lambda dy, *_: dy
)


def one_or_many(rank: int) -> Callable[[F], F]:
    """Return a decorator: an operation on a batch of `rank` dimensions that takes one example, without the first, as
    well."""

    def decorate(function: F) -> F:
        first = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def batched_or_single(*args: Any, **options: Any) -> Any:
            x = args[0] if args else options.get(first)
            if x is None or x.ndim != rank - 1:
                return function(*args, **options)
            others = {name: value for name, value in options.items() if name != first}
            y = function(x.unsqueeze(0), *args[1:], **others)
            return tuple(each.squeeze(0) for each in y) if isinstance(y, tuple) else y.squeeze(0)

        return batched_or_single  # type: ignore[return-value]

    return decorate


def reshape(input: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Return input in another shape with as many elements; one size may be -1. A view where strides allow, else a copy.

    Raises ValueError when the sizes do not fit.
    """
    sizes = check.unpacked("reshape", "shape", shape)
    count = math.prod(size for size in sizes if size != -1)
    fits = (
        input.numel() == count if -1 not in sizes else sizes.count(-1) == 1 and count > 0 and input.numel() % count == 0
    )
    if not fits or any(size < -1 for size in sizes):
        raise ValueError(f"reshape: {list(input.shape)} has {input.numel()} elements, which do not fit {list(sizes)}")
    return Reshape.apply(input, sizes)


def viewed(input: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Return `reshape`, marked as a copy of what torch's `view` would share (see `copies`)."""
    output = reshape(input, *shape)
    copies.note(output.data, input.data, always=True)
    return output


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return input with the dimensions from start_dim to end_dim (inclusive) merged into one. A scalar becomes [1]."""
    if input.ndim == 0:
        return reshape(input, 1)
    start, end = check.axis("flatten", start_dim, input.ndim), check.axis("flatten", end_dim, input.ndim)
    if start > end:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(input, *input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :])


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return input with a dimension split into several of these sizes, one of which may be -1."""
    at = check.axis("unflatten", dim, input.ndim)
    total, product = input.shape[at], math.prod(n for n in sizes if n != -1)
    new = [total // max(product, 1) if n == -1 else n for n in sizes]
    if math.prod(new) != total:
        raise ValueError(f"unflatten: {list(sizes)} does not fit a dimension of {total}")
    return reshape(input, *input.shape[:at], *new, *input.shape[at + 1 :])


def permute(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """Return a view of input with its dimensions in the order `dims`. Raises ValueError unless each is named once."""
    order = check.axes("permute", check.unpacked("permute", "dims", dims), input.ndim, "dims")
    if sorted(order) != list(range(input.ndim)):
        raise ValueError(f"permute: {list(order)} does not name each of {input.ndim} dimensions once")
    return Permute.apply(input, order)


def movedim(input: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Return the view with one or several dimensions moved to other positions.

    Raises IndexError for a dimension out of range, ValueError unless both name as many dimensions, each once.
    """
    sources = check.axes("movedim", source, input.ndim, "source")
    destinations = check.axes("movedim", destination, input.ndim, "destination")
    if (
        len(set(sources)) != len(set(destinations))
        or len(sources) != len(set(sources))
        or len(destinations) != len(sources)
    ):
        raise ValueError(
            f"movedim: source {source} and destination {destination} do not name as many dimensions, each once"
        )
    dims = [dim for dim in range(input.ndim) if dim not in sources]
    for position, dim in sorted(zip(destinations, sources, strict=True)):
        dims.insert(position, dim)
    return permute(input, *dims)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return a view of input with two dimensions swapped. Raises IndexError for a dimension out of range."""
    rank = max(input.ndim, 1)  # torch lets a scalar have a dimension 0
    order = list(range(rank))
    a, b = check.axis("transpose", dim0, rank), check.axis("transpose", dim1, rank)
    order[a], order[b] = order[b], order[a]
    return Permute.apply(input, tuple(order[: input.ndim]))


def swapaxes(input: Tensor, axis0: int, axis1: int) -> Tensor:
    """Return `transpose`."""
    return transpose(input, axis0, axis1)


def transposed(x: Tensor) -> Tensor:
    """Return a view of x with all its dimensions in reverse order (`x.T`)."""
    return Permute.apply(x, tuple(reversed(range(x.ndim))))


def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return the view of the diagonal of two dimensions, moved by `offset` along dim2, as the last dimension. Raises
    IndexError for a dimension out of range, ValueError for one twice."""
    first, second = check.axis("diagonal", dim1, input.ndim), check.axis("diagonal", dim2, input.ndim)
    if first == second:
        raise ValueError(f"diagonal: dim1 {dim1} and dim2 {dim2} are one dimension")
    return Diagonal.apply(input, (offset, first, second))


def expand(input: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """Return a view of input broadcast to `shape` (-1 keeps a size). Raises ValueError when it does not broadcast."""
    sizes = check.unpacked("expand", "shape", shape)
    try:
        view = input.data.expand(sizes)
    except RuntimeError as error:
        raise ValueError(f"expand: {list(input.shape)} does not broadcast to {list(sizes)}") from error
    return Expand.apply(input, tuple(view.shape))


def squeeze(input: Tensor, *dim: int | Sequence[int] | None) -> Tensor:
    """Return input without its dimensions of size 1, or without the dimensions `dim` that have size 1."""
    dims = dim[0] if len(dim) == 1 else dim
    dropped = range(input.ndim) if dim in ((), (None,)) else check.axes("squeeze", dims, max(input.ndim, 1))
    return Reshape.apply(input, tuple(s for i, s in enumerate(input.shape) if s != 1 or i not in dropped))


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """Return input with a new dimension of size 1 at `dim`."""
    at = check.axis("unsqueeze", dim, input.ndim + 1)
    return Reshape.apply(input, (*input.shape[:at], 1, *input.shape[at:]))


def clone(input: Tensor, *, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """Return a copy of input in new memory; gradients flow through (not through `input.detach().clone()`)."""
    return Clone.apply(input, memory_format)


def wide(input: Tensor) -> Tensor:
    """Return input in float32 if it has 16 bits."""
    return to(input, torch.float32) if input.dtype in (torch.float16, torch.bfloat16) else input


def contiguous(input: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return input with its elements in row-major order in memory, or in that of images with their channels last;
    copied only where they are not."""
    return Contiguous.apply(input, memory_format)


def to(
    input: Tensor, *args: Any, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False,
    copy: bool = False, memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:  # fmt: skip
    """Return input rounded to another dtype or on another device: to(dtype), to(device), to(device, dtype), to(tensor).

    As in torch, input itself is returned if nothing changes, unless `copy`; `non_blocking` may follow, and then `copy`.
    Raises TypeError for a tensor with a gradient that would have integers.
    """
    positional = list(args)
    if positional and isinstance(positional[0], Tensor | torch.Tensor):
        other = positional.pop(0)
        device, dtype = other.device, other.dtype
    elif positional and isinstance(positional[0], torch.dtype):
        dtype = positional.pop(0)
    elif positional:
        device = positional.pop(0)
        if positional and (positional[0] is None or isinstance(positional[0], torch.dtype)):
            dtype = positional.pop(0)
    if len(positional) > 2 or any(not isinstance(flag, bool) for flag in positional):
        raise TypeError(f"to: got {args}, expected a dtype, a device, both, or a tensor; then non_blocking and copy")
    copy = positional[1] if len(positional) == 2 else copy
    dtype, device = dtype or input.dtype, input.device if device is None else device_of(device)
    if input.requires_grad and not dtype.is_floating_point:
        raise TypeError(f"to: a tensor with a gradient cannot become {dtype}; use .detach() first")
    if (input.device, input.dtype) != (device, dtype):
        input = To.apply(input, device, dtype)
    elif copy:
        input = clone(input)
    return input if memory_format == torch.preserve_format else contiguous(input, memory_format)
