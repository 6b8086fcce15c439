"""Tensor descriptors but for their address: what of a box a plan can keep."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

FAR = 2**40  # bytes: strides of a descriptor are below


class ConcatPair(NamedTuple):
    """Two tensors of one layout that a box sees as one [2, ...], however far apart they lie: the first axis has their
    distance as its stride. Addresses grow, so where the second lies before the first they are exchanged: `turned`."""

    first: torch.Tensor
    second: torch.Tensor

    @property
    def turned(self) -> int:
        return int(self.second.data_ptr() < self.first.data_ptr())

    @property
    def distance(self) -> int:
        """Of their first values, in bytes."""
        return abs(self.second.data_ptr() - self.first.data_ptr())

    @property
    def device(self) -> torch.device:
        return self.first.device


class Box:
    """Boxes of `block` values of a tensor seen in `shape` and `strides`, read or written through a descriptor.

    `of` gives the descriptor of a tensor. Triton checks the first one; those that follow have the same layout, begin at
    a multiple of 16 bytes as well, and are made in a tenth of the time.
    """

    __slots__ = ("_layout", "_like")

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self._layout = list(shape), list(strides), list(block)
        self._like: TensorDescriptor | None = None

    @staticmethod
    def of_rows(rows: int, row: int, block: Sequence[int]) -> "Box":
        """Boxes of a contiguous matrix [rows, row]."""
        return Box((rows, row), (row, 1), block)

    def of(self, base: torch.Tensor | ConcatPair) -> TensorDescriptor:
        """The descriptor of `base`, contiguous, whose own shape does not matter; of halves, whose distance is the first
        of the strides."""
        if isinstance(base, ConcatPair):
            shape, strides, block = self._layout
            low, high = reversed(base) if base.turned else base
            found = TensorDescriptor(low, shape, [base.distance // low.element_size(), *strides[1:]], block)
            found.__dict__["beside"] = high  # it is kept as long as the first is, and known to who looks at accesses
            return found
        if self._like is None:
            found = TensorDescriptor(base, *self._layout)
            self._like = of_base(found, None)
            return found
        return of_base(self._like, base)


def of_base(like: TensorDescriptor, base: Any) -> TensorDescriptor:
    """The same boxes of another tensor, or of what stands for one."""
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(like.__dict__)
    found.base = base
    return found
