"""Indexing with tensors: a view, and rows of that view selected by integers.

Integers, slices, None and ... select a view first. Tensors then select positions along dimensions of the view; a mask
selects the positions where it is true. Dimensions of adjacent tensors keep their position, others come first, as in
torch. torch computes the integers; `kernels.lookup` moves the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import check, memory_layout
from minidl.ops import compare
from minidl.ops.lookup import Embedding
from minidl.ops.shape import expand, permute, reshape
from minidl.tensors import Tensor

__all__ = ["getitem", "masked_select", "narrow", "nonzero", "select"]


@linear(lambda ctx, x: GetItem.apply(x, ctx.index))
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


def getitem(x: Tensor, index: Any) -> Tensor:
    """Return x[index]: a view for integers, slices, None and ..., a copy for masks and tensors of integers.

    The gradient sums equal positions in order. Raises TypeError for any other index, IndexError out of range; on a GPU,
    where a check would wait for the device, a tensor's index out of range selects NaN.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if all(map(is_basic, parts)):
        return GetItem.apply(x, index)
    basic, dims, tensors = parse(x.shape, parts, x.device)
    y = x if all(part == slice(None) for part in basic) else GetItem.apply(x, basic)
    if not dims:
        return y
    rest = [dim for dim in range(y.ndim) if dim not in dims]
    sizes, rest_sizes = [y.shape[dim] for dim in dims], [y.shape[dim] for dim in rest]
    at = flat_index(tensors, sizes)
    table = reshape(permute(y, *dims, *rest), math.prod(sizes), math.prod(rest_sizes))
    selected = Embedding.apply(at, table, -1) if table.dtype.is_floating_point else Tensor(table.data[at])
    selected = reshape(selected, *at.shape, *rest_sizes)
    if dims[0] == 0 or dims[-1] - dims[0] >= len(dims):
        return selected
    order = list(range(at.dim(), at.dim() + dims[0])), list(range(at.dim()))
    return permute(selected, *order[0], *order[1], *range(at.dim() + dims[0], selected.ndim))


def select(input: Tensor, dim: int, index: int) -> Tensor:
    """Return the view at one position along `dim`. Raises IndexError out of range."""
    at = check.axis("select", dim, input.ndim)
    return getitem(input, (*[slice(None)] * at, index))


def narrow(input: Tensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    """Return the view of `length` positions from `start` along `dim`. Raises IndexError, or ValueError where that is
    outside."""
    at = check.axis("narrow", dim, input.ndim)
    total = input.shape[at]
    if isinstance(start, Tensor) and (start.ndim or start.dtype.is_floating_point or start.dtype == torch.bool):
        raise TypeError(f"narrow: start is {start.dtype} {list(start.shape)}, expected a whole number")
    start, length = check.integer("narrow", "start", start), check.integer("narrow", "length", length)
    start = start + total if start < 0 else start
    if not 0 <= start <= start + length <= total:
        raise ValueError(f"narrow: {length} positions from {start} are outside of {total}")
    return getitem(input, (*[slice(None)] * at, slice(start, start + length)))


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """Return the elements where mask is true, [K]; both broadcast. The gradient goes back to them."""
    shape = torch.broadcast_shapes(input.shape, mask.shape, (1,))
    return getitem(expand(input, shape), Tensor(mask.data.expand(shape)))


def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    """Return the positions where input is not 0, int64 [K, dimensions], or [K] for each dimension; waits for the
    device."""
    mask = compare.nonzero_mask(input)
    positions = torch.nonzero(mask.reshape(1) if as_tuple and input.ndim == 0 else mask)
    return tuple(Tensor(column) for column in positions.unbind(1)) if as_tuple else Tensor(positions)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class ParsedIndex(NamedTuple):
    basic: tuple[Any, ...]  # the index of the view
    dims: list[int]  # dimensions of the view that tensors index
    tensors: list[torch.Tensor]  # int64 on the tensor's device, one for each of dims


def is_basic(part: Any) -> bool:
    """Return whether a part of an index selects a view."""
    integer = isinstance(part, int) and not isinstance(part, bool)
    return part is None or part is Ellipsis or isinstance(part, slice) or integer


def parse(shape: Sequence[int], parts: Sequence[Any], device: torch.device) -> ParsedIndex:
    """Parse an index of a tensor of this shape.

    Raises TypeError if it is no index, IndexError if it does not fit.
    """
    if len(parts) == 1 and isinstance(parts[0], list) and any(map(_takes_a_dimension, parts[0])):
        raise TypeError(
            "a list of lists, slices or tensors as an index is split by torch, as in x[tuple(index)], but not by "
            "NumPy; write that, or x[minidl.tensor(index)] for one index"
        )
    entries = [part if is_basic(part) else _as_index(part, device) for part in parts]
    count_of_dims = sum(part.dim() if _is_mask(part) else part is not None and part is not Ellipsis for part in entries)
    if count_of_dims > len(shape):
        raise IndexError(f"too many indices: {count_of_dims} for a tensor of {len(shape)} dimensions")
    dots = [i for i, part in enumerate(entries) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can contain ... only once")
    at = dots[0] if dots else len(entries)
    entries[at : at + 1] = [slice(None)] * (len(shape) - count_of_dims)
    basic: list[Any] = []
    dims: list[int] = []
    index: list[torch.Tensor] = []
    dim = 0  # dimension of the tensor
    for part in entries:
        count = part.dim() if _is_mask(part) else part is not None
        if isinstance(part, torch.Tensor):
            if _is_mask(part) and tuple(part.shape) != tuple(shape[dim : dim + count]):
                raise IndexError(
                    f"a mask of shape {list(part.shape)} does not fit {list(shape[dim : dim + count])}, the sizes it "
                    "indexes"
                )
            first = sum(not isinstance(before, int) for before in basic)
            dims += range(first, first + count)
            index += part.nonzero(as_tuple=True) if _is_mask(part) else [part]
            basic += [slice(None)] * count
        else:
            basic.append(part)
        dim += count
    return ParsedIndex(tuple(basic), dims, index)


def _takes_a_dimension(part: Any) -> bool:
    return isinstance(part, slice | EllipsisType | None) or hasattr(part, "__len__")


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.bool


def _as_index(part: Any, device: torch.device) -> Any:
    """Return an integer tensor or a mask, on the device; an int for one without dimensions."""
    part = part.data if isinstance(part, Tensor) else part
    if getattr(getattr(part, "dtype", None), "kind", "") in ("i", "u") and part.shape == ():
        return int(part)  # a NumPy integer of any width
    if isinstance(part, list | range) or hasattr(part, "__array__"):
        try:
            part = torch.as_tensor(part if not isinstance(part, range) else list(part))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"getitem: a tensor is indexed by integers, slices, None, ..., masks and tensors: {error}"
            ) from error
        part = part.long() if part.numel() == 0 else part
    if not isinstance(part, torch.Tensor):
        raise TypeError(
            f"getitem: a tensor is indexed by integers, slices, None, ..., masks and tensors, got {type(part).__name__}"
        )
    if part.dtype not in (*INTEGERS, torch.bool) or (part.dtype == torch.bool and part.dim() == 0):
        raise TypeError(
            f"getitem: a tensor is indexed by tensors of integers or a mask, got {part.dtype} {list(part.shape)}"
        )
    if part.dim() == 0:
        return int(part)
    return part.to(device) if part.dtype == torch.bool else part.to(device, torch.int64)


def flat_index(index: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the positions as one int64 index into the flattened dimensions of these sizes.

    Raises IndexError for tensors that do not broadcast, and on the CPU for one out of range; on a GPU, where a
    check would wait for the device, the index is -1.
    """
    try:
        index = torch.broadcast_tensors(*index)
    except RuntimeError as error:
        shapes = " and ".join(str(list(each.shape)) for each in index)
        raise IndexError(f"shapes {shapes} of the tensors in an index do not broadcast") from error
    inside = torch.ones((), dtype=torch.bool, device=index[0].device)
    at = torch.zeros((), dtype=torch.int64, device=index[0].device)
    for each, size in zip(index, sizes, strict=True):
        fits = (each >= -size) & (each < size)
        if not each.is_cuda and not bool(fits.all()):
            raise IndexError(f"index {int(each[~fits][0])} is out of range for a dimension of size {size}")
        inside = inside & fits
        at = at * size + torch.where(each < 0, each + size, each)
    return torch.where(inside, at, -1) if at.is_cuda else at
