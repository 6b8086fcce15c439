"""A residual in one pass over memory: scale x per channel and per example, add another tensor; and its gradients.

    y[m, n]     = added[m, n] + x[m, n] scale[n] factor[m // R]
    dx[m, n]    = dy[m, n] factor[m // R] scale[n]
    dscale[n]   = sum over m of x[m, n] dy[m, n] factor[m // R], in a fixed order          dadded = dy

    x, added, dy  [..., N]  float16 | bfloat16 | float32 | float64, may differ; rows contiguous (else copied)
    scale         [N]       floating
    factor        [F]       floating, or none: M = F R rows; 0 or 1 / (1 - p) for an example of stochastic depth

Products are rounded in the order of torch's separate kernels, in the accumulation dtype of the promoted dtype: if all
inputs have that dtype, y and dx have torch's bits. Each program of the gradient loops over a band of rows, so that
dscale has few partial sums. The tiles are those of `bias_act`, which has the same memory accesses.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels import check, memory_layout, reduce
from minidl.kernels.bias_act import Sizes, Tile, load_rows, plan_bands, plan_tiles, rows_of, store_rows, tile_of
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def scaled_sum_kernel(p_x, p_scale, p_factor, p_added, p_y, sizes, R, tile: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    M, N, s_x, s_added, _ = sizes
    o_m, o_n, m_m, m_n = tile_of(M, N, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_y = load_rows(p_x, o_m, o_n, s_x, m_mn, tile.ACC)
    b_y *= tl.load(p_scale + o_n, mask=m_n, other=0).to(tile.ACC)[None, :]
    if p_factor is not None:
        b_y *= tl.load(p_factor + o_m // R, mask=m_m, other=0).to(tile.ACC)[:, None]
    b_y += load_rows(p_added, o_m, o_n, s_added, m_mn, tile.ACC)
    store_rows(p_y, o_m, o_n, N, b_y, m_mn)


@triton.jit
def scaled_sum_grad_kernel(
    p_dy, p_x, p_scale, p_factor, p_dx, p_partial, sizes, R, tile: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Write dx, and the sum of each band of rows for dscale: partial [bands, N]. Either may be None."""
    wait(EARLY)
    M, N, s_dy, s_x, band = sizes
    o_n = tl.program_id(0) * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
    m_n = o_n < N
    start = tl.program_id(1).to(tl.int64) * band
    end = tl.minimum(start + band, M)
    b_dscale = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    if p_dx is not None:
        b_scale = tl.load(p_scale + o_n, mask=m_n, other=0).to(tile.ACC)[None, :]  # [1, BLOCK_N]
    for m in range(0, band, tile.BLOCK_M):
        o_m = start + m + tl.arange(0, tile.BLOCK_M)
        m_m = o_m < end
        m_mn = m_m[:, None] & m_n[None, :]
        b_dy = load_rows(p_dy, o_m, o_n, s_dy, m_mn, tile.ACC)
        if p_factor is not None:
            b_dy *= tl.load(p_factor + o_m // R, mask=m_m, other=0).to(tile.ACC)[:, None]
        if p_dx is not None:
            store_rows(p_dx, o_m, o_n, N, b_dy * b_scale, m_mn)
        if p_partial is not None:
            b_dscale += load_rows(p_x, o_m, o_n, s_x, m_mn, tile.ACC) * b_dy
    if p_partial is not None:
        tl.store(p_partial + tl.program_id(1).to(tl.int64) * N + o_n, tl.sum(b_dscale, axis=0), mask=m_n)


@replayed
def scaled_sum(x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
    """Return added + x * scale * factor, in x's shape, contiguous, in torch's promoted dtype.

    x, added [..., N], scale [N], factor [F] for F equal runs of rows, or None; dtypes may differ.
    Raises ValueError for shapes or devices that do not fit, TypeError for dtypes that are not floating.
    """
    _check("scaled_sum", x, scale, factor, added=added)
    dtype = promoted(x, scale, factor, added)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, others = rows_of(x), rows_of(added)
    M, N = rows.shape
    tile, grid = plan_tiles(x.dtype, M, N)
    launch.run(
        scaled_sum_kernel, grid, rows, scale.contiguous(), memory_layout.contiguous(factor), others, y,
        Sizes(M, N, rows.stride(0), others.stride(0)), _run(M, factor), tile=tile.record(Tile, ACC=launch.acc(dtype)),
        enable_fp_fusion=False, **dependent_launch.options(), **tile.launch_options,
    )  # fmt: skip
    return y


@replayed
def scaled_sum_grad(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, *, want_x: bool = True,
    want_scale: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return (dx, dscale) for y = added + x * scale * factor, None for each that is not wanted.

    dy, x [..., N], the others as in `scaled_sum`. dx is contiguous in x's dtype, dscale [N] in scale's.
    Raises ValueError for shapes or devices that do not fit, TypeError for dtypes that are not floating.
    """
    _check("scaled_sum_grad", x, scale, factor, dy=dy)
    if not (want_x or want_scale):
        return None, None
    dtype = promoted(x, scale, factor, dy)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_x else None
    rows_dy, rows_x = rows_of(dy), rows_of(x)
    M, N = rows_x.shape
    tile, grid, band = plan_bands(x.dtype, M, N)
    partial = torch.empty(grid[1], N, dtype=launch.acc_torch(dtype), device=x.device) if want_scale else None
    launch.run(
        scaled_sum_grad_kernel, grid, rows_dy, rows_x, scale.contiguous(),
        memory_layout.contiguous(factor), dx, partial,
        Sizes(M, N, rows_dy.stride(0), rows_x.stride(0), band), _run(M, factor),
        tile=tile.record(Tile, ACC=launch.acc(dtype)), **dependent_launch.options(), **tile.launch_options,
    )  # fmt: skip
    return dx, None if partial is None else reduce.sum_rows(partial, out_dtype=scale.dtype)


def promoted(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return the dtype to which torch promotes tensors of one or more dimensions."""
    (dtype, *others) = (t.dtype for t in tensors if t is not None)
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype


def _run(rows: int, factor: torch.Tensor | None) -> int:
    """Return how many rows share a factor."""
    return 1 if factor is None else max(rows // max(len(factor), 1), 1)


def _check(op: str, x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, **other: torch.Tensor) -> None:
    check.floating(op, x=x, scale=scale, factor=factor, **other)
    ((name, second),) = other.items()
    if second.shape != x.shape or x.dim() == 0 or scale.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: x has shape {list(x.shape)}, {name} {list(second.shape)}, scale {list(scale.shape)}; expected "
            "[..., N] of both and [N]"
        )
    rows = math.prod(x.shape[:-1])
    if factor is not None and (factor.dim() != 1 or (rows and (len(factor) == 0 or rows % len(factor)))):
        raise ValueError(f"{op}: factor has shape {list(factor.shape)}, expected [F] with F a divisor of {rows} rows")
    for label, tensor in (("scale", scale), ("factor", factor), (name, second)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {label} is on {tensor.device} and x is on {x.device}; move one of them with .to()")
