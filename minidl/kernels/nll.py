"""The negative log-likelihood loss, from log-probabilities, and its gradient.

    loss = -w_t x_t of a row x with the class t         dx_t = -w_t dy, 0 elsewhere

    x   [R, N], [N] or [R, N, ...], any strides         t   [R], [] or [R, ...] int64, int32 or uint8

Only the target element of each row is read. The mean divides by the sum of w_t over the rows that are not ignored, as
in `cross_entropy`, which also describes the handling of classes out of range.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import memory_layout
from minidl.kernels.cross_entropy.targets import check_classes, divisor_parts, row_targets
from minidl.kernels.loss_total import write_total
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


class Sizes(NamedTuple):
    """R rows of N classes, [R / INNER, N, INNER], and the strides of x or dx."""

    R: int
    N: int
    INNER: int
    s_outer: int
    s_class: int
    s_inner: int


@triton.jit
def target_offset(o_m, b_t, sizes):
    """Return the memory offset of class b_t of row o_m."""
    o_outer = o_m // sizes.INNER
    return o_outer * sizes.s_outer + b_t * sizes.s_class + (o_m - o_outer * sizes.INNER) * sizes.s_inner


@triton.jit
def nll_kernel(
    p_x, p_t, p_w, p_loss, sizes, ignore_index, EACH: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the loss of each row, or the sum over the program's rows."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_t, b_w, m_kept, m_class = row_targets(p_t, p_w, o_m, o_m < sizes.R, sizes.N, ignore_index, False, ACC)
    o_x = target_offset(o_m, b_t, sizes)
    b_x = tl.load(p_x + o_x, mask=m_kept & m_class, other=0.0).to(ACC)  # [BLOCK_N]
    b_loss = tl.where(m_kept & (m_class == 0), float("nan"), b_x * b_w * -1.0)
    if EACH:
        tl.store(p_loss + o_m, b_loss.to(p_loss.dtype.element_ty), mask=o_m < sizes.R)
    else:
        tl.store(p_loss + tl.program_id(0), tl.sum(tl.where(m_kept, b_loss, 0.0), axis=0))


@triton.jit
def nll_grad_kernel(
    p_dy, p_t, p_w, p_divisor, p_dx, sizes, ignore_index, EACH: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write -w_t dy at each row's class to zeroed memory; dy is one value (None means 1) or one for each row."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_t, b_w, m_kept, m_class = row_targets(p_t, p_w, o_m, o_m < sizes.R, sizes.N, ignore_index, False, ACC)
    if EACH:
        b_dy = tl.load(p_dy + o_m, mask=o_m < sizes.R, other=0.0).to(ACC)  # [BLOCK_N]
    else:
        if p_dy is None:
            b_dy = tl.full((), 1.0, ACC)
        else:
            b_dy = tl.load(p_dy).to(ACC)
        if p_divisor is not None:
            b_dy = b_dy / tl.load(p_divisor)
    b_dx = b_w * b_dy * -1.0
    o_x = target_offset(o_m, b_t, sizes)
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_kept & m_class)


@replayed
def nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the loss of each row, their mean, or their sum, in x's dtype, and the divisor of a mean or None.

    Arguments and errors as `cross_entropy`, for targets that are classes.
    """
    check_classes("nll_loss", x, target, weight, reduction)
    rows, sizes = _rows(x)
    R, N, each = sizes.R, sizes.N, reduction == "none"
    target, weight = target.contiguous(), memory_layout.contiguous(weight)
    sums, count = divisor_parts("nll_loss", target, weight, R, N, ignore_index, x.dtype, reduction == "mean")
    loss = torch.empty(target.shape if each else (), dtype=x.dtype, device=x.device)
    tile = launch.tile("loss", x.dtype, N=R)
    programs = launch.cdiv(R, tile["BLOCK_N"])
    parts = loss if each else torch.empty(programs, dtype=launch.acc_torch(x.dtype), device=x.device)
    launch.run(
        nll_kernel, (programs,), rows, target, weight, parts, sizes, ignore_index, EACH=each, ACC=launch.acc(x.dtype),
        **tile.options,
    )  # fmt: skip
    return loss, None if each else write_total(parts, loss, sums, count)


def nll_loss_grad(
    dy: torch.Tensor | None, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int,
    divisor: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return dx of `nll_loss` in x's memory layout, from dy in the loss's shape (None means 1) and its divisor."""
    last = memory_layout.channels_last(x)
    shape = x.movedim(1, -1).shape if last else x.shape
    dx = torch.zeros(shape, dtype=x.dtype, device=x.device)
    dx = dx.movedim(-1, 1) if last else dx
    sizes = _rows(dx)[1]
    tile = launch.tile("loss", x.dtype, N=sizes.R)
    launch.run(
        nll_grad_kernel, (launch.cdiv(sizes.R, tile["BLOCK_N"]),), memory_layout.contiguous(dy),
        target.contiguous(), memory_layout.contiguous(weight), divisor, dx, sizes, ignore_index,
        EACH=dy is not None and dy.dim() > 0, ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    return dx


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, Sizes]:
    """Return x as [outer, N, inner], a view if strides allow, and its sizes."""
    rows = x.view(1, -1, 1) if x.dim() == 1 else x.reshape(*x.shape[:2], x.shape[2:].numel())
    outer, N, inner = rows.shape
    return rows, Sizes(outer * inner, N, inner, *rows.stride())
