"""The "taps" rewrite, for few output channels: all products of pixels and taps by a 1x1 convolution, then their sums.

    z[n, i, (r, s, m)] = sum over c of x[n, i, c] w[m, r, s, c]
    y[n, o, m] = sum over r, s of z[n, i(o, r, s), (r, s, m)]

The first step is a 1x1 convolution with R S M output channels, which reads x once rather than once per tap, and fills
tiles that M channels would leave empty. z is float32 and is summed in the order of the taps. Backward any stride is
supported; forward the dilation must be a multiple of the stride, so that every tap of a pixel is needed.

The 1x1 convolution is a matrix product or, with a stride, a problem with its own plan (`plan`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, product
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import FORWARD, INT32_LIMIT, TRANSPOSED, Operands, Problem, Unsupported
from minidl.kernels.conv.rewrites.rewrite import Conversion, Result, Rewrite
from minidl.kernels.epilogue import save_or_add
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

# Products per pixel are padded to a multiple of this: rows not aligned to 16 bytes are written value by value.
UNIT = 8
# Additional share of a matrix product's time when it writes float32: 1304->34 3x3, 14 images of 44x44, 83 us.
WRITTEN = 0.15
# Bytes up to which products may exceed twice the images.
ROOM = 2**26


class Sizes(NamedTuple):
    """The numbers of outputs in all, of rows and columns of products, and of rows and columns of outputs."""

    total: int
    H: int
    W: int
    OH: int
    OW: int


class Sums(NamedTuple):
    """M outputs of an R x S kernel; products of a pixel are PITCH values. Along each axis output o adds J taps, from
    tap rho on in steps of STRIDE, at inputs (o + START) // STRIDE + j * TAP; rho is the remainder of o + START."""

    M: int
    PITCH: int
    R: int
    S: int
    JH: int
    JW: int
    START_H: int
    START_W: int
    STRIDE_H: int
    STRIDE_W: int
    TAP_H: int
    TAP_W: int


@triton.jit
def conv_tap_sum_kernel(
    p_z, p_bias, p_scale, p_y, p_beside, sizes,
    sums: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y [N, OH, OW, M] from z [N, H, W, PITCH], in which a pixel starts with its [R, S, M] products."""
    wait(EARLY)
    M: tl.constexpr = sums.M
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_y = o < sizes.total
    m = o % M
    o_pixel = o // M
    at_h = o_pixel // sizes.OW % sizes.OH + sums.START_H
    at_w = o_pixel % sizes.OW + sums.START_W
    # Neither is negative if a stride is above 1.
    r = at_h % sums.STRIDE_H
    s = at_w % sums.STRIDE_W
    x_h = at_h // sums.STRIDE_H
    x_w = at_w // sums.STRIDE_W
    o_z = ((o_pixel // sizes.OW // sizes.OH * sizes.H + x_h) * sizes.W + x_w) * sums.PITCH + (r * sums.S + s) * M + m
    b_acc = tl.zeros((BLOCK,), dtype=ACC)
    for j in tl.range(0, sums.JH * sums.JW, loop_unroll_factor=4):
        j_h = j // sums.JW
        j_w = j % sums.JW
        h = x_h + j_h * sums.TAP_H
        w = x_w + j_w * sums.TAP_W
        m_z = m_y & (h >= 0) & (h < sizes.H) & (w >= 0) & (w < sizes.W)
        m_z = m_z & (r + j_h * sums.STRIDE_H < sums.R) & (s + j_w * sums.STRIDE_W < sums.S)
        o_tap = (j_h * sums.TAP_H * sizes.W + j_w * sums.TAP_W) * sums.PITCH
        o_tap += (j_h * sums.STRIDE_H * sums.S + j_w * sums.STRIDE_W) * M
        b_acc += tl.load(p_z + (o_z + o_tap), mask=m_z, other=0.0)  # [BLOCK]
    if p_scale is not None:
        b_acc *= tl.load(p_scale + m, mask=m_y, other=0.0).to(ACC)
    if p_bias is not None:
        b_acc += tl.load(p_bias + m, mask=m_y, other=0.0).to(ACC)
    b_acc = save_or_add(b_acc, p_beside, o, m_y, epilogue.SAVE_Z)
    tl.store(p_y + o, activate(b_acc, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_y)


@dataclass(frozen=True)
class TapSums(Conversion):
    """The launch that adds the products of the taps, and their number of columns."""

    launch: launch.Prepared
    pitch: int

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        x, w, bias, scale, added = operands
        products, _ = plans[0].run(Operands(x, self._columns(w, problem.direction == TRANSPOSED)))
        y = torch.empty(problem.shape, dtype=problem.result, device=x.device)
        z = torch.empty_like(y) if problem.preactivation else None
        self.launch.run(products, bias, scale, y, z if added is None else added)
        return y, z

    def _columns(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """Return the 1x1 weights: a row (backward: a column) per tap and output, padded with zeros."""
        if back:  # [C, M, R, S]
            C, M, R, S = w.shape
            rows = w.permute(0, 2, 3, 1)
            if self.pitch == M * R * S:
                return rows.contiguous().view(C, -1, 1, 1)
            columns = torch.empty(C, self.pitch, dtype=w.dtype, device=w.device)
            columns[:, : M * R * S].view(C, R, S, M).copy_(rows)
            columns[:, M * R * S :].zero_()
            return columns.view(C, -1, 1, 1)
        M, R, S, C = w.shape
        columns = torch.empty(self.pitch, C, dtype=w.dtype, device=w.device)
        columns[: M * R * S].view(R, S, M, C).copy_(w.permute(1, 2, 0, 3))
        columns[M * R * S :].zero_()
        return columns.view(-1, 1, 1, C)


class Taps(Rewrite):
    """The products of all taps by a 1x1 convolution, then their sums."""

    name, families = "taps", ("conv_taps",)

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        if problem.direction not in (FORWARD, TRANSPOSED):
            return Unsupported("neither forward nor transposed")
        down, across, groups = problem.geometry
        R, S, M = down.kernel, across.kernel, problem.M
        if groups > 1 or problem.pool:
            return Unsupported("groups, or a pool")
        if not self.is_measured(problem):
            return Unsupported("no measured tiles for this dtype and target")
        if R * S == 1 or min(problem.C, M) == 0:
            return Unsupported("one tap, or no channels")
        back = problem.direction == TRANSPOSED
        if any(
            axis.dilation % axis.stride if not back else min(axis.stride, axis.dilation) > 1 for axis in (down, across)
        ):
            return Unsupported("a stride that skips taps, or backward a dilation with a stride")
        H, W = problem.read
        axes = (Axis(H, 1, H, 1, 0, 1), Axis(W, 1, W, 1, 0, 1)) if back else (_strided(down), _strided(across))
        pitch = UNIT * launch.cdiv(R * S * M, UNIT)
        # Backward, weights without padding are read in place.
        aligned = problem.w_aligned or not back or pitch > R * S * M
        pointwise = problem._replace(
            geometry=Geometry(*axes), M=pitch, bias=False, scale=False, act=None, preactivation=False, added=False,
            w_aligned=aligned, strides=(pitch, 1, pitch, pitch) if back else (), out=launch.acc_torch(problem.dtype),
            form=product.NAME if back or down.stride == across.stride == 1 else None,
        )  # fmt: skip
        if (
            pointwise.N * min(pointwise.written) < 1
            or max(_bytes(pointwise) // pointwise.result.itemsize, math.prod(problem.shape)) >= INT32_LIMIT
        ):
            return Unsupported("no pixels, or more than 32 bits count")
        images = problem.images
        if _bytes(pointwise._replace(N=images)) > max(ROOM, 2 * images * problem.image_bytes):
            return Unsupported("products that take more memory than the images")
        return (pointwise,)

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        """Add the time of writing products as float32, adding them and writing outputs."""
        (pointwise,), (time,) = others, times
        taps = problem.geometry.h.kernel * problem.geometry.w.kernel
        outputs = problem.N * math.prod(problem.written) * problem.M * problem.result.itemsize
        device = costs.constants(problem)
        total = costs.shares_time(problem, taps, _bytes(pointwise) // (4 * taps)) + outputs / device.copy
        if problem.direction == FORWARD or taps * problem.M != pointwise.M or not problem.in_place:
            # 3x3 512->512 of one image of 7x7: 10.9 us, of which the copy of the weights is 4.
            total += costs.copy_time(problem, 2.0 * taps * problem.C * problem.M * problem.dtype.itemsize)
        return time + total + costs.sum_time(problem) + (WRITTEN * time if pointwise.form == product.NAME else 0.0)

    def prepare(self, problem: Problem, others: Sequence[Problem]) -> Conversion:
        (pointwise,) = others
        height, width, _ = problem.geometry
        back = problem.direction == TRANSPOSED
        (H, W), (OH, OW) = pointwise.written, problem.written
        total = problem.N * OH * OW * problem.M
        tile = launch.tile("conv_taps", problem.dtype, target_=problem.target, total=total)
        grid = launch.cdiv(total, tile["BLOCK"])
        down, across = (_sum_steps(axis, back) for axis in (height, width))
        steps = (step for pair in zip(down, across, strict=True) for step in pair)
        # Many waiting programs would occupy the product's slots.
        meta = {
            "sums": Sums(problem.M, pointwise.M, height.kernel, width.kernel, *steps), "epilogue": problem.epilogue,
            "ACC": launch.acc(problem.dtype),
            **dependent_launch.options(grid * tile.num_warps, problem.target), **tile.options,
        }  # fmt: skip
        tap_sum = launch.Prepared(conv_tap_sum_kernel, (grid,), (Sizes(total, H, W, OH, OW),), meta)
        return TapSums(tap_sum, pointwise.M)


def _bytes(pointwise: Problem) -> int:
    """Return the size of the products of all taps."""
    return pointwise.N * math.prod(pointwise.written) * pointwise.M * pointwise.result.itemsize


def _strided(axis: Axis) -> Axis:
    """Return the axis of the inputs that taps read: all of them, or one per stride if it divides the dilation."""
    first = -axis.padding % axis.stride
    return Axis(axis.size, 1, -(-(axis.size - first) // axis.stride), axis.stride, -first, 1)


def _sum_steps(axis: Axis, back: bool) -> tuple[int, int, int, int]:
    """Return J, START, STRIDE and TAP of `Sums` along an axis."""
    if back:
        return launch.cdiv(axis.kernel, axis.stride), axis.padding, axis.stride, -axis.dilation
    first = -axis.padding % axis.stride
    return axis.kernel, (-axis.padding - first) // axis.stride, 1, axis.dilation // axis.stride
