"""The weights of a backward phase: its taps, with input and output channels exchanged."""

from __future__ import annotations

import triton
import triton.language as tl

from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch


@triton.jit
def conv_reorder_kernel(
    p_w, p_reordered, M, C, s_m, s_c, s_r, s_s, first_r, step_r, first_s, step_s,
    JH: tl.constexpr, JW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write reordered[g * C + c, j, m] = w[g * M + m, c, tap j]: one group, tap and block of channels per program."""
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
    tl.store(p_reordered + o_row[:, None] + o_m[None, :], b_w, mask=m_cm)


def prepare(problem: Problem, down: Phase, across: Phase) -> Copy:
    """Return the copy from w [groups * M, C, R, S] in any strides to [groups * C, JH, JW, M] for a pair of phases."""
    # A backward problem writes the channels that the convolution reads.
    M, C, JH, JW = problem.C, problem.M, len(down.taps), len(across.taps)
    tile = problem.tile("conv_reorder", floor=1, M=C, N=M)
    grid = launch.cdiv(M, tile["BLOCK_N"]) * launch.cdiv(C, tile["BLOCK_M"]) * JH * JW * problem.groups
    return Copy(
        (problem.groups * C, JH, JW, M),
        launch.Prepared(
            conv_reorder_kernel, (grid,),
            (M, C, *problem.strides, down.taps[0], down.tap_step, across.taps[0], across.tap_step),
            {"JH": JH, "JW": JW, **tile.options},
        ),
    )  # fmt: skip
