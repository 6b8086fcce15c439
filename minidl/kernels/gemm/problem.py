"""`Problem`: a hashable description of a matrix product, without addresses; the key of the plan cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidl.kernels.epilogue import ADDED, Epilogue
from minidl.kernels.gemm import choice
from minidl.kernels.gemm.operands import Operand, unit
from minidl.runtime import launch

# The forms, and the tile tables that they use.
FAMILIES = {
    "tma": "gemm", "parts": "gemm_parts", "pointer": "gemm_pointer", "thin": "gemm_thin", "vector": "gemm_vector",
    "copied": "gemm", "tail": "gemm",
}  # fmt: skip


class Problem(NamedTuple):
    """One product c = act(scale a b + bias), a [M, K], b [K, N], c [M, N] or a batch of these.

    precision  of products, as in `launch.precision`, or for float8 as in `float8.product`
    batch      matrices of a batch; None for a product of two matrices
    form, split   those requested; None for the fastest
    in_order   whether shares are added in their order, for any number of values
    """

    a: Operand
    b: Operand
    dtype: torch.dtype
    precision: str
    epilogue: Epilogue = Epilogue()
    batch: int | None = None
    form: str | None = None
    split: int | None = None
    in_order: bool = False
    target: str = "interpreted"
    processors: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return M, N and K."""
        return self.a.rows, self.b.columns, self.a.columns

    @property
    def matrices(self) -> int:
        """Return the number of products."""
        return 1 if self.batch is None else self.batch

    @property
    def values(self) -> int:
        """Return the number of values of c."""
        return self.matrices * self.a.rows * self.b.columns

    @property
    def compiled(self) -> bool:
        return self.target != "interpreted"

    @property
    def adds(self) -> bool:
        """Return whether the product is added to another tensor in place."""
        return ADDED.value == self.epilogue.SAVE_Z

    @property
    def flat(self) -> bool:
        """Return whether descriptors of suitable operands can be read; none can be made of an empty one."""
        return launch.boxes(self.target) and self.batch is None and min(self.sizes) > 0

    @property
    def boxed(self) -> bool:
        """Return whether descriptors can read both operands."""
        return self.flat and self.a.has_box(self.dtype) and self.b.has_box(self.dtype)

    @property
    def copyable(self) -> bool:
        """Return whether descriptors can read both operands, or copies of them with aligned rows."""
        in_order = None not in (self.a.transposed, self.b.transposed)
        return self.flat and in_order and self.dtype != torch.float64

    def shape(self, by_pointers: bool) -> choice.Shape:
        """Return the sizes from which `choice` estimates the time."""
        M, N, K = self.sizes
        units = (self.a.at_once, self.b.t.at_once) if by_pointers else (8, 8)
        return choice.Shape(M, N, K, self.matrices, (*units, unit(N)))

    def tile(self, form: str, floor: int = 1) -> launch.Tile:
        """Return the first tile of a form's table."""
        M, N, K = self.sizes
        return launch.tile(
            FAMILIES[form], self.dtype, floor=floor, precision=self.precision, target_=self.target, M=M, N=N, K=K
        )  # fmt: skip
