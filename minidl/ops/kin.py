"""Short forms that torch has for views, choices, comparisons and products that are here already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.kernels import check
from minidl.ops import activation, elementwise, linalg, pieces, reduce, unary, view
from minidl.tensors import Scalar, Tensor

__all__ = [
    "addmm", "allclose", "clip", "cosine_similarity", "count_nonzero", "dot", "equal", "hstack", "isclose", "isfinite",
    "isinf", "isnan", "lerp", "log10", "logical_xor", "logsigmoid", "logsumexp", "masked_select", "meshgrid", "movedim",
    "mv", "narrow", "nonzero", "normalize", "pixel_unshuffle", "prod", "select", "softmin", "std_mean", "swapaxes",
    "tile", "trace", "tril", "triu", "unbind", "unflatten", "var_mean", "vstack",
]  # fmt: skip


def isnan(input: Tensor) -> Tensor:
    """Where input is NaN."""
    return elementwise.ne(input, input)


def isinf(input: Tensor) -> Tensor:
    """Where input is infinite, of either sign."""
    return elementwise.eq(unary.abs(input), math.inf)


def isfinite(input: Tensor) -> Tensor:
    """Where input is neither infinite nor NaN."""
    return elementwise.lt(unary.abs(input), math.inf)


def equal(input: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and the same values; NaN equals nothing."""
    return input.shape == other.shape and bool(pieces.all(elementwise.eq(input, other)))


def isclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Where |input - other| <= atol + rtol |other|. TypeError for two floating types, ValueError for less than 0."""
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"isclose: rtol is {rtol} and atol {atol}, expected numbers from 0")
    off = unary.abs(elementwise.sub(input, other))
    near = elementwise.le(off, elementwise.add(elementwise.mul(unary.abs(other), rtol), atol))
    near = pieces.logical_or(pieces.logical_and(near, isfinite(off)), elementwise.eq(input, other))
    return pieces.logical_or(near, pieces.logical_and(isnan(input), isnan(other))) if equal_nan else near


def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether `isclose` everywhere."""
    return bool(pieces.all(isclose(input, other, rtol, atol, equal_nan)))


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) over `dim`, from the maximum, so that nothing overflows.

    -inf of no elements. Raises IndexError for a dimension out of range, TypeError for integers.
    """
    if input.numel() == 0:
        return unary.log(reduce.sum(unary.exp(input), dim, keepdim))
    most = reduce.amax(input.detach(), dim, True)
    most = elementwise.where(isfinite(most), most, 0)
    total = unary.log(reduce.sum(unary.exp(elementwise.sub(input, most)), dim, keepdim))
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
    at = check.axis("unbind", dim, input.ndim)
    return tuple(view.squeeze(part, at) for part in pieces.split(input, 1, at)) if input.shape[at] else ()


def select(input: Tensor, dim: int, index: int) -> Tensor:
    """The view at one place along `dim`. Raises IndexError out of range."""
    at = check.axis("select", dim, input.ndim)
    return view.getitem(input, (*[slice(None)] * at, index))


def narrow(input: Tensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    """The view of `length` places from `start` along `dim`. Raises IndexError, or ValueError where that is outside."""
    at = check.axis("narrow", dim, input.ndim)
    total = input.shape[at]
    if isinstance(start, Tensor) and (start.ndim or start.dtype.is_floating_point or start.dtype == torch.bool):
        raise TypeError(f"narrow: start is {start.dtype} {list(start.shape)}, expected a whole number")
    start, length = check.whole("narrow", "start", start), check.whole("narrow", "length", length)
    start = start + total if start < 0 else start
    if not 0 <= start <= start + length <= total:
        raise ValueError(f"narrow: {length} places from {start} are outside of {total}")
    return view.getitem(input, (*[slice(None)] * at, slice(start, start + length)))


def movedim(input: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """The view with dimensions, one or several, in other places.

    Raises IndexError for a dimension out of range, ValueError unless as many places are named, each once.
    """
    here = check.axes("movedim", source, input.ndim, "source")
    there = check.axes("movedim", destination, input.ndim, "destination")
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


def prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product along `dim`, or of all elements, by halves; of elements converted to `dtype` if given.

    float16 is computed in float32. That of integers is torch's, and that of no elements is 1.
    Raises IndexError for a dimension out of range.
    """
    x = input if dtype is None else view.to(input, dtype)
    if not x.dtype.is_floating_point:
        return Tensor(torch.prod(x.data) if dim is None else torch.prod(x.data, dim, keepdim))
    at = 0 if dim is None else check.axis("prod", dim, max(x.ndim, 1))
    wide = view.to(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    wide = view.reshape(wide, x.numel()) if dim is None or x.ndim == 0 else wide
    if not wide.shape[at]:
        return view.to(elementwise.add(reduce.sum(wide, at, keepdim), 1), x.dtype)
    left = []  # what has no partner
    while (n := wide.shape[at]) > 1:
        if n % 2:
            left.append(narrow(wide, at, n - 1, 1))
        wide = elementwise.mul(narrow(wide, at, 0, n // 2), narrow(wide, at, n // 2, n // 2))
    for part in left:
        wide = elementwise.mul(wide, part)
    found = view.to(wide, x.dtype)
    return found if keepdim and x.ndim and dim is not None else view.squeeze(found, at)


def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Views of vectors as grids, one for each, of all their sizes; with indexing "xy" the first two are exchanged."""
    given = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    if indexing not in (None, "ij", "xy") or any(t.ndim > 1 for t in given):
        raise ValueError(
            f'meshgrid: got {[t.ndim for t in given]} dimensions and {indexing!r}, expected vectors, "ij" or "xy"'
        )
    swap = indexing == "xy" and len(given) > 1
    order = [1, 0, *range(2, len(given))] if swap else [*range(len(given))]
    sizes = [given[i].numel() for i in order]
    grids = [
        view.expand(view.reshape(t, *(t.numel() if k == i else 1 for k in order)), sizes) for i, t in enumerate(given)
    ]
    return tuple(grids)


def tile(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """`repeat`, where `dims` may name the last dimensions alone."""
    counts = check.unpacked("tile", "dims", dims)
    return pieces.repeat(input, *(1,) * (input.ndim - len(counts)), *counts)


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The dimension as several of these sizes, one of which may be -1."""
    at = check.axis("unflatten", dim, input.ndim)
    total, known = input.shape[at], math.prod(n for n in sizes if n != -1)
    new = [total // max(known, 1) if n == -1 else n for n in sizes]
    if math.prod(new) != total:
        raise ValueError(f"unflatten: {list(sizes)} does not fit a dimension of {total}")
    return view.reshape(input, *input.shape[:at], *new, *input.shape[at + 1 :])


def swapaxes(input: Tensor, axis0: int, axis1: int) -> Tensor:
    """`transpose`."""
    return view.transpose(input, axis0, axis1)


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors joined along their second dimension, vectors along their first."""
    parts = [t if t.ndim else view.reshape(t, 1) for t in tensors]
    return view.cat(parts, 0 if parts and parts[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors joined along their first dimension, vectors as rows."""
    return view.cat([t if t.ndim > 1 else view.reshape(t, 1, t.numel()) for t in tensors], 0)


def trace(input: Tensor) -> Tensor:
    """The sum of a matrix's diagonal. Raises ValueError for others."""
    if input.ndim != 2:
        raise ValueError(f"trace: input has shape {list(input.shape)}, expected a matrix")
    return reduce.sum(view.diagonal(input))


def count_nonzero(input: Tensor, dim: Any = None) -> Tensor:
    """How many elements along `dim` are not 0, int64."""
    return reduce.sum(Tensor(pieces.truths(input)), dim)


def logical_xor(input: Tensor, other: Tensor) -> Tensor:
    """Whether just one of them is not 0."""
    return Tensor(torch.logical_xor(pieces.truths(input), pieces.truths(other)))


def log10(input: Tensor) -> Tensor:
    """The logarithm to the base 10. Raises TypeError for integers."""
    return elementwise.mul(unary.log2(input), math.log10(2))


def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """input + weight (end - input), weight a number or a tensor. Raises as `add`."""
    return elementwise.add(input, elementwise.mul(elementwise.sub(end, input), weight))


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """beta input + alpha mat1 mat2; input broadcasts. Raises as `mm` and `add`."""
    product = linalg.matmul(mat1, mat2)
    product = product if alpha == 1 else elementwise.mul(product, alpha)
    if beta == 0:
        return product
    return elementwise.add(product, input if beta == 1 else elementwise.mul(input, beta))


def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """input divided by its p-norm along `dim`, or by eps where that is less. Raises as `norm`."""
    return elementwise.div(input, elementwise.clamp(reduce.norm(input, p, dim, True), min=eps))


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The products of x1 and x2, each over its norm or eps, added up along `dim`; both broadcast."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    first, second = (normalize(view.expand(x, shape), 2, dim, eps) for x in (x1, x2))
    return reduce.sum(elementwise.mul(first, second), dim)


def logsigmoid(input: Tensor) -> Tensor:
    """log(1 / (1 + e^-input)), exact where it is small or large. Raises TypeError for integers."""
    soft = unary.log1p(unary.exp(unary.neg(unary.abs(input))))
    return elementwise.sub(elementwise.minimum(input, 0), soft)


def softmin(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`softmax` of -input."""
    return activation.softmax(unary.neg(input), dim, dtype=dtype)


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """[..., C, H r, W r] as [..., C r^2, H, W] for r = downscale_factor: what `pixel_shuffle` undoes."""
    r = downscale_factor
    if input.ndim < 3 or r < 1 or input.shape[-1] % r or input.shape[-2] % r:
        raise ValueError(f"pixel_unshuffle: input {list(input.shape)} is no image of a multiple of {r} pixels each way")
    *first, C, H, W = input.shape
    x = view.reshape(input, math.prod(first), C, H // r, r, W // r, r)
    return view.reshape(view.permute(x, 0, 1, 3, 5, 2, 4), *first, C * r * r, H // r, W // r)


def var_mean(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`var` and `mean`."""
    return pieces.var(input, dim, unbiased, keepdim, correction=correction), _mean(input, dim, keepdim)


def std_mean(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`std` and `mean`."""
    return pieces.std(input, dim, unbiased, keepdim, correction=correction), _mean(input, dim, keepdim)


def _mean(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    return reduce.mean(x, None if isinstance(dim, bool) else dim, keepdim)
