"""float32 products as three tf32 products, of operands that are split into tf32 parts beforehand.

x = hi + lo, hi and lo with 10 fraction bits each; A B = hi hi + hi lo + lo hi, without lo lo (2^-22 of |A| |B|). The
parts are written once, contiguous along K, as the tf32 matrix instructions read shared memory; splitting each block in
the product kernel (`tf32x3` of `tl.dot`) takes longer than the products (H200, 4096^3: 1.94 ms).

An infinity times a lo of zero would give NaN. If operands contain infinities or NaN, a flag on the device (p_wild)
stops this kernel, and the kernel that splits each block itself runs instead. In both, a sum beyond the largest float32
may be NaN instead of infinite.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.kernels.gemm.tiled import epilogue, tile_position
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

EXPONENT = tl.constexpr(0x7F800000)
FRACTION = tl.constexpr(-0x2000)  # all bits but the last 13


@triton.jit
def nearest_tf32(b_x):
    """Return the nearest number with 10 fraction bits; if that is infinite, x without its last 13 bits."""
    bits = b_x.to(tl.int32, bitcast=True)
    near = (bits + 0x1000) & FRACTION
    near = tl.where((near & EXPONENT) == EXPONENT, bits & FRACTION, near)
    return near.to(tl.float32, bitcast=True)


@triton.jit
def load_block(p_x, ROWS, K, s_row, s_k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load this program's block of x [ROWS, K]; return its row and column offsets, mask and values."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    o_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    m_mk = (o_m < ROWS) & (o_k < K)
    b_x = tl.load(p_x + o_m * s_row + o_k.to(tl.int64) * s_k, mask=m_mk, other=0.0)  # [BLOCK_M, BLOCK_K]
    return o_m, o_k, m_mk, b_x


@triton.jit
def along_k_kernel(
    p_x, p_y, ROWS, K, s_row, s_k, width,
    NEAREST: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy x [ROWS, K] to y [ROWS, width], contiguous along K; rounded to tf32 with NEAREST."""
    wait(EARLY)
    o_m, o_k, m_mk, b_x = load_block(p_x, ROWS, K, s_row, s_k, BLOCK_M, BLOCK_K)
    if NEAREST:
        wild = (b_x.to(tl.int32, bitcast=True) & EXPONENT) == EXPONENT
        b_x = tl.where(wild, b_x, nearest_tf32(b_x))
    tl.store(p_y + o_m * width + o_k, b_x, mask=m_mk)


@triton.jit
def parts_kernel(
    p_x, p_parts, p_wild, ROWS, K, s_row, s_k, s_part, width,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write parts [2, ROWS, width], hi and lo of x [ROWS, K]; set *p_wild to 1 if x has infinities or NaN."""
    wait(EARLY)
    o_m, o_k, m_mk, b_x = load_block(p_x, ROWS, K, s_row, s_k, BLOCK_M, BLOCK_K)
    wild = tl.max(((b_x.to(tl.int32, bitcast=True) & EXPONENT) == EXPONENT).to(tl.int32))
    tl.atomic_max(p_wild, wild, mask=wild > 0)
    b_hi = nearest_tf32(b_x)
    p_parts += o_m * width + o_k
    tl.store(p_parts, b_hi, mask=m_mk)
    tl.store(p_parts + s_part, nearest_tf32(b_x - b_hi), mask=m_mk)


@triton.jit
def gemm_parts_kernel(
    d_a_hi, d_a_lo, d_b_hi, d_b_lo, p_bias, p_c, p_z, p_wild, M, N, K, s_split, PROGRAMS,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write the tiles of `tiled.gemm_tma_kernel` from parts [M, K] and [N, K] if *p_wild is 0, else nothing."""
    wait(EARLY)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    blocks_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    tl.assume(blocks_per_split > 0)
    work = tl.where(tl.load(p_wild) == 0, tiles * SPLIT, 0)
    for i_work in tl.range(tl.program_id(0), work, PROGRAMS, flatten=FLATTEN):
        i_split = i_work // tiles
        i_m, i_n = tile_position(i_work % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        m = i_m * BLOCK_M
        n = i_n * BLOCK_N
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for i_k in range(blocks_per_split):
            k = (i_split * blocks_per_split + i_k) * BLOCK_K
            b_a_hi = d_a_hi.load([m, k])  # [BLOCK_M, BLOCK_K]
            b_b_lo = d_b_lo.load([n, k])  # [BLOCK_N, BLOCK_K]
            b_ab = tl.dot(b_a_hi, b_b_lo.T, input_precision="tf32", out_dtype=ACC)
            b_a_lo = d_a_lo.load([m, k])
            b_b_hi = d_b_hi.load([n, k])
            b_ab = tl.dot(b_a_lo, b_b_hi.T, b_ab, input_precision="tf32", out_dtype=ACC)
            # Tensor cores truncate their sums: accumulated there, 4096 terms are off by 3e-5 of the norm.
            b_acc += tl.dot(b_a_hi, b_b_hi.T, b_ab, input_precision="tf32", out_dtype=ACC)
        epilogue(
            b_acc, p_bias, None, p_c + i_split.to(tl.int64) * s_split, p_z, m, n, M, N,
            HAS_BIAS, False, ACT, SLOPE, SAVE_Z, PIECES,
        )  # fmt: skip


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor, z: torch.Tensor | None,
    tile: launch.Tile, programs: int, flags: dict[str, object],
) -> torch.Tensor:  # fmt: skip
    """Write c (or its shares) = a @ b if all numbers are finite; return the flag. a [M, K], b [K, N], any strides."""
    (M, K), N = a.shape, b.shape[1]
    wild = torch.zeros(1, dtype=torch.int32, device=a.device)
    boxes_a = _boxes(_split_parts(a, wild), K, tile["BLOCK_M"], tile["BLOCK_K"])
    boxes_b = _boxes(_split_parts(b.t(), wild), K, tile["BLOCK_N"], tile["BLOCK_K"])
    launch.run(
        gemm_parts_kernel, (programs,), *boxes_a, *boxes_b, bias, c, z, wild, M, N, K,
        c.numel() // int(flags["SPLIT"]), programs, **flags, **dependent_launch.options(), **tile.options,
    )  # fmt: skip
    return wild


def along_k(x: torch.Tensor, nearest: bool = False) -> torch.Tensor:
    """Return x [rows, K] if it is contiguous along K, else a copy that is, with 16-byte aligned rows.

    With `nearest` the copy is rounded to tf32. Tensor cores would truncate the same bits, with twice the error.
    """
    if x.stride(1) == 1 or 0 in x.shape:
        return x
    y, grid, options = _allocate(x)
    launch.run(along_k_kernel, grid, x, y, *x.shape, *x.stride(), y.shape[1], NEAREST=nearest, **options)
    return y[:, : x.shape[1]]


def _split_parts(x: torch.Tensor, wild: torch.Tensor) -> torch.Tensor:
    """Return the parts [2, rows, K and padding] of x [rows, K]."""
    parts, grid, options = _allocate(x, 2)
    launch.run(parts_kernel, grid, x, parts, wild, *x.shape, *x.stride(), *parts.stride()[:2], **options)
    return parts


def _allocate(x: torch.Tensor, *copies: int) -> tuple[torch.Tensor, tuple[int], dict[str, Any]]:
    """Return memory [*copies, rows, K and padding] for copies of x [rows, K], and the kernel's grid and options."""
    rows, K = x.shape
    y = torch.empty(*copies, rows, launch.cdiv(K, 4) * 4, dtype=x.dtype, device=x.device)  # rows begin at 16 bytes
    tile = launch.tile("gemm_cut", x.dtype, M=rows, K=K)
    grid = (launch.cdiv(rows, tile["BLOCK_M"]) * launch.cdiv(K, tile["BLOCK_K"]),)
    return y, grid, {**dependent_launch.options(), **tile.options}


def _boxes(parts: torch.Tensor, K: int, block_rows: int, block_k: int) -> list[TensorDescriptor]:
    _, rows, width = parts.shape
    return [TensorDescriptor(part, [rows, K], [width, 1], [block_rows, block_k]) for part in parts]
