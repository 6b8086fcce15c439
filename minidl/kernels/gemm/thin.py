"""Small matrix products with M, N or K of at most 16: multiply-adds on 3-D blocks, without tensor cores.

Tensor cores need extents of 16 or more, boxes need aligned rows, and tf32 needs both operands contiguous along K. Here
operands are read in place: c[m, n] = sum over k of a[m, k] b[k, n], in blocks [BLOCK_K, BLOCK_M, BLOCK_N] of products.

K is the first axis of a block, so that the compiler gives neighbouring threads neighbouring results and each thread a
part of K: threads sum on their own, and warps exchange sums once at the end. 1024x4x128 needs 2 shuffles, 26 with K
between M and N, 162 with K last.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.gemm.tiled import finish
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

THIN = 16
# An H200 takes 0.13 us for this many float32 multiply-adds at its peak, without tensor cores.
MOST_PRODUCTS = 2**22
# 16 bits: 605x488x10 took 5.6 us, 2.5 with tensor cores, and 320x1376x2 2.1 us (H100).
MOST_PRODUCTS_16 = 1_000_000


def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether this form suits a [M, K] @ b [K, N]: thin, and so small that launches take longer than arithmetic.

    In float32 the other forms copy operands that are not contiguous along K: 4 to 5 us each on an H200, before a
    product of 5 to 11 us (1024x4x128 and its gradients). 16-bit operands are never copied and fill tensor cores from
    16 on. float64 uses tensor cores, too, and the interpreter is faster with `tl.dot` than with 3-D blocks.
    """
    if launch.INTERPRETED or a.dim() != 2 or a.dtype == torch.float64:
        return False
    (M, K), N = a.shape, b.shape[1]
    thinnest = min(M, N, K)
    if a.dtype == torch.float32:
        return thinnest <= THIN and M * N * K <= MOST_PRODUCTS
    return thinnest < THIN and M * N * K <= MOST_PRODUCTS_16


@triton.jit
def gemm_thin_kernel(
    p_a, p_b, p_bias, p_c, p_z, M, N, K, s_am, s_ak, s_bk, s_bn, s_split,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a tile of c, or of a share, by pointers, as sums of blocks [BLOCK_K, BLOCK_M, BLOCK_N] over their K."""
    wait(EARLY)
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // tiles_n * BLOCK_M
    n = tl.program_id(0) % tiles_n * BLOCK_N
    i_split = tl.program_id(1)
    o_m = m + tl.arange(0, BLOCK_M)
    o_n = n + tl.arange(0, BLOCK_N)
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    start = i_split * k_per_split
    end = tl.minimum(K, start + k_per_split)
    o_k = start + tl.arange(0, BLOCK_K)
    p_a += o_k.to(tl.int64)[:, None] * s_ak + o_m.to(tl.int64)[None, :] * s_am
    p_b += o_k.to(tl.int64)[:, None] * s_bk + o_n.to(tl.int64)[None, :] * s_bn
    b_acc = tl.zeros((BLOCK_K, BLOCK_M, BLOCK_N), dtype=ACC)
    # Triton pipelines loads that feed no tl.dot only if the loop itself sets num_stages.
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        m_k = (k + tl.arange(0, BLOCK_K)) < end
        b_a = tl.load(p_a, mask=m_k[:, None] & (o_m < M)[None, :], other=0.0).to(ACC)  # [BLOCK_K, BLOCK_M]
        b_b = tl.load(p_b, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0).to(ACC)  # [BLOCK_K, BLOCK_N]
        b_acc += b_a[:, :, None] * b_b[:, None, :]
        p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
        p_b += tl.full((), BLOCK_K, tl.int64) * s_bk
    p_c += i_split.to(tl.int64) * s_split
    finish(tl.sum(b_acc, 0), p_bias, None, p_c, p_z, m, n, M, N, HAS_BIAS, False, ACT, SLOPE, SAVE_Z)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor, z: torch.Tensor | None,
    tile: launch.Tile, tiles: int, flags: dict[str, object],
) -> None:  # fmt: skip
    """Write c (or its shares) = a @ b with the epilogue of `flags`; a [M, K] and b [K, N] have any strides."""
    (M, K), N, split = a.shape, b.shape[1], int(flags["SPLIT"])
    launch.run(
        gemm_thin_kernel, (tiles, split), a, b, bias, c, z, M, N, K, *a.stride(), *b.stride(), c.numel() // split,
        STAGES=tile.num_stages, **dependent_launch.options(), **flags, **tile.options,
    )  # fmt: skip
