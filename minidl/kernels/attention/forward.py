"""The forward kernel of attention: a block of rows of y in one pass over the keys, with an online softmax.

For each block of keys, rows keep their maximum m and the sum s of 2^(score - m); a new maximum scales s and the sum of
values by 2^(old - new) (Milakov and Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691).
"""

import triton
import triton.language as tl

from minidl.kernels.attention.blocks import (
    UNLIMITED,
    at_head,
    drop,
    head_of,
    keys_of,
    keys_seen,
    load_block,
    masked_scores,
    product,
)
from minidl.kernels.bias_act import store_rows
from minidl.kernels.softmax.rows import row_max, shift


@triton.jit
def attend(
    b_q, state, p_k, p_v, p_mask, p_key, i_head, m, end, start, stop, sizes, strides,
    tile: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return `state`, (acc, max, sum), after the keys from start to stop."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    o_i = tl.arange(0, BLOCK_M)[:, None]
    o_j = tl.arange(0, BLOCK_N)[None, :]
    b_acc, b_max, b_sum = state
    for n in tl.range(start, stop, BLOCK_N):
        b_k = load_block(p_k, n, stop, strides.k.row, tile.E, BLOCK_N, BLOCK_E, MASKED)  # [BLOCK_N, BLOCK_E]
        b_qk = product(b_q, tl.trans(b_k), None, tile)
        b_s = masked_scores(b_qk, m, n, o_i, o_j, end, p_mask, strides.mask, sizes.L, tile, MASKED)
        b_new = tl.maximum(b_max, row_max(b_s))
        b_shift = shift(b_new)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_scale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_scale + tl.sum(b_p, axis=1)
        b_max = b_new
        b_p = drop(b_p, p_key, i_head, m, n, sizes, tile)
        b_v = load_block(p_v, n, stop, strides.v.row, tile.V, BLOCK_N, BLOCK_V, MASKED)  # [BLOCK_N, BLOCK_V]
        b_acc = product(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], tile)
    return b_acc, b_max, b_sum


@triton.jit
def attention_kernel(
    p_q, p_k, p_v, p_mask, p_lengths, p_key, p_y, p_lse, sizes, strides, tile: tl.constexpr
):  # fmt: skip
    """Write BLOCK_M rows of y, and with p_lse [batch, heads, L] log2 of the sums of powers; infinite if no key is seen.

    p_lengths [batch]: keys of each image; p_key: seed and stream of dropout. Both, and p_mask, may be None.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    tiles = tl.cdiv(sizes.L, BLOCK_M)
    i_head = tl.program_id(0) // tiles
    # The last rows first: in a causal attention they see most keys.
    m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    i_b, i_h, i_g = head_of(i_head, sizes)
    end = keys_of(p_lengths, i_b, sizes)
    p_k = at_head(p_k, strides.k, i_b, i_g)
    p_v = at_head(p_v, strides.v, i_b, i_g)
    if p_mask is not None:
        p_mask = at_head(p_mask, strides.mask, i_b, i_h)
    p_q = at_head(p_q, strides.q, i_b, i_h)
    b_q = load_block(p_q, m, sizes.L, strides.q.row, tile.E, BLOCK_M, BLOCK_E, True)
    b_acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tile.ACC)
    b_max = tl.full((BLOCK_M,), float("-inf"), tile.ACC)
    b_sum = tl.zeros((BLOCK_M,), dtype=tile.ACC)
    state = b_acc, b_max, b_sum
    start, full_start, full_stop, stop = keys_seen(m, end, tile)
    if tile.LEFT != UNLIMITED:
        state = attend(
            b_q, state, p_k, p_v, p_mask, p_key, i_head, m, end, start, tl.minimum(full_start, stop), sizes,
            strides, tile, True,
        )  # fmt: skip
    state = attend(
        b_q, state, p_k, p_v, p_mask, p_key, i_head, m, end, full_start, full_stop, sizes, strides, tile, False
    )  # fmt: skip
    state = attend(
        b_q, state, p_k, p_v, p_mask, p_key, i_head, m, end, full_stop, stop, sizes, strides, tile, True
    )  # fmt: skip
    b_acc, b_max, b_sum = state
    b_empty = b_sum == 0.0
    o_m = m + tl.arange(0, BLOCK_M)
    m_m = o_m < sizes.L
    if p_lse is not None:
        b_lse = tl.where(b_empty, float("inf"), b_max + tl.log2(tl.where(b_empty, 1.0, b_sum)))
        tl.store(p_lse + i_head.to(tl.int64) * sizes.L + o_m, b_lse, mask=m_m)
    b_y = b_acc / tl.where(b_empty, 1.0, b_sum)[:, None]
    o_v = tl.arange(0, BLOCK_V)
    p_y = at_head(p_y, strides.y, i_b, i_h)
    store_rows(p_y, o_m.to(tl.int64), o_v, strides.y.row, b_y, m_m[:, None] & (o_v < tile.V)[None, :])
