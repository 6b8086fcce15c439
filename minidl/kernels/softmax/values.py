"""Softmax and log-softmax: one kernel for rows that fit a block, one for longer rows."""

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.activation import exponential
from minidl.kernels.reduce import as_multiple, offsets, opaque
from minidl.kernels.softmax.rows import (
    MINUS_INF,
    block_max,
    columns,
    end_columns,
    ends,
    in_shape,
    lanes,
    levels,
    loop_alignment,
    online,
    row_max,
    row_pointers,
    row_strides,
    row_sum,
    rows_of,
    shift,
    vectors,
)  # fmt: skip
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def softmax_kernel(
    p_x, p_y, R, N, INNER, s_x1, s_x2, s_xn, s_y1, s_y2, s_yn,
    LOG: tl.constexpr, LEVELS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write y of rows of at most BLOCK_N elements."""
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = columns(BLOCK_N, LANES)
    m_mn = (o_m < R)[None, :, None] & (o_n < as_multiple(N, ALIGN))
    p_x += as_multiple(offsets(o_m, INNER, s_x1, s_x2, LEVELS), ALIGN)[None, :, None]
    p_y += as_multiple(offsets(o_m, INNER, s_y1, s_y2, LEVELS), ALIGN)[None, :, None]
    p_x = row_pointers(p_x, o_n.to(tl.int64) * s_xn, BLOCK_N, LANES)
    b_x = tl.load(p_x, mask=m_mn, other=MINUS_INF)  # [pieces, BLOCK_M, LANES]
    b_m = block_max(b_x).to(ACC)  # before the conversion: half of the registers
    b_z = b_x.to(ACC) - b_m[None, :, None]
    b_e = exponential(b_z)
    b_s = row_sum(b_e)
    if LOG:
        b_y = b_z - tl.log(b_s)[None, :, None]
    else:
        b_y = b_e * (1.0 / b_s)[None, :, None]
    p_y = row_pointers(p_y, o_n.to(tl.int64) * s_yn, BLOCK_N, LANES)
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
    # Not evict_first, although this is the last read: 2048x131072 takes 0.299 ms, 0.306 with evict_first.
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
def softmax_loop_kernel(
    p_x, p_y, R, N, s_x,
    LOG: tl.constexpr, ACC: tl.constexpr, OPAQUE: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
    ENDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KEPT: tl.constexpr,
):  # fmt: skip
    """Write y of contiguous rows of any length with stride s_x. WHOLE: blocks fill the rows and the kept parts exactly.

    With ENDS, blocks begin at the first multiple of ALIGN in a row; its head and tail are loaded separately.
    """
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_m = tl.full((BLOCK_M,), MINUS_INF, ACC)
    b_s = tl.zeros((BLOCK_M,), ACC)
    o_x, o_y = o_m * s_x, o_m * N
    b_head, b_body = ends(o_x, N, ALIGN)
    if ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, ALIGN)
        m_e = m_e & (o_m < R)[:, None]
        b_ends = tl.load(p_x + o_x[:, None] + o_e, mask=m_e, other=MINUS_INF).to(ACC)  # [BLOCK_M, 2 ALIGN]
        b_m, b_s = online(b_ends, b_m, b_s)
        p_ends = p_y + o_y[:, None] + o_e
        o_x += b_head
        o_y += b_head
    N = as_multiple(N, ALIGN)
    p_x += as_multiple(o_x, ALIGN)[:, None]
    p_y += as_multiple(o_y, ALIGN)[:, None]
    first = tl.cdiv(tl.maximum(N - BLOCK_KEPT, 0), BLOCK_N) * BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    for n in range(0, first, BLOCK_N):
        b_x = read_block(p_x, o_m, n + o_n, R, b_body, WHOLE, True)  # [BLOCK_M, BLOCK_N]
        b_m, b_s = online(b_x.to(ACC), b_m, b_s)
    o_kept = first + tl.arange(0, BLOCK_KEPT)
    b_kept = read_block(p_x, o_m, o_kept, R, b_body, WHOLE, False)  # [BLOCK_M, BLOCK_KEPT]
    b_before, b_m = b_m, tl.maximum(b_m, row_max(b_kept).to(ACC))
    b_shift = shift(b_m)
    b_kept = opaque(b_kept, OPAQUE)
    b_s = b_s * exponential(b_before - b_shift) + tl.sum(exponential(b_kept.to(ACC) - b_shift[:, None]), axis=1)
    b_m = b_shift[:, None]
    b_s = b_s[:, None]
    b_kept = opaque(b_kept, OPAQUE)
    write_block(p_y, block_result(b_kept.to(ACC), b_m, b_s, LOG), o_m, o_kept, R, b_body, WHOLE)
    for n in range(0, first, BLOCK_N):
        b_x = read_block(p_x, o_m, n + o_n, R, b_body, WHOLE, False).to(ACC)
        write_block(p_y, block_result(b_x, b_m, b_s, LOG), o_m, n + o_n, R, b_body, WHOLE)
    if ENDS:
        tl.store(p_ends, block_result(b_ends, b_m, b_s, LOG).to(p_y.dtype.element_ty), mask=m_e)


@replayed
def forward(op: str, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Return softmax, or log-softmax with `log`, of x along `dim`; `op` is the name in errors."""
    check.floating(op, x=x)
    axis = check.axis(op, dim, max(x.dim(), 1))
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x if x.dim() else x.view(1)
    (rows,), tile, fits = rows_of("softmax", "softmax_loop", axis, flat)
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    outer, N, inner = rows.shape
    R = outer * inner
    grid = (launch.cdiv(R, tile["BLOCK_M"]),)
    align = vectors(rows, y)
    meta = {"LOG": log, "ACC": launch.acc(x.dtype), **tile.options}
    if fits:
        strides = *row_strides(rows), *row_strides(y)
        launch.run(
            softmax_kernel, grid, rows, y, R, N, inner, *strides, LEVELS=levels(rows), ALIGN=align,
            LANES=lanes(align, tile, rows, y), **dependent_launch.options(grid[0]), **meta,
        )  # fmt: skip
    else:
        hide = x.element_size() == 2 and not launch.INTERPRETED
        rest = N - tile["BLOCK_KEPT"]
        align, with_ends = loop_alignment(align, rows, y)
        full_blocks = not with_ends and R % tile["BLOCK_M"] == 0 and rest >= 0 and rest % tile["BLOCK_N"] == 0
        launch.run(
            softmax_loop_kernel, grid, rows, y, R, N, rows.stride(0), OPAQUE=hide, WHOLE=full_blocks, ALIGN=align,
            ENDS=with_ends, **meta,
        )  # fmt: skip
    return in_shape(y, flat.shape, axis).view(x.shape)
