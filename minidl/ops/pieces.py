"""Parts of tensors put elsewhere, running sums, spread: what is made of other operations, and `cumsum`.

Integers and truths are torch's arithmetic; every sum and product of floating values is one of the operations it names.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import scan
from minidl.ops import elementwise, reduce, view
from minidl.ops.promotion import alike, python_number
from minidl.runtime import check
from minidl.tensors import Scalar, Tensor

__all__ = [
    "all", "any", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "chunk", "cumsum", "flip",
    "floor_divide", "gather", "index_select", "logical_and", "logical_not", "logical_or", "masked_fill", "one_hot",
    "outer", "remainder", "repeat", "split", "std", "var",
]  # fmt: skip

Dim = int | Sequence[int] | None


class Cumsum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return scan.cumsum(x, dim)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return scan.cumsum(dy, ctx.dim, reverse=True), None


class Split(Function):
    """Views of x; the gradient is theirs joined, zeros for those that were not used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: tuple[int, ...], dim: int) -> tuple[torch.Tensor, ...]:
        parts = x.split(sizes, dim)
        ctx.dim, ctx.like = dim, [(part.shape, part.dtype, part.device) for part in parts]
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
            for dy, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        return torch.cat(parts, ctx.dim), None, None


class Flip(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        ctx.dims = dims
        return x.flip(dims)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy.flip(ctx.dims), None


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sums of the elements so far along `dim`; int64 for integers and bools. IndexError for one out of range."""
    input = input if dtype is None else view.to(input, dtype)
    if not input.dtype.is_floating_point:
        return Tensor(torch.cumsum(input.data, check.axis("cumsum", dim, max(input.ndim, 1))))
    return Cumsum.apply(input, dim)


def split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Views of `tensor` along `dim`: of one size, the last perhaps smaller, or of the sizes given, which add up.

    Raises ValueError for sizes that do not fit, IndexError for a dimension out of range.
    """
    at = check.axis("split", dim, tensor.ndim)
    total = tensor.shape[at]
    if isinstance(split_size_or_sections, int):
        each = split_size_or_sections
        if each < 0 or (each == 0 and total):
            raise ValueError(f"split: a size of {each} does not divide {total}, expected a number from 1")
        sizes = tuple(min(each, total - start) for start in range(0, total, max(each, 1))) or (total,)
    else:
        sizes = tuple(split_size_or_sections)
    if builtins.any(size < 0 for size in sizes) or builtins.sum(sizes) != total:
        raise ValueError(f"split: sizes {list(sizes)} do not add up to the {total} of dim {dim}")
    return tuple(Split.apply(tensor, sizes, at))


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """`chunks` views of one size along `dim`, the last perhaps smaller, or fewer where that divides so, as torch's.

    Raises ValueError for less than one, IndexError for a dimension out of range.
    """
    at = check.axis("chunk", dim, input.ndim)
    if chunks < 1:
        raise ValueError(f"chunk: chunks is {chunks}, expected a number from 1")
    total = input.shape[at]
    return split(input, -(-total // chunks), at) if total else split(input, (0,) * chunks, at)


def flip(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """A copy of input, reversed along `dims`. Raises IndexError for one out of range, ValueError for one twice."""
    named = tuple(check.axis("flip", dim, input.ndim) for dim in view.unpacked(dims))
    if len(set(named)) < len(named):
        raise ValueError(f"flip: dims {list(named)} name a dimension twice")
    return Flip.apply(input, named)


def repeat(input: Tensor, *repeats: int | Sequence[int]) -> Tensor:
    """Copies of input side by side, `repeats` for each dimension, of which new ones come first.

    Raises ValueError for fewer numbers than dimensions, or a negative one.
    """
    counts = view.unpacked(repeats)
    if len(counts) < input.ndim or builtins.any(count < 0 for count in counts):
        raise ValueError(f"repeat: got {list(counts)} for a tensor of {input.ndim} dimensions")
    sizes = (1,) * (len(counts) - input.ndim) + tuple(input.shape)
    apart = view.reshape(input, *(size for each in sizes for size in (1, each)))
    wide = view.expand(apart, *(size for pair in zip(counts, sizes, strict=True) for size in pair))
    made = view.reshape(wide, *(count * size for count, size in zip(counts, sizes, strict=True)))
    # A copy in any case, also where all that is repeated are dimensions of size 1, which strides of 0 can say.
    return view.clone(made) if made.data.untyped_storage()._cdata == input.data.untyped_storage()._cdata else made


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """The places `index` (int64 or int32, [K] or one) along `dim`; a copy. The gradient adds up equal places in order.

    Raises IndexError for a dimension or, on the CPU, an index out of range; ValueError for an index of more dimensions.
    """
    if index.ndim > 1:
        raise ValueError(f"index_select: index has shape {list(index.shape)}, expected [K]")
    at = check.axis("index_select", dim, max(input.ndim, 1))
    whole = input if input.ndim else view.reshape(input, 1)
    found = view.getitem(whole, (*[slice(None)] * at, Tensor(_not_negative("index_select", index).reshape(-1))))
    return found if input.ndim else view.reshape(found)


def gather(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """input at `index` along `dim`, and at the same place along the others: index (int64) of as many dimensions, none
    larger than input's but `dim`. The gradient adds up equal places in their order.

    Raises IndexError for a dimension or, on the CPU, an index out of range; ValueError for an index that does not fit.
    """
    at = check.axis("gather", dim, max(input.ndim, 1))
    fits = input.ndim == index.ndim and not builtins.any(
        mine < size for i, (mine, size) in enumerate(zip(input.shape, index.shape, strict=True)) if i != at
    )
    if not fits:
        raise ValueError(f"gather: index has shape {list(index.shape)}, which does not fit {list(input.shape)}")
    raw = _not_negative("gather", index)
    if input.ndim == 0:
        return view.reshape(gather(view.reshape(input, 1), 0, Tensor(raw.reshape(1))))
    places: list[Any] = []
    for i, size in enumerate(index.shape):
        along = torch.arange(size, device=raw.device).view(*(size if k == i else 1 for k in range(index.ndim)))
        places.append(Tensor(raw if i == at else along))
    return view.getitem(input, tuple(places))


def _not_negative(name: str, index: Tensor) -> torch.Tensor:
    """The index, which counts from the front alone."""
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: index has dtype {index.dtype}, expected int64 or int32")
    raw = index.data
    if raw.is_cuda:  # where looking would wait: a place that no dimension has, so that NaN is what it selects
        return torch.where(raw < 0, torch.iinfo(torch.int64).max, raw.long())
    if bool((raw < 0).any()):
        raise IndexError(f"{name}: index {int(raw.min())} is negative")
    return raw


def masked_fill(input: Tensor, mask: Tensor, value: Scalar | Tensor) -> Tensor:
    """value (a number, or a tensor of one) where mask is true, else input, in input's dtype.

    Raises TypeError for a mask that is not torch.bool, or a fraction among integers; ValueError for other shapes.
    """
    if isinstance(value, Tensor) and value.ndim:
        raise ValueError(f"masked_fill: value has shape {list(value.shape)}, expected a number; use where")
    if not input.dtype.is_floating_point and (
        isinstance(value, float) or (isinstance(value, Tensor) and value.dtype.is_floating_point)
    ):
        raise TypeError(f"masked_fill: {value!r} does not fit a tensor of {input.dtype}; convert it with .to()")
    return elementwise.where(mask, value, input)


def any(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Whether any element along `dim` is not 0. NaN is not. Raises IndexError for a dimension out of range."""
    return Tensor(torch.any(truths(input), _axes("any", input, dim), keepdim))


def all(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Whether no element along `dim` is 0. Raises IndexError for a dimension out of range."""
    return Tensor(torch.all(truths(input), _axes("all", input, dim), keepdim))


def _axes(name: str, x: Tensor, dim: Dim) -> Any:
    if dim is None or isinstance(dim, int):
        return None if dim is None else check.axis(name, dim, max(x.ndim, 1))
    return tuple(check.axis(name, each, max(x.ndim, 1)) for each in dim) or None


def truths(x: Tensor) -> torch.Tensor:
    """Where x is not 0."""
    return x.data if x.dtype == torch.bool else elementwise.ne(x, 0).data


def logical_not(input: Tensor) -> Tensor:
    """Whether an element is 0."""
    return Tensor(torch.logical_not(truths(input)))


def logical_and(input: Tensor, other: Tensor) -> Tensor:
    """Whether neither is 0."""
    return Tensor(torch.logical_and(truths(input), truths(other)))


def logical_or(input: Tensor, other: Tensor) -> Tensor:
    """Whether either is not 0."""
    return Tensor(torch.logical_or(truths(input), truths(other)))


def bitwise_not(input: Tensor) -> Tensor:
    """~input, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_not(_whole("bitwise_not", input)))


def bitwise_and(input: Tensor, other: Tensor | Scalar) -> Tensor:
    """input & other, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_and(_whole("bitwise_and", input), _whole("bitwise_and", other)))


def bitwise_or(input: Tensor, other: Tensor | Scalar) -> Tensor:
    """input | other, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_or(_whole("bitwise_or", input), _whole("bitwise_or", other)))


def bitwise_xor(input: Tensor, other: Tensor | Scalar) -> Tensor:
    """input ^ other, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_xor(_whole("bitwise_xor", input), _whole("bitwise_xor", other)))


def floor_divide(input: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """The quotient rounded down, of integers. Raises TypeError for floating types."""
    return Tensor(torch.floor_divide(*_whole_pair("floor_divide", input, other)))


def remainder(input: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """What is left of input after `floor_divide`, with other's sign, of integers. Raises as `floor_divide`."""
    return Tensor(torch.remainder(*_whole_pair("remainder", input, other)))


def _whole_pair(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    a, b = alike(a, b)
    return _whole(name, a), _whole(name, b)


def _whole(name: str, x: Any) -> Any:
    """The raw operand. Raises TypeError unless it is of integers or bools."""
    raw = x.data if isinstance(x, Tensor) else python_number(x)
    floating = raw.dtype.is_floating_point if isinstance(raw, torch.Tensor) else not isinstance(raw, int)
    if floating:
        kind = raw.dtype if isinstance(raw, torch.Tensor) else type(raw).__name__
        raise TypeError(f"{name}: got {kind}, expected integers or bools; for floating types it is not built")
    return raw


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """A 1 at the place of each class, int64: [*] -> [*, num_classes], the largest class and one if that is -1.

    Raises TypeError unless the classes are int64, ValueError for a negative one or one too large.
    """
    if tensor.dtype != torch.int64:
        raise TypeError(f"one_hot: tensor has dtype {tensor.dtype}, expected int64")
    try:
        return Tensor(torch.nn.functional.one_hot(tensor.data, num_classes))
    except RuntimeError as error:
        raise ValueError(f"one_hot: {error}") from error


def outer(input: Tensor, vec2: Tensor) -> Tensor:
    """The products of each element of one vector with each of another: [N], [M] -> [N, M]. ValueError for others."""
    if input.ndim != 1 or vec2.ndim != 1:
        raise ValueError(f"outer: got shapes {list(input.shape)} and {list(vec2.shape)}, expected two vectors")
    return elementwise.mul(view.unsqueeze(input, 1), vec2)


def var(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    """The sum of squared distances from the mean over `dim`, divided by their number less `correction` (1; 0 if not
    unbiased), computed in float32 at least. NaN for one element.

    Raises TypeError for integers, IndexError for a dimension out of range, ValueError for one named twice.
    """
    away, dim, left = _spread("var", input, dim, unbiased, correction)
    return view.to(elementwise.div(reduce.sum(elementwise.square(away), dim, keepdim), left), input.dtype)


def std(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    """The square root of `var`, with gradient 0 where it is 0."""
    away, dim, left = _spread("std", input, dim, unbiased, correction)
    return view.to(elementwise.div(reduce.norm(away, 2, dim, keepdim), math.sqrt(left)), input.dtype)


def _spread(name: str, x: Tensor, dim: Any, unbiased: Any, correction: Any) -> tuple[Tensor, Dim, float]:
    """Distances from the mean, the dimensions, and what sums of squares are divided by."""
    if isinstance(dim, bool):
        unbiased, dim = dim, None
    if unbiased is not None and correction is not None:
        raise ValueError(f"{name}: got both unbiased and correction; give one")
    check.floating(name, input=x.data)
    off = correction if correction is not None else 1 if unbiased is None else int(unbiased)
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    wide = view.to(x, torch.float32) if narrow else x
    mean = reduce.mean(wide, dim, True)
    count = x.numel() // max(mean.numel(), 1)
    return elementwise.sub(wide, mean), dim, float(max(count - off, 0))
