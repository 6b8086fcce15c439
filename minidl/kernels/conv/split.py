"""float32 operands split into tf32 parts before a convolution, as `gemm.parts` does for products.

x = hi + lo, hi and lo with 10 fraction bits each; a b = hi hi + hi lo + lo hi, without lo lo (2^-22 of |a| |b|). The
tensor cores read all parts from shared memory. Splitting each block in the kernel of the product (`tf32x3` of `tl.dot`)
takes longer than the products.

Values that are not finite have a lo of zero. An infinity times such a lo is NaN, so kernels compute a tile that is not
finite everywhere again from hi alone, for those of its results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Unsupported
from minidl.kernels.conv.split_places import MOST, Places, parts
from minidl.kernels.gemm.parts import nearest_tf32
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def split(b_x):
    """Return hi and lo of x."""
    finite = tl.abs(b_x) < INFINITY
    b_hi = tl.where(finite, nearest_tf32(b_x), b_x + b_x)
    return b_hi, tl.where(finite, nearest_tf32(b_x - b_hi), 0.0)


@triton.jit
def split_product(b_a, b_a_lo, b_b, b_b_lo, b_acc, ACC: tl.constexpr):
    """Return the accumulator [M, N] plus a [M, K] times b [K, N], each in two parts."""
    b_ab = tl.dot(b_a, b_b_lo, input_precision="tf32", out_dtype=ACC)
    b_ab = tl.dot(b_a_lo, b_b, b_ab, input_precision="tf32", out_dtype=ACC)
    # Tensor cores truncate their sums, so the accumulator is in registers.
    return b_acc + tl.dot(b_a, b_b, b_ab, input_precision="tf32", out_dtype=ACC)


@triton.jit
def not_finite(b_acc):
    """Return 1 if some sum is infinite or NaN, else 0."""
    return tl.max(tl.where(tl.abs(b_acc) < INFINITY, 0, 1))


@triton.jit
def conv_split_kernel(p_x, p_parts, total, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """Write parts [2, total], hi and lo of x."""
    wait(EARLY)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_hi, b_lo = split(tl.load(p_x + o, mask=o < total, other=0.0))  # [BLOCK]
    tl.store(p_parts + o, b_hi, mask=o < total)
    tl.store(p_parts + total + o, b_lo, mask=o < total)


@triton.jit
def conv_split_across_kernel(
    p_x, p_parts, part, places,
    PARTS: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write parts [PARTS, remainders, groups, columns, C, places], hi and lo of x [N, H, W, groups * C] or hi alone,
    see `Places`; the parts are `part` values apart."""
    wait(EARLY)
    N, H, W, GROUPS, C, height, width, first_h, step_h, _, first_w, step_w, tap_w, columns, pitch = places
    count = N * height * width
    tiles = tl.cdiv(GROUPS * C, BLOCK_N)
    o_p = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o_c = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    i_remainder = tl.program_id(1) // columns
    j = tl.program_id(1) % columns
    o_h = o_p // width % height * step_h + first_h + i_remainder
    o_w = o_p % width * step_w + first_w + j * tap_w
    o_row = ((o_p // (width * height)).to(tl.int64) * H + o_h) * W + o_w
    m_p = (o_p < count) & (o_h >= 0) & (o_h < H) & (o_w >= 0) & (o_w < W)
    m_c = o_c < GROUPS * C
    b_x = tl.load(p_x + o_row[:, None] * (GROUPS * C) + o_c[None, :], mask=m_p[:, None] & m_c[None, :], other=0.0)
    b_hi, b_lo = split(b_x)  # [BLOCK_M, BLOCK_N]
    o_to = ((i_remainder * GROUPS + o_c // C) * columns + j) * C + o_c % C
    o_to = o_to.to(tl.int64)[:, None] * pitch + o_p[None, :]
    m_to = m_c[:, None] & (o_p < count)[None, :]
    tl.store(p_parts + o_to, b_hi.T, mask=m_to)
    if PARTS == 2:
        tl.store(p_parts + part + o_to, b_lo.T, mask=m_to)


def able(problem: Problem, size: int) -> bool | Unsupported:
    """Return whether to compute the problem by parts of `size` bytes; the interpreter splits on request alone."""
    if size > MOST:
        return Unsupported("parts of more than 2 GiB")
    if problem.target == "interpreted" and problem.dtype == torch.float32:
        return problem.form == "split" or Unsupported("nothing gained by the interpreter")
    if problem.direction == GRAD_WEIGHT:
        return problem.on_tf32_cores or Unsupported("not float32 in tf32 products on sm_90")
    return problem.splits or Unsupported("not float32 in three tf32 products on sm_90")


def copy_time(problem: Problem, size: float) -> float:
    """Return the microseconds of splitting `size` bytes."""
    return costs.copy_time(problem, 3 * size)


def prepare(problem: Problem, shape: tuple[int, ...]) -> Copy:
    """Return the copy of a tensor to parts [2, *shape]."""
    total = math.prod(shape)
    tile = problem.tile("conv_split", floor=1, total=total)
    grid = launch.cdiv(total, tile["BLOCK"])
    meta = {**dependent_launch.options(grid, problem.target), **tile.options}
    return Copy((2, *shape), launch.Prepared(conv_split_kernel, (grid,), (total,), meta))


def prepare_across(problem: Problem, places: Places) -> Copy:
    """Return the copy of images to parts [parts, rows, pitch]."""
    channels = places.GROUPS * places.C
    tile = problem.tile("conv_split_across", floor=1, M=places.length, N=channels)
    grid = launch.cdiv(places.length, tile["BLOCK_M"]) * launch.cdiv(channels, tile["BLOCK_N"])
    copies = places.remainders * places.columns
    shape = parts(problem), places.rows, places.pitch
    meta = {"PARTS": shape[0], **dependent_launch.options(grid * copies, problem.target), **tile.options}
    scalars = places.rows * places.pitch, places
    return Copy(shape, launch.Prepared(conv_split_across_kernel, (grid, copies), scalars, meta))
