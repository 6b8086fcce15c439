"""Compute the statistics of a following batch norm in the epilogue of the product.

    s [bands, 2, N]      mean of each column of a band of rows, and the sum of squared distances from that mean

A band is the rows of one tile, so all bands have the same size. The statistics describe the stored (rounded) numbers,
and squares are of distances from the mean, so large means cause no cancellation. `norm.statistics` joins them in order.

In the accumulator layout of tensor cores a thread has a few rows of many columns, and a sum over rows needs 3 shuffles
per column: 216 per thread for 256x128 in eight warps. Splitting even and odd rows first makes the compiler move the
block, in 16 bits, to a layout with one row and four columns per thread: 24 shuffles. Kernel on sm_90: 1872 instructions
without spills; 2256 with spills if shuffled; 920 without statistics. 128x128 in four warps and three stages takes
114,712 bytes of shared memory (8 KB more) and 255 registers: two programs still fit a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Most columns of a tile: the layout change of 128x256 needs 64 KB, which four stages of boxes do not leave.
WIDEST = 128


@triton.jit
def store_statistics(b_acc, p_bias, p_s, i_band, n, N, low_n, HAS_BIAS: tl.constexpr, TYPE: tl.constexpr):
    """Write the statistics of a block, columns from n on of N, to band i_band of s [bands, 2, N].

    All rows of the block must be inside the result; another tile writes columns before `low_n`. Returns the block with
    its bias, rounded, so that registers hold only one copy.
    """
    ROWS: tl.constexpr = b_acc.shape[0]
    o_n = n + tl.arange(0, b_acc.shape[1])
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
    b_y = b_acc.to(TYPE)
    b_even, b_odd = tl.split(tl.permute(tl.reshape(b_y, (ROWS // 2, 2, b_acc.shape[1])), (0, 2, 1)))
    b_even, b_odd = b_even.to(b_acc.dtype), b_odd.to(b_acc.dtype)
    b_mean = tl.sum(b_even + b_odd, axis=0) * (1.0 / ROWS)  # [columns]
    b_even -= b_mean[None, :]
    b_odd -= b_mean[None, :]
    b_m2 = tl.sum(b_even * b_even + b_odd * b_odd, axis=0)
    m_n = (o_n >= low_n) & (o_n < N)
    p_s += i_band.to(tl.int64) * (2 * N) + o_n
    tl.store(p_s, b_mean, mask=m_n)
    tl.store(p_s + N, b_m2, mask=m_n)
    return b_y
