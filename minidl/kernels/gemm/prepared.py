"""Prepared launches of a product, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minidl.kernels import activation
from minidl.kernels import plan as plans
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.operands import Copy, unit
from minidl.kernels.gemm.problem import Problem
from minidl.kernels.gemm.tiled import BoxTile
from minidl.runtime import dependent_launch, launch
from minidl.runtime.descriptors import Box


@dataclass(frozen=True)
class Product(plans.Plan):
    """One launch, or one that writes shares of K and one that adds them.

    partial  shape of the shares, [shares, values of c] or longer
    total    the sum of the shares with the epilogue; None if there is one share
    copies   of a and b, which are read in their place
    swapped  whether the kernel takes b first
    """

    name: str
    product: launch.Prepared
    partial: tuple[int, ...]
    total: launch.Prepared | None
    copies: tuple[Copy | None, Copy | None] = (None, None)
    swapped: bool = False

    def run(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None, c: torch.Tensor,
        z: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write c, and z if it is saved."""
        a, b = self.operands(a, b)
        if self.total is None:
            self.product.run(a, b, bias, scale, c, z)
            return
        partial = self.shares(c)
        self.product.run(a, b, None, None, partial, None)
        self.total.run(partial, bias, scale, c, z)

    def operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the kernel reads for a and b."""
        of_a, of_b = self.copies
        a, b = a if of_a is None else of_a.of(a), b if of_b is None else of_b.of(b)
        return (b, a) if self.swapped else (a, b)

    def shares(self, c: torch.Tensor) -> torch.Tensor:
        """Return memory for the shares of c."""
        return torch.empty(self.partial, dtype=launch.acc_torch(c.dtype), device=c.device)


def product(
    problem: Problem, name: str, kernel: Any, grid: tuple[int, ...], scalars: tuple[Any, ...], constants: Any,
    tile: launch.Tile, split: int, *, short: int = 1, boxes: tuple[Box | None, ...] = (),
) -> Product:  # fmt: skip
    """Prepare `kernel` in `split` shares of K; `short` is the number of programs if they are short."""
    epilogue = problem.epilogue
    total = None
    if split > 1:
        total = launches.sum_of_shares(
            problem.dtype, problem.b.columns, problem.values, split, epilogue, problem.target, problem.in_order
        )  # fmt: skip
        epilogue = epilogue._replace(ACT=activation.NONE.value, SAVE_Z=0)
    meta = {
        "tile": constants, "epilogue": epilogue, **dependent_launch.options(short, problem.target),
        **tile.launch_options,
    }  # fmt: skip
    return Product(name, launch.Prepared(kernel, grid, scalars, meta, boxes), (split, problem.values), total)


def boxes(problem: Problem, tile: launch.Tile) -> tuple[BoxTile, tuple[Box, Box]]:
    """Return the constants of a product by boxes, and the boxes of both operands."""
    a, b = problem.a, problem.b
    constants = tile.record(
        BoxTile, ACC=launch.acc(problem.dtype), PRECISION=problem.precision, A_TRANSPOSED=a.transposed,
        B_TRANSPOSED=b.transposed, UNIT_N=unit(b.columns),
    )  # fmt: skip
    return constants, (a.box(tile["BLOCK_M"], tile["BLOCK_K"]), b.box(tile["BLOCK_K"], tile["BLOCK_N"]))
