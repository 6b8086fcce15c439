"""Multiply a matrix by a vector, y = act(A x + bias). A row times a matrix is the same product of the transpose.

    A  [M, K], any strides     x  [K]     y  [M]

Each value of A is read and used once, so reading A bounds the time and tensor cores do not help. A program multiplies
blocks [BLOCK_M, BLOCK_K] of A by a block of x, accumulates the products in registers and sums each row at the end.
Neighbouring threads read neighbouring values along the contiguous axis of A.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.division import as_multiple
from minidl.kernels.epilogue import save_or_add
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.operands import unit
from minidl.kernels.gemm.prepared import Product, product
from minidl.kernels.gemm.problem import Problem
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait

# Smallest K; `thin` is as fast for shorter rows.
LEAST = 256
# Programs per multiprocessor; fewer do not keep enough loads in flight.
PROGRAMS = 4


class VectorSizes(NamedTuple):
    """Sizes and strides of a product of SPLIT shares; s_bias is 0 if all rows have one bias."""

    M: int
    K: int
    s_am: int
    s_ak: int
    s_x: int
    s_bias: int
    s_split: int
    SPLIT: int


class VectorTile(NamedTuple):
    """Constants of a product. UNITS divide M, K, s_am and s_ak, in this order; STAGES: loads that run ahead."""

    BLOCK_M: int
    BLOCK_K: int
    UNITS: tuple[int, ...]
    STAGES: int
    ACC: Any


@triton.jit
def gemm_vector_kernel(
    p_a, p_x, p_bias, p_scale, p_y, p_z, sizes, tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Write y, or one share of it."""
    wait(EARLY)
    M, K = as_multiple(sizes.M, tile.UNITS[0]), as_multiple(sizes.K, tile.UNITS[1])
    s_am, s_ak = as_multiple(sizes.s_am, tile.UNITS[2]), as_multiple(sizes.s_ak, tile.UNITS[3])
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    i_split = tl.program_id(1)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), sizes.SPLIT) * BLOCK_K
    start = i_split * k_per_split
    end = tl.minimum(K, start + k_per_split)
    o_k = start + tl.arange(0, BLOCK_K)
    p_a += o_m[:, None] * s_am + o_k.to(tl.int64)[None, :] * s_ak
    p_x += o_k.to(tl.int64) * sizes.s_x
    b_acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=tile.ACC)
    # Triton pipelines loads that feed no tl.dot only if the loop itself sets num_stages.
    for k in tl.range(start, end, BLOCK_K, num_stages=tile.STAGES):
        m_k = (k + tl.arange(0, BLOCK_K)) < end
        b_x = tl.load(p_x, mask=m_k, other=0.0).to(tile.ACC)  # [BLOCK_K]
        b_a = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0).to(tile.ACC)  # [BLOCK_M, BLOCK_K]
        b_acc += b_a * b_x[None, :]
        p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
        p_x += tl.full((), BLOCK_K, tl.int64) * sizes.s_x
    b_y = tl.sum(b_acc, 1)  # [BLOCK_M]
    m_m = o_m < M
    if p_scale is not None:
        b_y *= tl.load(p_scale + o_m * sizes.s_bias, mask=m_m, other=0.0).to(tile.ACC)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_m * sizes.s_bias, mask=m_m, other=0.0).to(tile.ACC)
    b_y = save_or_add(b_y, p_z, o_m, m_m, epilogue.SAVE_Z)
    p_y += i_split.to(tl.int64) * sizes.s_split + o_m
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
    column = problem.b.columns == 1
    matrix, x = (problem.a, problem.b) if column else (problem.b.t, problem.a.t)
    M, K, strides = matrix.rows, matrix.columns, matrix.strides
    tile = launch.tile(
        "gemm_vector", problem.dtype, target_=problem.target, M=M, K=K, STEP=strides[1] if K > 1 else 1
    )  # fmt: skip
    tiles = launch.cdiv(M, tile["BLOCK_M"])
    split = launches.shares_of(tiles, K, tile, PROGRAMS * problem.processors, problem.split, least=1)
    sizes = VectorSizes(M, K, *strides, x.strides[0], 0 if column else 1, M, split)
    units = tuple(map(unit, (M, K, *strides)))
    record = tile.record(VectorTile, UNITS=units, STAGES=tile.num_stages, ACC=launch.acc(problem.dtype))
    made = product(
        problem, "vector", gemm_vector_kernel, (tiles, split), (sizes,), record, tile, split, short=tiles * split
    )  # fmt: skip
    return dataclasses.replace(made, swapped=not column)
