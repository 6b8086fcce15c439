"""The "fill" rewrite: pads channels with zeros, or merges groups, for channel counts that other forms do not support.

Rows not aligned to 16 bytes are read value by value. So the channels of images, weights and the output's gradient are
padded to a multiple of 16 bytes, by copies of [rows, C] with another row length. Groups of few channels leave tiles
mostly empty; several of them are merged into one group whose weights between different original groups are zero. This
copies only weights, or the blocks that are needed of their gradient. A non-finite input makes all outputs of a merged
group NaN.

The wider problem has its own plan (`plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, PHASE, TRANSPOSED, Operands, Problem, Unsupported
from minidl.kernels.conv.rewrites.rewrite import Conversion, Result, Rewrite
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model import selection
from minidl.runtime.dependent_launch import wait

# Maximum channels of a merged group; minimum channels worth padding.
FULL = 64
LEAST = 6
# 3x3 stride 3 with a dilation, 2->13 at 63x63: nine phases with padded channels took 757 us, and 49 without.
MOST_PHASES = 4
# Up to FEW_OUTPUTS outputs of a transposed convolution (`few_outputs`), or fewer than LEAST in a weight gradient,
# channels are padded to a multiple of FEW_UNIT: 952->1 at 12x12, 173 images, 219 us as pixels, cuDNN 107.
FEW_UNIT, FEW_OUTPUTS = 16, 4
# Multiple of channels for forms with descriptors, if padding to it adds less than a sixteenth.
BOX = 32


@triton.jit
def conv_fill_kernel(
    p_from, p_to, rows, pitch, to, per_group, each,
    MERGED: tl.constexpr, ALL: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy from [.., pitch] to [rows, to], padded with zeros; of every `per_group` rows written, `each` are read.

    ALL: every row is read, without 64-bit divisions. MERGED > 1: every row is read, and a row of group g is written
    from column g % MERGED * each on; with BACK it is read from that column on.
    """
    wait(EARLY)
    tiles_n = tl.cdiv(to, BLOCK_N)
    o_row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_to = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    o_from = o_to + o_row * 0
    o_read = o_row
    m_row = o_row < rows
    if MERGED == 1 and not ALL:
        within = o_row % per_group
        o_read = o_row // per_group * each + within
        m_row &= within < each
    if MERGED > 1:
        first = o_row // per_group % MERGED * each
        if BACK:
            o_from += first
        else:
            o_from -= first
    m_to = (o_row < rows) & (o_to < to)
    m_from = m_row & (o_to < to) & (o_from >= 0) & (o_from < pitch)
    b_x = tl.load(p_from + o_read * pitch + o_from, mask=m_from, other=0.0)  # [BLOCK_M, BLOCK_N]
    tl.store(p_to + o_row * to + o_to, b_x, mask=m_to)


@dataclass(frozen=True)
class Filling(Conversion):
    """The copies of x and w before the wider problem runs, and of its result; None for no copy."""

    x: Copy | None
    w: Copy | None
    result: Copy | None

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        x, w = operands.x, operands.w
        if problem.direction == TRANSPOSED:
            # [groups * C, M, R, S] as the kernel counts its rows, in the order [groups * C, R, S, M].
            w = w.permute(0, 2, 3, 1).contiguous()
        weights = w if self.w is None else self.w.run(w)
        if problem.direction == TRANSPOSED:
            weights = weights.permute(0, 3, 1, 2)
        y, z = plans[0].run(operands._replace(x=x if self.x is None else self.x.run(x), w=weights))
        # Without a copy the gradient of the weight may have further rows.
        return (y[: problem.shape[0]] if self.result is None else self.result.run(y)), z


class Fill(Rewrite):
    """More channels, of which some are zeros."""

    name, families = "fill", ("conv_fill",)

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        if problem.direction == PHASE or problem.dtype.itemsize == 1:
            return Unsupported("a backward phase, or float8")
        if problem.dtype == torch.float64 or (problem.target == "interpreted" and problem.form != self.name):
            return Unsupported("nothing gained with float64, or by the interpreter")
        if problem.pool:
            return Unsupported("a pool")
        if problem.direction == TRANSPOSED and (most := _most_phases(problem)) is not None:
            return Unsupported(f"more than {most} backward phases")
        unit = 16 // problem.dtype.itemsize
        groups, C, M = problem.groups, problem.C, problem.M
        merged = _merged_groups(groups, max(C, M))
        if merged > 1:
            C, M = merged * C, merged * M
        elif groups == 1 and problem.direction == TRANSPOSED and M <= FEW_OUTPUTS:
            C = launch.cdiv(C, FEW_UNIT) * FEW_UNIT
        else:
            few = problem.direction == GRAD_WEIGHT and groups == 1 and M < LEAST and C >= FULL
            C = C if few and C % unit == 0 else _padded(C, unit)
            if problem.direction == GRAD_WEIGHT:
                M = FEW_UNIT if few else _padded(M, unit)
        if (C, M) == (problem.C, problem.M):
            return Unsupported("channels that need no padding")
        wider = problem._replace(C=C, M=M, geometry=problem.geometry._replace(groups=groups // merged), form=None)
        copied = merged == 1 and problem.C != C and (problem.direction != GRAD_WEIGHT or problem.M != M)
        wider = wider._replace(aligned=problem.aligned or copied, w_aligned=True)
        if problem.direction == TRANSPOSED:
            R, S = problem.geometry.h.kernel, problem.geometry.w.kernel
            wider = wider._replace(strides=(R * S * M, 1, S * M, M))
        return (wider,)

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        """Add the copies."""
        device = selection.of(problem.target)
        filling = self.prepare(problem, others)
        copies = [copy for copy in (filling.x, filling.w, filling.result) if copy is not None]
        values = sum(2.0 * torch.Size(copy.shape).numel() for copy in copies)
        fixed, size = device.launch + device.steps.fill, values * problem.dtype.itemsize
        return times[0] + len(copies) * fixed + size / (device.copy * device.steps.filled)

    def prepare(self, problem: Problem, others: Sequence[Problem]) -> Filling:
        (wider,) = others
        H, W = problem.read
        R, S = problem.geometry.h.kernel, problem.geometry.w.kernel
        groups, taps, merged = problem.groups, R * S, problem.groups // wider.groups
        rows = problem.N * H * W * groups
        back = problem.direction == TRANSPOSED
        x = None
        if merged == 1 and wider.C != problem.C:
            x = _copy(problem, (problem.N, H, W, groups * wider.C), wider.C, rows, problem.C)
        if problem.direction == GRAD_WEIGHT:
            OH, OW = problem.written
            rows = problem.N * OH * OW * groups
            dy = result = None
            if merged == 1 and wider.M != problem.M:
                dy = _copy(problem, (problem.N, OH, OW, groups * wider.M), wider.M, rows, problem.M)
            if wider.C != problem.C or (groups > 1 and wider.M != problem.M):
                rows = groups * problem.M * taps
                group = merged, problem.M * taps, problem.C if merged > 1 else wider.M * taps
                result = _copy(problem, problem.shape, problem.C, rows, wider.C, group, back=True)
            return Filling(x, dy, result)
        # Rows of the weights are output channels, backward the channels that are read.
        group_rows, row, padded = (problem.C, problem.M, wider.M) if back else (problem.M, problem.C, wider.C)
        wider_group = wider.C if back else wider.M
        shape = wider.groups * wider_group, R, S, padded
        group = (merged, group_rows * taps, row) if merged > 1 else (1, wider_group * taps, group_rows * taps)
        return Filling(x, _copy(problem, shape, padded, wider.groups * wider_group * taps, row, group), None)


def _most_phases(problem: Problem) -> int | None:
    """Return the largest number of backward phases that is worth filling if the problem has more, else None.

    Without a dilation one launch computes all phases (`pixel_back`), so more of them are worth it.
    """
    down, across = problem.geometry.h, problem.geometry.w
    most = MOST_PHASES if down.dilation * across.dilation > 1 else 4 * MOST_PHASES
    return most if down.stride * across.stride > most else None


def _copy(
    problem: Problem, shape: tuple[int, ...], to: int, rows: int, pitch: int,
    merged: tuple[int, int, int] | None = None, back: bool = False,
) -> Copy:  # fmt: skip
    """Return the copy to `rows` rows of `to` values from rows of `pitch` values.

    merged: (MERGED, per_group, each) of `conv_fill_kernel`, None if all rows are read; back: its BACK.
    """
    tile = problem.tile("conv_fill", floor=1, M=rows, N=to)
    grid = launch.cdiv(rows, tile["BLOCK_M"]) * launch.cdiv(to, tile["BLOCK_N"])
    parts, per_group, each = merged or (1, rows, rows)
    scalars = (rows, pitch, to, per_group, each)
    meta = {"MERGED": parts, "ALL": parts == 1 and each == per_group, "BACK": back}
    meta |= {**dependent_launch.options(grid, problem.target), **tile.options}
    return Copy(shape, launch.Prepared(conv_fill_kernel, (grid,), scalars, meta))


def _merged_groups(groups: int, channels: int) -> int:
    """Return the number of groups to merge: the largest divisor with at most FULL channels."""
    if groups == 1 or channels > FULL // 2:
        return 1
    return max(k for k in range(1, FULL // channels + 1) if groups % k == 0)


def _padded(channels: int, unit: int) -> int:
    """Return the channels padded to a multiple of `unit` or, if that adds little, of BOX."""
    if channels < LEAST:
        return channels
    boxes = launch.cdiv(channels, BOX) * BOX
    return boxes if boxes - channels <= channels // 16 else launch.cdiv(channels, unit) * unit
