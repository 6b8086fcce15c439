"""What a matrix product or convolution does to a block of sums before it stores the block: scale, bias, activation.

    z = scale b_acc + bias (+ addend)     y = act(z)     for a block b_acc of y [rows, GROUPS * N]

A block has any rows o_row of y, and neighbouring columns of a group from `column` on; those from `columns` on are not
stored:

             group 0   column  columns  group 1
    o_row[0]   |         [   b_a|cc ]         |
    o_row[1]   |         [      |   ]         |
"""

from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels import activation
from minidl.kernels.activation import activate
from minidl.kernels.float8 import stored

# SAVE_Z of an epilogue, 0 if there is no p_z. p_z holds:
SAVED = tl.constexpr(1)  # z, which the epilogue stores, laid out like y
ADDED = tl.constexpr(2)  # an addend of z, which the epilogue reads, laid out like y
STATISTICS = tl.constexpr(3)  # means and squares of y's columns, which `gemm.fused_statistics` stores


class Epilogue(NamedTuple):
    """Constants of an epilogue. A kernel adds a bias and multiplies by a scale if their pointers are not None.

    ACT, SLOPE  the activation and its parameter, of `activation.parse`
    SAVE_Z      0, or what `p_z` has: SAVED, ADDED or STATISTICS
    POOL        0, or the 2x2 pool after the activation
    """

    ACT: int = activation.NONE.value
    SLOPE: float = 0.0
    SAVE_Z: int = 0
    POOL: int = 0


@triton.jit
def affine(b_acc, p_bias, p_scale, column, columns, i_group):
    """Return scale * b_acc + bias of a block [rows, from `column` on] of group i_group, which has `columns` columns."""
    o_n = column + tl.arange(0, b_acc.shape[1])
    if p_scale is not None:
        b_acc *= tl.load(p_scale + i_group * columns + o_n, mask=o_n < columns, other=0.0).to(b_acc.dtype)[None, :]
    if p_bias is not None:
        b_acc += tl.load(p_bias + i_group * columns + o_n, mask=o_n < columns, other=0.0).to(b_acc.dtype)[None, :]
    return b_acc


@triton.jit
def save_or_add(b_z, p_z, o_z, m_z, SAVE_Z: tl.constexpr):
    """Return the value before the activation: b_z, SAVED to p_z, or with the value of p_z ADDED."""
    if SAVE_Z == SAVED:
        tl.store(p_z + o_z, b_z.to(p_z.dtype.element_ty), mask=m_z)
    if SAVE_Z == ADDED:
        b_z += tl.load(p_z + o_z, mask=m_z, other=0.0).to(b_z.dtype)
    return b_z


@triton.jit
def split_columns(b_x):
    """Return the left and the right half of the columns."""
    b_x = tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2))
    return tl.split(tl.permute(b_x, (0, 2, 1)))


@triton.jit
def finish(
    b_acc, p_bias, p_scale, p_y, p_z, o_row, m_row, column, columns, i_group, GROUPS,
    epilogue: tl.constexpr, PIECES: tl.constexpr, low=None,
):  # fmt: skip
    """Apply the epilogue to a block [rows, from `column` on] and store it at rows o_row, where m_row, of y.

    PIECES (a power of two) of the columns are stored serially, with less shared memory and fewer registers. Columns
    before low belong to another block, which stores them. Without epilogue (None) only scale and bias are applied.
    """
    if PIECES == 1:
        b_acc = affine(b_acc, p_bias, p_scale, column, columns, i_group)
        o_n = column + tl.arange(0, b_acc.shape[1])
        m_n = o_n < columns
        if low is not None:
            m_n = (o_n >= low) & m_n
        m_y = m_row[:, None] & m_n[None, :]
        o_y = (o_row * (GROUPS * columns))[:, None] + (i_group * columns + o_n)[None, :]
        if epilogue is not None:
            b_acc = activate(save_or_add(b_acc, p_z, o_y, m_y, epilogue.SAVE_Z), epilogue.ACT, epilogue.SLOPE)
        tl.store(p_y + o_y, stored(b_acc, p_y.dtype.element_ty), mask=m_y)
    else:
        b_left, b_right = split_columns(b_acc)
        finish(
            b_left, p_bias, p_scale, p_y, p_z, o_row, m_row, column, columns, i_group, GROUPS,
            epilogue, PIECES // 2, low,
        )  # fmt: skip
        finish(
            b_right, p_bias, p_scale, p_y, p_z, o_row, m_row, column + b_left.shape[1], columns, i_group, GROUPS,
            epilogue, PIECES // 2, low,
        )  # fmt: skip
