"""Statistics of a result for the batch norm after it, from the tiles of the product that makes it.

    s [bands, 2, N]      mean of each column of a band of rows, and the sum of squared distances from that mean

A band is the rows of one tile, so all bands have as many. Statistics are of the numbers that are stored, rounded, and
squares are taken of distances: no cancellation where means are large. `norm.statistics` joins them, in order.

A thread has a few rows of many columns in the accumulator of tensor cores, and sums over rows there are 3 shuffles for
each column and sum: of 256x128 in eight warps 216 a thread. Neighbouring rows are split apart first, for which the
compiler moves the block, in 16 bits, to a layout with a row and four columns for each thread of a warp: sums within a
thread, one exchange between warps, 24 shuffles. Whole kernel, sm_90: 1872 instructions without spills, of shuffles 2256
and spills, 920 with no statistics. 128x128 in four warps and three stages takes 114,712 bytes of shared memory, 8 KB
more than without, and 255 registers: two programs still fit a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a tile: those of 128x256 would move through 64 KB, which four stages of boxes do not leave.
WIDEST = 128


@triton.jit
def hand_on(b_acc, p_bias, p_s, i_band, n, N, low_n, HAS_BIAS: tl.constexpr, TYPE: tl.constexpr):
    """Write the statistics of a block [rows, columns from n on of N], none of whose rows is beyond the result, to band
    i_band of s [bands, 2, N]. Columns before `low_n` another tile writes.

    Returns what is to be stored, with its bias and rounded: registers hold only that.
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
