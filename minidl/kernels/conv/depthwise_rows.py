"""The "depthwise" form by rows: all weights are in registers, and each value of x is loaded once for all its outputs.

    y[n, q, o] = act(scale[o] * sum over taps j of x[n, at(q, j), o] w[j, o] + bias[o])

For groups of one channel and one output, with all taps of VEC channels in registers: a program proceeds down the rows
of x, for BLOCK_R rows of BLOCK_K sets of COLUMNS outputs, and stores a row after its last tap. Rows of x are loaded
AHEAD of their use, as the compiler moves no load before a store. Stride and dilation are 1; the transposed direction is
the same with reversed taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, depthwise, depthwise_weights, narrow
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import FORWARD, TRANSPOSED, Problem, Tensors, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "depthwise"
DIRECTIONS = FORWARD, TRANSPOSED
FAMILIES = ("conv_turn",)
MOST_TAPS = 25  # maximum taps with weights in registers
# Minimum outputs that were measured, on an H100: 168 channels 5x5 at 128x128, 102 images, 598 us forward and backward
# (`depthwise` 704 and 868), 144 channels 3x3 at 56x56, 128 images, 86 (99).
LEAST = 2**25
RELATIVE_TIME = 0.85
# Rows, columns of a set, sets of a program; maximum vector by number of taps. 5x5 with 4 rows or 2 columns 710 to 734
# us, 3x3 92 and 96.
ROWS, COLUMNS, SETS = 8, 4, 128
VECTORS = {9: 4, MOST_TAPS: 2}
AHEAD = 1  # 144 channels 3x3: 93 us with 0, 168 channels 5x5: the same with 2


@triton.jit
def conv_depthwise_rows_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z,
    total, vectors, QH, QW, H, W, in_h, in_w, first, s_r, s_s,
    VEC: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_R rows of outputs; row b of a tile and tap r read row b + r of the tile's inputs."""
    wait(EARLY)
    ROWS: tl.constexpr = BLOCK_R + KERNEL_H - 1
    WIDE: tl.constexpr = COLUMNS + KERNEL_W - 1
    tiles_r = tl.cdiv(QH, BLOCK_R)
    i_row = tl.program_id(0) % tiles_r * BLOCK_R
    o_k = tl.program_id(0) // tiles_r * BLOCK_K + tl.arange(0, BLOCK_K)
    o_p = o_k // vectors
    o_c = (o_k % vectors * VEC)[:, None] + tl.arange(0, VEC)[None, :]  # [BLOCK_K, VEC]
    m_k = o_k < total
    OUT = vectors * VEC
    n = (o_p // (QW // COLUMNS)).to(tl.int64)
    q_w = o_p % (QW // COLUMNS) * COLUMNS
    x_w = in_w + q_w
    x_h = in_h + i_row
    o_x = ((n * H * W + x_w) * OUT)[:, None] + o_c
    o_y = ((n * QH * QW + q_w) * OUT)[:, None] + o_c
    p_w += first + o_c
    b_ws = ()
    for r in tl.static_range(KERNEL_H):
        for s in tl.static_range(KERNEL_W):
            b_w = tl.load(p_w + (r * s_r + s * s_s), mask=m_k[:, None], other=0.0)  # [BLOCK_K, VEC]
            b_ws += (b_w.to(ACC),)
    o_ws = ()
    for v in tl.static_range(WIDE):
        o_ws += (tl.where(m_k, x_w + v, -1).to(tl.uint32, bitcast=True),)
    b_xs = ()
    b_sums = ()
    for _ in tl.static_range(BLOCK_R * COLUMNS):
        b_sums += (tl.zeros((BLOCK_K, VEC), dtype=ACC),)
    for k in tl.static_range(-AHEAD, ROWS):
        if k + AHEAD < ROWS:
            h = x_h + (k + AHEAD)
            inside = (h >= 0) & (h < H)
            end = tl.where(inside, W, 0).to(tl.uint32, bitcast=True)
            for v in tl.static_range(WIDE):
                m_x = m_k & inside
                if v < FIRST or v >= END:
                    m_x = o_ws[v] < end
                p_row = p_x + (h * W + v) * OUT
                b_xs += (tl.load(p_row + o_x, mask=m_x[:, None], other=0.0),)  # [BLOCK_K, VEC]
        if k >= 0:
            b_row = ()
            for v in tl.static_range(WIDE):
                b_row += (b_xs[k * WIDE + v].to(ACC),)
            b_next = ()
            for b in tl.static_range(BLOCK_R):
                for v in tl.static_range(COLUMNS):
                    b_sum = b_sums[b * COLUMNS + v]
                    if k >= b and k - b < KERNEL_H:
                        for s in tl.static_range(KERNEL_W):
                            b_sum += b_row[v + s] * b_ws[(k - b) * KERNEL_W + s]
                    b_next += (b_sum,)
            b_sums = b_next
            if k >= KERNEL_H - 1:
                i_out = i_row + k - (KERNEL_H - 1)
                for v in tl.static_range(COLUMNS):
                    b_sum = b_sums[(k - (KERNEL_H - 1)) * COLUMNS + v]
                    if HAS_SCALE:
                        b_sum *= tl.load(p_scale + o_c, mask=m_k[:, None], other=0.0).to(ACC)
                    if HAS_BIAS:
                        b_sum += tl.load(p_bias + o_c, mask=m_k[:, None], other=0.0).to(ACC)
                    o_row = (i_out * QW + v) * OUT
                    m_y = (m_k & (i_out < QH))[:, None]
                    if SAVE_Z:
                        tl.store(p_z + o_row + o_y, b_sum.to(p_z.dtype.element_ty), mask=m_y)
                    tl.store(p_y + o_row + o_y, activate(b_sum, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_y)


def able(problem: Problem) -> bool | Unsupported:
    if problem.pool:
        return Unsupported("a pool")
    if problem.M != 1 or problem.C != 1:
        return Unsupported("groups of several channels")
    h, v = problem.geometry[:2]
    # Rows and columns between taps would be unrolled: 3x3 with a dilation of 6 spills 2.4 KB.
    if max(h.stride, v.stride, h.dilation, v.dilation) > 1 or h.kernel * v.kernel > MOST_TAPS:
        return Unsupported(f"a stride, a dilation, or more than {MOST_TAPS} taps")
    if problem.target != "interpreted" and (problem.dtype.itemsize != 2 or problem.target != "sm_90"):
        return Unsupported("measured only with 16 bits on sm_90")
    return depthwise.fits(problem)


def estimate(problem: Problem) -> float:
    """Estimate microseconds relative to `depthwise`."""
    large = costs.outputs(problem) * problem.groups >= LEAST and problem.written[1] % COLUMNS == 0
    return depthwise.estimate(problem) * (RELATIVE_TIME if large and problem.paced else 2.0)


def axes_of(problem: Problem) -> tuple[Axis, Axis]:
    """Return the axes of the convolution, or of the equivalent convolution of a transposed one."""
    axes = problem.geometry[:2]
    if problem.direction == TRANSPOSED:
        axes = tuple(
            axis._replace(size=axis.output, output=axis.size, padding=axis.kernel - 1 - axis.padding) for axis in axes
        )
    return axes


def prepare(problem: Problem) -> Product:
    h, v = axes_of(problem)
    (H, W), (QH, QW) = (h.size, v.size), (h.output, v.output)
    out = problem.groups
    interpreted = problem.target == "interpreted"
    rows = min(ROWS, QH)
    columns = max(n for n in range(1, COLUMNS + 1) if QW % n == 0)
    vec = narrow.vector(out, problem, max(vec for taps, vec in VECTORS.items() if h.kernel * v.kernel <= taps))
    block = 64 * SETS if interpreted else SETS
    weights = depthwise_weights.prepare(problem, depthwise_weights.strides(problem))
    _, S, _, width = weights.shape
    s_r, s_s = S * width, width
    first = 0
    if problem.direction == TRANSPOSED:
        first, s_r, s_s = (h.kernel - 1) * s_r + (v.kernel - 1) * s_s, -s_r, -s_s
    vectors = out // vec
    total = problem.N * (QW // columns) * vectors
    grid = launch.cdiv(QH, rows) * launch.cdiv(total, block)
    begin, end = narrow.always_inside(v, W, QW, columns, v.kernel)
    meta = {
        "AHEAD": AHEAD, "VEC": vec, "KERNEL_H": h.kernel, "KERNEL_W": v.kernel,
        "FIRST": begin, "END": end, "COLUMNS": columns,
        "ACC": launch.acc(problem.dtype), **dependent_launch.options(grid, problem.target), **problem.flags("POOL"),
        "BLOCK_R": rows, "BLOCK_K": block, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    scalars = total, vectors, QH, QW, H, W, -h.padding, -v.padding, first, s_r, s_s
    return Product(weights, launch.Prepared(conv_depthwise_rows_kernel, (grid,), scalars, meta))


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)
