"""Multiply a matrix by a vector, y = act(A x + bias). A row times a matrix is the same product of the transpose.

    A  [M, K], any strides     x  [K]     y  [M]

Each value of A is read and used once, so reading A bounds the time and tensor cores do not help. A program multiplies
blocks [BLOCK_M, BLOCK_K] of A by a block of x, accumulates the products in registers and sums each row at the end.
Neighbouring threads read neighbouring values along the contiguous axis of A.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.division import as_multiple
from minidl.kernels.epilogue import save_or_add
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.operands import units
from minidl.kernels.gemm.prepared import Product, strided
from minidl.kernels.gemm.problem import Problem
from minidl.kernels.gemm.tiled import share_of_k
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait

# Smallest K; `thin` is as fast for shorter rows.
LEAST = 256
# Programs per multiprocessor; fewer do not keep enough loads in flight.
PROGRAMS = 4


@triton.jit
def gemm_vector_kernel(
    p_a, p_x, p_bias, p_scale, p_y, p_z, sizes, strides, s_bias,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write y, or one share of it. x has the strides of b; s_bias is 0 if all rows have one bias."""
    wait(EARLY)
    M, K = as_multiple(sizes.M, tile.UNITS[0]), as_multiple(sizes.K, tile.UNITS[2])
    s_am, s_ak = as_multiple(strides.am, tile.UNITS[3]), as_multiple(strides.ak, tile.UNITS[4])
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    start, end = share_of_k(K, sizes.SPLIT, BLOCK_K)
    o_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
    p_a += o_m[:, None] * s_am + o_k[None, :] * s_ak
    p_x += o_k * strides.bk
    b_acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=tile.ACC)
    for k in tl.range(start, end, BLOCK_K, num_stages=tile.STAGES):
        m_k = (k + tl.arange(0, BLOCK_K)) < end
        b_x = tl.load(p_x, mask=m_k, other=0.0).to(tile.ACC)  # [BLOCK_K]
        b_a = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_K]
        b_acc += b_a * b_x[None, :]
        p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
        p_x += tl.full((), BLOCK_K, tl.int64) * strides.bk
    b_y = tl.sum(b_acc, 1)  # [BLOCK_M]
    m_m = o_m < M
    if p_scale is not None:
        b_y *= tl.load(p_scale + o_m * s_bias, mask=m_m, other=0.0).to(tile.ACC)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_m * s_bias, mask=m_m, other=0.0).to(tile.ACC)
    b_y = save_or_add(b_y, p_z, o_m, m_m, epilogue.SAVE_Z)
    p_y += tl.program_id(1).to(tl.int64) * sizes.s_split + o_m
    tl.store(p_y, activate(b_y, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_m)


def suits(problem: Problem) -> bool:
    """Whether a product is a matrix times a vector (or the reverse), is compiled, and has 16 or 32 bits.

    The interpreter is faster with `tl.dot`, and float64 has tensor cores.
    """
    if not problem.compiled or problem.batch is not None or problem.dtype == torch.float64:
        return False
    M, N, K = problem.sizes
    return 1 in (M, N) and K >= LEAST


def prepare(problem: Problem) -> Product:
    """Prepare a product in which b has one column or a has one row, with enough programs to keep memory busy."""
    swapped = problem.b.columns > 1
    matrix, x = (problem.b.t, problem.a.t) if swapped else (problem.a, problem.b)
    M, K, step = matrix.rows, matrix.columns, matrix.strides[1]
    tile = launch.tile("gemm_vector", problem.dtype, target_=problem.target, M=M, K=K, STEP=step if K > 1 else 1)
    tiles = launch.cdiv(M, tile["BLOCK_M"])
    split = launches.shares_of(tiles, K, tile, PROGRAMS * problem.processors, problem.split, least=1)
    result = strided(
        problem, "vector", gemm_vector_kernel, tiles, tile, split, int(swapped), operands=(matrix, x),
        short=tiles * split, UNITS=units(matrix, x)[:5], STAGES=tile.num_stages,
    )  # fmt: skip
    return dataclasses.replace(result, swapped=swapped)
