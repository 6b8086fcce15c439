"""Compute the statistics of a following batch norm in the epilogue of the product.

    s [bands, 2, N]      mean of each column of a band of rows, and the sum of squared distances from that mean

A band is the rows of one tile, so all bands have the same size. The statistics describe the stored (rounded) numbers,
and squares are of distances from the mean, so large means cause no cancellation. `norm.statistics` joins them in order.

In the accumulator layout of tensor cores a thread has a few rows of many columns, and a sum over rows needs 3 shuffles
per column. Splitting even and odd rows first makes the compiler move the block, in 16 bits, to a layout with one row
and four columns per thread, which needs a ninth of the shuffles and spills no registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Most columns of a tile: the layout change of 128x256 needs 64 KB, which four stages of boxes do not leave.
WIDEST = 128


@triton.jit
def store_statistics(b_acc, p_bias, p_s, i_band, n, N, low_n, TYPE: tl.constexpr):
    """Write the statistics of a block, columns from n on of N, to band i_band of s [bands, 2, N].

    All rows of the block must be inside the result; another tile writes columns before `low_n`, which may be None.
    Returns the block with its bias, rounded, so that registers hold only one copy.
    """
    ROWS: tl.constexpr = b_acc.shape[0]
    o_n = n + tl.arange(0, b_acc.shape[1])
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
    b_y = b_acc.to(TYPE)
    b_even, b_odd = tl.split(tl.permute(tl.reshape(b_y, (ROWS // 2, 2, b_acc.shape[1])), (0, 2, 1)))
    b_even, b_odd = b_even.to(b_acc.dtype), b_odd.to(b_acc.dtype)
    b_mean = tl.sum(b_even + b_odd, axis=0) * (1.0 / ROWS)  # [columns]
    b_even -= b_mean[None, :]
    b_odd -= b_mean[None, :]
    b_m2 = tl.sum(b_even * b_even + b_odd * b_odd, axis=0)
    m_n = o_n < N
    if low_n is not None:
        m_n = (o_n >= low_n) & m_n
    p_s += i_band.to(tl.int64) * (2 * N) + o_n
    tl.store(p_s, b_mean, mask=m_n)
    tl.store(p_s + N, b_m2, mask=m_n)
    return b_y
