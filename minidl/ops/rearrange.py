"""Split, repeat, flip and roll tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import check
from minidl.ops.join import Cat
from minidl.ops.shape import clone, expand, move_function, reshape, squeeze
from minidl.tensors import Tensor

__all__ = ["chunk", "flip", "meshgrid", "repeat", "roll", "split", "tile", "unbind"]


@recordable(cat=lambda parts, dim: Cat.apply(dim, *parts))
class Split(Function):
    """Views of x; their gradients are concatenated, with zeros for views that were not used."""

    cat = staticmethod(torch.cat)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: tuple[int, ...], dim: int) -> tuple[torch.Tensor, ...]:
        parts = x.split(sizes, dim)
        ctx.dim, ctx.like = dim, [(part.shape, part.dtype, part.device) for part in parts]
        return tuple(parts)

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
            for dy, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        return cls.cat(parts, ctx.dim), None, None


Flip = move_function("Flip", torch.flip, lambda dy, _, dims: dy.flip(dims))
Roll = move_function(
    "Roll", lambda x, how: x.roll(*how), lambda dy, _, how: dy.roll([-shift for shift in how[0]], how[1])
)


def split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return views of `tensor` along `dim`: of one size, the last perhaps smaller, or of the listed sizes, which add
    up.

    Raises ValueError for sizes that do not fit, IndexError for a dimension out of range.
    """
    at = check.axis("split", dim, tensor.ndim)
    total = tensor.shape[at]
    sizes = check.integers("split", "split_size_or_sections", split_size_or_sections)
    if len(sizes) == 1 and not isinstance(split_size_or_sections, list | tuple):
        (each,) = sizes
        if each < 0 or (each == 0 and total):
            raise ValueError(f"split: a size of {each} does not divide {total}, expected a number from 1")
        sizes = tuple(min(each, total - start) for start in range(0, total, max(each, 1))) or (total,)
    if any(size < 0 for size in sizes) or sum(sizes) != total:
        raise ValueError(f"split: sizes {list(sizes)} do not add up to the {total} of dim {dim}")
    return tuple(Split.apply(tensor, sizes, at))


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return `chunks` views of one size along `dim`, the last perhaps smaller, or fewer, as in
    torch.

    Raises ValueError for less than one, IndexError for a dimension out of range.
    """
    at, chunks = check.axis("chunk", dim, input.ndim), check.integer("chunk", "chunks", chunks)
    if chunks < 1:
        raise ValueError(f"chunk: chunks is {chunks}, expected a number from 1")
    total = input.shape[at]
    return split(input, -(-total // chunks), at) if total else split(input, (0,) * chunks, at)


def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Return the views at each index along `dim`. Raises IndexError for a dimension out of range."""
    at = check.axis("unbind", dim, input.ndim)
    return tuple(squeeze(part, at) for part in split(input, 1, at)) if input.shape[at] else ()


def flip(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """Return a copy of input, reversed along `dims`. Raises IndexError for one out of range, ValueError for one
    twice."""
    axes = check.axes("flip", check.unpacked("flip", "dims", dims), input.ndim, "dims")
    if len(set(axes)) < len(axes):
        raise ValueError(f"flip: dims {list(axes)} name a dimension twice")
    return Flip.apply(input, axes)


def roll(input: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """Return a copy of input rolled along `dims`: elements that leave at the end enter at the front; without dims,
    input is rolled as one row. Raises IndexError for a dimension out of range, ValueError unless both are as
    many."""
    offsets = check.integers("roll", "shifts", shifts)
    if dims is None:
        if len(offsets) != 1:
            raise ValueError(f"roll: {len(offsets)} shifts without dims, expected one")
        flat = reshape(input, input.numel())
        return reshape(Roll.apply(flat, (offsets, (0,))), *input.shape)
    axes = check.axes("roll", dims, input.ndim, "dims")
    if len(axes) != len(offsets):
        raise ValueError(f"roll: {len(offsets)} shifts and {len(axes)} dims, expected as many")
    return Roll.apply(input, (offsets, axes))


def repeat(input: Tensor, *repeats: int | Sequence[int]) -> Tensor:
    """Return copies of input side by side, `repeats` for each dimension, of which new ones come first.

    Raises ValueError for fewer numbers than dimensions, or a negative one.
    """
    counts = check.unpacked("repeat", "repeats", repeats)
    if len(counts) < input.ndim or any(count < 0 for count in counts):
        raise ValueError(f"repeat: got {list(counts)} for a tensor of {input.ndim} dimensions")
    sizes = (1,) * (len(counts) - input.ndim) + tuple(input.shape)
    separated = reshape(input, *(size for each in sizes for size in (1, each)))
    repeated = expand(separated, *(size for pair in zip(counts, sizes, strict=True) for size in pair))
    output = reshape(repeated, *(count * size for count, size in zip(counts, sizes, strict=True)))
    # Always a copy, although strides of 0 could express a repeat of dimensions of size 1.
    return clone(output) if output.data.untyped_storage()._cdata == input.data.untyped_storage()._cdata else output


def tile(input: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """Return `repeat`, where `dims` may name the last dimensions alone."""
    counts = check.unpacked("tile", "dims", dims)
    return repeat(input, *(1,) * (input.ndim - len(counts)), *counts)


def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Return the vectors as views of one grid shape; with indexing "xy" the first two dimensions are swapped."""
    vectors = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else list(tensors)
    if indexing not in (None, "ij", "xy") or any(t.ndim > 1 for t in vectors):
        raise ValueError(
            f'meshgrid: got {[t.ndim for t in vectors]} dimensions and {indexing!r}, expected vectors, "ij" or "xy"'
        )
    swap = indexing == "xy" and len(vectors) > 1
    order = [1, 0, *range(2, len(vectors))] if swap else [*range(len(vectors))]
    sizes = [vectors[i].numel() for i in order]
    grids = [expand(reshape(t, *(t.numel() if k == i else 1 for k in order)), sizes) for i, t in enumerate(vectors)]
    return tuple(grids)
