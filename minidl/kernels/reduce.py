"""Reductions over any axes: sum, mean, 2-norm, maximum and its first position.

    x   any shape and strides          y   x's shape without the reduced axes (or with size 1 there)

A reduction is seen as a matrix [K, R]: kept index by reduced index, each of at most two levels of strides (so the
sums over N, H and W of an [N, C, H, W] tensor need no copy; other layouts are copied first). A program keeps
[BLOCK_K, BLOCK_R] partial results in lanes, walks its share of R, and joins the lanes at the end. Where K alone
gives too few programs, R is shared out and a second launch joins the shares in order. Nothing depends on scheduling.

Floating sums are accumulated in float32 (float64 for float64); norms of anything narrower in float64, where the
squares of float32 neither overflow nor vanish. Sums of integers and bools are int64. NaN wins a maximum.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minidl.kernels import check, launch

SUM = tl.constexpr(0)
MEAN = tl.constexpr(1)
NORM = tl.constexpr(2)
COUNT = tl.constexpr(3)


@triton.jit
def offsets(o, extent, s_1, s_2, LEVELS: tl.constexpr):
    """Memory offsets of indices o = i * extent + j with strides s_1 of i and s_2 of j."""
    if LEVELS == 2:
        return (o // extent) * s_1 + (o % extent) * s_2
    else:
        return o * s_2


@triton.jit
def sum_kernel(
    p_x, p_m, p_y, K, R, K2, R2, s_k1, s_k2, s_r1, s_r2, share,
    OP: tl.constexpr, LAST: tl.constexpr, K_LEVELS: tl.constexpr, R_LEVELS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y[share, k] = sum over the share's r of x[k, r], of its square, or of whether it equals m[k]."""
    o_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_k = o_k < K
    p_x += offsets(o_k, K2, s_k1, s_k2, K_LEVELS)[:, None]
    start = tl.program_id(1) * share
    b_acc = tl.zeros((BLOCK_K, BLOCK_R), dtype=ACC)
    if OP == COUNT:
        b_m = tl.load(p_m + o_k, mask=m_k, other=0)[:, None]
    for r in range(0, share, BLOCK_R):
        o_r = start.to(tl.int64) + r + tl.arange(0, BLOCK_R)
        m_kr = m_k[:, None] & ((o_r < R) & (o_r < start + share))[None, :]
        b_x = tl.load(p_x + offsets(o_r, R2, s_r1, s_r2, R_LEVELS)[None, :], mask=m_kr, other=0)  # [BLOCK_K, BLOCK_R]
        if OP == COUNT:
            b_acc += (m_kr & (b_x == b_m)).to(ACC)
        elif OP == NORM:
            b_acc += b_x.to(ACC) * b_x.to(ACC)
        else:
            b_acc += b_x.to(ACC)
    b_y = tl.sum(b_acc, axis=1)  # [BLOCK_K]
    if LAST and OP == MEAN:
        b_y = b_y / R
    if LAST and OP == NORM:
        b_y = tl.sqrt(b_y)
    tl.store(p_y + tl.program_id(1).to(tl.int64) * K + o_k, b_y.to(p_y.dtype.element_ty), mask=m_k)


def sum(x: torch.Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The sum over `dims` (all when None)."""
    axes = _axes("sum", dims, x.dim())
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    y = torch.empty(_kept_shape(x, axes, keepdim), dtype=dtype, device=x.device)
    _sum(x, axes, y)
    return y


def sum_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """x summed over what a broadcast of `shape` to x's shape repeated: the gradient of that broadcast."""
    shape = tuple(shape)
    if tuple(x.shape) == shape:
        return x
    new = x.dim() - len(shape)
    axes = tuple(i for i, size in enumerate(x.shape) if i < new or (shape[i - new] == 1 and size != 1))
    return sum(x, axes, keepdim=True).reshape(shape)


def sum_rows(x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of the rows of x [M, N], as [N] in `out_dtype` (default x's)."""
    y = torch.empty(x.shape[1:], dtype=out_dtype or x.dtype, device=x.device)
    _sum(x, (0,), y)
    return y


def _axes(name: str, dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(rank))
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(sorted(check.axis(name, d, rank) for d in listed))


def _kept_shape(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> list[int]:
    return [1 if i in axes else size for i, size in enumerate(x.shape) if keepdim or i not in axes]


def _levels(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def _sum(x: torch.Tensor, axes: Sequence[int], y: torch.Tensor) -> None:
    if x.numel() == 0:
        y.zero_()
        return
    kept = [i for i in range(x.dim()) if i not in axes]
    k = _levels([x.shape[i] for i in kept], [x.stride(i) for i in kept])
    r = _levels([x.shape[i] for i in axes], [x.stride(i) for i in axes])
    if len(k) > 2 or len(r) > 2:
        x = x.permute(*kept, *axes).contiguous()
        K = y.numel()
        return _sum(x.view(K, -1), (1,), y)
    k_levels, r_levels = len(k), len(r)
    k = [(1, 0)] * (2 - len(k)) + k
    r = [(1, 0)] * (2 - len(r)) + r
    K, R = k[0][0] * k[1][0], r[0][0] * r[1][0]
    acc = launch.acc(x.dtype) if x.dtype.is_floating_point else tl.int64
    tile = launch.tile("reduce", x.dtype, K=K, R=R)
    launch.run(
        sum_kernel, (triton.cdiv(K, tile["BLOCK_K"]), 1), x, None, y, K, R, k[1][0], r[1][0],
        k[0][1], k[1][1], r[0][1], r[1][1], R,
        OP=SUM, LAST=True, K_LEVELS=k_levels, R_LEVELS=r_levels, ACC=acc, **tile.options,
    )  # fmt: skip
