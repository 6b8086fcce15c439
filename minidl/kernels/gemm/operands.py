"""The operands of products in memory, without addresses: strides, boxes, and copies that kernels read instead."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from minidl.runtime import launch
from minidl.runtime.descriptors import Box


def unit(extent: int) -> int:
    """Return the largest of 1, 2, 4 and 8 that divides `extent`: the values of one vector access (8 are 16 bytes)."""
    return math.gcd(extent, 8)


class Operand(NamedTuple):
    """A matrix [rows, columns] in memory, or a batch of them.

    strides   values from a row to the next, and from a column to the next
    aligned   whether it begins at a multiple of 16 bytes
    s_batch   values from a matrix of a batch to the next
    """

    rows: int
    columns: int
    strides: tuple[int, int]
    aligned: bool = True
    s_batch: int = 0

    @classmethod
    def of(cls, x: torch.Tensor) -> Operand:
        *batch, s_row, s_column = x.stride()
        rows, columns = x.shape[-2:]
        return cls(rows, columns, (s_row, s_column), x.data_ptr() % 16 == 0, batch[0] if batch else 0)

    @property
    def t(self) -> Operand:
        """Return the transpose."""
        return self._replace(rows=self.columns, columns=self.rows, strides=self.strides[::-1])

    @property
    def transposed(self) -> bool | None:
        """Return whether rows of the transpose are contiguous and not those of the matrix; None if neither are."""
        if self.strides[1] == 1 and (self.strides[0] != 1 or 1 in (self.rows, self.columns)):
            return False
        return True if self.strides[0] == 1 else None

    @property
    def at_once(self) -> int:
        """Return how many values one load can take along the contiguous axis."""
        for x in (self, self.t):
            if x.strides[1] == 1:
                return unit(x.columns) if x.rows == 1 else math.gcd(unit(x.columns), x.strides[0])
        return 1

    def has_box(self, dtype: torch.dtype) -> bool:
        """Return whether a tensor descriptor can read it: rows along its contiguous axis are 16-byte aligned."""
        if self.transposed is None or not self.aligned or dtype == torch.float64:
            return False
        pitch, row = (self.strides[1], self.rows) if self.transposed else (self.strides[0], self.columns)
        return pitch * dtype.itemsize % 16 == 0 and pitch >= row

    def box(self, rows: int, columns: int) -> Box:
        """Return boxes of [rows, columns], which are transposed in memory if the operand is."""
        shape, strides, block = (self.rows, self.columns), self.strides, (rows, columns)
        return Box(*(each[::-1] if self.transposed else each for each in (shape, strides, block)))


def units(a: Operand, b: Operand) -> tuple[int, ...]:
    """Return the units of M, N, K and of the strides of a and b."""
    return tuple(map(unit, (a.rows, b.columns, a.columns, *a.strides, *b.strides)))


class Copy(NamedTuple):
    """A copy of an operand: the memory it fills, and the operand that lies there.

    launch  on the operand and the memory; None for a batch, which torch copies (`transposed`: to contiguous columns)
    """

    launch: launch.Prepared | None
    shape: tuple[int, ...]
    operand: Operand
    transposed: bool = False

    def of(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Return the memory with a copy of x; the launch takes `more` after it."""
        if self.launch is None:
            return (x.mT if self.transposed else x).contiguous()
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        self.launch.run(x, y, *more)
        return y
