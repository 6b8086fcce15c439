"""Running sums along a dimension: y[.., r, ..] = x[.., 0, ..] + ... + x[.., r, ..], or from the other end.

    x, y  [A, R, B], contiguous; the gradient of a running sum is the running sum of dy from the other end

A program takes BLOCK_M of the A B rows and walks along R, BLOCK_N at a time, with the sum so far. The order of the
additions depends on the tile alone. Sums are in float32 (float64 for float64) and rounded as they are stored.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.runtime import check, launch


@triton.jit
def cumsum_kernel(
    p_x, p_y, K, R, B, REVERSE: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """BLOCK_M rows; row k begins at k // B * R * B + k % B, its elements B apart."""
    o_k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = ((o_k // B) * R * B + o_k % B)[:, None]
    b_sum = tl.zeros((BLOCK_M,), ACC)
    for start in range(0, R, BLOCK_N):
        o_r = start + tl.arange(0, BLOCK_N)
        m = (o_k < K)[:, None] & (o_r < R)[None, :]
        o = o_row + ((R - 1 - o_r) if REVERSE else o_r).to(tl.int64)[None, :] * B
        b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_y = tl.cumsum(b_x, axis=1) + b_sum[:, None]
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)
        # Its last column: a sum of b_x, added up here, fails in a pass of Triton 3.6 and 3.7 (OptimizeThreadLocality).
        b_sum = tl.sum(tl.where(tl.arange(0, BLOCK_N)[None, :] == BLOCK_N - 1, b_y, 0.0), axis=1)


def cumsum(x: torch.Tensor, dim: int, reverse: bool = False) -> torch.Tensor:
    """The running sums of a floating tensor along `dim`, from its end with `reverse`; contiguous.

    Raises TypeError for integers, IndexError for a dimension out of range.
    """
    check.floating("cumsum", input=x)
    at = check.axis("cumsum", dim, max(x.dim(), 1))
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    R = x.shape[at] if x.dim() else 1
    B = math.prod(x.shape[at + 1 :])
    K = x.numel() // R
    tile = launch.tile("elementwise_tile", x.dtype, M=K, N=R)
    launch.run(
        cumsum_kernel, (launch.cdiv(K, tile["BLOCK_M"]),), x, y, K, R, B, REVERSE=reverse, ACC=launch.acc(x.dtype),
        **tile.options,
    )  # fmt: skip
    return y
