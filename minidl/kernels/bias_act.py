"""Bias and activation in one pass over memory: y = act(x + b), and its gradients.

    x, y, dy  [..., N]  float16 | bfloat16 | float32 | float64; rows contiguous, at any distance (else copied)
    b         [N], or none
    dx = dy act'(x + b)            db = sum over rows of dx, in a fixed order

The gradient saves x and b and recomputes x + b, without extra memory traffic. After a product with a fused epilogue,
the output y = act(z) is saved if act' follows from it (`from_output`), else z. Each program of the gradient loops over
a band of rows, so that db has few partial sums:

    x [BLOCK_M, BLOCK_N] -> y            dy, x [band, BLOCK_N] -> dx, partial sums [bands, N] -> db
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check, elementwise, memory_layout, reduce
from minidl.kernels.activation import NONE, Activation, activate, activate_grad, activate_grad_from_output
from minidl.kernels.epilogue import Epilogue
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


class Tile(NamedTuple):
    """Constants: a block [BLOCK_M, BLOCK_N], computed in ACC."""

    ACC: Any
    BLOCK_M: int
    BLOCK_N: int


class Sizes(NamedTuple):
    """[M, N], with the strides of rows of two inputs; band: the rows of a band of a gradient."""

    M: int
    N: int
    s_first: int
    s_second: int
    band: int = 1


@triton.jit
def tile_of(M, N, tile: tl.constexpr):
    """Return the rows and columns of a program's block, and their masks."""
    tiles_n = tl.cdiv(N, tile.BLOCK_N)
    o_m = (tl.program_id(0) // tiles_n).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    o_n = (tl.program_id(0) % tiles_n) * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
    m_n = o_n < N
    return o_m, o_n, o_m < M, m_n


@triton.jit
def load_rows(p, o_m, o_n, s, m_mn, ACC: tl.constexpr):
    """Load a block [BLOCK_M, BLOCK_N] of rows with the stride s."""
    return tl.load((p + o_m * s)[:, None] + o_n[None, :], mask=m_mn, other=0).to(ACC)


@triton.jit
def store_rows(p, o_m, o_n, s, b, m_mn):
    tl.store((p + o_m * s)[:, None] + o_n[None, :], b.to(p.dtype.element_ty), mask=m_mn)


@triton.jit
def bias_act_kernel(
    p_x, p_b, p_y, M, N, s_x, tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait(EARLY)
    o_m, o_n, m_m, m_n = tile_of(M, N, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_z = load_rows(p_x, o_m, o_n, s_x, m_mn, tile.ACC)
    b_z += tl.load(p_b + o_n, mask=m_n, other=0).to(tile.ACC)[None, :]
    p_y = (p_y + o_m * N)[:, None] + o_n[None, :]
    tl.store(p_y, activate(b_z, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_mn)


@triton.jit
def bias_act_grad_kernel(
    p_dy, p_x, p_b, p_dx, p_partial, sizes, tile: tl.constexpr, epilogue: tl.constexpr, FROM_OUTPUT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx, and the sums of its columns over each band of rows: partial [bands, N]. Either may be None."""
    wait(EARLY)
    M, N, s_dy, s_x, band = sizes
    o_n = tl.program_id(0) * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)
    m_n = o_n < N
    start = tl.program_id(1).to(tl.int64) * band
    end = tl.minimum(start + band, M)
    b_db = tl.full((tile.BLOCK_M, tile.BLOCK_N), 0.0, tile.ACC)
    if p_b is not None:
        b_b = tl.load(p_b + o_n, mask=m_n, other=0).to(tile.ACC)[None, :]  # [1, BLOCK_N]
    for m in range(0, band, tile.BLOCK_M):
        o_m = start + m + tl.arange(0, tile.BLOCK_M)
        m_mn = (o_m < end)[:, None] & m_n[None, :]
        b_dx = load_rows(p_dy, o_m, o_n, s_dy, m_mn, tile.ACC)
        if epilogue.ACT != NONE:
            b_x = load_rows(p_x, o_m, o_n, s_x, m_mn, tile.ACC)
            if p_b is not None:
                b_x += b_b
            if FROM_OUTPUT:
                b_dx *= activate_grad_from_output(b_x, epilogue.ACT, epilogue.SLOPE)
            else:
                b_dx *= activate_grad(b_x, epilogue.ACT, epilogue.SLOPE)
        if p_dx is not None:
            store_rows(p_dx, o_m, o_n, N, b_dx, m_mn)
        if p_partial is not None:
            # A row past the end has dy = 0, but act' of the bias alone may not be finite.
            b_db += tl.where(m_mn, b_dx, 0.0)
    if p_partial is not None:
        tl.store(p_partial + tl.program_id(1).to(tl.int64) * N + o_n, tl.sum(b_db, axis=0), mask=m_n)


@replayed
def bias_act(x: torch.Tensor, b: torch.Tensor | None, act: Activation) -> torch.Tensor:
    """act(x + b), or act(x) without a bias.

    x [..., N], b [N], one dtype and device; returns x's shape, contiguous, in x's dtype.
    Raises ValueError for an unknown activation or a bias of another shape, TypeError for dtypes.
    """
    name, slope = activation.parse(act)
    _check("bias_act", x, b)
    if b is None:
        return elementwise.act(x, act)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows_of(x)
    M, N = rows.shape
    tile, grid = plan_tiles(x.dtype, M, N)
    launch.run(
        bias_act_kernel, grid, rows, b.contiguous(), y, M, N, rows.stride(0),
        tile=tile.record(Tile, ACC=launch.acc(x.dtype)), epilogue=Epilogue(activation.CODES[name], slope),
        **dependent_launch.options(), **tile.launch_options,
    )  # fmt: skip
    return y


@replayed
def bias_act_grad(
    dy: torch.Tensor, x: torch.Tensor, b: torch.Tensor | None, act: Activation, from_output: bool = False, *,
    want_x: bool = True, want_bias: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return (dx, db) for y = act(x + b), None for each that is not wanted.

    dy, x [..., N]; b [N], or None if x is already x + b. With `from_output`, x is y, b is None and act must be in
    `activation.FROM_OUTPUT`. dx has x's shape. Without an activation dx is dy, or a contiguous copy (from the same
    launch as db) if dy is not contiguous and both are wanted. db [N].
    Raises ValueError for shapes that differ, an unknown activation, or one whose derivative needs its input.
    """
    name, slope = activation.parse(act)
    _check("bias_act_grad", x, b, dy)
    if dy.shape != x.shape:
        raise ValueError(f"bias_act_grad: dy has shape {list(dy.shape)}, expected x's {list(x.shape)}")
    if from_output and name not in activation.FROM_OUTPUT:
        raise ValueError(f"bias_act_grad: the derivative of {name} does not follow from its output; give its input")
    if from_output and b is not None:
        raise ValueError("bias_act_grad: the bias is already in the output; give b=None with from_output=True")
    if name is None and (not (want_x and want_bias) or dy.is_contiguous() or dy.numel() == 0):
        return dy if want_x else None, reduce.sum_rows(rows_of(dy)) if want_bias else None
    if b is None and not want_bias:
        return elementwise.act_grad(dy, x, act, from_output) if want_x else None, None
    if not (want_x or want_bias):
        return None, None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_x else None
    rows_dy, rows_x = rows_of(dy), rows_of(x)
    M, N = rows_x.shape
    tile, grid, band = plan_bands(x.dtype, M, N)
    partial = torch.empty(grid[1], N, dtype=launch.acc_torch(x.dtype), device=x.device) if want_bias else None
    launch.run(
        bias_act_grad_kernel, grid, rows_dy, rows_x, memory_layout.contiguous(b), dx, partial,
        Sizes(M, N, rows_dy.stride(0), rows_x.stride(0), band), tile=tile.record(Tile, ACC=launch.acc(x.dtype)),
        epilogue=Epilogue(activation.CODES[name], slope), FROM_OUTPUT=from_output, **dependent_launch.options(),
        **tile.launch_options,
    )  # fmt: skip
    return dx, None if partial is None else reduce.sum_rows(partial, out_dtype=x.dtype)


def plan_tiles(dtype: torch.dtype, M: int, N: int) -> tuple[launch.Tile, tuple[int]]:
    """Return the tile of [M, N], and the grid."""
    tile = launch.tile("bias_act", dtype, M=M, N=N)
    return tile, (launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(N, tile["BLOCK_N"]),)


def plan_bands(dtype: torch.dtype, M: int, N: int) -> tuple[launch.Tile, tuple[int, int], int]:
    """Return the tile of a gradient of [M, N], its grid (tiles of columns, bands), and the rows of a band."""
    tile = launch.tile("bias_act_grad", dtype, M=M, N=N)
    tiles_n = launch.cdiv(N, tile["BLOCK_N"])
    band = reduce.band(M, tiles_n, tile["BLOCK_M"])
    return tile, (tiles_n, launch.cdiv(M, band)), band


def depth(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the longest chain of additions of a term of db."""
    tile, (_, bands), band = plan_bands(dtype, rows, columns)
    return min(max(rows - 1, 0), band // tile["BLOCK_M"] + tile["BLOCK_M"] + bands)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., N] as [M, N] with contiguous rows, a view if possible."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _check(op: str, x: torch.Tensor, b: torch.Tensor | None, dy: torch.Tensor | None = None) -> None:
    check.floating(op, x=x)
    check.same(op, x=x, b=b, dy=dy)
    if b is not None and (x.dim() == 0 or b.shape != x.shape[-1:]):
        raise ValueError(
            f"{op}: bias has shape {list(b.shape)}, expected [{x.shape[-1] if x.dim() else 'N'}], "
            f"the last size of x {list(x.shape)}"
        )
