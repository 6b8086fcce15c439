"""The memory layout of a result, from the layouts of its operands, by torch's rule.

If all operands are dense with equal strides, the result has these strides. Else dimensions are sorted by the strides of
the first operand, then of the second; an operand that is broadcast along a dimension is skipped for it. This is the
rule of torch's TensorIterator (aten/src/ATen/TensorIterator.cpp, reorder_dimensions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

Strides = tuple[int, ...]


def empty(shape: Sequence[int], operands: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a result of `shape`, to which the operands broadcast."""
    if all(x.is_contiguous() for x in operands):
        return torch.empty(shape, dtype=dtype, device=operands[0].device)
    layouts = tuple((tuple(x.shape), x.stride()) for x in operands)
    return torch.empty_strided(shape, strides(tuple(shape), layouts), dtype=dtype, device=operands[0].device)


def dims(x: torch.Tensor) -> list[int]:
    """Return the dimensions of x from the outermost to the innermost in memory; equal strides keep their order."""
    if x.is_contiguous():
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def channels_last(x: torch.Tensor) -> bool:
    """Return whether x [N, C, ...] is channels-last and not also contiguous."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return an optional operand, contiguous."""
    return None if x is None else x.contiguous()


def span(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor in memory, including gaps."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def back(permuted: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    return sorted(range(len(permuted)), key=permuted.__getitem__)


@functools.lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...], operands: tuple[tuple[tuple[int, ...], Strides], ...]) -> Strides:
    """Return the strides of a result of `shape`, from the shapes and strides of the operands."""
    alike = {steps for size, steps in operands if size == shape}
    if len(alike) == 1 and all(size == shape for size, _ in operands) and dense(shape, *alike):
        return alike.pop()
    broadcast = [_broadcast(shape, size, steps) for size, steps in operands if size]
    order = list(reversed(range(len(shape))))  # the innermost dimension first
    for position in range(1, len(order)):
        index = position
        for before in reversed(range(position)):
            comparison = _outside(order[before], order[index], shape, broadcast)
            if comparison > 0:
                order[before], order[index] = order[index], order[before]
                index = before
            elif comparison < 0:
                break
    result, step = [0] * len(shape), 1
    for dim in order:
        result[dim] = step
        step *= max(1, shape[dim])
    return tuple(result)


def _outside(inner: int, outer: int, shape: tuple[int, ...], layouts: list[list[int]]) -> int:
    """Return 1 if dimension `inner` must move outside `outer`, -1 if not, 0 if no operand decides."""
    for steps in layouts:
        a, b = steps[inner], steps[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _broadcast(shape: tuple[int, ...], size: tuple[int, ...], steps: Strides) -> list[int]:
    """Return strides of an operand broadcast to `shape`: 0 along repeated dimensions."""
    along = zip(size, shape[len(shape) - len(size) :], steps, strict=True)
    result = [0 if extent == 1 != size_ else step for extent, size_, step in along]
    return [0] * (len(shape) - len(size)) + result


def dense(shape: tuple[int, ...], steps: Strides) -> bool:
    """Return whether the strides are a permutation of contiguous ones, without gaps or overlaps."""
    step = 1
    for size, at in sorted(((s, t) for s, t in zip(shape, steps, strict=True) if s != 1), key=lambda pair: pair[1]):
        if at != step:
            return False
        step *= size
    return math.prod(shape) > 0
