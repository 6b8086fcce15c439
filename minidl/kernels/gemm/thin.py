"""Small matrix products with M, N or K of at most 16: multiply-adds on 3-D blocks, without tensor cores.

Tensor cores need extents of 16 or more, boxes need aligned rows, and tf32 needs both operands contiguous along K. Here
operands are read in place: c[m, n] = sum over k of a[m, k] b[k, n], in blocks [BLOCK_K, BLOCK_M, BLOCK_N] of products.

           +----------+
          /  b       /|     N        b_acc[k, m, n] = a[m, k] b[k, n], block after block of K;
         +----------+ |              c = the sum of b_acc over its first axis
      M  |          | +
         | a        |/  K
         +----------+

K is the first axis of a block, so that the compiler gives neighbouring threads neighbouring results and each thread a
part of K: threads sum on their own, and warps exchange sums once at the end. With K between M and N, or last, threads
would exchange many more.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.gemm import launches
from minidl.kernels.gemm.prepared import Product, strided
from minidl.kernels.gemm.problem import Problem
from minidl.kernels.gemm.tiled import share_of_k, store_tile
from minidl.runtime.dependent_launch import wait

THIN = 16
# An H200 takes 0.13 us for this many float32 multiply-adds at its peak, without tensor cores.
MOST_PRODUCTS = 2**22
MOST_PRODUCTS_16 = 1_000_000  # for 16 bits, where tensor cores are the alternative


def suits(problem: Problem) -> bool:
    """Whether this form suits a product: thin, and so small that launches take longer than arithmetic.

    In float32 the other forms copy operands that are not contiguous along K, which takes as long as a small product.
    16-bit operands are never copied and fill tensor cores from 16 on. float64 uses tensor cores, too, and the
    interpreter is faster with `tl.dot` than with 3-D blocks.
    """
    if not problem.compiled or problem.batch is not None or problem.dtype == torch.float64:
        return False
    M, N, K = problem.sizes
    if problem.dtype == torch.float32:
        return min(M, N, K) <= THIN and M * N * K <= MOST_PRODUCTS
    return min(M, N, K) < THIN and M * N * K <= MOST_PRODUCTS_16


@triton.jit
def gemm_thin_kernel(
    p_a, p_b, p_bias, p_scale, p_c, p_z, sizes, strides,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a tile of c, or of a share, by pointers, as sums of blocks [BLOCK_K, BLOCK_M, BLOCK_N] over their K."""
    wait(EARLY)
    M, N = sizes.M, sizes.N
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // tiles_n * BLOCK_M
    n = tl.program_id(0) % tiles_n * BLOCK_N
    o_m = m + tl.arange(0, BLOCK_M)
    o_n = n + tl.arange(0, BLOCK_N)
    start, end = share_of_k(sizes.K, sizes.SPLIT, BLOCK_K)
    o_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
    p_a += o_k * strides.ak + o_m.to(tl.int64)[None, :] * strides.am
    p_b += o_k * strides.bk + o_n.to(tl.int64)[None, :] * strides.bn
    b_acc = tl.zeros((BLOCK_K, BLOCK_M, BLOCK_N), dtype=tile.ACC)
    for k in tl.range(start, end, BLOCK_K, num_stages=tile.STAGES):
        m_k = (k + tl.arange(0, BLOCK_K)) < end
        b_a = tl.load(p_a, mask=m_k[:, None] & (o_m < M)[None, :], other=0.0).to(tile.ACC)  # [BLOCK_K, BLOCK_M]
        b_b = tl.load(p_b, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0).to(tile.ACC)  # [BLOCK_K, BLOCK_N]
        b_acc += b_a[:, :, None] * b_b[:, None, :]
        p_a += tl.full((), BLOCK_K, tl.int64) * strides.ak
        p_b += tl.full((), BLOCK_K, tl.int64) * strides.bk
    p_c += tl.program_id(1).to(tl.int64) * sizes.s_split
    store_tile(tl.sum(b_acc, 0), p_bias, p_scale, p_c, p_z, m, n, M, N, epilogue, 1)


def prepare(problem: Problem) -> Product:
    """Prepare a product of operands in any strides."""
    (M, N, K), tile = problem.sizes, problem.tile("thin")
    tiles = launches.tiles_of(M, N, tile)
    least = 8 if problem.dtype.itemsize == 4 else 2
    split = launches.shares_of(tiles, K, tile, problem.processors, problem.split, least)
    return strided(problem, "thin", gemm_thin_kernel, tiles, tile, split, STAGES=tile.num_stages)
