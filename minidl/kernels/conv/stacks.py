"""Stacks: for each output of a phase in depth, the slices that it reads as the channels of one image."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import INT32_LIMIT
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def conv_stack_kernel(
    p_x, p_to, rows, D, pixels, count, in_start, in_step, in_tap,
    C: tl.constexpr, J: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write to [N, count, pixels, GROUPS, J, C] from x [N, D, pixels, GROUPS, C] at in_start + q in_step + j in_tap."""
    wait(EARLY)
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    i_first = tl.program_id(0) // tiles_c * BLOCK_M
    if WIDE:
        i_first = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_M
    o_row = i_first + tl.arange(0, BLOCK_M)
    o_c = tl.program_id(0) % tiles_c * BLOCK_N + tl.arange(0, BLOCK_N)
    o_group = o_row // J
    o_pixel = o_group // GROUPS
    o_image = o_pixel // pixels
    n = o_image // count
    d = in_start + (o_image - n * count) * in_step + o_row % J * in_tap
    m_row = (o_row < rows) & (d >= 0) & (d < D)
    o_x = ((n * D + d) * pixels + o_pixel % pixels) * (GROUPS * C) + o_group % GROUPS * C
    m_c = o_c < C
    b_x = tl.load(p_x + o_x[:, None] + o_c[None, :], mask=m_row[:, None] & m_c[None, :], other=0.0)
    tl.store(p_to + (o_row * C)[:, None] + o_c[None, :], b_x, mask=(o_row < rows)[:, None] & m_c[None, :])


def stack_slices(x: torch.Tensor, phase: Phase, groups: int) -> torch.Tensor:
    """Return [N * count, H, W, groups * taps * C]: the slices of x [N, D, H, W, groups * C] that each output reads.

    Slices outside are zeros. The result is a view if `is_identity`.
    """
    N, D, H, W, channels = x.shape
    J = len(phase.taps)
    if is_identity(phase, D):
        return x.flatten(0, 1)
    shape = N * phase.count, H, W, channels * J
    return _stacking(shape, D, phase, groups, x.dtype, launch.target()).of(x)


@launch.cached
def _stacking(
    shape: tuple[int, int, int, int], D: int, phase: Phase, groups: int, dtype: torch.dtype, target: str
) -> Copy:
    J = len(phase.taps)
    C = shape[3] // (J * groups)
    rows = math.prod(shape[:3]) * groups * J
    tile = launch.tile("conv_fill", dtype, floor=1, target_=target, M=rows, N=C)
    options = tile.options
    block = options["BLOCK_M"] * options["BLOCK_N"]
    options["BLOCK_N"] = min(options["BLOCK_N"], 1 << max(0, C - 1).bit_length())
    options["BLOCK_M"] = block // options["BLOCK_N"]
    grid = launch.cdiv(rows, options["BLOCK_M"]) * launch.cdiv(C, options["BLOCK_N"])
    volumes = shape[0] // max(phase.count, 1)
    largest = max(math.prod(shape), volumes * (D + abs(phase.in_start)) * shape[1] * shape[2] * groups * C)
    scalars = rows, D, shape[1] * shape[2], phase.count, phase.in_start, phase.in_step, phase.in_tap
    meta = {
        "C": C, "J": J, "GROUPS": groups, "WIDE": largest >= INT32_LIMIT,
        **dependent_launch.options(grid, target), **options,
    }  # fmt: skip
    return Copy(shape, launch.Prepared(conv_stack_kernel, (grid,), scalars, meta))


def is_identity(phase: Phase, D: int) -> bool:
    """Return whether output q reads slice q alone."""
    return (len(phase.taps), phase.in_start, phase.in_step, phase.count) == (1, 0, 1, D)
