"""The weights of the depthwise form, reordered so that the channels of one tap are contiguous."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import FORWARD, Problem
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


class TapStrides(NamedTuple):
    """Strides of w: group, output and input channel, row and column of taps; with a depth, of a slice of taps.

    first  the first tap
    """

    s_g: int
    s_m: int
    s_c: int
    s_r: int
    s_s: int
    s_q: int = 0
    first: int = 0


@triton.jit
def conv_spread_kernel(
    p_w, p_spread, M, OUT, WIDTH, S, rows, strides,
    C: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write spread[r * S + s, c, g * M + m] = w of group g, output m, channel c and tap r, s; rows of WIDTH values."""
    wait(EARLY)
    tiles_o = tl.cdiv(OUT, BLOCK_N)
    o_o = tl.program_id(0) % tiles_o * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.program_id(0) // tiles_o * BLOCK_M + tl.arange(0, BLOCK_M)
    j = o_k // C
    o_w = (j // S).to(tl.int64) * strides.s_r + j % S * strides.s_s + o_k % C * strides.s_c
    o_channel = (o_o // M).to(tl.int64) * strides.s_g + o_o % M * strides.s_m
    m_w = (o_k < rows)[:, None] & (o_o < OUT)[None, :]
    b_w = tl.load(p_w + o_w[:, None] + o_channel[None, :], mask=m_w, other=0.0)  # [BLOCK_M, BLOCK_N]
    tl.store(p_spread + o_k.to(tl.int64)[:, None] * WIDTH + o_o[None, :], b_w, mask=m_w)


def strides(problem: Problem) -> TapStrides:
    """Return the strides of the convolution's weights."""
    if problem.direction == FORWARD:  # [groups * M, R, S, C]
        R, S, C = problem.geometry.h.kernel, problem.geometry.w.kernel, problem.C
        return TapStrides(problem.M * R * S * C, R * S * C, 1, S * C, C)
    input_stride, output_stride, *tap_strides = problem.strides  # [groups * C, M, R, S]
    return TapStrides(problem.C * input_stride, output_stride, input_stride, *tap_strides)


def prepare(problem: Problem, of: TapStrides) -> Copy:
    """Return the copy to [R, S, C, groups * M], in rows of a multiple of 16 values, from weights with strides `of`."""
    R, S, C, out = problem.geometry.h.kernel, problem.geometry.w.kernel, problem.C, problem.groups * problem.M
    width = 16 * launch.cdiv(out, 16)
    tile = problem.tile("conv_reorder", floor=1, M=R * S * C, N=out)
    grid = launch.cdiv(R * S * C, tile["BLOCK_M"]) * launch.cdiv(out, tile["BLOCK_N"])
    meta = {"C": C, **dependent_launch.options(grid, problem.target), **tile.options}
    scalars = (problem.M, out, width, S, R * S * C, of)
    return Copy((R, S, C, width), launch.Prepared(conv_spread_kernel, (grid,), scalars, meta))
