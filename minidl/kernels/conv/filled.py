"""A convolution as one of more channels, the additional ones zero: for channels that other forms cannot take.

Rows of memory that no 16 bytes divide are read value by value. So channels are filled up to a multiple of 16 bytes, of
images, of weights and of the output's gradient: copies of [rows, C] with rows of another length. Groups of few channels
leave a tile empty; several of them are one group whose weights are zero where its input and its output were of
different groups. Nothing is copied for that but weights, or of their gradient the blocks that are wanted. An input that
is not finite makes NaN of all outputs of such a group.

What is then computed is a problem with a plan of its own (`plan`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model import selection
from minidl.runtime.dependent_launch import wait

NAME = "fill"
DIRECTIONS = FORWARD, TRANSPOSED, GRAD_WEIGHT
FAMILIES = ("conv_fill",)
# Channels of a group made of several, at most; of a channel count to which zeros are worth adding, at least.
FULL = 64
LEAST = 6
# 3x3 stride 3 with a dilation, 2->13 at 63x63: nine walks of filled channels took 757 us, and 49 as they are.
MOST_PHASES = 4
# Channels of the form for few outputs of a way back are a multiple of this, up to so many outputs; and fewer than LEAST
# outputs, of whose weights the gradient is wanted: 952->1 at 12x12, 173 images, 219 us as pixels, cuDNN 107.
FEW_UNIT, FEW_OUTPUTS = 16, 4
# Channels of forms that read boxes, where this adds less than a sixteenth.
BOX = 32


@triton.jit
def conv_fill_kernel(
    p_from, p_to, rows, pitch, to, per_group, each,
    MERGED: tl.constexpr, ALL: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """to [rows, to] = from [.., pitch], with zeros beyond. Of `per_group` rows that are written `each` are read; ALL
    where that is each of them, which needs no division in 64 bits.

    MERGED above 1: of a row of group g, g % MERGED, times `each`, is the first column that is written; with BACK the
    first one that is read. All rows are read.
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


class Filling(NamedTuple):
    """What is copied before the wider problem is run, and of its result; None where nothing is."""

    x: Copy | None
    w: Copy | None
    result: Copy | None

    def before(self, x: torch.Tensor, w: torch.Tensor, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        """x and w, or of the gradient of the weight x and dy, for the wider problem."""
        if direction == TRANSPOSED:
            # [groups * C, M, R, S] as the kernel counts its rows, in the order [groups * C, R, S, M].
            w = w.permute(0, 2, 3, 1).contiguous()
        made = w if self.w is None else self.w.of(w)
        if direction == TRANSPOSED:
            made = made.permute(0, 3, 1, 2)
        return (x if self.x is None else self.x.of(x)), made

    def run(
        self, problem: Problem, part: Any, x: torch.Tensor, w: torch.Tensor, *vectors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, z) by the plan `part` of the wider problem; vectors: bias, scale, and what is added."""
        y, z = part.run(*self.before(x, w, problem.direction), *vectors)
        return self.after(y, problem.shape), z

    def after(self, y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """What is wanted of the result; of a gradient of the weight the first rows, where it is not copied."""
        return y[: shape[0]] if self.result is None else self.result.of(y)


def wider(problem: Problem) -> Problem | Unsupported:
    """The problem of more channels."""
    if problem.direction not in DIRECTIONS:
        return Unsupported("a walk back")
    if problem.dtype == torch.float64 or (problem.target == "interpreted" and problem.form != NAME):
        return Unsupported("nothing gained with float64, or by the interpreter")
    if problem.pool:
        return Unsupported("a pool")
    if problem.direction == TRANSPOSED and not _has_few_phases(problem):
        return Unsupported("more walks than two strides of 2 have")
    unit = 16 // problem.dtype.itemsize
    groups, C, M = problem.groups, problem.C, problem.M
    merged = _merged(groups, max(C, M))
    if merged > 1:
        C, M = merged * C, merged * M
    elif groups == 1 and problem.direction == TRANSPOSED and M <= FEW_OUTPUTS:
        C = launch.cdiv(C, FEW_UNIT) * FEW_UNIT
    else:
        few = problem.direction == GRAD_WEIGHT and groups == 1 and M < LEAST and C >= FULL
        C = C if few and C % unit == 0 else _filled(C, unit)
        if problem.direction == GRAD_WEIGHT:
            M = FEW_UNIT if few else _filled(M, unit)
    if (C, M) == (problem.C, problem.M):
        return Unsupported("channels that need no more")
    made = problem._replace(C=C, M=M, geometry=problem.geometry._replace(groups=groups // merged), form=None)
    copied = merged == 1 and problem.C != C and (problem.direction != GRAD_WEIGHT or problem.M != M)
    made = made._replace(aligned=problem.aligned or copied, w_aligned=True)
    if problem.direction == TRANSPOSED:
        R, S = problem.geometry.h.kernel, problem.geometry.w.kernel
        made = made._replace(strides=(R * S * M, 1, S * M, M))
    return made


def _has_few_phases(problem: Problem) -> bool:
    """Whether the walks back are few, or one launch (`pixel_back`)."""
    h, v = problem.geometry.h, problem.geometry.w
    return h.stride * v.stride <= (MOST_PHASES if h.dilation * v.dilation > 1 else 4 * MOST_PHASES)


def cost(problem: Problem, made: Problem) -> float:
    """Microseconds of the copies, of what is read and written."""
    device = selection.of(problem.target)
    filling = prepare(problem, made)
    copies = [copy for copy in filling if copy is not None]
    values = sum(2.0 * torch.Size(copy.shape).numel() for copy in copies)
    apart = device.steps.fill if problem.paced else 0.0
    rate = device.copy * (device.steps.filled if problem.paced else 1.0)
    return len(copies) * (device.launch + apart) + values * problem.dtype.itemsize / rate


def prepare(problem: Problem, made: Problem) -> Filling:
    """The copies for the problem that was made wider."""
    H, W = problem.read
    R, S = problem.geometry.h.kernel, problem.geometry.w.kernel
    groups, taps, merged = problem.groups, R * S, problem.groups // made.groups
    rows = problem.N * H * W * groups
    back = problem.direction == TRANSPOSED
    x = None
    if merged == 1 and made.C != problem.C:
        x = _copy(problem, (problem.N, H, W, groups * made.C), made.C, rows, problem.C)
    if problem.direction == GRAD_WEIGHT:
        OH, OW = problem.written
        rows = problem.N * OH * OW * groups
        dy = result = None
        if merged == 1 and made.M != problem.M:
            dy = _copy(problem, (problem.N, OH, OW, groups * made.M), made.M, rows, problem.M)
        if made.C != problem.C or (groups > 1 and made.M != problem.M):
            rows = groups * problem.M * taps
            group = merged, problem.M * taps, problem.C if merged > 1 else made.M * taps
            result = _copy(problem, problem.shape, problem.C, rows, made.C, group, back=True)
        return Filling(x, dy, result)
    # Rows of the weights are channels that are written, on the way back those that are read.
    of_group, row, filled = (problem.C, problem.M, made.M) if back else (problem.M, problem.C, made.C)
    made_of_group = made.C if back else made.M
    shape = made.groups * made_of_group, R, S, filled
    group = (merged, of_group * taps, row) if merged > 1 else (1, made_of_group * taps, of_group * taps)
    return Filling(x, _copy(problem, shape, filled, made.groups * made_of_group * taps, row, group), None)


def _copy(
    problem: Problem, shape: tuple[int, ...], to: int, rows: int, pitch: int,
    merged: tuple[int, int, int] | None = None, back: bool = False,
) -> Copy:  # fmt: skip
    """rows, of `to` values: of the result; pitch: values of a row of what is copied.

    merged, back: of `conv_fill_kernel`, MERGED, `per_group` and `each`; None where all rows are read.
    """
    tile = problem.tile("conv_fill", floor=1, M=rows, N=to)
    grid = launch.cdiv(rows, tile["BLOCK_M"]) * launch.cdiv(to, tile["BLOCK_N"])
    parts, per_group, each = merged or (1, rows, rows)
    scalars = (rows, pitch, to, per_group, each)
    meta = {"MERGED": parts, "ALL": parts == 1 and each == per_group, "BACK": back}
    meta |= {**dependent_launch.options(grid, problem.target), **tile.options}
    return Copy(shape, launch.Prepared(conv_fill_kernel, (grid,), scalars, meta))


def _merged(groups: int, channels: int) -> int:
    """Groups of so many channels that are made one: as many as fill FULL channels and divide their number."""
    if groups == 1 or channels > FULL // 2:
        return 1
    return max(k for k in range(1, FULL // channels + 1) if groups % k == 0)


def _filled(channels: int, unit: int) -> int:
    """Channels with those added that make whole units or, where that adds little, blocks for boxes."""
    if channels < LEAST:
        return channels
    boxes = launch.cdiv(channels, BOX) * BOX
    return boxes if boxes - channels <= channels // 16 else launch.cdiv(channels, unit) * unit
