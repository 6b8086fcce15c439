"""Tensor descriptors (TMA on a GPU) without their address, so that a plan can be cached without its tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

FAR = 2**40  # bytes, the limit of a descriptor's strides


class ConcatPair(NamedTuple):
    """Two tensors of one layout that a descriptor reads as one tensor [2, ...]: the distance of their addresses is the
    stride of the first axis. Strides are positive, so the pair is `swapped` if the second address is the lower one."""

    first: torch.Tensor
    second: torch.Tensor

    @property
    def swapped(self) -> int:
        return int(self.second.data_ptr() < self.first.data_ptr())

    @property
    def distance(self) -> int:
        """The distance of the two addresses, in bytes."""
        return abs(self.second.data_ptr() - self.first.data_ptr())

    @property
    def device(self) -> torch.device:
        return self.first.device


class Box:
    """A descriptor without its tensor: boxes of `block` values of a tensor with `shape` and `strides`.

    `of` returns the descriptor of a tensor. Triton checks the first one; later ones have the same layout, also start at
    a multiple of 16 bytes, and are built in a tenth of the time.
    """

    __slots__ = ("_layout", "_like")

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self._layout = list(shape), list(strides), list(block)
        self._like: TensorDescriptor | None = None

    @staticmethod
    def of_rows(rows: int, row: int, block: Sequence[int]) -> "Box":
        """Return the boxes of a contiguous matrix [rows, row]."""
        return Box((rows, row), (row, 1), block)

    def of(self, base: torch.Tensor | ConcatPair) -> TensorDescriptor:
        """Return the descriptor of a contiguous tensor, or of a pair, whose distance becomes the first stride."""
        if isinstance(base, ConcatPair):
            shape, strides, block = self._layout
            low, high = reversed(base) if base.swapped else base
            descriptor = TensorDescriptor(low, shape, [base.distance // low.element_size(), *strides[1:]], block)
            descriptor.__dict__["beside"] = high  # keeps it alive, and lets the sanitizer check accesses to it
            return descriptor
        if self._like is None:
            descriptor = TensorDescriptor(base, *self._layout)
            self._like = of_base(descriptor, None)
            return descriptor
        return of_base(self._like, base)


def of_base(like: TensorDescriptor, base: Any) -> TensorDescriptor:
    """Return the same descriptor for another tensor, or for a substitute of one."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(like.__dict__)
    descriptor.base = base
    return descriptor
