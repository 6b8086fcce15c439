"""Largest and smallest elements and their positions.

`max`, `min` and `topk` along one dimension return values and positions: among equal elements the first has the position
and all of the gradient.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear, recordable
from minidl.kernels import check, memory_layout, reduce
from minidl.kernels import elementwise as elementwise_kernels
from minidl.ops import elementwise
from minidl.ops.arguments import Dim
from minidl.ops.binary import piecewise_linear
from minidl.ops.indexing import narrow
from minidl.ops.scatter_gather import gather
from minidl.ops.shape import expand, squeeze
from minidl.tensors import Tensor

__all__ = ["amax", "amin", "argmax", "argmin", "kthvalue", "max", "min", "topk"]


class Found(NamedTuple):
    """The largest or smallest elements along a dimension, and their positions along it, int64."""

    values: Tensor
    indices: Tensor


def _gradient(kernel: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return the gradient of an extremum whose kernel also reads the number of equal elements."""

    def gradient(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: Dim) -> torch.Tensor:
        return kernel(dy, x, y, reduce.count_equal(x, y, dim))

    return gradient


_amax_back, _max_back = _gradient(elementwise_kernels.amax_grad), _gradient(elementwise_kernels.max_grad)


class Reduction(Function):
    """A reduction whose gradient is computed from dy, its operand x, its result y, and `dim`."""

    compute: Callable[..., torch.Tensor]
    gradient: Callable[..., Any]

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = cls.compute(x, dim, keepdim)
        ctx.dim, ctx.keepdim_shape = dim, reduce.kept_shape(x, dim)
        ctx.save(x, y)
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        x, y = ctx.saved
        return cls.gradient(dy.reshape(ctx.keepdim_shape), x, y.reshape(ctx.keepdim_shape), ctx.dim), None, None


@recordable(gradient=piecewise_linear(_amax_back))
class Amax(Reduction):
    compute, gradient = staticmethod(reduce.amax), staticmethod(_amax_back)


class Amin(Amax):
    compute = staticmethod(reduce.amin)


@recordable(gradient=piecewise_linear(_max_back))
class Max(Amax):
    """The maximum whose gradient goes to NaN if x contains NaN."""

    gradient = staticmethod(_max_back)


class Min(Max):
    compute = staticmethod(reduce.amin)


def _at_positions(ctx: Any, x: Tensor) -> Tensor:
    """Return x at the positions that forward chose."""
    (indices,), (shape, _, dim) = ctx.saved, ctx.layout
    if not shape:
        return expand(x, *indices.shape)  # one element, or no elements
    positions = indices if indices.dim() == len(shape) else indices.unsqueeze(dim)
    return gather(x, dim, Tensor(positions)).reshape(indices.shape)


@linear(_at_positions)
class Chosen(Function):
    """Values and positions along one dimension; the gradient goes to the positions of the values."""

    @staticmethod
    def save_positions(
        ctx: Any, x: torch.Tensor, dim: int, y: torch.Tensor, indices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Save the values that backward needs, and return the outputs of forward."""
        ctx.layout = x.shape, memory_layout.dims(x), dim % x.dim() if x.dim() else 0
        ctx.save(indices)
        return y, indices

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: None) -> Any:
        (indices,) = ctx.saved
        shape, dims, dim = ctx.layout
        if shape:
            if indices.dim() < len(shape):
                dy, indices = dy.unsqueeze(dim), indices.unsqueeze(dim)
            dy = reduce.spread(dy, indices, shape, dims, dim)
        else:
            dy = reduce.sum_to(dy, shape)  # one element, or no elements
        return (dy, *(None for _ in ctx.needs[1:]))


class Extreme(Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keepdim: bool, smallest: bool) -> tuple[torch.Tensor, ...]:
        return Chosen.save_positions(ctx, x, dim, *reduce.extreme(x, dim, keepdim, smallest))


class Topk(Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, ...]:
        return Chosen.save_positions(ctx, x, dim, *reduce.leading(x, k, dim, largest))


def amax(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return the maximum over `dim`; NaN if any element is NaN, as is its gradient. Equal maxima share the gradient
    evenly.

    Raises ValueError for the maximum of no elements or a dimension named twice, IndexError for one out of range.
    """
    return Amax.apply(input, dim, keepdim)


def amin(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return the minimum over `dim`; NaN if any element is NaN. Equal minima share the gradient evenly. Raises as
    `amax`."""
    return Amin.apply(input, dim, keepdim)


def max(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
    """Return the maximum of input; or along `dim` (values, indices), the first NaN or maximum; or `maximum` of a
    Tensor.

    Without `dim` equal maxima, or NaNs, share the gradient evenly, along one the first has it all.
    Raises ValueError for the maximum of no elements, IndexError for a dimension out of range, TypeError for several,
    which `amax` takes.
    """
    return _extreme("max", input, dim, keepdim)


def min(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
    """Return the minimum of input; or along `dim` (values, indices); or `minimum` of a Tensor. As `max`."""
    return _extreme("min", input, dim, keepdim)


def _extreme(name: str, x: Tensor, dim: Any, keepdim: bool) -> Any:
    smallest = name == "min"
    if isinstance(dim, torch.Tensor):
        dim = Tensor(dim)
    if isinstance(dim, Tensor):
        return elementwise.minimum(x, dim) if smallest else elementwise.maximum(x, dim)
    if dim is None:
        return (Min if smallest else Max).apply(x, None, keepdim)
    if not hasattr(dim, "__index__") or isinstance(dim, bool):
        raise TypeError(f"{name}: dim is {dim!r}, expected one dimension or None; a{name} takes several")
    return Found(*Extreme.apply(x, dim, keepdim, smallest))


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the first maximum along `dim`, or in flattened input, as int64; of the first NaN if there is
    one.

    Raises ValueError for the maximum of no elements, IndexError for a dimension out of range, TypeError for several.
    """
    return Tensor(reduce.argmax(input.data, _one("argmax", input, dim), keepdim))


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the first minimum along `dim`, or in flattened input, as int64. As `argmax`."""
    return Tensor(reduce.argmin(input.data, _one("argmin", input, dim), keepdim))


def _one(name: str, x: Tensor, dim: Any) -> int | None:
    return None if dim is None else check.axis(name, dim, builtins.max(x.ndim, 1))


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Found:
    """Return the k largest elements along `dim` (or smallest), in order, and their indices; NaN counts as above all
    others.

    Of equal elements the first comes first. They are in order also where `sorted` is False.
    Raises ValueError unless 0 <= k <= the size of `dim`, IndexError for a dimension out of range.
    """
    return Found(*Topk.apply(input, k, dim, largest))


def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Found:
    """Return the k-th smallest element along `dim`, counted from 1, and its index; NaN counts as above all others.

    Raises ValueError unless 1 <= k <= the size of `dim`, IndexError for a dimension out of range.
    """
    at, k = check.axis("kthvalue", dim, builtins.max(input.ndim, 1)), check.integer("kthvalue", "k", k)
    size = input.shape[at] if input.ndim else 1
    if not 1 <= k <= size:
        raise ValueError(f"kthvalue: k is {k}, expected 1 to {size}, the size of dim {dim}")
    smallest = topk(input, k, at, largest=False)
    if not input.ndim:
        return smallest
    last = [narrow(part, at, k - 1, 1) for part in smallest]
    return Found(*last) if keepdim else Found(*(squeeze(part, at) for part in last))
