"""The gradients of attention, in two kernels without atomics: one walks keys for rows of q, one rows for keys.

    p = 2^(score - lse)      dp = dy v^T, dropped as p was      ds = p (dp - delta)      delta = sum of dy y, per row
    dq = scale ds k          dk = scale ds^T q                  dv = (dropped p)^T dy    dmask = ds

Both recompute p from the saved lse, so that no [L, S] matrix is stored, and add in a fixed order. The first kernel
writes delta, which the second reads.
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
    rows_seeing,
)
from minidl.kernels.bias_act import store_rows


@triton.jit
def walk_keys(
    b_dq, rows, p_k, p_v, p_mask, p_key, p_dmask, i_head, m, end, start, stop, sizes, strides,
    tile: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return dq / scale after the keys from start to stop, and write dmask there; rows: (q, dy, lse, delta)."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    o_i = tl.arange(0, BLOCK_M)[:, None]
    o_j = tl.arange(0, BLOCK_N)[None, :]
    b_q, b_dy, b_lse, b_delta = rows
    for n in tl.range(start, stop, BLOCK_N):
        b_k = load_block(p_k, n, stop, strides.k.row, tile.E, BLOCK_N, BLOCK_E, MASKED)  # [BLOCK_N, BLOCK_E]
        b_v = load_block(p_v, n, stop, strides.v.row, tile.V, BLOCK_N, BLOCK_V, MASKED)  # [BLOCK_N, BLOCK_V]
        b_qk = product(b_q, tl.trans(b_k), None, tile)
        b_s = masked_scores(b_qk, m, n, o_i, o_j, end, p_mask, strides.mask, sizes.L, tile, MASKED)
        b_p = tl.exp2(b_s - b_lse[:, None])
        b_dp = drop(product(b_dy, tl.trans(b_v), None, tile), p_key, i_head, m, n, sizes, tile)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if p_dmask is not None:
            p_block = p_dmask + (i_head.to(tl.int64) * sizes.L + m) * sizes.S + n
            m_block = (o_i < sizes.L - m) & (o_j < end - n)
            tl.store(p_block + (o_i * sizes.S + o_j), b_ds.to(p_dmask.dtype.element_ty), mask=m_block)
        b_dq = product(b_ds.to(b_k.dtype), b_k, b_dq, tile)
    return b_dq


@triton.jit
def attention_grad_q_kernel(
    p_q, p_k, p_v, p_mask, p_lengths, p_key, p_y, p_dy, p_lse, p_delta, p_dq, p_dmask, sizes, strides,
    tile: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_M rows of delta [batch, heads, L] and of dq, and with p_dmask [batch, heads, L, S] the rows of it.

    dmask is 0 before; dy has y's strides. Other arguments as in `forward.attention_kernel`.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    tiles = tl.cdiv(sizes.L, BLOCK_M)
    i_head = tl.program_id(0) // tiles
    m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    i_b, i_h, i_g = head_of(i_head, sizes)
    end = keys_of(p_lengths, i_b, sizes)
    p_k = at_head(p_k, strides.k, i_b, i_g)
    p_v = at_head(p_v, strides.v, i_b, i_g)
    if p_mask is not None:
        p_mask = at_head(p_mask, strides.mask, i_b, i_h)
    p_q = at_head(p_q, strides.q, i_b, i_h)
    p_y = at_head(p_y, strides.y, i_b, i_h)
    p_dy = at_head(p_dy, strides.y, i_b, i_h)
    b_q = load_block(p_q, m, sizes.L, strides.q.row, tile.E, BLOCK_M, BLOCK_E, True)
    b_y = load_block(p_y, m, sizes.L, strides.y.row, tile.V, BLOCK_M, BLOCK_V, True)
    b_dy = load_block(p_dy, m, sizes.L, strides.y.row, tile.V, BLOCK_M, BLOCK_V, True)
    b_delta = tl.sum(b_dy.to(tile.ACC) * b_y.to(tile.ACC), axis=1)
    o_m = m + tl.arange(0, BLOCK_M)
    m_m = o_m < sizes.L
    o_lse = i_head.to(tl.int64) * sizes.L + o_m
    tl.store(p_delta + o_lse, b_delta, mask=m_m)
    b_lse = tl.load(p_lse + o_lse, mask=m_m, other=float("inf"))
    b_dq = tl.zeros((BLOCK_M, BLOCK_E), dtype=tile.ACC)
    rows = b_q, b_dy, b_lse, b_delta
    start, full_start, full_stop, stop = keys_seen(m, end, tile)
    if tile.LEFT != UNLIMITED:
        b_dq = walk_keys(
            b_dq, rows, p_k, p_v, p_mask, p_key, p_dmask, i_head, m, end, start,
            tl.minimum(full_start, stop), sizes, strides, tile, True,
        )  # fmt: skip
    b_dq = walk_keys(
        b_dq, rows, p_k, p_v, p_mask, p_key, p_dmask, i_head, m, end, full_start, full_stop, sizes, strides,
        tile, False,
    )  # fmt: skip
    b_dq = walk_keys(
        b_dq, rows, p_k, p_v, p_mask, p_key, p_dmask, i_head, m, end, full_stop, stop, sizes, strides,
        tile, True,
    )  # fmt: skip
    b_dq *= tl.full((), tile.SCALE, tile.ACC)
    o_e = tl.arange(0, BLOCK_E)
    p_dq = at_head(p_dq, strides.dq, i_b, i_h)
    store_rows(p_dq, o_m.to(tl.int64), o_e, strides.dq.row, b_dq, m_m[:, None] & (o_e < tile.E)[None, :])


@triton.jit
def walk_rows(
    state, keys, rows, p_mask, p_key, i_head, n, end, start, stop, sizes, strides,
    tile: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return `state`, (dk / scale, dv), after the rows of a head from start to stop.

    keys: (k, v); rows: pointers to q, dy, lse and delta.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    o_i = tl.arange(0, BLOCK_M)[None, :]
    o_j = tl.arange(0, BLOCK_N)[:, None]
    b_dk, b_dv = state
    b_k, b_v = keys
    p_q, p_dy, p_lse, p_delta = rows
    for m in tl.range(start, stop, BLOCK_M):
        b_q = load_block(p_q, m, sizes.L, strides.q.row, tile.E, BLOCK_M, BLOCK_E, True)
        b_dy = load_block(p_dy, m, sizes.L, strides.y.row, tile.V, BLOCK_M, BLOCK_V, True)
        o_m = m + tl.arange(0, BLOCK_M)
        o_lse = i_head.to(tl.int64) * sizes.L + o_m
        b_lse = tl.load(p_lse + o_lse, mask=o_m < sizes.L, other=float("inf"))
        b_delta = tl.load(p_delta + o_lse, mask=o_m < sizes.L, other=0.0)
        b_kq = product(b_k, tl.trans(b_q), None, tile)  # [BLOCK_N, BLOCK_M]
        b_s = masked_scores(b_kq, m, n, o_i, o_j, end, p_mask, strides.mask, sizes.L, tile, MASKED)
        b_p = tl.exp2(b_s - b_lse[None, :])
        b_dropped = b_p
        b_dp = product(b_v, tl.trans(b_dy), None, tile)
        if tile.DROP != 0:
            b_dropped = tl.trans(drop(tl.trans(b_p), p_key, i_head, m, n, sizes, tile))
            b_dp = tl.trans(drop(tl.trans(b_dp), p_key, i_head, m, n, sizes, tile))
        b_dv = product(b_dropped.to(b_dy.dtype), b_dy, b_dv, tile)
        b_ds = b_p * (b_dp - b_delta[None, :])
        b_dk = product(b_ds.to(b_q.dtype), b_q, b_dk, tile)
    return b_dk, b_dv


@triton.jit
def attention_grad_kv_kernel(
    p_q, p_k, p_v, p_mask, p_lengths, p_key, p_dy, p_lse, p_delta, p_dk, p_dv, sizes, strides, tile: tl.constexpr
):  # fmt: skip
    """Write BLOCK_N rows of dk and dv, the sums over the GROUP heads of queries that share them."""
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    tiles = tl.cdiv(sizes.S, BLOCK_N)
    n = tl.program_id(0) % tiles * BLOCK_N
    first_head = tl.program_id(0) // tiles * sizes.GROUP
    i_b, _, i_g = head_of(first_head, sizes)
    end = keys_of(p_lengths, i_b, sizes)
    p_k = at_head(p_k, strides.k, i_b, i_g)
    p_v = at_head(p_v, strides.v, i_b, i_g)
    b_k = load_block(p_k, n, end, strides.k.row, tile.E, BLOCK_N, BLOCK_E, True)
    b_v = load_block(p_v, n, end, strides.v.row, tile.V, BLOCK_N, BLOCK_V, True)
    b_dk = tl.zeros((BLOCK_N, BLOCK_E), dtype=tile.ACC)
    b_dv = tl.zeros((BLOCK_N, BLOCK_V), dtype=tile.ACC)
    state = b_dk, b_dv
    keys = b_k, b_v
    start, full_start, full_stop, stop = rows_seeing(n, end, sizes.L, tile)
    for i_head in range(first_head, first_head + sizes.GROUP):
        i_h = (i_head % sizes.HEADS).to(tl.int64)
        p_mask_h = None  # Triton 3.6 takes no None from a helper
        if p_mask is not None:
            p_mask_h = at_head(p_mask, strides.mask, i_b, i_h)
        rows = at_head(p_q, strides.q, i_b, i_h), at_head(p_dy, strides.y, i_b, i_h), p_lse, p_delta
        if tile.RIGHT != UNLIMITED:
            state = walk_rows(
                state, keys, rows, p_mask_h, p_key, i_head, n, end, start,
                tl.minimum(full_start, stop), sizes, strides, tile, True,
            )  # fmt: skip
        state = walk_rows(
            state, keys, rows, p_mask_h, p_key, i_head, n, end, full_start, full_stop, sizes,
            strides, tile, False,
        )  # fmt: skip
        if tile.LEFT != UNLIMITED:
            state = walk_rows(
                state, keys, rows, p_mask_h, p_key, i_head, n, end, full_stop, stop,
                sizes, strides, tile, True,
            )  # fmt: skip
    b_dk, b_dv = state
    b_dk *= tl.full((), tile.SCALE, tile.ACC)
    o_n = n + tl.arange(0, BLOCK_N)
    m_n = (o_n < sizes.S)[:, None]
    m_seen = (o_n < end)[:, None]
    o_e = tl.arange(0, BLOCK_E)
    o_v = tl.arange(0, BLOCK_V)
    p_dk = at_head(p_dk, strides.dk, i_b, i_g)
    p_dv = at_head(p_dv, strides.dv, i_b, i_g)
    o_n = o_n.to(tl.int64)
    store_rows(p_dk, o_n, o_e, strides.dk.row, tl.where(m_seen, b_dk, 0.0), m_n & (o_e < tile.E)[None, :])
    store_rows(p_dv, o_n, o_v, strides.dv.row, tl.where(m_seen, b_dv, 0.0), m_n & (o_v < tile.V)[None, :])
