"""Multiply a matrix by a vector, y = act(A x + bias). A row times a matrix is the same product of the transpose.

    A  [M, K], any strides     x  [K]     y  [M]

Each value of A is read and used once, so reading A bounds the time and tensor cores do not help. A program multiplies
blocks [BLOCK_M, BLOCK_K] of A by a block of x, accumulates the products in registers and sums each row at the end.
Neighbouring threads read neighbouring values along the contiguous axis of A.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.division import as_multiple
from minidl.kernels.gemm import launches
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

# Smallest K; `thin` is as fast for shorter rows.
LEAST = 256
# Programs per multiprocessor; fewer do not keep enough loads in flight.
PROGRAMS = 4


@triton.jit
def gemm_vector_kernel(
    p_a, p_x, p_bias, p_y, p_z, M, K, s_am, s_ak, s_x, s_bias, s_split, SPLIT,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, UNITS: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write y, or one share of it. UNITS divide M, K, s_am and s_ak, in this order."""
    wait(EARLY)
    M, K = as_multiple(M, UNITS[0]), as_multiple(K, UNITS[1])
    s_am, s_ak = as_multiple(s_am, UNITS[2]), as_multiple(s_ak, UNITS[3])
    i_split = tl.program_id(1)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    start = i_split * k_per_split
    end = tl.minimum(K, start + k_per_split)
    o_k = start + tl.arange(0, BLOCK_K)
    p_a += o_m[:, None] * s_am + o_k.to(tl.int64)[None, :] * s_ak
    p_x += o_k.to(tl.int64) * s_x
    b_acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=ACC)
    # Triton pipelines loads that feed no tl.dot only if the loop itself sets num_stages.
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        m_k = (k + tl.arange(0, BLOCK_K)) < end
        b_x = tl.load(p_x, mask=m_k, other=0.0).to(ACC)  # [BLOCK_K]
        b_a = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0).to(ACC)  # [BLOCK_M, BLOCK_K]
        b_acc += b_a * b_x[None, :]
        p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
        p_x += tl.full((), BLOCK_K, tl.int64) * s_x
    b_y = tl.sum(b_acc, 1)  # [BLOCK_M]
    m_m = o_m < M
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_m * s_bias, mask=m_m, other=0.0).to(ACC)
    if SAVE_Z:
        tl.store(p_z + o_m, b_y.to(p_z.dtype.element_ty), mask=m_m)
    p_y += i_split.to(tl.int64) * s_split + o_m
    tl.store(p_y, activate(b_y, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_m)


def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a @ b is a matrix times a vector (or the reverse), is compiled, and has 16 or 32 bits.

    The interpreter is faster with `tl.dot`, and float64 has tensor cores.
    """
    if launch.INTERPRETED or a.dim() != 2 or a.dtype == torch.float64:
        return False
    return 1 in (a.shape[0], b.shape[1]) and a.shape[1] >= LEAST


def tile(a: torch.Tensor, b: torch.Tensor, split: int | None) -> tuple[launch.Tile, int, int]:
    """Return the tile, the number of tiles, and the shares of K: enough programs to keep memory busy."""
    matrix = a if b.shape[1] == 1 else b.t()
    M, K = matrix.shape
    tile_ = launch.tile("gemm_vector", a.dtype, M=M, K=K, STEP=matrix.stride(1) if K > 1 else 1)
    tiles = launch.cdiv(M, tile_["BLOCK_M"])
    return tile_, tiles, launches.shares_of(tiles, K, tile_, PROGRAMS * launch.processors(), split, least=1)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor, z: torch.Tensor | None,
    tile: launch.Tile, tiles: int, flags: dict[str, Any],
) -> None:  # fmt: skip
    """Write c (or its shares) = a @ b with the epilogue of `flags`; b has one column or a has one row; any strides."""
    matrix, x, s_bias = (a, b[:, 0], 0) if b.shape[1] == 1 else (b.t(), a[0], 1)
    (M, K), split = matrix.shape, flags["SPLIT"]
    units = tuple(map(launches.unit, (M, K, *matrix.stride())))
    meta = {
        "UNITS": units,
        "STAGES": tile.num_stages,
        **dependent_launch.options(tiles * split),
        **flags,
        **tile.options,
    }
    del meta["SPLIT"]
    launch.run(
        gemm_vector_kernel, (tiles, split), matrix, x, bias, c, z, M, K, *matrix.stride(), x.stride(0), s_bias, M,
        split, **meta,
    )  # fmt: skip
