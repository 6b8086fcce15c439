"""The "unfold" form of 3-D convolutions with few input channels: the taps of a row, along depth and width, as channels.

    x [N, D, H, W, C]  --copy-->  images [N * OD, H, OW, (q, s, c), zeros]  --kernel of R x 1-->  y [N * OD, OH, OW, M]

The rows of a stack of few channels are not aligned to 16 bytes, and each tap fills a part of a block. Here a row has
the inputs of Q x S taps, and is padded. The weight gradient reads the same images.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import conv
from minidl.kernels.conv import costs
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, INT32_LIMIT, Problem, Tensors
from minidl.kernels.conv.stacks import pictures, volumes
from minidl.kernels.conv.voxels import VolumeProblem
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "unfold"
MOST = 8  # input channels
# Rows become a multiple of BOX values, for forms with descriptors, if that makes them at most PADDED times as long.
# 27 taps to 64 channels, 992 images of 64x62, float32: 863 us with 32 channels, 1,428 with 28.
BOX, PADDED = 32, 1.2


class Sizes(NamedTuple):
    """`rows` rows of images [OD, H, OW] of volumes [D, H, W]."""

    rows: int
    D: int
    H: int
    W: int
    OD: int
    OW: int


class Taps(NamedTuple):
    """C channels of Q x S taps: in depth output o reads o * STEP_D + START_D + q * TAP_D, likewise in width."""

    C: int
    Q: int
    S: int
    STEP_D: int
    START_D: int
    TAP_D: int
    STEP_W: int
    START_W: int
    TAP_W: int
    TO: int


@triton.jit
def conv_unfold_kernel(
    p_x, p_to, sizes, taps: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write rows of TO values, those of the taps and then zeros; taps outside the volume are zeros."""
    wait(EARLY)
    i_first = tl.program_id(0) * BLOCK_M
    if WIDE:
        i_first = tl.program_id(0).to(tl.int64) * BLOCK_M
    o_row = i_first + tl.arange(0, BLOCK_M)
    o_slice = o_row // sizes.OW
    o_image = o_slice // sizes.H
    n = o_image // sizes.OD
    o_to = tl.arange(0, BLOCK_N)
    o_tap = o_to // taps.C
    d = ((o_image - n * sizes.OD) * taps.STEP_D + taps.START_D)[:, None] + (o_tap // taps.S * taps.TAP_D)[None, :]
    w = ((o_row % sizes.OW) * taps.STEP_W + taps.START_W)[:, None] + (o_tap % taps.S * taps.TAP_W)[None, :]
    m_x = (o_row < sizes.rows)[:, None] & (o_tap < taps.Q * taps.S)[None, :]
    m_x = m_x & (d >= 0) & (d < sizes.D) & (w >= 0) & (w < sizes.W)
    o_x = (((n[:, None] * sizes.D + d) * sizes.H + (o_slice % sizes.H)[:, None]) * sizes.W + w) * taps.C
    b_x = tl.load(p_x + o_x + (o_to % taps.C)[None, :], mask=m_x, other=0.0)
    m_to = (o_row < sizes.rows)[:, None] & (o_to < taps.TO)[None, :]
    tl.store(p_to + (o_row * taps.TO)[:, None] + o_to[None, :], b_x, mask=m_to)


class Prepared(NamedTuple):
    """The copy of x, and the geometry of its images."""

    copy: Copy
    at: Geometry


def able(problem: VolumeProblem) -> bool:
    """Return whether x has few channels in one group, and several taps in depth and width."""
    of, d, w = problem.problem, problem.d, problem.problem.geometry.w
    if problem.back or of.N * of.M == 0:
        return False
    return of.groups == 1 and 0 < of.C < MOST and min(d.kernel, w.kernel) > 1


def images_of(problem: VolumeProblem) -> Problem:
    """Return the problem of the images."""
    of, d, (h, w, _) = problem.problem, problem.d, problem.problem.geometry
    at = Geometry(h, Axis(w.output, 1, w.output, 1, 0, 1), 1)
    taps = d.kernel * w.kernel * of.C
    aligned, box = (launch.cdiv(taps, unit) * unit for unit in (16 // of.dtype.itemsize, BOX))
    return of._replace(N=of.N * d.output, C=box if box <= PADDED * taps else aligned, geometry=at)


def estimate(problem: VolumeProblem) -> float:
    """Return the microseconds of the copy and the convolution of its images."""
    images = images_of(problem)
    copied = 1.5 * images.N * images.geometry.h.size * images.geometry.w.size * images.C * images.dtype.itemsize
    return plans.plan(images).microseconds + costs.copy_time(images, copied)


def prepare(problem: VolumeProblem) -> Prepared:
    """Return the launch of the copy."""
    of, images, d, w = problem.problem, images_of(problem), problem.d.forward(), problem.problem.geometry.w.forward()
    (D, H, W), to = problem.read, images.C
    shape = images.N, H, w.count, to
    sizes = Sizes(images.N * H * w.count, D, H, W, d.count, w.count)
    columns = triton.next_power_of_2(to)
    tile = launch.tile("conv_fill", of.dtype, floor=1, target_=of.target, M=sizes.rows, N=to)
    block = max(1, tile["BLOCK_M"] * tile["BLOCK_N"] // columns)
    reach = max(D, d.count * d.in_step + abs(d.in_start)) * max(W, w.count * w.in_step + abs(w.in_start))
    wide = max(sizes.rows * to, of.N * reach * H * of.C) >= INT32_LIMIT
    taps = Taps(
        of.C, len(d.taps), len(w.taps), d.in_step, d.in_start, d.in_tap, w.in_step, w.in_start, w.in_tap, to
    )  # fmt: skip
    grid = launch.cdiv(sizes.rows, block)
    meta: dict[str, Any] = {
        "taps": taps, "WIDE": wide, "BLOCK_M": block, "BLOCK_N": columns,
        **dependent_launch.options(grid, of.target), **tile.launch_options,
    }  # fmt: skip
    return Prepared(Copy(shape, launch.Prepared(conv_unfold_kernel, (grid,), (sizes,), meta)), images.geometry)


def run(problem: VolumeProblem, prepared: Prepared, t: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, z) as volumes; for GRAD_WEIGHT (dw [M, Q, R, S, C], None), from x and dy."""
    of, Q, S = problem.problem, problem.d.kernel, problem.problem.geometry.w.kernel
    taps, x = Q * S * of.C, pictures(prepared.copy.run(t.x))
    if of.direction == GRAD_WEIGHT:
        dw = conv.grad_weight(x, pictures(t.w.flatten(0, 1)), prepared.at)[:, :taps, :, 0]  # [M, (q, s, c), R]
        return dw.unflatten(1, (Q, S, of.C)).permute(0, 1, 4, 2, 3).contiguous(), None
    w = torch.full((t.w.shape[0], t.w.shape[3], 1, prepared.copy.shape[3]), 0.0, dtype=t.w.dtype, device=t.w.device)
    # [M, C, Q, R, S] as [M, R, 1, (q, s, c)].
    w[:, :, 0, :taps].unflatten(2, (Q, S, of.C)).copy_(t.w.permute(0, 3, 2, 4, 1))
    epilogue = {"scale": t.scale, "preactivation": of.preactivation}
    y, z = conv.forward(x, pictures(w), prepared.at, t.bias, of.act, **epilogue)
    return volumes(y, problem.shape), None if z is None else volumes(z, problem.shape)
