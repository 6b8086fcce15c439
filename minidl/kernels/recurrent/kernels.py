"""A step of a recurrence and its gradient, with their products or after them: read `minidl.kernels.recurrent`.

    lstm   i, f, o = sigmoid of gates 0, 1, 3     g = tanh of gate 2     c' = f c + i g     h' = o tanh(c')
    gru    r, z = sigmoid of gates 0, 1           n = tanh(x_n + r q)    h' = n + z (h - n)
    rnn    h' = act of the gate

A gate is x + h weight^T + bias; q is the product and bias of gate 2 alone. A program computes a block
[BLOCK_M, BLOCK_N] of the rows and H columns of a step, of all gates of a direction. It loads the product, or computes
it:

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
    """H: columns of a state; states: values of all states of a direction, B H."""

    H: int
    states: int


class Step(NamedTuple):
    """For each direction, the first row in N and the number of rows of this step and of the step computed before it.

    All are multiplied by H, usually a multiple of 16: Triton compiles other variants for numbers that are not.
    """

    first: int
    rows: int
    former: int
    former_rows: int
    first_reverse: int = 0
    rows_reverse: int = 0
    former_reverse: int = 0
    former_rows_reverse: int = 0


class Tile(NamedTuple):
    """Constants. GATES: products of a step; PRECISION: how they are computed; DIRECTIONS: 1 or 2."""

    ACC: Any
    PRECISION: str
    GATES: int
    DIRECTIONS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int = 16


@triton.jit
def block_of(sizes, step, tile: tl.constexpr):
    """Return the program's direction; its rows times H: in N, of the step before in N, of [D, B]; its columns; and the
    masks of rows, rows of the step before, and columns."""
    o_m, o_n, _, m_n = tile_of(sizes.H, sizes.H, tile)
    o_m *= sizes.H
    d = 0
    first, rows, former, former_rows = step.first, step.rows, step.former, step.former_rows
    if tile.DIRECTIONS > 1:
        d = tl.program_id(1)
        first, rows = tl.where(d == 0, first, step.first_reverse), tl.where(d == 0, rows, step.rows_reverse)
        former = tl.where(d == 0, former, step.former_reverse)
        former_rows = tl.where(d == 0, former_rows, step.former_rows_reverse)
    m_m = o_m < rows
    m_former = o_m < tl.minimum(rows, former_rows)
    o_r, o_former = o_m + first, o_m + former
    return d, o_r, o_former, d * sizes.states + o_m, o_n, m_m, m_former, m_n


@triton.jit
def load_gates(p, o_m, o_n, H, s, m_mn, COUNT: tl.constexpr, ACC: tl.constexpr):
    """Load four blocks H columns apart, the first in place of those after COUNT."""
    b_0 = load_rows(p, o_m, o_n, s, m_mn, ACC)
    b_1, b_2, b_3 = b_0, b_0, b_0
    if COUNT > 1:
        b_1 = load_rows(p + H, o_m, o_n, s, m_mn, ACC)
        b_2 = load_rows(p + 2 * H, o_m, o_n, s, m_mn, ACC)
    if COUNT > 3:
        b_3 = load_rows(p + 3 * H, o_m, o_n, s, m_mn, ACC)
    return b_0, b_1, b_2, b_3


@triton.jit
def store_gates(p, o_m, o_n, H, s, blocks, m_mn, COUNT: tl.constexpr):
    """Store the first COUNT of four blocks H columns apart."""
    b_0, b_1, b_2, b_3 = blocks
    store_rows(p, o_m, o_n, s, b_0, m_mn)
    if COUNT > 1:
        store_rows(p + H, o_m, o_n, s, b_1, m_mn)
        store_rows(p + 2 * H, o_m, o_n, s, b_2, m_mn)
    if COUNT > 3:
        store_rows(p + 3 * H, o_m, o_n, s, b_3, m_mn)


@triton.jit
def product(p_a, p_b, o_n, m_m, m_n, K, N, b_acc, tile: tl.constexpr):
    """Return b_acc + a b, for pointers to rows [K] of a, and b [K, N]."""
    PRECISION: tl.constexpr = tile.PRECISION
    for k in range(0, K, tile.BLOCK_K):
        o_k = k + tl.arange(0, tile.BLOCK_K)
        m_k = o_k < K
        b_a = tl.load(p_a[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
        b_b = tl.load(p_b + (o_k[:, None] * N + o_n[None, :]), mask=m_k[:, None] & m_n[None, :], other=0)
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=tile.ACC)
    return b_acc


@triton.jit
def hidden_products(p_h, p_hidden, p_weight, p_bias, d, o_b, o_n, m_m, m_n, H, tile: tl.constexpr):
    """Return h weight^T + bias of each gate in four blocks; p_h: pointers to the rows of h, o_b: rows of hidden."""
    ACC: tl.constexpr = tile.ACC
    GATES: tl.constexpr = tile.GATES
    PRECISION: tl.constexpr = tile.PRECISION
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    if p_hidden is not None:
        m_mn = m_m[:, None] & m_n[None, :]
        b_0, b_1, b_2, b_3 = load_gates(p_hidden, o_b, o_n, H, GATES, m_mn, GATES, ACC)
    else:
        b_0 = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        b_1, b_2, b_3 = b_0, b_0, b_0
        p_weight += d * GATES * H * H
        for k in range(0, H, tile.BLOCK_K):
            o_k = k + tl.arange(0, tile.BLOCK_K)
            m_k = o_k < H
            b_h = tl.load(p_h[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
            o_w = o_n[None, :] * H + o_k[:, None]
            m_w = m_k[:, None] & m_n[None, :]
            b_w = tl.load(p_weight + o_w, mask=m_w, other=0)
            b_0 = tl.dot(b_h, b_w, b_0, input_precision=PRECISION, out_dtype=ACC)
            if GATES > 1:
                b_w = tl.load(p_weight + H * H + o_w, mask=m_w, other=0)
                b_1 = tl.dot(b_h, b_w, b_1, input_precision=PRECISION, out_dtype=ACC)
                b_w = tl.load(p_weight + 2 * H * H + o_w, mask=m_w, other=0)
                b_2 = tl.dot(b_h, b_w, b_2, input_precision=PRECISION, out_dtype=ACC)
            if GATES > 3:
                b_w = tl.load(p_weight + 3 * H * H + o_w, mask=m_w, other=0)
                b_3 = tl.dot(b_h, b_w, b_3, input_precision=PRECISION, out_dtype=ACC)
    if p_bias is not None:
        p_bias += d * GATES * H + o_n
        b_0 += tl.load(p_bias, mask=m_n, other=0).to(tile.ACC)[None, :]
        if GATES > 1:
            b_1 += tl.load(p_bias + H, mask=m_n, other=0).to(tile.ACC)[None, :]
            b_2 += tl.load(p_bias + 2 * H, mask=m_n, other=0).to(tile.ACC)[None, :]
        if GATES > 3:
            b_3 += tl.load(p_bias + 3 * H, mask=m_n, other=0).to(tile.ACC)[None, :]
    return b_0, b_1, b_2, b_3


@triton.jit
def recurrent_kernel(
    p_x, p_h, p_hidden, p_weight, p_bias, p_c, p_y, p_before, p_c_before, p_gates, p_state, sizes, step,
    tile: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write y, the next h, and change c in place; write the former h and c and the gates if these are not None.

    p_h: the first h; p_hidden: the products of h and weight, computed here if it is None; p_state: None, or a copy of
    the states, of which this writes the next.
    """
    wait(EARLY)
    ACC: tl.constexpr = tile.ACC
    GATES: tl.constexpr = tile.GATES
    D: tl.constexpr = tile.DIRECTIONS
    H = sizes.H
    d, o_r, o_former, o_b, o_n, m_m, m_former, m_n = block_of(sizes, step, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    p_rows = tl.where(m_former, p_y + o_former * D + d * H, p_h + o_b)
    b_0, b_1, b_2, b_3 = hidden_products(p_rows, p_hidden, p_weight, p_bias, d, o_b, o_n, m_m, m_n, H, tile)
    b_before = tl.load(p_rows[:, None] + o_n[None, :], mask=m_mn, other=0).to(ACC)
    b_x, b_x1, b_x2, b_x3 = load_gates(p_x + d * GATES * H, o_r, o_n, H, GATES * D, m_mn, GATES, ACC)
    b_0 += b_x
    if KIND == LSTM:
        b_i, b_f, b_g, b_o = sigmoid(b_0), sigmoid(b_1 + b_x1), tanh(b_2 + b_x2), sigmoid(b_3 + b_x3)
        b_c_before = load_rows(p_c, o_b, o_n, 1, m_mn, ACC)
        b_c = b_f * b_c_before + b_i * b_g
        b_h = b_o * tanh(b_c)
        store_rows(p_c, o_b, o_n, 1, b_c, m_mn)
        if p_gates is not None:
            store_rows(p_c_before + d * H, o_r, o_n, D, b_c_before, m_mn)
            store_gates(p_gates + d * 4 * H, o_r, o_n, H, 4 * D, (b_i, b_f, b_g, b_o), m_mn, 4)
    elif KIND == GRU:
        b_r, b_z = sigmoid(b_0), sigmoid(b_1 + b_x1)
        b_n = tanh(b_x2 + b_r * b_2)
        b_h = b_n + b_z * (b_before - b_n)
        if p_gates is not None:
            store_gates(p_gates + d * 4 * H, o_r, o_n, H, 4 * D, (b_r, b_z, b_n, b_2), m_mn, 4)
    else:
        b_h = activate(b_0, KIND, 0.0)
    store_rows(p_y + d * H, o_r, o_n, D, b_h, m_mn)
    if p_state is not None:
        store_rows(p_state, o_b, o_n, 1, b_h, m_mn)
    if p_before is not None:
        store_rows(p_before + d * H, o_r, o_n, D, b_before, m_mn)


@triton.jit
def recurrent_grad_kernel(
    p_product, p_weight, p_dy, p_gates, p_before, p_c_before, p_dh, p_dc, p_dx, p_dhidden, p_state, sizes, step,
    tile: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gates, in dhidden those of the hidden product if they differ (gru).

    dh and dc change in place from the gradients of a step's results to those of its former states, in dh without the
    part that passes through the hidden product. The launch of the former step adds that: p_product, or that of the
    gradients written before with p_weight; nothing if both are None. dy may be None. p_state: None, or a copy of the
    last gradients of the hidden product, [D, B, GATES H].
    """
    wait(EARLY)
    ACC: tl.constexpr = tile.ACC
    GATES: tl.constexpr = tile.GATES
    D: tl.constexpr = tile.DIRECTIONS
    H = sizes.H
    d, o_r, o_former, o_b, o_n, m_m, m_former, m_n = block_of(sizes, step, tile)
    m_mn = m_m[:, None] & m_n[None, :]
    b_dh = load_rows(p_dh, o_b, o_n, 1, m_mn, ACC)
    if p_product is not None:
        b_dh += load_rows(p_product, o_b, o_n, 1, m_former[:, None] & m_n[None, :], ACC)
    elif p_weight is not None:
        p_rows = (p_dx if p_dhidden is None else p_dhidden) + o_former * (GATES * D) + d * GATES * H
        b_dh = product(p_rows, p_weight + d * GATES * H * H, o_n, m_former, m_n, GATES * H, H, b_dh, tile)
    if p_dy is not None:
        b_dh += load_rows(p_dy + d * H, o_r, o_n, D, m_mn, ACC)
    b_pass = tl.zeros_like(b_dh)
    if KIND == LSTM:
        b_i, b_f, b_g, b_o = load_gates(p_gates + d * 4 * H, o_r, o_n, H, 4 * D, m_mn, 4, ACC)
        b_c_before = load_rows(p_c_before + d * H, o_r, o_n, D, m_mn, ACC)
        b_t = tanh(b_f * b_c_before + b_i * b_g)
        b_dc = load_rows(p_dc, o_b, o_n, 1, m_mn, ACC) + b_dh * b_o * (1.0 - b_t * b_t)
        store_rows(p_dc, o_b, o_n, 1, b_dc * b_f, m_mn)
        b_0 = b_dc * b_g * (b_i * (1.0 - b_i))
        b_1 = b_dc * b_c_before * (b_f * (1.0 - b_f))
        b_2 = b_dc * b_i * (1.0 - b_g * b_g)
        blocks = b_0, b_1, b_2, b_dh * b_t * (b_o * (1.0 - b_o))
        hidden = blocks
    elif KIND == GRU:
        b_r, b_z, b_n, b_q = load_gates(p_gates + d * 4 * H, o_r, o_n, H, 4 * D, m_mn, 4, ACC)
        b_dn = b_dh * (1.0 - b_z) * (1.0 - b_n * b_n)
        b_dr = b_dn * b_q * (b_r * (1.0 - b_r))
        b_dz = b_dh * (load_rows(p_before + d * H, o_r, o_n, D, m_mn, ACC) - b_n) * (b_z * (1.0 - b_z))
        b_pass = b_dh * b_z
        blocks = b_dr, b_dz, b_dn, b_dn
        hidden = b_dr, b_dz, b_dn * b_r, b_dn
    else:
        b_dx = b_dh * activate_grad_from_output(load_rows(p_gates + d * H, o_r, o_n, D, m_mn, ACC), KIND, 0.0)
        blocks = b_dx, b_dx, b_dx, b_dx
        hidden = blocks
    store_gates(p_dx + d * GATES * H, o_r, o_n, H, GATES * D, blocks, m_mn, GATES)
    if p_dhidden is not None:
        store_gates(p_dhidden + d * GATES * H, o_r, o_n, H, GATES * D, hidden, m_mn, GATES)
    if p_state is not None:
        store_gates(p_state, o_b, o_n, H, GATES, hidden, m_mn, GATES)
    store_rows(p_dh, o_b, o_n, 1, b_pass, m_mn)
