"""The order in which a result lies in memory: that of its operands, by torch's rule.

Operands that are dense and lie alike hand their strides on. Else dimensions are sorted by the operands' strides, the
first operand's before the second's: one that is broadcast along a dimension says nothing about it. This is the rule of
torch's TensorIterator (aten/src/ATen/TensorIterator.cpp, reorder_dimensions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

Strides = tuple[int, ...]


def empty(shape: Sequence[int], operands: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result of this shape that the operands broadcast to."""
    if all(x.is_contiguous() for x in operands):
        return torch.empty(shape, dtype=dtype, device=operands[0].device)
    seen = tuple((tuple(x.shape), x.stride()) for x in operands)
    return torch.empty_strided(shape, strides(tuple(shape), seen), dtype=dtype, device=operands[0].device)


def dims(x: torch.Tensor) -> list[int]:
    """The dimensions of x from the outermost to the innermost in memory; in their order where strides are equal."""
    if x.is_contiguous():
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def channels_last(x: torch.Tensor) -> bool:
    """Whether [N, C, ...] lies in rows of C, and in no other order that is known."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor in memory, gaps counted."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def back(permuted: Sequence[int]) -> list[int]:
    """The permutation that undoes one."""
    return sorted(range(len(permuted)), key=permuted.__getitem__)


@functools.lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...], operands: tuple[tuple[tuple[int, ...], Strides], ...]) -> Strides:
    """Those of a result, from the shapes and strides of the operands."""
    alike = {steps for size, steps in operands if size == shape}
    if len(alike) == 1 and all(size == shape for size, _ in operands) and dense(shape, *alike):
        return alike.pop()
    seen = [_broadcast(shape, size, steps) for size, steps in operands if size]
    order = list(reversed(range(len(shape))))  # the innermost dimension first
    for place in range(1, len(order)):
        at = place
        for before in reversed(range(place)):
            said = _outside(order[before], order[at], shape, seen)
            if said > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif said < 0:
                break
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= max(1, shape[dim])
    return tuple(found)


def _outside(inner: int, outer: int, shape: tuple[int, ...], seen: list[list[int]]) -> int:
    """1 where the dimension taken for the inner one lies outside of the other, -1 where it does not, 0 if none says."""
    for steps in seen:
        a, b = steps[inner], steps[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _broadcast(shape: tuple[int, ...], size: tuple[int, ...], steps: Strides) -> list[int]:
    """Strides in `shape`: 0 along what is repeated."""
    along = zip(size, shape[len(shape) - len(size) :], steps, strict=True)
    own = [0 if had == 1 != wanted else step for had, wanted, step in along]
    return [0] * (len(shape) - len(size)) + own


def dense(shape: tuple[int, ...], steps: Strides) -> bool:
    """Whether every place of some memory belongs to one element."""
    step = 1
    for size, at in sorted(((s, t) for s, t in zip(shape, steps, strict=True) if s != 1), key=lambda pair: pair[1]):
        if at != step:
            return False
        step *= size
    return math.prod(shape) > 0
