"""Copy operands that tensor descriptors cannot read to rows that begin at a multiple of 16 bytes.

    x  [rows, columns], any row stride     y  [rows, columns], of 16 or 32 bits

Threads read as many bytes at once as the alignment of a row allows and write 16.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.division import as_multiple
from minidl.kernels.gemm.operands import Copy, Operand
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def gemm_rows_kernel(
    p_x, p_y, ROWS, COLUMNS, s_row, width,
    UNIT: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy x to y. UNIT divides COLUMNS and s_row; zeros fill the rows of y up to `width`, a multiple of AT_ONCE."""
    wait(EARLY)
    COLUMNS, s_row, width = as_multiple(COLUMNS, UNIT), as_multiple(s_row, UNIT), as_multiple(width, AT_ONCE)
    tiles = tl.cdiv(width, BLOCK_K)
    o_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_k = tl.program_id(0) % tiles * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    b_x = tl.load(p_x + o_m * s_row + o_k, mask=(o_m < ROWS) & (o_k < COLUMNS), other=0.0)  # [BLOCK_M, BLOCK_K]
    tl.store(p_y + o_m * width + o_k, b_x, mask=(o_m < ROWS) & (o_k < width))


def aligned(x: Operand, dtype: torch.dtype, target: str) -> Copy | None:
    """Prepare an aligned copy of an operand along its contiguous axis; return None if a descriptor can read it."""
    if x.has_box(dtype):
        return None
    stored = x.t if x.transposed else x
    at_once = 16 // dtype.itemsize
    width = at_once * launch.cdiv(stored.columns, at_once)
    tile = launch.tile("gemm_rows", dtype, target_=target, M=stored.rows, K=stored.columns)
    programs = launch.cdiv(stored.rows, tile["BLOCK_M"]) * launch.cdiv(width, tile["BLOCK_K"])
    meta = {
        "UNIT": stored.at_once, "AT_ONCE": at_once, **dependent_launch.options(programs, target), **tile.options,
    }  # fmt: skip
    scalars = stored.rows, stored.columns, stored.strides[0], width
    copied = Operand(stored.rows, stored.columns, (width, 1))
    prepared = launch.Prepared(gemm_rows_kernel, (programs,), scalars, meta)
    return Copy(prepared, (stored.rows, width), copied.t if x.transposed else copied)
