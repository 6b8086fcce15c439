"""Convolutions of volumes as convolutions of images, which are views or copies of x [N, D, H, W, C].

    for a kernel of 1 x R x S   "slices":   slices, [N * D, H, W, C], without those that a stride skips
    for a kernel of Q x 1 x 1   "columns":  one image of D rows per volume, [N, D, H * W, C]
    otherwise                   "stack":    the slices that an output reads, as channels: [N * OD, H, W, Q * C]

So the taps of an output are a single sum in the accumulator's dtype. The first two copy nothing. A stack writes and
reads x Q times, with zeros for slices outside.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import conv
from minidl.kernels.conv import costs
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, INT32_LIMIT, Problem, Tensors
from minidl.kernels.conv.voxels import VolumeProblem
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

STACKED = 1.25  # factor on the estimate of a stack


class Sizes(NamedTuple):
    """`rows` rows of the copy of D slices of `pixels` pixels to `images` images of a phase."""

    rows: int
    D: int
    pixels: int
    images: int
    in_start: int
    in_step: int
    in_tap: int


@triton.jit
def conv_stack_kernel(
    p_x, p_to, sizes,
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
    o_image = o_pixel // sizes.pixels
    n = o_image // sizes.images
    d = sizes.in_start + (o_image - n * sizes.images) * sizes.in_step + o_row % J * sizes.in_tap
    m_row = (o_row < sizes.rows) & (d >= 0) & (d < sizes.D)
    o_x = ((n * sizes.D + d) * sizes.pixels + o_pixel % sizes.pixels) * (GROUPS * C) + o_group % GROUPS * C
    m_c = o_c < C
    b_x = tl.load(p_x + o_x[:, None] + o_c[None, :], mask=m_row[:, None] & m_c[None, :], other=0.0)
    tl.store(p_to + (o_row * C)[:, None] + o_c[None, :], b_x, mask=(o_row < sizes.rows)[:, None] & m_c[None, :])


def is_identity(phase: Phase, D: int) -> bool:
    """Return whether output q reads slice q alone."""
    return (len(phase.taps), phase.in_start, phase.in_step, phase.count) == (1, 0, 1, D)


def name(problem: VolumeProblem) -> str:
    """Return the name of the images of a problem."""
    if problem.volume.flat:
        return "columns"
    return "slices" if is_identity(problem.d.forward(), problem.d.size) else "stack"


def estimate(problem: VolumeProblem) -> float:
    """Return the microseconds of the copies and convolutions of slices or a stack."""
    of_slices, (h, w, _) = problem.problem, problem.problem.geometry
    M, total = of_slices.M, 0.0
    if of_slices.direction != GRAD_WEIGHT:
        # The weights are reordered, too.
        weights = problem.taps * of_slices.groups * of_slices.C * M * of_slices.dtype.itemsize
        total = costs.copy_time(of_slices, 8 * weights)
    for phase in problem.depth_phases:
        images = of_slices._replace(N=of_slices.N * phase.count, C=of_slices.C * len(phase.taps))
        if problem.back:
            images = images._replace(strides=(h.kernel * w.kernel * M, 1, w.kernel * M, M))
        total += _images_time(images, phase, *problem.read)
        if problem.d.stride > 1 and problem.back:
            written = images.N * h.size * w.size * of_slices.groups * M * of_slices.dtype.itemsize
            total += costs.copy_time(of_slices, 2 * written)
    return total


def _images_time(images: Problem, phase: Phase, D: int, h: int, w: int) -> float:
    """Return the microseconds of a convolution of stacked slices [h, w], including their copy."""
    time = plans.plan(images).microseconds
    if is_identity(phase, D):
        return time
    # Bytes written, and partly read.
    copied = 1.5 * images.N * h * w * images.groups * images.C * images.dtype.itemsize
    return STACKED * (time + costs.copy_time(images, copied))


def run(problem: VolumeProblem, _: None, t: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, z) as volumes; for GRAD_WEIGHT (dw [groups * M, Q, R, S, C], None), from x and dy."""
    of_slices, phase, flat = problem.problem, problem.d.forward(), problem.volume.flat
    at = problem.volume.columns if flat else of_slices.geometry
    epilogue = {"scale": t.scale, "preactivation": of_slices.preactivation}
    if problem.back and not flat:
        return _run_back(problem, t, epilogue)
    x = pictures(t.x.flatten(2, 3) if flat else stack_slices(t.x, phase, at.groups))
    if of_slices.direction == GRAD_WEIGHT:
        dw = conv.grad_weight(x, pictures(t.w.flatten(2, 3) if flat else t.w.flatten(0, 1)), at)
        # From [groups * M, C, Q, 1] or [groups * M, Q * C, R, S].
        dw = dw.unsqueeze(-1) if flat else dw.unflatten(1, (problem.d.kernel, -1)).transpose(1, 2)
        return dw.permute(0, 2, 3, 4, 1).contiguous(), None
    w = t.w.squeeze(-1) if flat else pictures(t.w.permute(0, 3, 4, 2, 1).flatten(3))
    y, z = (conv.transposed if problem.back else conv.forward)(x, w, at, t.bias, of_slices.act, **epilogue)
    return volumes(y, problem.shape), None if z is None else volumes(z, problem.shape)


def _run_back(problem: VolumeProblem, t: Tensors, epilogue: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, z) of a transposed convolution, of one convolution per phase in depth."""
    of_slices = problem.problem
    y = torch.empty(problem.shape, dtype=t.x.dtype, device=t.x.device)
    z = torch.empty_like(y) if of_slices.preactivation else None
    for phase in problem.depth_phases:
        images = stack_slices(t.x, phase, of_slices.groups)
        taps = t.w[:, :, phase.taps[0] : phase.taps[-1] + 1 : max(1, phase.tap_step)]
        # [groups, taps, M, R, S, C], which backward kernels read in place.
        taps = taps.unflatten(0, (of_slices.groups, -1)).permute(0, 3, 1, 4, 5, 2).flatten(0, 2)
        part, part_z = conv.transposed(
            pictures(images), pictures(taps), of_slices.geometry, t.bias, of_slices.act, **epilogue
        )  # fmt: skip
        shape = y.shape[0], phase.count, *y.shape[2:]
        if shape == y.shape:
            return volumes(part, shape), None if part_z is None else volumes(part_z, shape)
        for to, images in ((y, part), (z, part_z)):
            if to is not None and images is not None:
                to[:, phase.out_start :: phase.out_step].copy_(volumes(images, shape))
    return y, z


def pictures(x: torch.Tensor) -> torch.Tensor:
    """Return [N, H, W, C] in torch's shape."""
    return x.permute(0, 3, 1, 2)


def volumes(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return images in torch's shape as volumes of `shape`, [N, D, H, W, C]."""
    return y.permute(0, 2, 3, 1).reshape(shape)


def stack_slices(x: torch.Tensor, phase: Phase, groups: int) -> torch.Tensor:
    """Return [N * count, H, W, groups * taps * C]: the slices of x [N, D, H, W, groups * C] that each output reads.

    Slices outside are zeros. The result is a view if each output reads its own slice.
    """
    N, D, H, W, channels = x.shape
    J = len(phase.taps)
    if is_identity(phase, D):
        return x.flatten(0, 1)
    shape = N * phase.count, H, W, channels * J
    return _stacking(shape, D, phase, groups, x.dtype, launch.target()).run(x)


@launch.cached
def _stacking(
    shape: tuple[int, int, int, int], D: int, phase: Phase, groups: int, dtype: torch.dtype, target: str
) -> Copy:
    J = len(phase.taps)
    C = shape[3] // (J * groups)
    rows = math.prod(shape[:3]) * groups * J
    tile = launch.tile("conv_fill", dtype, floor=1, target_=target, M=rows, N=C)
    columns = min(tile["BLOCK_N"], 1 << max(0, C - 1).bit_length())
    block = tile["BLOCK_M"] * tile["BLOCK_N"] // columns
    grid = launch.cdiv(rows, block) * launch.cdiv(C, columns)
    count = shape[0] // max(phase.count, 1)
    largest = max(math.prod(shape), count * (D + abs(phase.in_start)) * shape[1] * shape[2] * groups * C)
    sizes = Sizes(rows, D, shape[1] * shape[2], phase.count, phase.in_start, phase.in_step, phase.in_tap)
    meta = {
        "C": C, "J": J, "GROUPS": groups, "WIDE": largest >= INT32_LIMIT, "BLOCK_M": block, "BLOCK_N": columns,
        **dependent_launch.options(grid, target), **tile.launch_options,
    }  # fmt: skip
    return Copy(shape, launch.Prepared(conv_stack_kernel, (grid,), (sizes,), meta))
