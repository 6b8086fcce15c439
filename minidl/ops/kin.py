"""Short forms that torch has for views, choices, comparisons and products that are here already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.ops import elementwise, linalg, pieces, reduce, view
from minidl.runtime import check
from minidl.tensors import Scalar, Tensor

__all__ = [
    "allclose", "clip", "dot", "equal", "isfinite", "isinf", "isnan", "logsumexp", "masked_select", "movedim", "mv",
    "narrow", "nonzero", "select", "tril", "triu", "unbind",
]  # fmt: skip


def isnan(input: Tensor) -> Tensor:
    """Where input is NaN."""
    return elementwise.ne(input, input)


def isinf(input: Tensor) -> Tensor:
    """Where input is infinite, of either sign."""
    return elementwise.eq(elementwise.abs(input), math.inf)


def isfinite(input: Tensor) -> Tensor:
    """Where input is neither infinite nor NaN."""
    return elementwise.lt(elementwise.abs(input), math.inf)


def equal(input: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and the same values; NaN equals nothing."""
    return input.shape == other.shape and bool(pieces.all(elementwise.eq(input, other)))


def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether |input - other| <= atol + rtol |other| everywhere. TypeError for two floating types."""
    off = elementwise.abs(elementwise.sub(input, other))
    near = elementwise.le(off, elementwise.add(elementwise.mul(elementwise.abs(other), rtol), atol))
    near = pieces.logical_or(pieces.logical_and(near, isfinite(off)), elementwise.eq(input, other))
    if equal_nan:
        near = pieces.logical_or(near, pieces.logical_and(isnan(input), isnan(other)))
    return bool(pieces.all(near))


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) over `dim`, from the maximum, so that nothing overflows.

    Raises ValueError for no elements, IndexError for a dimension out of range, TypeError for integers.
    """
    most = reduce.amax(input.detach(), dim, True)
    most = elementwise.where(isfinite(most), most, 0)
    total = elementwise.log(reduce.sum(elementwise.exp(elementwise.sub(input, most)), dim, keepdim))
    return elementwise.add(total, view.reshape(most, *total.shape))


def dot(input: Tensor, tensor: Tensor) -> Tensor:
    """The sum of the products of two vectors. Raises ValueError for others."""
    if input.ndim != 1 or tensor.ndim != 1:
        raise ValueError(f"dot: got shapes {list(input.shape)} and {list(tensor.shape)}, expected two vectors")
    return linalg.matmul(input, tensor)


def mv(input: Tensor, vec: Tensor) -> Tensor:
    """A matrix times a vector. Raises ValueError for others."""
    if input.ndim != 2 or vec.ndim != 1:
        raise ValueError(f"mv: got shapes {list(input.shape)} and {list(vec.shape)}, expected a matrix and a vector")
    return linalg.matmul(input, vec)


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """0 above a diagonal of the last two dimensions. Raises ValueError for a vector."""
    return _triangle("tril", input, diagonal)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """0 below a diagonal of the last two dimensions. Raises ValueError for a vector."""
    return _triangle("triu", input, diagonal)


def _triangle(name: str, x: Tensor, diagonal: int) -> Tensor:
    if x.ndim < 2:
        raise ValueError(f"{name}: input has shape {list(x.shape)}, expected two dimensions or more")
    kept = getattr(torch, name)(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device), diagonal)
    return pieces.masked_fill(x, Tensor(~kept), 0)


def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Views at each place along `dim`. Raises IndexError for a dimension out of range."""
    return tuple(view.squeeze(part, dim) for part in pieces.split(input, 1, dim)) if input.shape[dim] else ()


def select(input: Tensor, dim: int, index: int) -> Tensor:
    """The view at one place along `dim`. Raises IndexError out of range."""
    at = check.axis("select", dim, input.ndim)
    return view.getitem(input, (*[slice(None)] * at, index))


def narrow(input: Tensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    """The view of `length` places from `start` along `dim`. Raises IndexError, or ValueError where that is outside."""
    at = check.axis("narrow", dim, input.ndim)
    total = input.shape[at]
    start = int(start)  # a tensor of one number, too
    start = start + total if start < 0 else start
    if not 0 <= start <= start + length <= total:
        raise ValueError(f"narrow: {length} places from {start} are outside of {total}")
    return view.getitem(input, (*[slice(None)] * at, slice(start, start + length)))


def movedim(input: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """The view with dimensions, one or several, in other places.

    Raises IndexError for a dimension out of range, ValueError unless as many places are named, each once.
    """
    given = [[dims] if isinstance(dims, int) else list(dims) for dims in (source, destination)]
    here, there = ([check.axis("movedim", dim, input.ndim) for dim in dims] for dims in given)
    if len(set(here)) != len(set(there)) or len(here) != len(set(here)) or len(there) != len(here):
        raise ValueError(
            f"movedim: source {source} and destination {destination} do not name as many dimensions, each once"
        )
    dims = [dim for dim in range(input.ndim) if dim not in here]
    for place, dim in sorted(zip(there, here, strict=True)):
        dims.insert(place, dim)
    return view.permute(input, *dims)


def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    """The places where input is not 0, int64 [K, dimensions], or [K] for each dimension; waits for the device."""
    truths = pieces.truths(input)
    found = torch.nonzero(truths.reshape(1) if as_tuple and input.ndim == 0 else truths)
    return tuple(Tensor(places) for places in found.unbind(1)) if as_tuple else Tensor(found)


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """The elements where mask is true, [K]; both broadcast. The gradient goes back to them."""
    shape = torch.broadcast_shapes(input.shape, mask.shape, (1,))
    return view.getitem(view.expand(input, shape), Tensor(mask.data.expand(shape)))


def clip(input: Tensor, min: Scalar | Tensor | None = None, max: Scalar | Tensor | None = None) -> Tensor:
    """`clamp`."""
    return elementwise.clamp(input, min, max)
