"""float32 products as three tf32 products, of operands that are split into tf32 parts beforehand.

x = hi + lo, hi and lo with 10 fraction bits each; A B = hi hi + hi lo + lo hi, without lo lo (2^-22 of |A| |B|). The
parts are written once, contiguous along K, as the tf32 matrix instructions read shared memory; splitting each block in
the product kernel (`tf32x3` of `tl.dot`) takes longer than the products.

An infinity times a lo of zero would give NaN. If operands contain infinities or NaN, a flag on the device (p_wild)
stops this kernel, and the kernel that splits each block itself runs instead. In both, a sum beyond the largest float32
may be NaN instead of infinite.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels.gemm import launches
from minidl.kernels.gemm.operands import Copy, Operand
from minidl.kernels.gemm.prepared import Product, boxes, product
from minidl.kernels.gemm.problem import Problem
from minidl.kernels.gemm.tiled import Sizes, gemm_tma_kernel, store_tile, tile_position
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
    d_a_hi, d_a_lo, d_b_hi, d_b_lo, p_bias, p_scale, p_c, p_z, p_wild, sizes,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the tiles of `tiled.gemm_tma_kernel` from parts [M, K] and [N, K] if *p_wild is 0, else nothing."""
    wait(EARLY)
    M, N = sizes.M, sizes.N
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    blocks_per_split = tl.cdiv(tl.cdiv(sizes.K, tile.BLOCK_K), sizes.SPLIT)
    tl.assume(blocks_per_split > 0)
    work = tl.where(tl.load(p_wild) == 0, tiles * sizes.SPLIT, 0)
    for i_work in tl.range(tl.program_id(0), work, sizes.PROGRAMS, flatten=tile.FLATTEN):
        i_split = i_work // tiles
        i_m, i_n = tile_position(i_work % tiles, M, N, BLOCK_M, BLOCK_N, tile.GROUP_M)
        m = i_m * BLOCK_M
        n = i_n * BLOCK_N
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        for i_k in range(blocks_per_split):
            k = (i_split * blocks_per_split + i_k) * tile.BLOCK_K
            b_a_hi = d_a_hi.load([m, k])  # [BLOCK_M, BLOCK_K]
            b_b_lo = d_b_lo.load([n, k])  # [BLOCK_N, BLOCK_K]
            b_ab = tl.dot(b_a_hi, b_b_lo.T, input_precision="tf32", out_dtype=tile.ACC)
            b_a_lo = d_a_lo.load([m, k])
            b_b_hi = d_b_hi.load([n, k])
            b_ab = tl.dot(b_a_lo, b_b_hi.T, b_ab, input_precision="tf32", out_dtype=tile.ACC)
            # Tensor cores truncate their sums, so the accumulator is in registers.
            b_acc += tl.dot(b_a_hi, b_b_hi.T, b_ab, input_precision="tf32", out_dtype=tile.ACC)
        p_share = p_c + i_split.to(tl.int64) * sizes.s_split
        store_tile(b_acc, p_bias, p_scale, p_share, p_z, m, n, M, N, epilogue, tile.PIECES)


@dataclass(frozen=True)
class Parts(Product):
    """The launches that split a and b, the product of their parts, and that of operands that are not finite."""

    cuts: tuple[Copy, ...] = ()
    wild: launch.Prepared | None = None

    def multiply(self, a: torch.Tensor, b: torch.Tensor, *written: torch.Tensor | None) -> None:
        """Launch on the operands, bias, scale, c and z."""
        assert self.wild is not None
        flag = torch.zeros(1, dtype=torch.int32, device=a.device)
        (a_hi, a_lo), (b_hi, b_lo) = (cut.of(x, flag) for cut, x in zip(self.cuts, (a, b), strict=True))
        self.product.run(a_hi, a_lo, b_hi, b_lo, *written, flag)
        self.wild.run(a, b, *written, flag)


def prepare(problem: Problem, tile: launch.Tile, split: int) -> Parts:
    """Prepare the product of float32 operands in any strides."""
    M, N, K = problem.sizes
    cut_a, cut_b = cut(problem.a, problem.target), cut(problem.b.t, problem.target)
    d_a, d_b = cut_a.operand.box(tile["BLOCK_M"], tile["BLOCK_K"]), cut_b.operand.box(tile["BLOCK_N"], tile["BLOCK_K"])
    programs = min(launches.tiles_of(M, N, tile) * split, problem.processors)
    sizes = Sizes(M, N, K, problem.values, split, programs)
    of_parts = product(
        problem, "parts", gemm_parts_kernel, (programs,), (sizes,), tile, split, boxes=(d_a, d_a, d_b, d_b),
        PRECISION=problem.precision,
    )  # fmt: skip
    wild_tile = problem.tile("tma", floor=16)
    scalars = (sizes._replace(PROGRAMS=problem.processors),)
    wild = product(
        problem, "tma", gemm_tma_kernel, (problem.processors,), scalars, wild_tile, split, **boxes(problem, wild_tile)
    )  # fmt: skip
    return Parts("parts", of_parts.product, of_parts.partial, of_parts.total, cuts=(cut_a, cut_b), wild=wild.product)


def along_k(x: Operand, nearest: bool, target: str) -> Copy | None:
    """Prepare a copy of float32 x [rows, K] that is contiguous along K, with 16-byte aligned rows; None if x is.

    The tf32 matrix instructions read shared memory along K only, and transposing each block in the kernel costs far
    more than copying the operand. With `nearest` the copy is rounded to tf32. Tensor cores would truncate the same
    bits, with twice the error.
    """
    if x.strides[1] == 1 or 0 in (x.rows, x.columns):
        return None
    return _copied(along_k_kernel, x, (), {"NEAREST": nearest}, target)


def cut(x: Operand, target: str) -> Copy:
    """Prepare the parts [2, rows, K and padding] of x [rows, K]; its launch also takes the flag."""
    return _copied(parts_kernel, x, (2,), {}, target)


def _copied(kernel: Any, x: Operand, copies: tuple[int, ...], meta: dict[str, Any], target: str) -> Copy:
    """Prepare copies [*copies, rows, K and padding] of x [rows, K]."""
    width = launch.cdiv(x.columns, 4) * 4  # rows begin at 16 bytes
    tile = launch.tile("gemm_cut", torch.float32, target_=target, M=x.rows, K=x.columns)
    grid = (launch.cdiv(x.rows, tile["BLOCK_M"]) * launch.cdiv(x.columns, tile["BLOCK_K"]),)
    scalars = (x.rows, x.columns, *x.strides, *([x.rows * width] if copies else []), width)
    meta = {**meta, **dependent_launch.options(target=target), **tile.options}
    copied = Operand(x.rows, x.columns, (width, 1))
    return Copy(launch.Prepared(kernel, grid, scalars, meta), (*copies, x.rows, width), copied)
