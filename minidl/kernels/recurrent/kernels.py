"""A step of a recurrence and its gradient, with their products or after them: read `minidl.kernels.recurrent`.

    lstm   i, f, o = sigmoid of gates 0, 1, 3     g = tanh of gate 2     c' = f c + i g     h' = o tanh(c')
    gru    r, z = sigmoid of gates 0, 1           n = tanh(x_n + r q)    h' = n + z (h - n)
    rnn    h' = act of the gate

A gate is x + h weight^T + bias; q is the product and bias of gate 2 alone. A program computes a block
[BLOCK_M, BLOCK_N] of the M rows and H columns of a step, of all gates. It loads the product, or computes it:

    forward        h [BLOCK_M, H]  times the rows of weight of these columns: BLOCK_N of each gate
    gradient       dgates of the next step [BLOCK_M, GATES H]  times these BLOCK_N columns of weight
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels.activation import activate, activate_grad_from_output, sigmoid, tanh
from minidl.kernels.bias_act import load_rows, store_rows, tile_of
from minidl.runtime.dependent_launch import wait

# KIND: an activation's code for a plain recurrence, or
LSTM, GRU = tl.constexpr(-1), tl.constexpr(-2)


class Sizes(NamedTuple):
    """M rows of a step, H columns of a state; following: rows of the step whose gradient was computed before."""

    M: int
    H: int
    following: int = 0


class Tile(NamedTuple):
    """Constants. GATES: products of a step; PRECISION: how they are computed."""

    ACC: Any
    PRECISION: str
    GATES: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int = 16


@triton.jit
def product(p_a, p_b, o_m, o_n, m_m, m_n, K, s_bk, s_bn, b_acc, tile: tl.constexpr):
    """Return b_acc + a b of rows [M, K] and b [K, N] with these strides."""
    PRECISION: tl.constexpr = tile.PRECISION
    for k in range(0, K, tile.BLOCK_K):
        o_k = k + tl.arange(0, tile.BLOCK_K)
        m_k = o_k < K
        b_a = tl.load((p_a + o_m * K)[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
        b_b = tl.load(p_b + (o_k[:, None] * s_bk + o_n[None, :] * s_bn), mask=m_k[:, None] & m_n[None, :], other=0)
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=tile.ACC)
    return b_acc


@triton.jit
def hidden_products(p_h, p_hidden, p_weight, p_bias, o_m, o_n, m_m, m_n, H, tile: tl.constexpr):
    """Return h weight^T + bias of each gate, four blocks, of which the last are 0 where there are fewer gates."""
    GATES: tl.constexpr = tile.GATES
    PRECISION: tl.constexpr = tile.PRECISION
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    b_0 = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    b_1, b_2, b_3 = b_0, b_0, b_0
    if p_hidden is not None:
        m_mn = m_m[:, None] & m_n[None, :]
        b_0 = load_rows(p_hidden, o_m, o_n, GATES * H, m_mn, tile.ACC)
        if GATES > 1:
            b_1 = load_rows(p_hidden + H, o_m, o_n, GATES * H, m_mn, tile.ACC)
            b_2 = load_rows(p_hidden + 2 * H, o_m, o_n, GATES * H, m_mn, tile.ACC)
        if GATES > 3:
            b_3 = load_rows(p_hidden + 3 * H, o_m, o_n, GATES * H, m_mn, tile.ACC)
    else:
        for k in range(0, H, tile.BLOCK_K):
            o_k = k + tl.arange(0, tile.BLOCK_K)
            m_k = o_k < H
            b_h = tl.load((p_h + o_m * H)[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
            o_w = o_n[None, :] * H + o_k[:, None]
            m_w = m_k[:, None] & m_n[None, :]
            b_w = tl.load(p_weight + o_w, mask=m_w, other=0)
            b_0 = tl.dot(b_h, b_w, b_0, input_precision=PRECISION, out_dtype=tile.ACC)
            if GATES > 1:
                b_w = tl.load(p_weight + H * H + o_w, mask=m_w, other=0)
                b_1 = tl.dot(b_h, b_w, b_1, input_precision=PRECISION, out_dtype=tile.ACC)
                b_w = tl.load(p_weight + 2 * H * H + o_w, mask=m_w, other=0)
                b_2 = tl.dot(b_h, b_w, b_2, input_precision=PRECISION, out_dtype=tile.ACC)
            if GATES > 3:
                b_w = tl.load(p_weight + 3 * H * H + o_w, mask=m_w, other=0)
                b_3 = tl.dot(b_h, b_w, b_3, input_precision=PRECISION, out_dtype=tile.ACC)
    if p_bias is not None:
        p_bias += o_n
        b_0 += tl.load(p_bias, mask=m_n, other=0).to(tile.ACC)[None, :]
        if GATES > 1:
            b_1 += tl.load(p_bias + H, mask=m_n, other=0).to(tile.ACC)[None, :]
            b_2 += tl.load(p_bias + 2 * H, mask=m_n, other=0).to(tile.ACC)[None, :]
        if GATES > 3:
            b_3 += tl.load(p_bias + 3 * H, mask=m_n, other=0).to(tile.ACC)[None, :]
    return b_0, b_1, b_2, b_3


@triton.jit
def recurrent_kernel(
    p_x, p_h, p_hidden, p_weight, p_bias, p_c, p_y, p_before, p_c_before, p_gates, sizes, tile: tl.constexpr,
    KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write y, the next h, and change c in place; write the former h and c and the gates if these are not None.

    p_hidden: the products of h and weight, computed here if it is None.
    """
    wait(EARLY)
    ACC: tl.constexpr = tile.ACC
    GATES: tl.constexpr = tile.GATES
    H = sizes.H
    o_m, o_n, m_m, m_n = tile_of(sizes.M, H, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_0, b_1, b_2, b_3 = hidden_products(p_h, p_hidden, p_weight, p_bias, o_m, o_n, m_m, m_n, H, tile)
    b_before = load_rows(p_h, o_m, o_n, H, m_mn, ACC)
    b_0 += load_rows(p_x, o_m, o_n, GATES * H, m_mn, ACC)
    if KIND == LSTM:
        b_i = sigmoid(b_0)
        b_f = sigmoid(b_1 + load_rows(p_x + H, o_m, o_n, 4 * H, m_mn, ACC))
        b_g = tanh(b_2 + load_rows(p_x + 2 * H, o_m, o_n, 4 * H, m_mn, ACC))
        b_o = sigmoid(b_3 + load_rows(p_x + 3 * H, o_m, o_n, 4 * H, m_mn, ACC))
        b_c_before = load_rows(p_c, o_m, o_n, H, m_mn, ACC)
        b_c = b_f * b_c_before + b_i * b_g
        b_h = b_o * tanh(b_c)
        store_rows(p_c, o_m, o_n, H, b_c, m_mn)
        if p_gates is not None:
            store_rows(p_c_before, o_m, o_n, H, b_c_before, m_mn)
            store_rows(p_gates, o_m, o_n, 4 * H, b_i, m_mn)
            store_rows(p_gates + H, o_m, o_n, 4 * H, b_f, m_mn)
            store_rows(p_gates + 2 * H, o_m, o_n, 4 * H, b_g, m_mn)
            store_rows(p_gates + 3 * H, o_m, o_n, 4 * H, b_o, m_mn)
    elif KIND == GRU:
        b_r = sigmoid(b_0)
        b_z = sigmoid(b_1 + load_rows(p_x + H, o_m, o_n, 3 * H, m_mn, ACC))
        b_n = tanh(load_rows(p_x + 2 * H, o_m, o_n, 3 * H, m_mn, ACC) + b_r * b_2)
        b_h = b_n + b_z * (b_before - b_n)
        if p_gates is not None:
            store_rows(p_gates, o_m, o_n, 4 * H, b_r, m_mn)
            store_rows(p_gates + H, o_m, o_n, 4 * H, b_z, m_mn)
            store_rows(p_gates + 2 * H, o_m, o_n, 4 * H, b_n, m_mn)
            store_rows(p_gates + 3 * H, o_m, o_n, 4 * H, b_2, m_mn)
    else:
        b_h = activate(b_0, KIND, 0.0)
    store_rows(p_y, o_m, o_n, H, b_h, m_mn)
    if p_before is not None:
        store_rows(p_before, o_m, o_n, H, b_before, m_mn)


@triton.jit
def recurrent_grad_kernel(
    p_next, p_product, p_weight, p_dy, p_gates, p_before, p_c_before, p_dh, p_dc, p_dx, p_dhidden, sizes,
    tile: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gates, in dhidden those of the hidden product if they differ (gru).

    dh and dc change in place from the gradients of a step's results to those of its former states, in dh without the
    part that passes through the hidden product. The launch of the former step adds that: p_product, or if it is None
    that of dhidden, its p_next, of `following` rows. dy, and both, may be None.
    """
    wait(EARLY)
    ACC: tl.constexpr = tile.ACC
    H = sizes.H
    o_m, o_n, m_m, m_n = tile_of(sizes.M, H, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_dh = load_rows(p_dh, o_m, o_n, H, m_mn, ACC)
    if p_product is not None:
        b_dh += load_rows(p_product, o_m, o_n, H, m_mn & (o_m < sizes.following)[:, None], ACC)
    elif p_next is not None:
        b_dh = product(p_next, p_weight, o_m, o_n, o_m < sizes.following, m_n, tile.GATES * H, H, 1, b_dh, tile)
    if p_dy is not None:
        b_dh += load_rows(p_dy, o_m, o_n, H, m_mn, ACC)
    b_pass = tl.zeros_like(b_dh)
    if KIND == LSTM:
        b_i = load_rows(p_gates, o_m, o_n, 4 * H, m_mn, ACC)
        b_f = load_rows(p_gates + H, o_m, o_n, 4 * H, m_mn, ACC)
        b_g = load_rows(p_gates + 2 * H, o_m, o_n, 4 * H, m_mn, ACC)
        b_o = load_rows(p_gates + 3 * H, o_m, o_n, 4 * H, m_mn, ACC)
        b_c_before = load_rows(p_c_before, o_m, o_n, H, m_mn, ACC)
        b_t = tanh(b_f * b_c_before + b_i * b_g)
        b_dc = load_rows(p_dc, o_m, o_n, H, m_mn, ACC) + b_dh * b_o * (1.0 - b_t * b_t)
        store_rows(p_dc, o_m, o_n, H, b_dc * b_f, m_mn)
        store_rows(p_dx, o_m, o_n, 4 * H, b_dc * b_g * (b_i * (1.0 - b_i)), m_mn)
        store_rows(p_dx + H, o_m, o_n, 4 * H, b_dc * b_c_before * (b_f * (1.0 - b_f)), m_mn)
        store_rows(p_dx + 2 * H, o_m, o_n, 4 * H, b_dc * b_i * (1.0 - b_g * b_g), m_mn)
        store_rows(p_dx + 3 * H, o_m, o_n, 4 * H, b_dh * b_t * (b_o * (1.0 - b_o)), m_mn)
    elif KIND == GRU:
        b_r = load_rows(p_gates, o_m, o_n, 4 * H, m_mn, ACC)
        b_z = load_rows(p_gates + H, o_m, o_n, 4 * H, m_mn, ACC)
        b_n = load_rows(p_gates + 2 * H, o_m, o_n, 4 * H, m_mn, ACC)
        b_q = load_rows(p_gates + 3 * H, o_m, o_n, 4 * H, m_mn, ACC)
        b_dn = b_dh * (1.0 - b_z) * (1.0 - b_n * b_n)
        b_dr = b_dn * b_q * (b_r * (1.0 - b_r))
        b_dz = b_dh * (load_rows(p_before, o_m, o_n, H, m_mn, ACC) - b_n) * (b_z * (1.0 - b_z))
        b_pass = b_dh * b_z
        store_rows(p_dx, o_m, o_n, 3 * H, b_dr, m_mn)
        store_rows(p_dx + H, o_m, o_n, 3 * H, b_dz, m_mn)
        store_rows(p_dx + 2 * H, o_m, o_n, 3 * H, b_dn, m_mn)
        store_rows(p_dhidden, o_m, o_n, 3 * H, b_dr, m_mn)
        store_rows(p_dhidden + H, o_m, o_n, 3 * H, b_dz, m_mn)
        store_rows(p_dhidden + 2 * H, o_m, o_n, 3 * H, b_dn * b_r, m_mn)
    else:
        b_y = load_rows(p_gates, o_m, o_n, H, m_mn, ACC)
        store_rows(p_dx, o_m, o_n, H, b_dh * activate_grad_from_output(b_y, KIND, 0.0), m_mn)
    store_rows(p_dh, o_m, o_n, H, b_pass, m_mn)
