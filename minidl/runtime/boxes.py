"""Tensor descriptors but for their address: what of a box a plan can keep."""

from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Box:
    """Boxes of `block` values of a tensor seen in `shape` and `strides`, read or written through a descriptor.

    `of` gives the descriptor of a tensor. Triton checks the first one; those that follow have the same layout, begin at
    a multiple of 16 bytes as well, and are made in a tenth of the time.
    """

    __slots__ = ("_fields", "_layout")

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self._layout = list(shape), list(strides), list(block)
        self._fields: dict[str, Any] | None = None

    @staticmethod
    def of_rows(rows: int, row: int, block: Sequence[int]) -> "Box":
        """Boxes of a contiguous matrix [rows, row]."""
        return Box((rows, row), (row, 1), block)

    def of(self, base: torch.Tensor) -> TensorDescriptor:
        """The descriptor of `base`, contiguous, whose own shape does not matter."""
        if self._fields is None:
            found = TensorDescriptor(base, *self._layout)
            self._fields = {name: value for name, value in vars(found).items() if name != "base"}
            return found
        found = object.__new__(TensorDescriptor)
        found.__dict__.update(self._fields)
        found.base = base
        return found
