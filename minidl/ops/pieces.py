"""Parts of tensors put elsewhere, running sums, spread: what is made of other operations, and `cumsum`.

Integers and truths are torch's arithmetic; every sum and product of floating values is one of the operations it names.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import check, scan
from minidl.ops import elementwise, reduce, unary, view
from minidl.ops.promotion import python_number
from minidl.tensors import Scalar, Tensor

__all__ = [
    "all", "any", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "chunk", "cumsum", "flip",
    "logical_and", "logical_not", "logical_or", "masked_fill", "one_hot",
    "outer", "repeat", "roll", "split", "std", "var",
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


Flip = view.of("Flip", torch.flip, lambda dy, _, dims: dy.flip(dims))
Roll = view.of("Roll", lambda x, how: x.roll(*how), lambda dy, _, how: dy.roll([-shift for shift in how[0]], how[1]))


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
    sizes = check.several("split", "split_size_or_sections", split_size_or_sections)
    if len(sizes) == 1 and not isinstance(split_size_or_sections, list | tuple):
        (each,) = sizes
        if each < 0 or (each == 0 and total):
            raise ValueError(f"split: a size of {each} does not divide {total}, expected a number from 1")
        sizes = tuple(min(each, total - start) for start in range(0, total, max(each, 1))) or (total,)
    if builtins.any(size < 0 for size in sizes) or builtins.sum(sizes) != total:
        raise ValueError(f"split: sizes {list(sizes)} do not add up to the {total} of dim {dim}")
    return tuple(Split.apply(tensor, sizes, at))


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """`chunks` views of one size along `dim`, the last perhaps smaller, or fewer where that divides so, as torch's.

    Raises ValueError for less than one, IndexError for a dimension out of range.
    """
    at, chunks = check.axis("chunk", dim, input.ndim), check.whole("chunk", "chunks", chunks)
    if chunks < 1:
        raise ValueError(f"chunk: chunks is {chunks}, expected a number from 1")
    total = input.shape[at]
    return split(input, -(-total // chunks), at) if total else split(input, (0,) * chunks, at)


def flip(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """A copy of input, reversed along `dims`. Raises IndexError for one out of range, ValueError for one twice."""
    named = check.axes("flip", check.unpacked("flip", "dims", dims), input.ndim, "dims")
    if len(set(named)) < len(named):
        raise ValueError(f"flip: dims {list(named)} name a dimension twice")
    return Flip.apply(input, named)


def roll(input: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """A copy of input moved along `dims` by as many places, what leaves at the end coming in at the front; without
    dims as if it were one row. Raises IndexError for a dimension out of range, ValueError unless both are as many.
    """
    by = check.several("roll", "shifts", shifts)
    if dims is None:
        if len(by) != 1:
            raise ValueError(f"roll: {len(by)} shifts without dims, expected one")
        flat = view.reshape(input, input.numel())
        return view.reshape(Roll.apply(flat, (by, (0,))), *input.shape)
    named = check.axes("roll", dims, input.ndim, "dims")
    if len(named) != len(by):
        raise ValueError(f"roll: {len(by)} shifts and {len(named)} dims, expected as many")
    return Roll.apply(input, (by, named))


def repeat(input: Tensor, *repeats: int | Sequence[int]) -> Tensor:
    """Copies of input side by side, `repeats` for each dimension, of which new ones come first.

    Raises ValueError for fewer numbers than dimensions, or a negative one.
    """
    counts = check.unpacked("repeat", "repeats", repeats)
    if len(counts) < input.ndim or builtins.any(count < 0 for count in counts):
        raise ValueError(f"repeat: got {list(counts)} for a tensor of {input.ndim} dimensions")
    sizes = (1,) * (len(counts) - input.ndim) + tuple(input.shape)
    apart = view.reshape(input, *(size for each in sizes for size in (1, each)))
    wide = view.expand(apart, *(size for pair in zip(counts, sizes, strict=True) for size in pair))
    made = view.reshape(wide, *(count * size for count, size in zip(counts, sizes, strict=True)))
    # A copy in any case, also where all that is repeated are dimensions of size 1, which strides of 0 can say.
    return view.clone(made) if made.data.untyped_storage()._cdata == input.data.untyped_storage()._cdata else made


def masked_fill(input: Tensor, mask: Tensor, value: Scalar | Tensor) -> Tensor:
    """value (a number, or a tensor of one) where mask is true, else input, in input's dtype.

    Raises TypeError for a mask that is not torch.bool, or a fraction among integers; ValueError for other shapes, and
    for a number outside the range of the dtype (a tensor of one wraps round, as looking would wait for the device).
    """
    filled: Any = value if isinstance(value, Tensor | torch.Tensor) else python_number(value)
    one = isinstance(filled, Tensor | torch.Tensor)
    if one and len(filled.shape):
        raise ValueError(f"masked_fill: value has shape {list(filled.shape)}, expected a number; use where")
    fraction = filled.dtype.is_floating_point if one else isinstance(filled, float)
    if (fraction and not input.dtype.is_floating_point) or (one and filled.dtype.is_complex):
        raise TypeError(f"masked_fill: {value!r} does not fit a tensor of {input.dtype}; convert it with .to()")
    if one:
        filled = view.to(filled, input.dtype)
    elif input.dtype == torch.bool:
        filled = bool(filled)
    return elementwise.where(mask, filled, input)


def any(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Whether any element along `dim` is not 0; along no dimensions, each for itself. NaN is not 0. uint8 of uint8.

    Raises IndexError for a dimension out of range.
    """
    return _of_truths(torch.any, input, dim, keepdim)


def all(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Whether no element along `dim` is 0, as `any`."""
    return _of_truths(torch.all, input, dim, keepdim)


def _of_truths(join: Callable[..., torch.Tensor], x: Tensor, dim: Dim, keepdim: bool) -> Tensor:
    axes = None if dim is None else check.axes(join.__name__, dim, max(x.ndim, 1))
    found = truths(x).clone() if axes == () else join(truths(x), axes, keepdim)
    return Tensor(found.to(torch.uint8) if x.dtype == torch.uint8 else found)


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


def left_shift(input: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """input << other, of integers. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_left_shift(_whole("<<", input), _whole("<<", other)))


def right_shift(input: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """input >> other, of integers, with the sign. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_right_shift(_whole(">>", input), _whole(">>", other)))


def positive(input: Tensor) -> Tensor:
    """+input: the tensor itself. Raises TypeError for bools."""
    if input.dtype == torch.bool:
        raise TypeError("+x: got torch.bool, expected numbers; convert it with .to()")
    return input


def contains(input: Tensor, element: Any) -> bool:
    """Whether any element equals `element`, a number or a tensor that broadcasts. Raises TypeError for all else."""
    element = Tensor(element) if isinstance(element, torch.Tensor) else python_number(element)
    if not isinstance(element, Tensor | int | float):
        raise TypeError(f"in: got {type(element).__name__}, expected a number or a Tensor")
    return bool(any(elementwise.eq(input, element)))


def _whole(name: str, x: Any) -> Any:
    """The raw operand. Raises TypeError unless it is of integers or bools."""
    raw = x.data if isinstance(x, Tensor) else python_number(x)
    floating = raw.dtype.is_floating_point if isinstance(raw, torch.Tensor) else not isinstance(raw, int)
    if floating:
        kind = raw.dtype if isinstance(raw, torch.Tensor) else type(raw).__name__
        raise TypeError(f"{name}: got {kind}, expected integers or bools")
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
    return view.to(elementwise.div(reduce.sum(unary.square(away), dim, keepdim), left), input.dtype)


def std(
    input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    """The square root of `var`, with gradient 0 where it is 0. Of one element it is NaN, as is its gradient."""
    away, dim, left = _spread("std", input, dim, unbiased, correction)
    if not left:
        return unary.sqrt(var(input, dim, keepdim=keepdim, unbiased=unbiased, correction=correction))
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
