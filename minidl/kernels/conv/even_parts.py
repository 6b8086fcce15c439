"""Weight gradients in equal parts: the steps of all tiles form a sequence that is divided equally among programs.

A tile has `boxes` steps after a PAUSE of idle steps, for the time of changing tiles. Several programs, its slots, sum a
tile; their partial sums are added in order of the slots. At its step t a program reads near the fraction t / Q of its
tile's steps.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv.problem import Problem
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import ConcatPair

TOGETHER = tl.constexpr(4)  # slots whose sums are read at once
VALUES = 2048  # values that a program adds


@triton.jit
def slots_of(first, steps, Q):
    """Return (first program, number of programs, its step at the tile's start, the last one's step at the tile's end).

    `first` and `steps` are the tile's, without its pause.
    """
    before = first // Q
    last = (first + steps - 1) // Q
    return before, last - before + 1, first - before * Q, first + steps - last * Q


@triton.jit
def step_at(t, slot, slots, opening, closing):
    """Return the step of the tile that a slot runs at its step t, given the result of `slots_of`.

    It is the number of steps that all slots run before t, plus those of earlier slots at t.
    """
    k = tl.maximum(t - opening, 0) + tl.maximum(slots - 2, 0) * t + tl.where(slots > 1, tl.minimum(t, closing), 0)
    return k + slot - tl.where((t < opening) & (slot > 0), 1, 0)


@triton.jit
def conv_even_parts_sum_kernel(
    p_partial, p_total, boxes, M, GROUPS, Q, PAUSE,
    C: tl.constexpr, J: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write total [groups * M, J * C]: for ROWS rows of a tile, the sum of its slots in order."""
    wait(EARLY)
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    PIECES: tl.constexpr = BLOCK_M // ROWS
    tiles_m = tl.cdiv(M, BLOCK_M)
    i_tile = tl.program_id(0) // (PIECES * TAPS)
    i_group = i_tile // (tiles_c * tiles_m) % GROUPS
    j = i_tile // (tiles_c * tiles_m * GROUPS) * TAPS + tl.program_id(0) // PIECES % TAPS
    _, slots, _, _ = slots_of(i_tile * (boxes + PAUSE) + PAUSE, boxes, Q)
    r_c = i_tile % tiles_c * BLOCK_N + tl.arange(0, BLOCK_N)
    r_m = i_tile // tiles_c % tiles_m * BLOCK_M + tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    m_mc = (r_m < M)[:, None] & (r_c < C)[None, :]
    o_mc = (i_group * M + r_m).to(tl.int64)[:, None] * (J * C) + j * C + r_c[None, :]
    o_slot = o_mc
    b_total = tl.load(p_partial + o_slot, mask=m_mc, other=0.0)
    for first in range(1, slots, TOGETHER):
        for i in tl.static_range(TOGETHER):
            o_slot += GROUPS * M * (J * C)
            b_total += tl.load(p_partial + o_slot, mask=m_mc & (first + i < slots), other=0.0)
    tl.store(p_total + o_mc, b_total.to(p_total.dtype.element_ty), mask=m_mc)


class Prepared(NamedTuple):
    """The product, the launch that adds its slots (None for a single slot), and the shapes of both results."""

    launch: launch.Prepared
    partial: tuple[int, int]
    sum: launch.Prepared | None
    shape: tuple[int, ...]

    def run(self, dy: torch.Tensor, x: torch.Tensor | ConcatPair, *swapped: int) -> torch.Tensor:
        """Return the gradient."""
        dtype = dy.dtype if self.sum is None else launch.acc_torch(dy.dtype)
        partial = torch.empty(self.partial, dtype=dtype, device=dy.device)
        self.launch.run(dy, x, partial, *swapped)
        if self.sum is None:
            return partial.view(self.shape)
        dw = torch.empty(self.shape, dtype=dy.dtype, device=dy.device)
        self.sum.run(partial, dw)
        return dw


def prepare_sum(
    problem: Problem, taps: int, tiles: int, boxes: int, each: int, pause: int, blocks: dict[str, int]
) -> launch.Prepared:
    """Prepare the sum of the slots of `tiles` tiles; a program of the product runs `each` steps."""
    # A program adds fewer values if there are few, so that there are enough programs.
    total = problem.groups * problem.M * taps * problem.C
    values = min(VALUES, max(VALUES // 16, launch.cdiv(total, 8 * problem.processors)))
    rows = max(1, min((1 << values.bit_length() - 1) // blocks["BLOCK_N"], blocks["BLOCK_M"]))
    return launch.Prepared(
        conv_even_parts_sum_kernel, (tiles * blocks["TAPS"] * blocks["BLOCK_M"] // rows,),
        (boxes, problem.M, problem.groups, each, pause),
        {"C": problem.C, "J": taps, "ROWS": rows, **blocks, **dependent_launch.options(target=problem.target)},
    )  # fmt: skip
