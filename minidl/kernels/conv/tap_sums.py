"""Few outputs of many channels: the products of every pixel and every tap first, then each output's sum of its own.

    z[n, i, (r, s, m)] = sum over c of x[n, i, c] w[m, r, s, c]
    y[n, o, m] = sum over r, s of z[n, i(o, r, s), (r, s, m)]

The first is a convolution with a kernel of 1x1 and R S M outputs, which reads x once and not once for every tap, and
fills tiles that M outputs leave empty. z is float32; its sums are in the order of the taps. So it is on the way back,
whatever the stride; forward where a dilation is a multiple of the stride, so that all taps of a pixel are wanted.

The 1x1 convolution is a matrix product, or with a stride a problem with a plan of its own (`plan`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, product, tile_throughput
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import FORWARD, MANY, TRANSPOSED, Problem, Unsupported
from minidl.kernels.gemm.tiled import save_or_add
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model import selection
from minidl.runtime.dependent_launch import wait

NAME = "taps"
FAMILIES = ("conv_taps",)
# Products of a pixel are a multiple of this: rows that no 16 bytes divide are written value by value.
UNIT = 8
# What a matrix product takes beside its estimate, where float32 is written: 1304->34 3x3, 14 images of 44x44, 83 us.
WRITTEN = 0.15
# Bytes of products that may exceed the images twice.
ROOM = 2**26


@triton.jit
def conv_tap_sum_kernel(
    p_z, p_bias, p_scale, p_y, p_beside, total, H, W, OH, OW,
    M: tl.constexpr, PITCH: tl.constexpr, R: tl.constexpr, S: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    START_H: tl.constexpr, START_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, TAP_H: tl.constexpr, TAP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [N, OH, OW, M] of z [N, H, W, PITCH], where a pixel begins with its [R, S, M] products. Output o reads
    tap rho + j * STRIDE at input (o + START) // STRIDE + j * TAP, rho being what the division leaves."""
    wait(EARLY)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_y = o < total
    m = o % M
    o_pixel = o // M
    at_h = o_pixel // OW % OH + START_H
    at_w = o_pixel % OW + START_W
    # Neither is below 0 where a stride is above 1.
    r = at_h % STRIDE_H
    s = at_w % STRIDE_W
    x_h = at_h // STRIDE_H
    x_w = at_w // STRIDE_W
    o_z = ((o_pixel // OW // OH * H + x_h) * W + x_w) * PITCH + (r * S + s) * M + m
    b_acc = tl.zeros((BLOCK,), dtype=ACC)
    for j in tl.range(0, JH * JW, loop_unroll_factor=4):
        h = x_h + j // JW * TAP_H
        w = x_w + j % JW * TAP_W
        m_z = m_y & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        m_z = m_z & (r + j // JW * STRIDE_H < R) & (s + j % JW * STRIDE_W < S)
        o_tap = (j // JW * TAP_H * W + j % JW * TAP_W) * PITCH + (j // JW * STRIDE_H * S + j % JW * STRIDE_W) * M
        b_acc += tl.load(p_z + (o_z + o_tap), mask=m_z, other=0.0)  # [BLOCK]
    if HAS_SCALE:
        b_acc *= tl.load(p_scale + m, mask=m_y, other=0.0).to(ACC)
    if HAS_BIAS:
        b_acc += tl.load(p_bias + m, mask=m_y, other=0.0).to(ACC)
    b_acc = save_or_add(b_acc, p_beside, o, m_y, SAVE_Z)
    tl.store(p_y + o, activate(b_acc, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_y)


class TapSums(NamedTuple):
    """The launch that adds the products of the taps, and how many columns these have."""

    launch: launch.Prepared
    pitch: int

    def run(
        self, problem: Problem, part: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
        scale: torch.Tensor | None, added: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(y, z) by the plan `part` of the problem that was made."""
        products, _ = part.run(x, self._columns(w, problem.direction == TRANSPOSED))
        y = torch.empty(problem.shape, dtype=problem.result, device=x.device)
        z = torch.empty_like(y) if problem.preactivation else None
        self.launch.run(products, bias, scale, y, z if added is None else added)
        return y, z

    def _columns(self, w: torch.Tensor, back: bool) -> torch.Tensor:
        """The weights of a kernel of 1x1: a row for each tap and output, back a column. Those beyond are 0."""
        if back:  # [C, M, R, S]
            C, M, R, S = w.shape
            rows = w.permute(0, 2, 3, 1)
            if self.pitch == M * R * S:
                return rows.contiguous().view(C, -1, 1, 1)
            made = torch.empty(C, self.pitch, dtype=w.dtype, device=w.device)
            made[:, : M * R * S].view(C, R, S, M).copy_(rows)
            made[:, M * R * S :].zero_()
            return made.view(C, -1, 1, 1)
        M, R, S, C = w.shape
        made = torch.empty(self.pitch, C, dtype=w.dtype, device=w.device)
        made[: M * R * S].view(R, S, M, C).copy_(w.permute(1, 2, 0, 3))
        made[M * R * S :].zero_()
        return made.view(-1, 1, 1, C)


def apart(problem: Problem) -> Problem | Unsupported:
    """The problem of a kernel of 1x1."""
    if problem.direction not in (FORWARD, TRANSPOSED):
        return Unsupported("neither a convolution nor a way back")
    h, v, groups = problem.geometry
    R, S, M = h.kernel, v.kernel, problem.M
    if groups > 1 or problem.pool:
        return Unsupported("groups, or a pool")
    if not problem.paced and problem.form != NAME:
        return Unsupported("tiles whose time is not known")
    if R * S == 1 or min(problem.C, M) == 0:
        return Unsupported("one tap, or no channels")
    back = problem.direction == TRANSPOSED
    if any(axis.dilation % axis.stride if not back else min(axis.stride, axis.dilation) > 1 for axis in (h, v)):
        return Unsupported("a stride that leaves taps out, or a dilation with a stride on the way back")
    H, W = problem.read
    axes = [Axis(H, 1, H, 1, 0, 1), Axis(W, 1, W, 1, 0, 1)] if back else [_wanted(h), _wanted(v)]
    pitch = UNIT * launch.cdiv(R * S * M, UNIT)
    # Back, rows of weights that are not filled up are read where they lie.
    aligned = problem.w_aligned or not back or pitch > R * S * M
    made = problem._replace(
        geometry=Geometry(*axes), M=pitch, bias=False, scale=False, act=None, preactivation=False, added=False,
        w_aligned=aligned, strides=(pitch, 1, pitch, pitch) if back else (), out=launch.acc_torch(problem.dtype),
        form=product.NAME if back or h.stride == v.stride == 1 else None,
    )  # fmt: skip
    if made.N * min(made.written) < 1 or max(_bytes(made) // made.result.itemsize, math.prod(problem.shape)) >= MANY:
        return Unsupported("no pixels, or more than 32 bits count")
    images = problem.images
    if _bytes(made._replace(N=images)) > max(ROOM, 2 * images * problem.image_bytes):
        return Unsupported("products that take more room than the images")
    return made


def _bytes(made: Problem) -> int:
    """Of the products of all taps."""
    return made.N * math.prod(made.written) * made.M * made.result.itemsize


def cost(problem: Problem, made: Problem, time: float) -> float:
    """Microseconds of writing products as float32 and adding them, and of the outputs, beside their `time`."""
    taps = problem.geometry.h.kernel * problem.geometry.w.kernel
    outputs = problem.N * math.prod(problem.written) * problem.M * problem.result.itemsize
    device = selection.of(problem.target)
    added = tile_throughput.of_shares(taps, _bytes(made) // (4 * taps)) + outputs / device.copy
    if problem.direction == FORWARD or taps * problem.M != made.M or not problem.in_place:
        # 3x3 512->512 of one image of 7x7: 10.9 us, of which the copy of the weights is 4.
        added += device.launch + 2.0 * taps * problem.C * problem.M * problem.dtype.itemsize / device.copy
    return added + costs.of_sum(problem) + (WRITTEN * time if made.form == product.NAME else 0.0)


def prepare(problem: Problem, made: Problem) -> TapSums:
    h, v, _ = problem.geometry
    back = problem.direction == TRANSPOSED
    (H, W), (OH, OW) = made.written, problem.written
    total = problem.N * OH * OW * problem.M
    tile = launch.tile("conv_taps", problem.dtype, target_=problem.target, total=total)
    grid = launch.cdiv(total, tile["BLOCK"])
    meta: dict[str, Any] = {"M": problem.M, "PITCH": made.M, "R": h.kernel, "S": v.kernel}
    for name, axis in (("H", h), ("W", v)):
        if back:
            found = axis.padding, axis.stride, -axis.dilation, launch.cdiv(axis.kernel, axis.stride)
        else:
            g = axis.stride
            first = -axis.padding % g
            found = (-axis.padding - first) // g, 1, axis.dilation // g, axis.kernel
        meta |= {f"START_{name}": found[0], f"STRIDE_{name}": found[1], f"TAP_{name}": found[2], f"J{name}": found[3]}
    meta |= {**problem.flags("POOL"), "ACC": launch.acc(problem.dtype)}
    # Many programs that wait take the place of the product's: 5x5 128->16, 8 images of 56x56, 94 us in place of 38.
    meta |= {**dependent_launch.options(grid * tile.num_warps, problem.target), **tile.options}
    made_launch = launch.Prepared(conv_tap_sum_kernel, (grid,), (total, H, W, OH, OW), meta)
    return TapSums(made_launch, made.M)


def _wanted(axis: Axis) -> Axis:
    """Of the inputs those that taps read: every one, or every one of a stride that divides the dilation."""
    first = -axis.padding % axis.stride
    return Axis(axis.size, 1, -(-(axis.size - first) // axis.stride), axis.stride, -first, 1)
