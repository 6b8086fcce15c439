"""The gradients of softmax and log-softmax."""

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.reduce import as_multiple, offsets
from minidl.kernels.softmax.rows import (
    columns,
    end_columns,
    ends,
    in_shape,
    lanes,
    levels,
    loop_alignment,
    row_pointers,
    row_strides,
    row_sum,
    rows_of,
    vectors,
)  # fmt: skip
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def softmax_grad_kernel(
    p_dy, p_y, p_dx, R, N, INNER, s_d1, s_d2, s_dn, s_y1, s_y2, s_yn,
    LOG: tl.constexpr, LEVELS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dx of rows of at most BLOCK_N elements; y and dx have the same strides."""
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = columns(BLOCK_N, LANES)
    m_mn = (o_m < R)[None, :, None] & (o_n < as_multiple(N, ALIGN))
    p_dy += as_multiple(offsets(o_m, INNER, s_d1, s_d2, LEVELS), ALIGN)[None, :, None]
    o_y = as_multiple(offsets(o_m, INNER, s_y1, s_y2, LEVELS), ALIGN)[None, :, None] + o_n.to(tl.int64) * s_yn
    p_dy = row_pointers(p_dy, o_n.to(tl.int64) * s_dn, BLOCK_N, LANES)
    b_dy = tl.load(p_dy, mask=m_mn, other=0.0).to(ACC)  # [pieces, BLOCK_M, LANES]
    b_y = tl.load(row_pointers(p_y, o_y, BLOCK_N, LANES), mask=m_mn, other=0.0).to(ACC)  # [pieces, BLOCK_M, LANES]
    if LOG:
        b_dx = b_dy - tl.exp(b_y) * row_sum(b_dy)[None, :, None]
    else:
        b_dx = b_y * (b_dy - row_sum(b_dy * b_y)[None, :, None])
    tl.store(row_pointers(p_dx, o_y, BLOCK_N, LANES), b_dx.to(p_dx.dtype.element_ty), mask=m_mn)


@triton.jit
def block_grad(b_dy, b_y, b_sum, LOG: tl.constexpr):
    """Return dx of a block, from the sums [rows, 1]."""
    if LOG:
        return b_dy - tl.exp(b_y) * b_sum
    else:
        return b_y * (b_dy - b_sum)


@triton.jit
def softmax_grad_loop_kernel(
    p_dy, p_y, p_dx, R, N, s_d, LOG: tl.constexpr, ALIGN: tl.constexpr, ENDS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dx of contiguous rows of any length; rows of dy have the stride s_d. ENDS as in `softmax_loop_kernel`."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = (o_m < R)[:, None]
    o_d, o_y = o_m * s_d, o_m * N
    b_head, b_body = ends(o_y, N, ALIGN)
    b_sum = tl.zeros((BLOCK_M,), ACC)
    if ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, ALIGN)
        m_e = m_e & m_m
        b_dy_ends = tl.load(p_dy + o_d[:, None] + o_e, mask=m_e, other=0.0).to(ACC)  # [BLOCK_M, 2 ALIGN]
        b_y_ends = tl.load(p_y + o_y[:, None] + o_e, mask=m_e, other=0.0).to(ACC)  # [BLOCK_M, 2 ALIGN]
        p_ends = p_dx + o_y[:, None] + o_e
        b_sum = tl.sum(b_dy_ends if LOG else b_dy_ends * b_y_ends, axis=1)
        o_d += b_head
        o_y += b_head
    p_dy += as_multiple(o_d, ALIGN)[:, None]
    p_y += as_multiple(o_y, ALIGN)[:, None]
    p_dx += as_multiple(o_y, ALIGN)[:, None]
    N = as_multiple(N, ALIGN)
    for n in range(0, N, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_dy = tl.load(p_dy + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        if LOG:
            b_sum += tl.sum(b_dy, axis=1)
        else:
            b_y = tl.load(p_y + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
            b_sum += tl.sum(b_dy * b_y, axis=1)
    for n in range(0, N, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_dy = tl.load(p_dy + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_y = tl.load(p_y + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        tl.store(p_dx + o_n, block_grad(b_dy, b_y, b_sum[:, None], LOG).to(p_dx.dtype.element_ty), mask=m_mn)
    if ENDS:
        tl.store(p_ends, block_grad(b_dy_ends, b_y_ends, b_sum[:, None], LOG).to(p_dx.dtype.element_ty), mask=m_e)


@replayed
def backward(op: str, dy: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Return dx of softmax, or log-softmax with `log`, along `dim`; `op` is the name in errors."""
    check.floating(op, dy=dy, y=y)
    check.same(op, dy=dy, y=y)
    if dy.shape != y.shape:
        raise ValueError(f"{op}: dy has shape {list(dy.shape)}, expected y's shape {list(y.shape)}")
    axis = check.axis(op, dim, max(y.dim(), 1))
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=y.dtype, device=y.device)
    flat = y.contiguous() if y.dim() else y.view(1)
    (dy_rows, y_rows), tile, fits = rows_of("softmax_grad", "softmax_grad_loop", axis, dy.reshape(flat.shape), flat)
    dx = torch.empty_like(y_rows)
    outer, N, inner = y_rows.shape
    R = outer * inner
    grid = (launch.cdiv(R, tile["BLOCK_M"]),)
    meta = {"LOG": log, "ACC": launch.acc(y.dtype), **tile.options}
    align = vectors(dy_rows, y_rows)
    if fits:
        strides = *row_strides(dy_rows), *row_strides(y_rows)
        launch.run(
            softmax_grad_kernel, grid, dy_rows, y_rows, dx, R, N, inner, *strides, LEVELS=levels(y_rows), ALIGN=align,
            LANES=lanes(align, tile, dy_rows, y_rows), **dependent_launch.options(grid[0]), **meta,
        )  # fmt: skip
    else:
        align, with_ends = loop_alignment(align, dy_rows, y_rows)
        launch.run(
            softmax_grad_loop_kernel, grid, dy_rows, y_rows, dx, R, N, dy_rows.stride(0), ALIGN=align, ENDS=with_ends,
            **meta,
        )  # fmt: skip
    return in_shape(dx, flat.shape, axis).view(y.shape)
