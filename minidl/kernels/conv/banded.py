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

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import bands, costs, tile_throughput
from minidl.kernels.conv.bands import band, group_of, in_rows, near, padded, store_groups
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import CORRELATIONS, INT32_LIMIT, Problem, Tensors, Unsupported
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "banded"
ADDED = 8
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_band", "conv_banded")

LOADS = 1.5  # time of loads of groups relative to loads of channels


@triton.jit
def conv_banded_kernel(
    p_x, p_band, p_bias, p_scale, p_y, p_z, rows, H, in_h,
    QH: tl.constexpr, QW: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, WC: tl.constexpr, IN_W: tl.constexpr, STEP: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_TAP_H: tl.constexpr, PADDED_H: tl.constexpr, WIDE: tl.constexpr,
    BOXES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, KP: tl.constexpr,
    NP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    i_first = tl.program_id(0) * BLOCK_M
    if WIDE:
        i_first = tl.program_id(0).to(tl.int64) * BLOCK_M
    n, q_h, g = group_of(i_first, BLOCK_M, QH, GROUPS, POOL)
    m_row = in_rows(i_first, rows, BLOCK_M, POOL)
    start = IN_W + g * (G * STEP)
    x_h = in_h + q_h * IN_STEP_H
    o_x = (n * H + x_h) * WC + start
    o_column = tl.arange(0, NP)
    b_acc = tl.zeros((BLOCK_M, NP), dtype=ACC)
    BLOCKS_K: tl.constexpr = KP // BLOCK_K
    # Without padding, and if the last group ends inside the image, no column needs a mask.
    INSIDE: tl.constexpr = IN_W >= 0 and IN_W + (GROUPS - 1) * G * STEP + KP <= WC
    for i in range(R * BLOCKS_K):
        r = i // BLOCKS_K
        o_k = i % BLOCKS_K * BLOCK_K + tl.arange(0, BLOCK_K)
        m_h = m_row
        if PADDED_H:
            h = x_h + r * IN_TAP_H
            m_h = m_row & (h >= 0) & (h < H)
        m_x = m_h[:, None] & (o_k < KP)[None, :]
        if not INSIDE:
            at = start[:, None] + o_k[None, :]
            m_x = m_x & (at < WC)
            if IN_W < 0:
                m_x = m_x & (at >= 0)
        b_x = tl.load(
            p_x + (o_x + r * (IN_TAP_H * WC))[:, None] + o_k[None, :], mask=m_x, other=0.0
        )  # [BLOCK_M, BLOCK_K]
        if BOXES:
            b_band = p_band.load([i * BLOCK_K, 0])  # [BLOCK_K, NP]
        else:
            b_band = tl.load(p_band + (r * KP + o_k)[:, None] * NP + o_column[None, :])
        b_acc = tl.dot(b_x, b_band, b_acc, input_precision=PRECISION, out_dtype=ACC)
    store_groups(
        b_acc, p_bias, p_scale, p_y, p_z, tl.program_id(0), rows, m_row, n, q_h, g,
        QH, QW, G, GROUPS, M, HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, POOL,
    )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    return (
        ((problem.groups == 1 and problem.M > 0) or Unsupported("more than one group"))
        and (problem.at.v.in_tap == 1 or Unsupported("a dilation"))
        and (problem.at.h.out_step == problem.at.v.out_step == 1 or Unsupported("a stride between outputs"))
        and (near(problem) or Unsupported("rows too far apart for 32-bit offsets"))
        and (groups_of(problem) is not None or Unsupported("too many channels for two pixels in a band"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    G, KP, NP = groups_of(problem)
    rows = costs.outputs(problem) // G
    tile = problem.tile("conv_banded", M=rows, K=KP, N=NP)
    block, height = min(tile["BLOCK_K"], KP), len(problem.at.h.taps)
    steps = tile_throughput.steps(problem, height * launch.cdiv(KP, block), block)
    # Groups may start at any value.
    loads = LOADS * tile_throughput.narrow(problem, math.gcd(G * problem.at.v.in_step, problem.read[1]) * problem.C)
    throughput = tile_throughput.of_pixels(problem, tile["BLOCK_M"], NP, loads)
    work = costs.Work(launch.cdiv(rows, tile["BLOCK_M"]), steps, throughput, "flat")
    return costs.at_least(problem, costs.microseconds(problem, work)) + costs.band_time(problem, height * KP * NP)


def prepare(problem: Problem) -> Product:
    h, H = problem.at.h, problem.read[0]
    G, KP, NP = groups_of(problem)
    constants = bands.constants(problem, G, KP, NP)
    per_image = constants["QH"] * constants["GROUPS"]
    rows = problem.N * per_image
    tile = problem.tile("conv_banded", M=problem.images * per_image, K=KP, N=NP)
    sizes = {**tile.options, "BLOCK_K": min(tile["BLOCK_K"], KP)}  # a band has whole blocks of K
    # Small bands stay in L1: the 7x7 layer of one channel takes 0.70 ms, and 0.86 ms with a descriptor; with 128 rows
    # of bands (12 channels) it is 1.06 and 0.97 ms.
    use_descriptor = launch.boxes(problem.target) and problem.dtype != torch.float64 and KP >= 64
    meta = {
        **constants, "PADDED_H": padded(h, H), "WIDE": rows >= INT32_LIMIT, "BOXES": use_descriptor,
        **problem.flags(), **sizes,
    }  # fmt: skip
    scalars = (rows, H, h.in_start)
    band_descriptor = Box.of_rows(len(h.taps) * KP, NP, (sizes["BLOCK_K"], NP)) if use_descriptor else None
    return Product(
        bands.prepare(problem, G, KP, NP),
        launch.Prepared(
            conv_banded_kernel, (launch.cdiv(rows, tile["BLOCK_M"]),), scalars, meta, (None, band_descriptor)
        ),
    )


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def groups_of(problem: Problem) -> tuple[int, int, int] | None:
    """Return (G, KP, NP) as `band` does; None if no group of two or more pixels is worthwhile."""
    v = problem.at.v
    return band(problem.C, problem.M, len(v.taps), v.in_step, v.count, problem.pool is not None)
