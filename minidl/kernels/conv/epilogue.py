"""Epilogues of convolutions as shared device functions: scale, bias, activation and 2x2 pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.epilogue import save_or_add, split_columns
from minidl.kernels.float8 import stored

MAX_POOL = tl.constexpr(1)
AVERAGE_POOL = tl.constexpr(2)
POOLS = {None: 0, "max": 1, "avg": 2}


def repeated(x: torch.Tensor | None, times: int = 2) -> torch.Tensor | None:
    """Return a vector [M] repeated to [times * M], for adjacent pixels that count as one; None stays None."""
    # For a single value, reshape alone would return a view of stride 0.
    return None if x is None else x.expand(times, -1).reshape(-1).contiguous()


@triton.jit
def affine(
    b_acc, p_bias, p_scale, m, M, i_group, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr
):  # fmt: skip
    """Return scale * b_acc + bias for a block [rows, channels from m on] of a group of M channels."""
    o_m = m + tl.arange(0, b_acc.shape[1])
    if HAS_SCALE:
        b_acc *= tl.load(p_scale + i_group * M + o_m, mask=o_m < M, other=0.0).to(b_acc.dtype)[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + i_group * M + o_m, mask=o_m < M, other=0.0).to(b_acc.dtype)[None, :]
    return b_acc


@triton.jit
def finish(
    b_acc, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, GROUPS,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a block [rows, channels from m on] and store it at pixels o_row of y [pixels, GROUPS * M].

    PIECES (a power of two) of the channels are stored serially, with less shared memory and fewer registers.
    """
    if PIECES == 1:
        b_acc = affine(b_acc, p_bias, p_scale, m, M, i_group, HAS_BIAS, HAS_SCALE)
        o_m = m + tl.arange(0, b_acc.shape[1])
        m_y = m_row[:, None] & (o_m < M)[None, :]
        o_y = (o_row * (GROUPS * M))[:, None] + (i_group * M + o_m)[None, :]
        b_acc = save_or_add(b_acc, p_z, o_y, m_y, SAVE_Z)
        tl.store(p_y + o_y, stored(activate(b_acc, ACT, SLOPE), p_y.dtype.element_ty), mask=m_y)
    else:
        b_left, b_right = split_columns(b_acc)
        finish(
            b_left, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, GROUPS,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES // 2,
        )  # fmt: skip
        finish(
            b_right, p_bias, p_scale, p_y, p_z, o_row, m_row, m + b_left.shape[1], M, i_group, GROUPS,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES // 2,
        )  # fmt: skip


@triton.jit
def pool_four(b_0, b_1, b_2, b_3, POOL: tl.constexpr):
    """Return the maximum (NaN if one is NaN) or the mean of the upper two and the lower two values of a window."""
    if POOL == MAX_POOL:
        top = tl.maximum(b_0, b_1, propagate_nan=tl.PropagateNan.ALL)
        bottom = tl.maximum(b_2, b_3, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(top, bottom, propagate_nan=tl.PropagateNan.ALL)
    else:
        return 0.25 * ((b_0 + b_1) + (b_2 + b_3))


@triton.jit
def pool_last(b_x, POOL: tl.constexpr):
    """Pool the last two axes, of size 2 each."""
    b_left, b_right = tl.split(b_x)
    b_0, b_2 = tl.split(b_left)
    b_1, b_3 = tl.split(b_right)
    return pool_four(b_0, b_1, b_2, b_3, POOL)


@triton.jit
def pool_quads(b_x, POOL: tl.constexpr):
    """Pool every four rows of [4 R, N] to one row of [R, N]."""
    b_x = tl.reshape(b_x, (b_x.shape[0] // 4, 2, 2, b_x.shape[1]))
    return pool_last(tl.permute(b_x, (0, 3, 1, 2)), POOL)
