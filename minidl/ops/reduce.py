"""Reductions. `dim` is one dimension, several, or None for all; with `keepdim` they stay with size 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import in_operations, linear, recordable
from minidl.kernels import check, reduce, scan
from minidl.kernels import elementwise as elementwise_kernels
from minidl.ops import compare, conditional, elementwise, extrema, indexing, unary
from minidl.ops.arguments import Dim
from minidl.ops.conditional import where
from minidl.ops.join import cat
from minidl.ops.shape import clone, expand, reshape, squeeze, to, wide
from minidl.tensors import Tensor

__all__ = [
    "all", "any", "cosine_similarity", "count_nonzero", "cumprod", "cumsum", "logsumexp", "mean", "norm",
    "normalize", "prod", "sum",
]  # fmt: skip


class Sum(Function):
    compute: Callable[..., torch.Tensor] = staticmethod(reduce.sum)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, dim: Dim, keepdim: bool) -> torch.Tensor:
        y = cls.compute(x, dim, keepdim)
        ctx.shape, ctx.keepdim_shape = x.shape, reduce.kept_shape(x, dim)
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return dy.reshape(ctx.keepdim_shape).expand(ctx.shape), None, None

    recorded_backward = backward


@recordable(divide=lambda dy, count: dy / count)
class Mean(Sum):
    compute, divide = staticmethod(reduce.mean), staticmethod(elementwise_kernels.div)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        count = ctx.shape.numel() // torch.Size(ctx.keepdim_shape).numel() if dy.numel() else 1
        return cls.divide(dy.reshape(ctx.keepdim_shape), count).expand(ctx.shape), None, None


def _norm_gradient(dy: Tensor, x: Tensor, y: Tensor, _: Dim) -> Tensor:
    zero = y == 0
    return x * where(zero, 0, dy / where(zero, 1, y))


@recordable(gradient=_norm_gradient)
class Norm(extrema.Reduction):
    compute = staticmethod(reduce.norm)
    gradient = staticmethod(lambda dy, x, y, _: elementwise_kernels.norm_grad(dy, x, y))


@in_operations
class NormOf(Function):
    """(sum |x|^p)^(1/p), or for p 0 the number of nonzero elements, whose gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, dim: Dim, keepdim: bool) -> torch.Tensor:
        ctx.p, ctx.keepdim_shape = p, reduce.kept_shape(x, dim)
        if p == 0:
            y = reduce.sum(elementwise_kernels.ne(x, 0).to(x.dtype), dim, keepdim)
        else:
            y = elementwise_kernels.pow(
                reduce.sum(elementwise_kernels.pow(elementwise_kernels.abs(x), p), dim, keepdim), 1 / p
            )
        ctx.save(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, y = ctx.saved
        y, dy = y.reshape(ctx.keepdim_shape), dy.reshape(ctx.keepdim_shape)
        zero = compare.logical_or(x == 0, y == (0 if ctx.p else y))
        slope = (where(zero, 1, unary.abs(x)) / where(y == 0, 1, y)) ** (ctx.p - 1)
        return where(y == y, where(zero, 0, dy * unary.sign(x) * slope), y), None, None, None


@linear(lambda ctx, x: Cumsum.apply(x, ctx.dim))
class Cumsum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return scan.cumsum(x, dim)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return scan.cumsum(dy, ctx.dim, reverse=True), None


def _convert(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else to(x, dtype)


def sum(input: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over `dim`, in its dtype; int64 for integers and bools. The sum of no elements is 0.

    With `dtype` the elements are converted to that first.

    Raises IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Sum.apply(_convert(input, dtype), dim, keepdim)


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums of the elements so far along `dim`; int64 for integers and bools. IndexError for one out of
    range."""
    input = input if dtype is None else to(input, dtype)
    if not input.dtype.is_floating_point:
        return Tensor(torch.cumsum(input.data, check.axis("cumsum", dim, max(input.ndim, 1))))
    return Cumsum.apply(input, dim)


def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the products of the elements so far along `dim`, computed in float64; int64 for integers and bools.

    Raises IndexError for a dimension out of range.
    """
    at = check.axis("cumprod", dim, max(input.ndim, 1))
    x = input if dtype is None else to(input, dtype)
    if not x.dtype.is_floating_point:
        return Tensor(torch.cumprod(x.data, at))
    if x.ndim == 0:
        return clone(x)
    products, n, step = to(x, torch.float64), x.shape[at], 1
    while step < n:  # of the last 2 step elements
        longer = elementwise.mul(
            indexing.narrow(products, at, step, n - step), indexing.narrow(products, at, 0, n - step)
        )
        products, step = cat([indexing.narrow(products, at, 0, step), longer], at), 2 * step
    return to(products, x.dtype, copy=True)


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Return log(sum(exp(input))) over `dim`, from the maximum, so that nothing overflows.

    -inf of no elements. Raises IndexError for a dimension out of range, TypeError for integers.
    """
    if input.numel() == 0:
        return unary.log(sum(unary.exp(input), dim, keepdim))
    maximum = extrema.amax(input.detach(), dim, True)
    maximum = where(compare.isfinite(maximum), maximum, 0)
    total = unary.log(sum(unary.exp(elementwise.sub(input, maximum)), dim, keepdim))
    return elementwise.add(total, reshape(maximum, *total.shape))


def prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the product along `dim`, or of all elements, by halves, after conversion to `dtype`.

    float16 is computed in float32. torch computes products of integers. The product of no elements is 1.
    Raises IndexError for a dimension out of range.
    """
    x = input if dtype is None else to(input, dtype)
    if not x.dtype.is_floating_point:
        return Tensor(torch.prod(x.data) if dim is None else torch.prod(x.data, dim, keepdim))
    at = 0 if dim is None else check.axis("prod", dim, max(x.ndim, 1))
    product = wide(x)
    product = reshape(product, x.numel()) if dim is None or x.ndim == 0 else product
    if not product.shape[at]:
        return to(elementwise.add(sum(product, at, keepdim), 1), x.dtype)
    odd = []  # odd elements, which have no partner
    while (n := product.shape[at]) > 1:
        if n % 2:
            odd.append(indexing.narrow(product, at, n - 1, 1))
        product = elementwise.mul(indexing.narrow(product, at, 0, n // 2), indexing.narrow(product, at, n // 2, n // 2))
    for part in odd:
        product = elementwise.mul(product, part)
    output = to(product, x.dtype)
    return output if keepdim and x.ndim and dim is not None else squeeze(output, at)


def mean(input: Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean over `dim`, of elements converted to `dtype`. The mean of no elements is NaN.

    Raises TypeError for integers, IndexError for a dimension out of range, ValueError for one named twice.
    """
    return Mean.apply(_convert(input, dtype), dim, keepdim)


def norm(input: Tensor, p: float | str = "fro", dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return the p-norm over `dim`, (sum |input|^p)^(1/p): the number of nonzero elements for p 0, the maximum for
    inf, the minimum for -inf, and for "fro" the norm of p 2. The gradient is 0 where input or the norm is 0; float16 is
    computed in float32.

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
        return (extrema.Max if p == math.inf else extrema.Min).apply(unary.abs(input), dim, keepdim)
    return to(NormOf.apply(wide(input), float(p), dim, keepdim), input.dtype)


def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """Return input divided by its p-norm along `dim`, or by eps if the norm is less. Raises as `norm`."""
    return elementwise.div(input, conditional.clamp(norm(input, p, dim, True), min=eps))


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the products of x1 and x2, each over its norm or eps, added up along `dim`; both broadcast."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    first, second = (normalize(expand(x, shape), 2, dim, eps) for x in (x1, x2))
    return sum(elementwise.mul(first, second), dim)


def any(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return whether any element along `dim` is not 0; along no dimensions, for each element. NaN is not 0. uint8 of
    uint8.

    Raises IndexError for a dimension out of range.
    """
    return _reduce_mask(torch.any, input, dim, keepdim)


def all(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Return whether every element along `dim` differs from 0, as `any`."""
    return _reduce_mask(torch.all, input, dim, keepdim)


def _reduce_mask(reduction: Callable[..., torch.Tensor], x: Tensor, dim: Dim, keepdim: bool) -> Tensor:
    axes = None if dim is None else check.axes(reduction.__name__, dim, max(x.ndim, 1))
    output = compare.nonzero_mask(x).clone() if axes == () else reduction(compare.nonzero_mask(x), axes, keepdim)
    return Tensor(output.to(torch.uint8) if x.dtype == torch.uint8 else output)


def count_nonzero(input: Tensor, dim: Any = None) -> Tensor:
    """Return the number of elements along `dim` that are not 0, int64."""
    return sum(Tensor(compare.nonzero_mask(input)), dim)
