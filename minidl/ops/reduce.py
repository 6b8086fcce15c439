"""Reductions. `dim` is one dimension, several, or None for all; with `keepdim` they stay with size 1.

`max`, `min` and `topk` along one dimension give values and positions, as torch's: of equal elements the first has the
position and all of the gradient.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from minidl.autograd import Function
from minidl.kernels import check, elementwise, memory_layout, reduce
from minidl.ops import elementwise as pointwise
from minidl.ops import unary, view
from minidl.tensors import Tensor

__all__ = ["amax", "amin", "argmax", "argmin", "max", "mean", "min", "norm", "sum", "topk"]

Dim = int | Sequence[int] | None


class Found(NamedTuple):
    """The largest or smallest elements along a dimension, and their positions there, int64."""

    values: Tensor
    indices: Tensor


class Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.sum(x, dim, keepdim)
        ctx.shape, ctx.kept = x.shape, reduce.kept_shape(x, dim)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy.reshape(ctx.kept).expand(ctx.shape), None, None


class Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.mean(x, dim, keepdim)
        ctx.shape, ctx.kept = x.shape, reduce.kept_shape(x, dim)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        count = ctx.shape.numel() // torch.Size(ctx.kept).numel() if dy.numel() else 1
        return elementwise.div(dy.reshape(ctx.kept), count).expand(ctx.shape), None, None


class Amax(Function):
    compute: Callable[..., torch.Tensor] = staticmethod(reduce.amax)
    gradient: Callable[..., torch.Tensor] = staticmethod(elementwise.amax_grad)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = cls.compute(x, dim, keepdim)
        ctx.dim, ctx.kept = dim, reduce.kept_shape(x, dim)
        ctx.save(x, y)
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        x, y = ctx.saved
        y, dy = y.reshape(ctx.kept), dy.reshape(ctx.kept)
        return cls.gradient(dy, x, y, reduce.count_equal(x, y, ctx.dim)), None, None


class Amin(Amax):
    compute = staticmethod(reduce.amin)


class Max(Amax):
    """The maximum whose gradient goes to NaN where there is one."""

    gradient = staticmethod(elementwise.max_grad)


class Min(Max):
    compute = staticmethod(reduce.amin)


class Chosen(Function):
    """Values and positions along one dimension; the gradient goes back to where the values were."""

    @staticmethod
    def kept(ctx: Any, x: torch.Tensor, dim: int, y: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What forward returns, with what backward needs."""
        ctx.place = x.shape, memory_layout.dims(x), dim % x.dim() if x.dim() else 0
        ctx.save(found)
        return y, found

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: None) -> Any:
        (found,) = ctx.saved
        shape, dims, dim = ctx.place
        if shape:
            if found.dim() < len(shape):
                dy, found = dy.unsqueeze(dim), found.unsqueeze(dim)
            dy = reduce.spread(dy, found, shape, dims, dim)
        else:
            dy = reduce.sum_to(dy, shape)  # of one element, or of none
        return (dy, *(None for _ in ctx.needs[1:]))


class Extreme(Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keepdim: bool, smallest: bool) -> tuple[torch.Tensor, ...]:
        return Chosen.kept(ctx, x, dim, *reduce.extreme(x, dim, keepdim, smallest))


class Topk(Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, ...]:
        return Chosen.kept(ctx, x, dim, *reduce.leading(x, k, dim, largest))


class Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = reduce.norm(x, dim, keepdim)
        ctx.kept = reduce.kept_shape(x, dim)
        ctx.save(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, y = ctx.saved
        return elementwise.norm_grad(dy.reshape(ctx.kept), x, y.reshape(ctx.kept)), None, None


class NormOf(Function):
    """(sum |x|^p)^(1/p), or for p 0 how many are not 0, whose gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, dim: Dim, keepdim: bool) -> torch.Tensor:
        ctx.p, ctx.kept = p, reduce.kept_shape(x, dim)
        if p == 0:
            y = reduce.sum(elementwise.ne(x, 0).to(x.dtype), dim, keepdim)
        else:
            y = elementwise.pow(reduce.sum(elementwise.pow(elementwise.abs(x), p), dim, keepdim), 1 / p)
        ctx.save(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, y = ctx.saved
        if ctx.p == 0:
            return torch.zeros_like(x), None, None, None
        y, dy = y.reshape(ctx.kept), dy.reshape(ctx.kept)
        slope = elementwise.pow(elementwise.div(elementwise.abs(x), y), ctx.p - 1)
        dx = elementwise.mul(elementwise.mul(dy, elementwise.sign(x)), slope)
        for zero in (x, y):
            dx = elementwise.where(elementwise.eq(zero, 0), 0, dx)
        return elementwise.where(elementwise.eq(y, y), dx, y), None, None, None


def _converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else view.to(x, dtype)


def sum(input: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over `dim`, in its dtype; int64 for integers and bools. The sum of no elements is 0.

    With `dtype` the elements are converted to that first.

    Raises IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Sum.apply(_converted(input, dtype), dim, keepdim)


def mean(input: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over `dim`, of elements converted to `dtype` if given. The mean of no elements is NaN.

    Raises TypeError for integers, IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Mean.apply(_converted(input, dtype), dim, keepdim)


def amax(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The maximum over `dim`; NaN if any element is NaN, as is its gradient. Equal maxima share the gradient evenly.

    Raises ValueError for the maximum of no elements or a dimension named twice, IndexError for one out of range.
    """
    return Amax.apply(input, dim, keepdim)


def amin(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The minimum over `dim`; NaN if any element is NaN. Equal minima share the gradient evenly. Raises as `amax`."""
    return Amin.apply(input, dim, keepdim)


def max(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
    """The maximum of input; or along `dim` (values, indices), the first NaN or maximum; or `maximum` of a Tensor.

    Without `dim` equal maxima, or NaNs, share the gradient evenly, along one the first has it all.
    Raises ValueError for the maximum of no elements, IndexError for a dimension out of range, TypeError for several,
    which `amax` takes.
    """
    return _extreme("max", input, dim, keepdim)


def min(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
    """The minimum of input; or along `dim` (values, indices); or `minimum` of a Tensor. As `max`."""
    return _extreme("min", input, dim, keepdim)


def _extreme(name: str, x: Tensor, dim: Any, keepdim: bool) -> Any:
    smallest = name == "min"
    if isinstance(dim, torch.Tensor):
        dim = Tensor(dim)
    if isinstance(dim, Tensor):
        return pointwise.minimum(x, dim) if smallest else pointwise.maximum(x, dim)
    if dim is None:
        return (Min if smallest else Max).apply(x, None, keepdim)
    if not hasattr(dim, "__index__") or isinstance(dim, bool):
        raise TypeError(f"{name}: dim is {dim!r}, expected one dimension, or none for all; a{name} takes several")
    return Found(*Extreme.apply(x, dim, keepdim, smallest))


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Found:
    """The k largest elements along `dim` (or smallest), in order, and their indices; NaN counts as above all others.

    Of equal elements the first comes first. They are in order also where `sorted` is False.
    Raises ValueError unless 0 <= k <= the size of `dim`, IndexError for a dimension out of range.
    """
    return Found(*Topk.apply(input, k, dim, largest))


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first maximum along `dim`, or in flattened input, as int64; of the first NaN if there is one.

    Raises ValueError for the maximum of no elements, IndexError for a dimension out of range, TypeError for several.
    """
    return Tensor(reduce.argmax(input.data, _one("argmax", input, dim), keepdim))


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the first minimum along `dim`, or in flattened input, as int64. As `argmax`."""
    return Tensor(reduce.argmin(input.data, _one("argmin", input, dim), keepdim))


def _one(name: str, x: Tensor, dim: Any) -> int | None:
    return None if dim is None else check.axis(name, dim, builtins.max(x.ndim, 1))


def norm(input: Tensor, p: float | str = "fro", dim: Dim = None, keepdim: bool = False) -> Tensor:
    """The p-norm over `dim`, (sum |input|^p)^(1/p): how many are not 0 for p 0, the largest for inf, the smallest for
    -inf, and for "fro" that of p 2. The gradient is 0 where input or the norm is 0; float16 is computed in float32.

    Raises ValueError for the nuclear norm or a dimension named twice, TypeError for integers, IndexError for a
    dimension out of range.
    """
    check.floating("norm", x=input.data)
    if p in ("fro", 2):
        return Norm.apply(input, dim, keepdim)
    if isinstance(p, str):
        raise ValueError(f"norm: p is {p!r}, expected a number or 'fro'; for the nuclear norm see torch.linalg")
    if p == 1:
        return sum(unary.abs(input), dim, keepdim)
    if p in (math.inf, -math.inf):
        return (Max if p == math.inf else Min).apply(unary.abs(input), dim, keepdim)
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return view.to(NormOf.apply(view.to(input, wide), float(p), dim, keepdim), input.dtype)
