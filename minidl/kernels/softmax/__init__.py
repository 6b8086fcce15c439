"""Softmax and log-softmax over one dimension, and their gradients.

    softmax        y = exp(x - m) / s          dx = y * (dy - sum(dy * y))
    log-softmax    y = (x - m) - log(s)        dx = dy - exp(y) * sum(dy)            m = max x,  s = sum exp(x - m)

    x   any shape and strides          y, dx   x's shape and memory layout

Subtracting the maximum prevents overflow without loss of accuracy (Blanchard, D. J. Higham and N. J. Higham, IMA
Journal of Numerical Analysis 41(4), 2021). The kernels view a tensor as [outer, N, inner], as rows of N elements with
stride `inner`; a program computes BLOCK_M rows. A row that fits BLOCK_N is read once. A longer row is read in two
passes, the first for m and s together (Milakov and Gimelshein, arXiv 1805.02867), the second for y. Its last BLOCK_KEPT
elements stay in registers in between, and the second pass reads the others from the cache. Long strided rows are copied
first: each element's address would take two registers. A row with NaN or +inf, or of -inf only, gives NaN.

    rows that fit a block      x [BLOCK_M, N] -> y                                 dy, y -> dx
    longer rows                x -> m, s, then x (cache, registers) -> y           dy, y -> sum, then dy, y -> dx

`rows` has the addresses and the plan of a launch.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from minidl.kernels import check, memory_layout
from minidl.kernels.activation import exponential
from minidl.kernels.reduce import as_multiple, offsets, opaque
from minidl.kernels.softmax.rows import (
    MINUS_INF,
    block_max,
    columns,
    end_columns,
    ends,
    in_shape,
    online,
    row_max,
    row_pointers,
    row_sum,
    rows_of,
    shift,
)  # fmt: skip
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed

__all__ = ["log_softmax", "log_softmax_grad", "softmax", "softmax_grad"]


@triton.jit
def softmax_kernel(p_x, p_y, sizes, tile: tl.constexpr, LOG: tl.constexpr, EARLY: tl.constexpr):
    """Write y of rows of at most BLOCK_N elements."""
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    o_n = columns(tile)
    m_mn = (o_m < sizes.R)[None, :, None] & (o_n < as_multiple(sizes.N, tile.ALIGN))
    p_x += as_multiple(offsets(o_m, sizes.INNER, sizes.s_x1, sizes.s_x2, tile.LEVELS), tile.ALIGN)[None, :, None]
    p_y += as_multiple(offsets(o_m, sizes.INNER, sizes.s_y1, sizes.s_y2, tile.LEVELS), tile.ALIGN)[None, :, None]
    p_x = row_pointers(p_x, o_n.to(tl.int64) * sizes.s_xn, tile)
    b_x = tl.load(p_x, mask=m_mn, other=MINUS_INF)  # [pieces, BLOCK_M, LANES]
    b_m = block_max(b_x).to(tile.ACC)  # before the conversion: half of the registers
    b_z = b_x.to(tile.ACC) - b_m[None, :, None]
    b_e = exponential(b_z)
    b_s = row_sum(b_e)
    if LOG:
        b_y = b_z - tl.log(b_s)[None, :, None]
    else:
        b_y = b_e * (1.0 / b_s)[None, :, None]
    p_y = row_pointers(p_y, o_n.to(tl.int64) * sizes.s_yn, tile)
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_mn)


@triton.jit
def block_result(b_x, b_m, b_s, LOG: tl.constexpr):
    """Return y of a block of rows with maxima b_m and sums b_s [rows, 1]."""
    if LOG:
        return (b_x - b_m) - tl.log(b_s)
    else:
        return exponential(b_x - b_m) * (1.0 / b_s)


@triton.jit
def read_block(p_x, o_m, o_n, R, b_body, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """Load elements o_n of rows p_x [rows, 1], to stay in the cache with KEEP; -inf outside (WHOLE: no mask)."""
    p_x += o_n[None, :]
    # Not evict_first, although this is the last read: that is slower.
    EVICTION: tl.constexpr = "evict_last" if KEEP else ""
    if WHOLE:
        return tl.load(p_x, eviction_policy=EVICTION)
    else:
        m_mn = (o_m < R)[:, None] & (o_n[None, :] < b_body[:, None])
        return tl.load(p_x, mask=m_mn, other=MINUS_INF, eviction_policy=EVICTION)


@triton.jit
def write_block(p_y, b_y, o_m, o_n, R, b_body, WHOLE: tl.constexpr):
    """Store y with a streaming store, which leaves the inputs in the cache."""
    p_y += o_n[None, :]
    if WHOLE:
        tl.store(p_y, b_y.to(p_y.dtype.element_ty), cache_modifier=".cs")
    else:
        m_mn = (o_m < R)[:, None] & (o_n[None, :] < b_body[:, None])
        tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_mn, cache_modifier=".cs")


@triton.jit
def softmax_loop_kernel(p_x, p_y, sizes, tile: tl.constexpr, LOG: tl.constexpr, OPAQUE: tl.constexpr):
    """Write y of contiguous rows of any length."""
    R, N, s_x = sizes
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    b_m = tl.full((tile.BLOCK_M,), MINUS_INF, tile.ACC)
    b_s = tl.full((tile.BLOCK_M,), 0.0, tile.ACC)
    o_x, o_y = o_m * s_x, o_m * N
    b_head, b_body = ends(o_x, N, tile.ALIGN)
    if tile.ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, tile.ALIGN)
        m_e = m_e & (o_m < R)[:, None]
        b_ends = tl.load(p_x + o_x[:, None] + o_e, mask=m_e, other=MINUS_INF).to(tile.ACC)  # [BLOCK_M, 2 ALIGN]
        b_m, b_s = online(b_ends, b_m, b_s)
        p_ends = p_y + o_y[:, None] + o_e
        o_x += b_head
        o_y += b_head
    N = as_multiple(N, tile.ALIGN)
    p_x += as_multiple(o_x, tile.ALIGN)[:, None]
    p_y += as_multiple(o_y, tile.ALIGN)[:, None]
    first = tl.cdiv(tl.maximum(N - tile.BLOCK_KEPT, 0), tile.BLOCK_N) * tile.BLOCK_N
    o_n = tl.arange(0, tile.BLOCK_N)
    for n in range(0, first, tile.BLOCK_N):
        b_x = read_block(p_x, o_m, n + o_n, R, b_body, tile.WHOLE, True)  # [BLOCK_M, BLOCK_N]
        b_m, b_s = online(b_x.to(tile.ACC), b_m, b_s)
    o_kept = first + tl.arange(0, tile.BLOCK_KEPT)
    b_kept = read_block(p_x, o_m, o_kept, R, b_body, tile.WHOLE, False)  # [BLOCK_M, BLOCK_KEPT]
    b_before, b_m = b_m, tl.maximum(b_m, row_max(b_kept).to(tile.ACC))
    b_shift = shift(b_m)
    b_kept = opaque(b_kept, OPAQUE)
    b_s = b_s * exponential(b_before - b_shift) + tl.sum(exponential(b_kept.to(tile.ACC) - b_shift[:, None]), axis=1)
    b_m = b_shift[:, None]
    b_s = b_s[:, None]
    b_kept = opaque(b_kept, OPAQUE)
    write_block(p_y, block_result(b_kept.to(tile.ACC), b_m, b_s, LOG), o_m, o_kept, R, b_body, tile.WHOLE)
    for n in range(0, first, tile.BLOCK_N):
        b_x = read_block(p_x, o_m, n + o_n, R, b_body, tile.WHOLE, False).to(tile.ACC)
        write_block(p_y, block_result(b_x, b_m, b_s, LOG), o_m, n + o_n, R, b_body, tile.WHOLE)
    if tile.ENDS:
        tl.store(p_ends, block_result(b_ends, b_m, b_s, LOG).to(p_y.dtype.element_ty), mask=m_e)


@triton.jit
def block_grad(b_dy, b_y, b_sum, LOG: tl.constexpr):
    """Return dx of a block, from the sums of its rows."""
    if LOG:
        return b_dy - tl.exp(b_y) * b_sum
    else:
        return b_y * (b_dy - b_sum)


@triton.jit
def softmax_grad_kernel(p_dy, p_y, p_dx, sizes, tile: tl.constexpr, LOG: tl.constexpr, EARLY: tl.constexpr):
    """Write dx of rows of at most BLOCK_N elements, with dy as x of `sizes`; y and dx have the same strides."""
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    o_n = columns(tile)
    m_mn = (o_m < sizes.R)[None, :, None] & (o_n < as_multiple(sizes.N, tile.ALIGN))
    p_dy += as_multiple(offsets(o_m, sizes.INNER, sizes.s_x1, sizes.s_x2, tile.LEVELS), tile.ALIGN)[None, :, None]
    o_y = as_multiple(offsets(o_m, sizes.INNER, sizes.s_y1, sizes.s_y2, tile.LEVELS), tile.ALIGN)[None, :, None]
    o_y += o_n.to(tl.int64) * sizes.s_yn
    p_dy = row_pointers(p_dy, o_n.to(tl.int64) * sizes.s_xn, tile)
    b_dy = tl.load(p_dy, mask=m_mn, other=0.0).to(tile.ACC)  # [pieces, BLOCK_M, LANES]
    b_y = tl.load(row_pointers(p_y, o_y, tile), mask=m_mn, other=0.0).to(tile.ACC)  # [pieces, BLOCK_M, LANES]
    if LOG:
        b_dx = b_dy - tl.exp(b_y) * row_sum(b_dy)[None, :, None]
    else:
        b_dx = b_y * (b_dy - row_sum(b_dy * b_y)[None, :, None])
    tl.store(row_pointers(p_dx, o_y, tile), b_dx.to(p_dx.dtype.element_ty), mask=m_mn)


@triton.jit
def softmax_grad_loop_kernel(p_dy, p_y, p_dx, sizes, tile: tl.constexpr, LOG: tl.constexpr):
    """Write dx of contiguous rows of any length, with dy as x of `sizes`."""
    R, N, s_dy = sizes
    o_m = tl.program_id(0).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    m_m = (o_m < R)[:, None]
    o_d, o_y = o_m * s_dy, o_m * N
    b_head, b_body = ends(o_y, N, tile.ALIGN)
    b_sum = tl.full((tile.BLOCK_M,), 0.0, tile.ACC)
    if tile.ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, tile.ALIGN)
        m_e = m_e & m_m
        b_dy_ends = tl.load(p_dy + o_d[:, None] + o_e, mask=m_e, other=0.0).to(tile.ACC)  # [BLOCK_M, 2 ALIGN]
        b_y_ends = tl.load(p_y + o_y[:, None] + o_e, mask=m_e, other=0.0).to(tile.ACC)  # [BLOCK_M, 2 ALIGN]
        p_ends = p_dx + o_y[:, None] + o_e
        b_sum = tl.sum(b_dy_ends if LOG else b_dy_ends * b_y_ends, axis=1)
        o_d += b_head
        o_y += b_head
    p_dy += as_multiple(o_d, tile.ALIGN)[:, None]
    p_y += as_multiple(o_y, tile.ALIGN)[:, None]
    p_dx += as_multiple(o_y, tile.ALIGN)[:, None]
    N = as_multiple(N, tile.ALIGN)
    for n in range(0, N, tile.BLOCK_N):
        o_n = n + tl.arange(0, tile.BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_dy = tl.load(p_dy + o_n, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        if LOG:
            b_sum += tl.sum(b_dy, axis=1)
        else:
            b_y = tl.load(p_y + o_n, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
            b_sum += tl.sum(b_dy * b_y, axis=1)
    for n in range(0, N, tile.BLOCK_N):
        o_n = n + tl.arange(0, tile.BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_dy = tl.load(p_dy + o_n, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        b_y = tl.load(p_y + o_n, mask=m_mn, other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_N]
        tl.store(p_dx + o_n, block_grad(b_dy, b_y, b_sum[:, None], LOG).to(p_dx.dtype.element_ty), mask=m_mn)
    if tile.ENDS:
        tl.store(p_ends, block_grad(b_dy_ends, b_y_ends, b_sum[:, None], LOG).to(p_dx.dtype.element_ty), mask=m_e)


@replayed
def _forward(op: str, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Return softmax, or log-softmax with `log`, of x along `dim`; `op` is the name in errors."""
    check.floating(op, x=x)
    axis = check.axis(op, dim, max(x.dim(), 1))
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x if x.dim() else x.view(1)
    (rows,), plan = rows_of("softmax", axis, flat)
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    kernel, constants = softmax_kernel, {}
    if not plan.fits:
        kernel, constants = softmax_loop_kernel, {"OPAQUE": x.element_size() == 2 and not launch.INTERPRETED}
    plan.run(kernel, rows, y, plan.sizes, LOG=log, **constants)
    return in_shape(y, flat.shape, axis).view(x.shape)


@replayed
def _backward(op: str, dy: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Return dx of softmax, or log-softmax with `log`, along `dim`; `op` is the name in errors."""
    check.floating(op, dy=dy, y=y)
    check.same(op, dy=dy, y=y)
    if dy.shape != y.shape:
        raise ValueError(f"{op}: dy has shape {list(dy.shape)}, expected y's shape {list(y.shape)}")
    axis = check.axis(op, dim, max(y.dim(), 1))
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=y.dtype, device=y.device)
    flat = y.contiguous() if y.dim() else y.view(1)
    (dy_rows, y_rows), plan = rows_of("softmax_grad", axis, dy.reshape(flat.shape), flat)
    dx = torch.empty_like(y_rows)
    kernel = softmax_grad_kernel if plan.fits else softmax_grad_loop_kernel
    plan.run(kernel, dy_rows, y_rows, dx, plan.sizes, LOG=log)
    return in_shape(dx, flat.shape, axis).view(y.shape)


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return exp(x) divided by its sum along `dim`; a scalar counts as one row of one element.

    Raises TypeError for an integer tensor, IndexError for a dimension out of range.
    """
    return _in_memory_order("softmax", _forward, (x,), dim, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the logarithm of `softmax(x, dim)`, without its underflow. Raises as `softmax`."""
    return _in_memory_order("log_softmax", _forward, (x,), dim, log=True)


def softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return dx of y = softmax(x, dim), from dy (any strides) and y. Raises ValueError if their shapes differ."""
    return _in_memory_order("softmax_grad", _backward, (dy, y), dim, log=False)


def log_softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return dx of y = log_softmax(x, dim), from dy (any strides) and y. Raises as `softmax_grad`."""
    return _in_memory_order("log_softmax_grad", _backward, (dy, y), dim, log=True)


def _in_memory_order(
    op: str, function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], dim: int, log: bool
) -> torch.Tensor:
    """Call the function with dimensions permuted to the memory order of the last tensor: contiguous if it is dense."""
    x = tensors[-1]
    if x.is_contiguous() or any(t.shape != x.shape for t in tensors):
        return function(op, *tensors, dim, log=log)
    dims = memory_layout.dims(x)
    axis = dims.index(check.axis(op, dim, x.dim()))
    return function(op, *(t.permute(dims) for t in tensors), axis, log=log).permute(memory_layout.back(dims))
