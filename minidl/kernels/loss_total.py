"""The sum or mean of a loss: one program adds the partial sums of other kernels in order."""

import torch
import triton
import triton.language as tl

from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

REDUCTIONS = ("mean", "sum", "none")
# The most programs that sum the weights of cross-entropy's targets: every loss program adds their sums.
SHARES = tl.constexpr(256)


@triton.jit
def share_sum(p_sum, count, ACC: tl.constexpr):
    """Return the sum of at most SHARES numbers."""
    o = tl.arange(0, SHARES)
    return tl.sum(tl.load(p_sum + o, mask=o < count, other=0.0).to(ACC), axis=0)


@triton.jit
def total_kernel(
    p_part, p_sum, p_loss, p_divisor, parts, count, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the sum of the parts over `count`, or over the sum of `count` numbers at p_sum, stored to p_divisor."""
    wait(EARLY)
    b_total = tl.zeros((BLOCK_N,), ACC)
    for n in range(0, parts, BLOCK_N):
        o = n + tl.arange(0, BLOCK_N).to(tl.int64)
        b_total += tl.load(p_part + o, mask=o < parts, other=0.0)  # [BLOCK_N]
    total = tl.sum(b_total, axis=0)
    if p_sum is None:
        total = total / count
    else:
        divisor = share_sum(p_sum, count, ACC)
        total = total / divisor
        tl.store(p_divisor, divisor)
    tl.store(p_loss, total.to(p_loss.dtype.element_ty))


def write_total(parts: torch.Tensor, loss: torch.Tensor, sums: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Write the sum of the parts over the divisor into `loss`, see `total_kernel`; return the divisor if `sums` has
    its parts."""
    divisor = None if sums is None else torch.empty((), dtype=parts.dtype, device=parts.device)
    tile = launch.tile("loss", parts.dtype, N=parts.numel())
    launch.run(
        total_kernel, (1,), parts, sums, loss, divisor, parts.numel(), count,
        ACC=launch.acc(parts.dtype), **dependent_launch.options(), **tile.options,
    )  # fmt: skip
    return divisor


def check_reduction(op: str, reduction: str) -> None:
    """Raise ValueError unless the reduction is one of REDUCTIONS."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")
