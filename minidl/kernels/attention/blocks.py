"""Blocks of scores as the three kernels of attention compute them: records, ranges of keys, masks and dropout.

                 S keys
            +----+----+----+
            |    |    |    |     A score is scale q_i k_j + mask_ij, in units of log 2, so that its exponential is
   L        +----+----+----+     a power of two. Row i sees key j if
queries     |    |////|    |
            +----+----+----+         j < length,    i - LEFT <= j <= i + RIGHT,    mask_ij is not False.
            |    |    |    |
            +----+----+----+     A block [BLOCK_M, BLOCK_N] that all rows see full_start needs no comparison.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels.philox import halves, interleave_4, words

MINUS_INF = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
UNLIMITED = tl.constexpr(-1)


class Sizes(NamedTuple):
    """L queries and S keys of HEADS heads; GROUP heads of queries share a head of keys and values.

    first   number of this tensor's first row of queries in the batch that dropout counts
    """

    HEADS: int
    GROUP: int
    L: int
    S: int
    first: int


class RowStrides(NamedTuple):
    """Strides of a tensor [batch, heads, rows, size], in values; the last axis is contiguous."""

    b: int
    h: int
    row: int


class MaskStrides(NamedTuple):
    """Strides of a mask [batch, heads, L, S]."""

    b: int
    h: int
    row: int
    column: int


class Tile(NamedTuple):
    """Constants.

    E, V          sizes of a head of queries and keys, and of values; BLOCK_E and BLOCK_V are powers of two
    SCALE         factor of q k
    LEFT, RIGHT   keys before and after a query's own position that it sees; UNLIMITED for all
    DROP, KEPT    dropout: words of random bits below DROP are dropped, and KEPT scales the others
    PRECISION     how products are computed
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_E: int
    BLOCK_V: int
    E: int
    V: int
    SCALE: float
    LEFT: int
    RIGHT: int
    DROP: int
    KEPT: float
    PRECISION: str
    ACC: Any


@triton.jit
def product(b_a, b_b, b_acc, tile: tl.constexpr):
    """Return b_acc + b_a b_b."""
    PRECISION: tl.constexpr = tile.PRECISION
    return tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=tile.ACC)


@triton.jit
def head_of(i_head, sizes):
    """Return (batch, head, head of keys) of the i-th head of queries, in int64."""
    i_b = (i_head // sizes.HEADS).to(tl.int64)
    i_h = (i_head % sizes.HEADS).to(tl.int64)
    return i_b, i_h, i_h // sizes.GROUP


@triton.jit
def at_head(p, strides, i_b, i_h):
    """Return the pointer to a head of a tensor."""
    return p + (i_b * strides.b + i_h * strides.h)


@triton.jit
def load_block(
    p, first, end, s_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Return rows [BLOCK, WIDTH] from `first` on; rows from `end` on and columns from SIZE on are 0."""
    o_row = tl.arange(0, BLOCK)
    o_column = tl.arange(0, WIDTH)
    p += first.to(tl.int64) * s_row
    p += o_row[:, None] * s_row + o_column[None, :]
    m_column = (o_column < SIZE)[None, :]
    if MASKED:
        return tl.load(p, mask=(first + o_row < end)[:, None] & m_column, other=0.0)
    elif SIZE < WIDTH:
        return tl.load(p, mask=m_column, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def keys_of(p_lengths, i_b, sizes):
    """Return the number of keys of an image of the batch, at most S."""
    end = tl.full((), sizes.S, tl.int32)
    if p_lengths is not None:
        end = tl.minimum(tl.maximum(tl.load(p_lengths + i_b), 0), end).to(tl.int32)
    return end


@triton.jit
def keys_seen(m, end, tile: tl.constexpr):
    """Return (start, full_start, full_stop, stop), keys that count from 0.

    The rows of the block at m see keys from start to stop; every one of these rows sees all keys from full_start to
    full_stop. Each but stop is a multiple of BLOCK_N.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    start = tl.full((), 0, tl.int32)
    full_start = start
    stop = end
    full_stop = end
    if tile.LEFT != UNLIMITED:
        start = tl.maximum(m - tile.LEFT, 0) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(m + BLOCK_M - 1 - tile.LEFT, 0), BLOCK_N) * BLOCK_N
    if tile.RIGHT != UNLIMITED:
        stop = tl.minimum(end, m + BLOCK_M + tile.RIGHT)
        full_stop = tl.minimum(end, m + tile.RIGHT + 1)
    return start, full_start, tl.maximum(full_stop // BLOCK_N * BLOCK_N, full_start), stop


@triton.jit
def rows_seeing(n, end, L, tile: tl.constexpr):
    """Return (start, full_start, full_stop, stop) of the rows that see the block of keys at n, as `keys_seen`.

    Keys from `end` on are not compared: what a block adds to their gradients is not stored.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    start = tl.full((), 0, tl.int32)
    full_start = start
    stop = tl.where(n < end, L, 0)
    full_stop = stop
    if tile.RIGHT != UNLIMITED:
        start = tl.maximum(n - tile.RIGHT, 0) // BLOCK_M * BLOCK_M
        full_start = tl.cdiv(tl.maximum(n + BLOCK_N - 1 - tile.RIGHT, 0), BLOCK_M) * BLOCK_M
    if tile.LEFT != UNLIMITED:
        stop = tl.minimum(stop, n + BLOCK_N + tile.LEFT)
        full_stop = tl.maximum(tl.minimum(stop, n + tile.LEFT + 1) // BLOCK_M * BLOCK_M, full_start)
    return start, full_start, full_stop, stop


@triton.jit
def masked_scores(b_qk, m, n, o_i, o_j, end, p_mask, strides, L, tile: tl.constexpr, MASKED: tl.constexpr):
    """Return scores in units of log 2 of products q k of rows from m and keys from n; -inf where one is not seen.

    o_i and o_j count in the block and broadcast to it, in either order. With MASKED the ranges are compared.
    """
    SCALE: tl.constexpr = tile.SCALE * LOG2_E
    b_s = b_qk * tl.full((), SCALE, tile.ACC)
    if p_mask is not None:
        p_mask += m.to(tl.int64) * strides.row + n.to(tl.int64) * strides.column
        b_mask = tl.load(
            p_mask + (o_i * strides.row + o_j * strides.column), mask=(o_i < L - m) & (o_j < end - n), other=0
        )  # fmt: skip
        if p_mask.dtype.scalar.element_ty == tl.int1:
            b_s = tl.where(b_mask, b_s, MINUS_INF)
        else:
            b_s += b_mask.to(tile.ACC) * tl.full((), LOG2_E, tile.ACC)
    if MASKED:
        b_s = tl.where(o_j < end - n, b_s, MINUS_INF)
        if tile.LEFT != UNLIMITED:
            b_s = tl.where(o_j >= o_i + (m - n - tile.LEFT), b_s, MINUS_INF)
        if tile.RIGHT != UNLIMITED:
            b_s = tl.where(o_j <= o_i + (m - n + tile.RIGHT), b_s, MINUS_INF)
    return b_s


@triton.jit
def drop(b_p, p_key, i_head, m, n, sizes, tile: tl.constexpr):
    """Return b_p [BLOCK_M, BLOCK_N] with 0 where the word of (head, row, key) is below DROP, and KEPT times others.

    Rows have full_start groups of four words, so that a number depends on its position alone.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    if tile.DROP == 0:
        return b_p
    zero = tl.full((), 0, tl.int32)
    seed_low, seed_high, stream_low, stream_high = halves(p_key, zero, zero, zero, zero)
    o_row = i_head.to(tl.int64) * sizes.L + sizes.first + m + tl.arange(0, BLOCK_M)
    o_group = n // 4 + tl.arange(0, BLOCK_N // 4)
    o_group = o_row[:, None] * tl.cdiv(sizes.S, 4) + o_group[None, :]
    a, b, c, d = words(seed_low, seed_high, stream_low, stream_high, o_group)
    return tl.where(interleave_4(a, b, c, d) >= tile.DROP, b_p * tile.KEPT, 0.0)
