"""The "banded" form, for few input channels: one row of the GEMM is a group of G neighbouring output pixels.

With 1, 3 or 12 channels a single tap has too few values to fill a load or a matrix instruction. But in channels-last
memory the inputs of G neighbouring outputs in one image row are contiguous, and so are their G * M results. For every
row r of the filter

    y[n, oh, g, (p, m)] += sum over k of x[n, h(oh, r), start(g) + k] band[r, k, (p, m)]
    band[r, (p * stride + s) * C + c, (p, m)] = w[m, r, s, c],  0 elsewhere

is a product with a band (Toeplitz) matrix, computed once per call. It multiplies zeros on matrix units that would be
idle otherwise, and loads and stores contiguous rows in exchange. Padding is a mask. A non-finite input makes outputs
NaN within the width of the band.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import bands, costs, tile_throughput
from minidl.kernels.conv.epilogue import pool_last
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import CORRELATIONS, INT32_LIMIT, Problem, Tensors, Unsupported
from minidl.kernels.epilogue import save_or_add
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "banded"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_band", "conv_banded")

LOADS = 1.5  # time of loads of groups relative to loads of channels
MANY_ROWS = 64  # of a band, above which a descriptor reads it: smaller bands stay in L1


class Bands(NamedTuple):
    """Constants of bands [R, KP, NP] for groups of G pixels; an image has QH * GROUPS groups and WC values in a row.

    A group starts STEP values per pixel from IN_W on; R rows of the filter are IN_TAP_H rows of the image apart, and
    may be outside the image if PADDED_H. WIDE: 32 bits do not count the groups.
    """

    QH: int
    QW: int
    G: int
    GROUPS: int
    M: int
    R: int
    WC: int
    IN_W: int
    STEP: int
    IN_STEP_H: int
    IN_TAP_H: int
    KP: int
    NP: int
    PADDED_H: bool
    WIDE: bool
    ACC: Any
    PRECISION: str

    @staticmethod
    def of(problem: Problem) -> Bands:
        """Return the bands of a problem that `able` supports."""
        down, across, (H, W), _ = problem.at
        G, KP, NP = groups_of(problem)
        q_h, q_w = (down.count // 2 * 2, across.count // 2 * 2) if problem.pool else (down.count, across.count)
        groups = launch.cdiv(q_w, G)
        return Bands(
            q_h, q_w, G, groups, problem.M, len(down.taps), W * problem.C, across.in_start * problem.C,
            across.in_step * problem.C, down.in_step, down.in_tap, KP, NP, not down.all_inside(H),
            problem.N * q_h * groups >= INT32_LIMIT, **problem.constants,
        )  # fmt: skip


@triton.jit
def group_of(i_first, BLOCK: tl.constexpr, bands: tl.constexpr, POOL: tl.constexpr):
    """Return the image, image row and group of `BLOCK` GEMM rows from i_first on.

    With POOL, eight groups of one image row alternate with the eight groups below them: in the accumulator of a matrix
    instruction one thread holds rows i and i + 8.
    """
    GROUPS: tl.constexpr = bands.GROUPS
    if POOL:
        PER_IMAGE: tl.constexpr = bands.QH // 2 * GROUPS
        i = tl.arange(0, BLOCK)
        first = i_first // 2
        o = (first % PER_IMAGE).to(tl.int32) + i // 16 * 8 + i % 8
        n = (first // PER_IMAGE).to(tl.int64) + o // PER_IMAGE
        o = o % PER_IMAGE
        return n, o // GROUPS * 2 + i // 8 % 2, o % GROUPS
    else:
        PER_IMAGE: tl.constexpr = bands.QH * GROUPS
        o = (i_first % PER_IMAGE).to(tl.int32) + tl.arange(0, BLOCK)
        n = (i_first // PER_IMAGE).to(tl.int64) + o // PER_IMAGE
        o = o % PER_IMAGE
        return n, o // GROUPS, o % GROUPS


@triton.jit
def in_rows(i_first, rows, BLOCK: tl.constexpr, POOL: tl.constexpr):
    """Return the mask of the rows of `group_of` that exist."""
    i = tl.arange(0, BLOCK)
    if POOL:
        return i_first // 2 + i // 16 * 8 + i % 8 < rows // 2
    else:
        return i_first + i < rows


@triton.jit
def store_groups(
    b_acc, p_bias, p_scale, p_y, p_z, rows, m_row, n, q_h, g, bands: tl.constexpr, epilogue: tl.constexpr
):  # fmt: skip
    """Apply scale, bias, activation and pool to the groups b_acc [BLOCK_M, NP] of a program, and store them in y."""
    ACT: tl.constexpr = epilogue.ACT
    SLOPE: tl.constexpr = epilogue.SLOPE
    G: tl.constexpr = bands.G
    M: tl.constexpr = bands.M
    BLOCK_M: tl.constexpr = b_acc.shape[0]
    NP: tl.constexpr = b_acc.shape[1]
    ACC: tl.constexpr = b_acc.dtype
    o_column = tl.arange(0, NP)
    m_column = o_column < G * M
    o_m = (o_column // 2 if epilogue.POOL else o_column) % M
    if p_scale is not None:
        b_acc *= tl.load(p_scale + o_m, mask=m_column, other=0.0).to(ACC)[None, :]
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_m, mask=m_column, other=0.0).to(ACC)[None, :]
    if epilogue.POOL:
        b_y = tl.reshape(activate(b_acc, ACT, SLOPE), (BLOCK_M // 16, 2, 8, NP // 2, 2))
        b_y = pool_last(tl.permute(b_y, (0, 2, 3, 1, 4)), epilogue.POOL)
        b_y = tl.reshape(b_y, (BLOCK_M // 2, NP // 2))
        i_window = tl.program_id(0).to(tl.int64) * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
        first = i_window // bands.GROUPS * ((bands.QW // 2) * M) + i_window % bands.GROUPS * (G // 2 * M)
        limit = tl.minimum(G // 2, bands.QW // 2 - (i_window % bands.GROUPS).to(tl.int32) * (G // 2)) * M
        o_half = tl.arange(0, NP // 2)
        m_y = (i_window < rows // 2)[:, None] & (o_half[None, :] < limit[:, None])
        tl.store(p_y + first[:, None] + o_half[None, :], b_y.to(p_y.dtype.element_ty), mask=m_y)
    else:
        o_y = ((n * bands.QH + q_h) * bands.QW + g * G) * M
        limit = tl.minimum(G, bands.QW - g * G) * M
        m_y = m_row[:, None] & (o_column[None, :] < limit[:, None])
        o_y = o_y[:, None] + o_column[None, :]
        b_y = activate(save_or_add(b_acc, p_z, o_y, m_y, epilogue.SAVE_Z), ACT, SLOPE)
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def conv_banded_kernel(
    p_x, p_band, p_bias, p_scale, p_y, p_z, rows, H, in_h,
    bands: tl.constexpr, epilogue: tl.constexpr, BOXES: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M groups of outputs."""
    wait(EARLY)
    KP: tl.constexpr = bands.KP
    NP: tl.constexpr = bands.NP
    WC: tl.constexpr = bands.WC
    IN_W: tl.constexpr = bands.IN_W
    i_first = tl.program_id(0) * BLOCK_M
    if bands.WIDE:
        i_first = tl.program_id(0).to(tl.int64) * BLOCK_M
    n, q_h, g = group_of(i_first, BLOCK_M, bands, epilogue.POOL)
    m_row = in_rows(i_first, rows, BLOCK_M, epilogue.POOL)
    start = IN_W + g * (bands.G * bands.STEP)
    x_h = in_h + q_h * bands.IN_STEP_H
    o_x = (n * H + x_h) * WC + start
    o_column = tl.arange(0, NP)
    b_acc = tl.zeros((BLOCK_M, NP), dtype=bands.ACC)
    BLOCKS_K: tl.constexpr = KP // BLOCK_K
    # Without padding, and if the last group ends inside the image, no column needs a mask.
    INSIDE: tl.constexpr = IN_W >= 0 and IN_W + (bands.GROUPS - 1) * bands.G * bands.STEP + KP <= WC
    for i in range(bands.R * BLOCKS_K):
        r = i // BLOCKS_K
        o_k = i % BLOCKS_K * BLOCK_K + tl.arange(0, BLOCK_K)
        m_h = m_row
        if bands.PADDED_H:
            h = x_h + r * bands.IN_TAP_H
            m_h = m_row & (h >= 0) & (h < H)
        m_x = m_h[:, None] & (o_k < KP)[None, :]
        if not INSIDE:
            at = start[:, None] + o_k[None, :]
            m_x = m_x & (at < WC)
            if IN_W < 0:
                m_x = m_x & (at >= 0)
        b_x = tl.load(
            p_x + (o_x + r * (bands.IN_TAP_H * WC))[:, None] + o_k[None, :], mask=m_x, other=0.0
        )  # [BLOCK_M, BLOCK_K]
        if BOXES:
            b_band = p_band.load([i * BLOCK_K, 0])  # [BLOCK_K, NP]
        else:
            b_band = tl.load(p_band + (r * KP + o_k)[:, None] * NP + o_column[None, :])
        b_acc = tl.dot(b_x, b_band, b_acc, input_precision=bands.PRECISION, out_dtype=bands.ACC)
    store_groups(b_acc, p_bias, p_scale, p_y, p_z, rows, m_row, n, q_h, g, bands, epilogue)


def able(problem: Problem) -> bool | Unsupported:
    return (
        ((problem.groups == 1 and problem.M > 0) or Unsupported("more than one group"))
        and (problem.at.across.in_tap == 1 or Unsupported("a dilation"))
        and (problem.at.down.out_step == problem.at.across.out_step == 1 or Unsupported("a stride between outputs"))
        and (near(problem) or Unsupported("rows too far apart for 32-bit offsets"))
        and (groups_of(problem)[0] > 0 or Unsupported("too many channels for two pixels in a band"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """Estimate microseconds, with the launch that computes the band."""
    G, KP, NP = groups_of(problem)
    rows = costs.outputs(problem) // G
    tile = problem.tile("conv_banded", M=rows, K=KP, N=NP)
    block, height = min(tile["BLOCK_K"], KP), len(problem.at.down.taps)
    steps = tile_throughput.steps(problem, height * launch.cdiv(KP, block), block)
    # Groups may start at any value; strides of 2 then read one by one where the first group starts at an odd value.
    across = problem.at.across
    start = across.in_start if across.in_step == 2 else 0
    loads = LOADS * tile_throughput.narrow(problem, math.gcd(G * across.in_step, problem.read[1], start) * problem.C)
    throughput = tile_throughput.of_pixels(problem, tile["BLOCK_M"], NP, loads, "banded")
    work = costs.Work(launch.cdiv(rows, tile["BLOCK_M"]), steps, throughput, "flat")
    return costs.launch_time(problem, costs.microseconds(problem, work)) + costs.band_time(problem, height * KP * NP)


def prepare(problem: Problem) -> Product:
    h, H = problem.at.down, problem.read[0]
    at = Bands.of(problem)
    per_image = at.QH * at.GROUPS
    rows = problem.N * per_image
    tile = problem.tile("conv_banded", M=problem.images * per_image, K=at.KP, N=at.NP)
    block = min(tile["BLOCK_K"], at.KP)  # a band has whole blocks of K
    use_descriptor = launch.boxes(problem.target) and problem.dtype != torch.float64 and at.KP >= MANY_ROWS
    meta = {
        "bands": at, "epilogue": problem.epilogue, "BOXES": use_descriptor,
        **dependent_launch.options(target=problem.target), **tile.options, "BLOCK_K": block,
    }  # fmt: skip
    band_box = Box.of_rows(at.R * at.KP, at.NP, (block, at.NP)) if use_descriptor else None
    return Product(
        bands.prepare(problem, at.G, at.KP, at.NP),
        launch.Prepared(
            conv_banded_kernel, (launch.cdiv(rows, tile["BLOCK_M"]),), (rows, H, h.in_start), meta, (None, band_box)
        ),
    )


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def groups_of(problem: Problem) -> tuple[int, int, int]:
    """Return (G, KP, NP) as `band` does; zeros if no group of two or more pixels is worthwhile."""
    across = problem.at.across
    return bands.band(
        problem.C, problem.M, len(across.taps), across.in_step, across.count, problem.pool is not None
    ) or (0, 0, 0)


def near(problem: Problem) -> bool:
    """Return whether 32 bits count the values of x [N, H, W, C] between the first and the last row of a filter."""
    down = problem.at.down
    return len(down.taps) * down.in_tap * problem.read[1] * problem.C < 2**31
