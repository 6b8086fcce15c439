"""What the forms of a convolution share: the epilogue after the sum, and the weights turned round for a walk back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, launch
from minidl.kernels.activation import Activation, activate
from minidl.kernels.conv.geometry import Walk
from minidl.kernels.gemm.tiled import halves

# From so many rows on they are counted in 64 bits, whose divisions cost more.
MANY = 2**31 - 2**21

MAX_POOL = tl.constexpr(1)
AVERAGE_POOL = tl.constexpr(2)
POOLS = {None: 0, "max": 1, "avg": 2}


@dataclass(frozen=True)
class Epilogue:
    """act(scale * sum + bias), then a 2x2 pool; z keeps the value before the activation.

    scale, bias [M] or None; pool None, "max" or "avg"; z like the output, or None.
    """

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    act: Activation = None
    pool: str | None = None
    z: torch.Tensor | None = None

    @property
    def flags(self) -> dict[str, Any]:
        """The constants that the kernels take."""
        name, slope = activation.parse(self.act)
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.scale is not None,
            "ACT": activation.CODES[name],
            "SLOPE": slope,
            "SAVE_Z": self.z is not None,
            "POOL": POOLS[self.pool],
        }

    def of_pairs(self) -> Epilogue:
        """The same where two neighbouring columns of the output count as one of twice the channels."""
        z = self.z
        pairs = None if z is None else z.view(*z.shape[:2], z.shape[2] // 2, 2 * z.shape[3])
        return Epilogue(_twice(self.bias), _twice(self.scale), self.act, self.pool, pairs)


def _twice(x: torch.Tensor | None) -> torch.Tensor | None:
    # Of one value a reshape alone would be a view of stride 0.
    return None if x is None else x.expand(2, -1).reshape(-1).contiguous()


@triton.jit
def affine(
    b_acc, p_bias, p_scale, m, M, i_group, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr
):  # fmt: skip
    """scale * b_acc + bias for a block [rows, channels from m on of M in a group]."""
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
    """The epilogue of a block [rows, channels from m on], for the pixels o_row of y seen as [pixels, GROUPS * M].

    In PIECES (a power of two) of channels one after another, which need less shared memory and fewer registers.
    """
    if PIECES == 1:
        b_acc = affine(b_acc, p_bias, p_scale, m, M, i_group, HAS_BIAS, HAS_SCALE)
        o_m = m + tl.arange(0, b_acc.shape[1])
        m_y = m_row[:, None] & (o_m < M)[None, :]
        o_y = (o_row * (GROUPS * M))[:, None] + (i_group * M + o_m)[None, :]
        if SAVE_Z:
            tl.store(p_z + o_y, b_acc.to(p_z.dtype.element_ty), mask=m_y)
        tl.store(p_y + o_y, activate(b_acc, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_y)
    else:
        b_left, b_right = halves(b_acc)
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
    """The maximum (NaN if one is NaN) or the mean of the upper two and the lower two of each window."""
    if POOL == MAX_POOL:
        top = tl.maximum(b_0, b_1, propagate_nan=tl.PropagateNan.ALL)
        bottom = tl.maximum(b_2, b_3, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(top, bottom, propagate_nan=tl.PropagateNan.ALL)
    else:
        return 0.25 * ((b_0 + b_1) + (b_2 + b_3))


@triton.jit
def pool_last(b_x, POOL: tl.constexpr):
    """The last two axes, of size 2 each, pooled."""
    b_left, b_right = tl.split(b_x)
    b_0, b_2 = tl.split(b_left)
    b_1, b_3 = tl.split(b_right)
    return pool_four(b_0, b_1, b_2, b_3, POOL)


@triton.jit
def pool_quads(b_x, POOL: tl.constexpr):
    """Every four rows [4 R, N] pooled to one [R, N]."""
    b_x = tl.reshape(b_x, (b_x.shape[0] // 4, 2, 2, b_x.shape[1]))
    return pool_last(tl.permute(b_x, (0, 3, 1, 2)), POOL)


@triton.jit
def conv_turn_kernel(
    p_w, p_turned, M, C, s_m, s_c, s_r, s_s, first_r, step_r, first_s, step_s,
    JH: tl.constexpr, JW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """turned[g * C + c, j, m] = w[g * M + m, c, taps of j]: one group, tap and block of channels per program."""
    tiles_m = tl.cdiv(M, BLOCK_N)
    tiles_c = tl.cdiv(C, BLOCK_M)
    o_m = tl.program_id(0) % tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    o_c = tl.program_id(0) // tiles_m % tiles_c * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(0) // (tiles_m * tiles_c) % (JH * JW)
    i_group = (tl.program_id(0) // (tiles_m * tiles_c * JH * JW)).to(tl.int64)
    m_cm = (o_c < C)[:, None] & (o_m < M)[None, :]
    p_w += i_group * M * s_m + (first_r + j // JW * step_r) * s_r + (first_s + j % JW * step_s) * s_s
    b_w = tl.load(
        p_w + o_c.to(tl.int64)[:, None] * s_c + o_m.to(tl.int64)[None, :] * s_m, mask=m_cm, other=0.0
    )  # [BLOCK_M, BLOCK_N]
    o_row = ((i_group * C + o_c) * (JH * JW) + j) * M
    tl.store(p_turned + o_row[:, None] + o_m[None, :], b_w, mask=m_cm)


def turned(w: torch.Tensor, h: Walk, v: Walk, groups: int) -> torch.Tensor:
    """The weights of two walks back, [groups * C, JH, JW, M] out of w [groups * M, C, R, S], in any strides."""
    M, C, JH, JW = w.shape[0] // groups, w.shape[1], len(h.taps), len(v.taps)
    out = torch.empty(groups * C, JH, JW, M, dtype=w.dtype, device=w.device)
    tile = launch.tile("conv_turn", w.dtype, M=C, N=M)
    grid = (launch.cdiv(M, tile["BLOCK_N"]) * launch.cdiv(C, tile["BLOCK_M"]) * JH * JW * groups,)
    launch.run(
        conv_turn_kernel, grid, w, out, M, C, *w.stride(), h.taps[0], h.tap_step, v.taps[0], v.tap_step,
        JH=JH, JW=JW, **tile.options,
    )  # fmt: skip
    return out


def taps_of(w: torch.Tensor, h: Walk, v: Walk, M: int) -> tuple[int, int, int]:
    """Where in a row of w [groups * C, R, S, M] the walks' first tap is, and how far the next one down and across."""
    row = w.shape[2] * M
    return h.taps[0] * row + v.taps[0] * M, h.tap_step * row, v.tap_step * M
