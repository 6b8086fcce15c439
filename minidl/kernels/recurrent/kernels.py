"""A step of a recurrence after its product with the hidden state, and its gradient: read `minidl.kernels.recurrent`.

    lstm   i, f, o = sigmoid of gates 0, 1, 3     g = tanh of gate 2     c' = f c + i g     h' = o tanh(c')
    gru    r, z = sigmoid of gates 0, 1           n = tanh(x_n + r q)    h' = n + z (h - n)
    rnn    h' = act of the gate

A gate is x + hidden product + bias; q is the hidden product and bias of gate 2 alone. A program computes a block
[BLOCK_M, BLOCK_N] of the M rows and H columns of a step.
"""

import triton
import triton.language as tl

from minidl.kernels.activation import activate, activate_grad_from_output, sigmoid, tanh
from minidl.kernels.bias_act import load_rows, store_rows, tile_of
from minidl.runtime.dependent_launch import wait

# KIND: an activation's code for a plain recurrence, or
LSTM, GRU = tl.constexpr(-1), tl.constexpr(-2)


@triton.jit
def hidden_sum(p_hidden, p_bias, o_m, o_n, m_mn, GATE: tl.constexpr, H, GATES: tl.constexpr, ACC: tl.constexpr):
    """Return the hidden product and the bias of gate GATE."""
    b = load_rows(p_hidden + GATE * H, o_m, o_n, GATES * H, m_mn, ACC)
    if p_bias is not None:
        b += tl.load(p_bias + GATE * H + o_n, mask=o_n < H, other=0).to(ACC)[None, :]
    return b


@triton.jit
def gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, GATE: tl.constexpr, H, GATES: tl.constexpr, ACC: tl.constexpr):
    """Return gate GATE before its activation."""
    b_x = load_rows(p_x + GATE * H, o_m, o_n, GATES * H, m_mn, ACC)
    return b_x + hidden_sum(p_hidden, p_bias, o_m, o_n, m_mn, GATE, H, GATES, ACC)


@triton.jit
def recurrent_kernel(
    p_x, p_hidden, p_bias, p_h, p_c, p_y, p_before, p_c_before, p_gates, M, H, tile: tl.constexpr, KIND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Change h and c in place, and write y = h; write the former h and c and the gates if these are not None."""
    wait(EARLY)
    ACC: tl.constexpr = tile.ACC
    o_m, o_n, m_m, m_n = tile_of(M, H, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_before = load_rows(p_h, o_m, o_n, H, m_mn, ACC)
    if KIND == LSTM:
        b_i = sigmoid(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 0, H, 4, ACC))
        b_f = sigmoid(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 1, H, 4, ACC))
        b_g = tanh(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 2, H, 4, ACC))
        b_o = sigmoid(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 3, H, 4, ACC))
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
        b_r = sigmoid(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 0, H, 3, ACC))
        b_z = sigmoid(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 1, H, 3, ACC))
        b_q = hidden_sum(p_hidden, p_bias, o_m, o_n, m_mn, 2, H, 3, ACC)
        b_n = tanh(load_rows(p_x + 2 * H, o_m, o_n, 3 * H, m_mn, ACC) + b_r * b_q)
        b_h = b_n + b_z * (b_before - b_n)
        if p_gates is not None:
            store_rows(p_gates, o_m, o_n, 4 * H, b_r, m_mn)
            store_rows(p_gates + H, o_m, o_n, 4 * H, b_z, m_mn)
            store_rows(p_gates + 2 * H, o_m, o_n, 4 * H, b_n, m_mn)
            store_rows(p_gates + 3 * H, o_m, o_n, 4 * H, b_q, m_mn)
    else:
        b_h = activate(gate_sum(p_x, p_hidden, p_bias, o_m, o_n, m_mn, 0, H, 1, ACC), KIND, 0.0)
    store_rows(p_h, o_m, o_n, H, b_h, m_mn)
    store_rows(p_y, o_m, o_n, H, b_h, m_mn)
    if p_before is not None:
        store_rows(p_before, o_m, o_n, H, b_before, m_mn)


@triton.jit
def recurrent_grad_kernel(
    p_product, p_dy, p_gates, p_before, p_c_before, p_dh, p_dc, p_dx, p_dhidden, M, products, H, tile: tl.constexpr,
    KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gates, in dhidden those of the hidden product if they differ (gru).

    dh and dc change in place from the gradients of a step's results to those of its former states, in dh without the
    part that passes through the hidden product: the next step gets that as p_product, of `products` rows. dy and
    p_product may be None.
    """
    wait(EARLY)
    ACC: tl.constexpr = tile.ACC
    o_m, o_n, m_m, m_n = tile_of(M, H, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_dh = load_rows(p_dh, o_m, o_n, H, m_mn, ACC)
    if p_dy is not None:
        b_dh += load_rows(p_dy, o_m, o_n, H, m_mn, ACC)
    if p_product is not None:
        b_dh += load_rows(p_product, o_m, o_n, H, m_mn & (o_m < products)[:, None], ACC)
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
