"""Prepared launches of a product, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minidl.kernels import activation
from minidl.kernels import plan as plans
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.operands import Copy, Operand, unit
from minidl.kernels.gemm.problem import Problem
from minidl.kernels.gemm.tiled import GemmTile, Sizes, Strides
from minidl.runtime import dependent_launch, launch
from minidl.runtime.descriptors import Box


@dataclass(frozen=True)
class Product(plans.Plan):
    """One launch, or one that writes shares of K and one that adds them.

    partial  shape of the shares, [shares, values of one]
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
        of_a, of_b = self.copies
        a, b = a if of_a is None else of_a.of(a), b if of_b is None else of_b.of(b)
        if self.swapped:
            a, b = b, a
        if self.total is None:
            self.multiply(a, b, bias, scale, c, z)
            return
        partial = torch.empty(self.partial, dtype=launch.acc_torch(c.dtype), device=c.device)
        self.multiply_shares(a, b, partial, bias, scale, c, z)
        self.total.run(partial, bias, scale, c, z)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, *written: torch.Tensor | None) -> None:
        """Launch on the operands, bias, scale, c and z."""
        self.product.run(a, b, *written)

    def multiply_shares(self, a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor, *_: torch.Tensor | None) -> None:
        """Write the shares; the sum writes c."""
        self.multiply(a, b, None, None, partial, None)


def product(
    problem: Problem, name: str, kernel: Any, grid: tuple[int, ...], scalars: tuple[Any, ...], tile: launch.Tile,
    split: int, *, short: int = 1, boxes: tuple[Box | None, ...] = (), **constants: Any,
) -> Product:  # fmt: skip
    """Prepare a launch in `split` shares of K; `short` is the number of programs if they are short."""
    total, epilogue = None, problem.epilogue
    if split > 1:
        total = launches.sum_of_shares(
            problem.dtype, problem.b.columns, problem.values, split, epilogue, problem.target, problem.in_order
        )  # fmt: skip
        epilogue = epilogue._replace(ACT=activation.NONE.value, SAVE_Z=0)
    meta = options(problem, tile, epilogue, short, **constants)
    return Product(name, launch.Prepared(kernel, grid, scalars, meta, boxes), (split, problem.values), total)


def strided(
    problem: Problem, name: str, kernel: Any, tiles: int, tile: launch.Tile, split: int, *more: int,
    operands: tuple[Operand, Operand] | None = None, short: int = 1, **constants: Any,
) -> Product:  # fmt: skip
    """Prepare a launch by pointers on the operands of the problem, or on others of the same product."""
    a, b = operands or (problem.a, problem.b)
    sizes = Sizes(a.rows, b.columns, a.columns, problem.values, split)
    scalars = sizes, Strides(a.s_batch, *a.strides, b.s_batch, *b.strides), *more
    return product(problem, name, kernel, (tiles, split), scalars, tile, split, short=short, **constants)


def boxes(problem: Problem, tile: launch.Tile) -> dict[str, Any]:
    """Return the boxes of both operands and a kernel's constants, for `product`."""
    a, b = problem.a, problem.b
    return {
        "boxes": (a.box(tile["BLOCK_M"], tile["BLOCK_K"]), b.box(tile["BLOCK_K"], tile["BLOCK_N"])),
        "PRECISION": problem.precision, "A_TRANSPOSED": a.transposed, "B_TRANSPOSED": b.transposed,
        "UNIT_N": unit(b.columns),
    }  # fmt: skip


def options(problem: Problem, tile: launch.Tile, epilogue: Any, short: int = 1, **constants: Any) -> dict[str, Any]:
    """Return the keyword arguments of a launch."""
    record = tile.record(GemmTile, ACC=launch.acc(problem.dtype), **constants)
    early = dependent_launch.options(short, problem.target)
    return {"tile": record, "epilogue": epilogue, **early, **tile.launch_options}
