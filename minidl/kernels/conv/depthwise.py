"""The "depthwise" form: an output channel reads one or a few input channels; without tensor cores, memory-bound.

    y[n, q, o] = act(scale[o] * sum over taps j, c < C of x[n, at(q, j), o // M * C + c] w[j, c, o] + bias[o])

    x  [N, H, W, groups * C]     w  the convolution's weights in any strides, or reordered to [R, S, C, groups * M]
    y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

    rows of x                    rows of y
    0 | v v ..                                A row of outputs of all images is split into vectors v of VEC channels. A
    1 | v v ..   3 rows of taps  0 | v v ..   program computes BLOCK_K vectors in BLOCK_R rows. For one column of taps
    2 | v v ..   ------------->  1 | v v ..   it loads each row of x once for all rows of y that read it: the compiler
    3 | v v ..                                merges loads with identical expressions.

All phases of a transposed convolution are one launch, in which every phase has the taps of the longest one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, depthwise_weights, narrow
from minidl.kernels.conv.depthwise_weights import TapStrides
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import FORWARD, INT32_LIMIT, TRANSPOSED, Problem, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "depthwise"
DIRECTIONS = FORWARD, TRANSPOSED
FAMILIES = (narrow.FAMILY, "conv_reorder")
# Input channels per output, whose loop is unrolled.
MOST_CHANNELS = 4


class DepthwiseSizes(NamedTuple):
    """Run-time numbers: QH x QW outputs of a phase at most, from H x W to OH x OW pixels.

    total, vectors  vectors of VEC channels of a row of all images, and of a pixel
    """

    total: int
    vectors: int
    QH: int
    QW: int
    H: int
    W: int
    OH: int
    OW: int
    pad_h: int
    pad_w: int


class DepthwiseTile(NamedTuple):
    """Constants of a launch: BLOCK_R rows of BLOCK_K vectors of VEC channels; ROWS rows of taps per iteration.

    C, M    input and output channels of a group     UNROLL  unrolled columns of taps
    BACK    transposed                               SPREAD  w is [R, S, C, groups * M]
    """

    C: int
    M: int
    BACK: bool
    SPREAD: bool
    ACC: Any
    UNROLL: int
    ROWS: int
    VEC: int
    BLOCK_R: int
    BLOCK_K: int


@triton.jit
def phase_of(
    i, size, pad,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PERIOD: tl.constexpr, INVERSE: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """Return (first tap, KERNEL if there is none; its input at q = 0; number of outputs) of backward phase i.

    Taps are PERIOD apart; output i + q STRIDE reads input (i + q STRIDE + pad - r DILATION) / STRIDE at tap r."""
    COMMON: tl.constexpr = STRIDE // PERIOD
    left = (i + pad) % STRIDE
    first = left // COMMON * INVERSE % PERIOD
    start = (i + pad - first * DILATION) // STRIDE
    if COMMON > 1:
        first = tl.where(left % COMMON == 0, first, KERNEL)
    return first, start, (size - i + STRIDE - 1) // STRIDE


@triton.jit
def conv_depthwise_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z, sizes, strides, slices,
    down: tl.constexpr, across: tl.constexpr, depth: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute at most QH x QW outputs per phase; with a depth, images are slices of volumes."""
    wait(EARLY)
    BLOCK_R: tl.constexpr = tile.BLOCK_R
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    VEC: tl.constexpr = tile.VEC
    ROWS: tl.constexpr = tile.ROWS
    C: tl.constexpr = tile.C
    JD: tl.constexpr = 1 if depth is None else depth.JD
    JH: tl.constexpr = (down.KERNEL + down.PERIOD - 1) // down.PERIOD
    JW: tl.constexpr = (across.KERNEL + across.PERIOD - 1) // across.PERIOD
    PARTS: tl.constexpr = (JH + ROWS - 1) // ROWS
    # Rows of taps that every part and every phase has.
    SURE: tl.constexpr = JH - (PARTS - 1) * ROWS - (1 if down.KERNEL % down.PERIOD != 0 else 0)
    i_tile = tl.program_id(0)
    i_h = i_tile % down.PHASES
    i_w = i_tile // down.PHASES % across.PHASES
    i_tile = i_tile // (down.PHASES * across.PHASES)
    tiles_r = tl.cdiv(sizes.QH, BLOCK_R)
    i_row = i_tile % tiles_r * BLOCK_R
    o_k = i_tile // tiles_r * BLOCK_K + tl.arange(0, BLOCK_K)
    o_p = o_k // sizes.vectors
    o_c = (o_k % sizes.vectors * VEC)[:, None] + tl.arange(0, VEC)[None, :]  # [BLOCK_K, VEC]
    n = (o_p // sizes.QW).to(tl.int64)
    n_y = n
    if depth is not None:
        x_d = slices.in_d + o_p // sizes.QW % slices.QD * depth.IN_STEP_D
        n_y = n // slices.QD * slices.OD + slices.out_d + n % slices.QD * depth.OUT_STEP_D
        n = n // slices.QD * slices.D + x_d
    q_w = o_p % sizes.QW
    if tile.BACK:
        tap_h, in_h, rows = phase_of(
            i_h, sizes.OH, sizes.pad_h, down.KERNEL, down.STRIDE, down.PERIOD, down.INVERSE, down.DILATION
        )  # fmt: skip
        tap_w, in_w, columns = phase_of(
            i_w, sizes.OW, sizes.pad_w, across.KERNEL, across.STRIDE, across.PERIOD, across.INVERSE, across.DILATION
        )  # fmt: skip
        m_y = (o_k < sizes.total) & (q_w < columns)
        m_k = m_y & (tap_h < down.KERNEL) & (tap_w < across.KERNEL)
    else:
        tap_h, in_h, rows = 0, -sizes.pad_h, sizes.QH
        tap_w, in_w = 0, -sizes.pad_w
        m_y = o_k < sizes.total
        m_k = m_y
    x_w = in_w + q_w * across.IN_STEP
    x_h = in_h + i_row * down.IN_STEP
    OUT = sizes.vectors * VEC
    CHANNELS = OUT // tile.M * C
    p_x += ((n * sizes.H * sizes.W + x_w) * CHANNELS)[:, None] + o_c // tile.M * C
    p_w += strides.first
    if tile.SPREAD:
        p_w += o_c
    else:
        p_w += (o_c // tile.M).to(tl.int64) * strides.s_g + o_c % tile.M * strides.s_m
    b_sums = ()
    for _ in tl.static_range(BLOCK_R):
        b_sums += (tl.zeros((BLOCK_K, VEC), dtype=tile.ACC),)
    for i in tl.range(0, JW * PARTS * JD, loop_unroll_factor=tile.UNROLL):
        m_d = m_k
        p_d = p_x
        p_q = p_w
        if depth is not None:
            d = x_d + i // (JW * PARTS) * depth.IN_TAP_D
            m_d = m_k & (d >= 0) & (d < slices.D)
            p_d += tl.cast(i // (JW * PARTS) * depth.IN_TAP_D, tl.int64) * sizes.H * sizes.W * CHANNELS
            p_q += i // (JW * PARTS) * strides.s_q
        if PARTS == 1 and JD == 1:
            s = i
            first_r = 0
        else:
            s = i % JW
            first_r = i // JW % PARTS * ROWS
        w = x_w + s * across.IN_TAP
        m_w = m_d
        if tile.BACK:
            m_w = m_w & (tap_w + s * across.PERIOD < across.KERNEL)
        m_x = m_w & (w >= 0) & (w < sizes.W)
        for c in tl.static_range(C):
            b_ws = ()
            for r in tl.static_range(ROWS):
                tap = tap_h + (first_r + r) * down.PERIOD
                p_tap = p_q + (tap * strides.s_r + (tap_w + s * across.PERIOD) * strides.s_s + c * strides.s_c)
                m_tap = m_w
                if r >= SURE:
                    m_tap = m_w & (tap < down.KERNEL)
                b_ws += (tl.load(p_tap, mask=m_tap[:, None], other=0.0).to(tile.ACC),)  # [BLOCK_K, VEC]
            b_next = ()
            for b in tl.static_range(BLOCK_R):
                b_sum = b_sums[b]
                for r in tl.static_range(ROWS):
                    h = x_h + first_r * down.IN_TAP + (b * down.IN_STEP + r * down.IN_TAP)
                    o_tap = (h * sizes.W + s * across.IN_TAP) * CHANNELS + c
                    m_h = (m_x & (h >= 0) & (h < sizes.H))[:, None]
                    b_x = tl.load(p_d + o_tap, mask=m_h, other=0.0)  # [BLOCK_K, VEC]
                    if r >= SURE:
                        # A separate mask would prevent the compiler from merging the load.
                        b_x = tl.where(tap_h + (first_r + r) * down.PERIOD < down.KERNEL, b_x, 0.0)
                    b_sum += b_x.to(tile.ACC) * b_ws[r]
                b_next += (b_sum,)
            b_sums = b_next
    for b in tl.static_range(BLOCK_R):
        b_sum = b_sums[b]
        if p_scale is not None:
            b_sum *= tl.load(p_scale + o_c, mask=m_y[:, None], other=0.0).to(tile.ACC)
        if p_bias is not None:
            b_sum += tl.load(p_bias + o_c, mask=m_y[:, None], other=0.0).to(tile.ACC)
        o_h = n_y * sizes.OH + i_h + (i_row + b) * down.OUT_STEP
        o_row = o_h * sizes.OW + i_w + q_w * across.OUT_STEP
        o_y = (o_row * OUT)[:, None] + o_c
        m_row = (m_y & (i_row + b < rows))[:, None]
        if epilogue.SAVE_Z:
            tl.store(p_z + o_y, b_sum.to(p_z.dtype.element_ty), mask=m_row)
        b_y = activate(b_sum, epilogue.ACT, epilogue.SLOPE)
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_row)


def able(problem: Problem) -> bool | Unsupported:
    if problem.pool:
        return Unsupported("a pool")
    return fits(problem) and (problem.M == 1 or problem.C == 1 or Unsupported("several channels to several channels"))


def fits(problem: Problem) -> bool | Unsupported:
    """Return whether groups are narrow enough, and sizes small enough, for the depthwise kernels."""
    (H, W), (OH, OW) = problem.read, problem.written
    down, across, _ = problem.geometry
    if problem.groups == 1 or problem.C > MOST_CHANNELS:
        return Unsupported(f"more than {MOST_CHANNELS} channels to a sum, or one group")
    reach = (across.kernel - 1) * across.dilation  # offsets start this far outside the image
    images = max((H * W + reach) * problem.C, OH * OW * problem.M) * problem.groups
    weights = down.kernel * across.kernel * problem.C * problem.groups * problem.M
    row = problem.N * max(W, OW) * problem.groups * problem.M
    if max(images, weights, row) >= INT32_LIMIT:
        return Unsupported("images or weights with more values than 32 bits count")
    return True


def estimate(problem: Problem) -> float:
    """Estimate microseconds; off by a factor of 1.23 in the geometric mean of 351 drawn layers on H100s and H200s.

    A warp loads each row of x once for all rows of outputs that read it, and weights in place.
    """
    cut = narrow.cut(problem)
    times, (down, across) = costs.constants(problem).channels, cut.taps
    stride = 1 if problem.direction == TRANSPOSED else problem.geometry.h.stride
    rows = min(cut.rows * down, (cut.rows - 1) * stride + down)
    read = rows * (1 if problem.M == problem.C == 1 else cut.vec)
    loads = across * problem.C * (read + down * (cut.vec if cut.direct else 1))
    products = across * problem.C * down * cut.rows * cut.vec
    warps = launch.cdiv(cut.tile["BLOCK_K"], 32)
    program = times.program + warps * (times.load * (loads + cut.rows) + times.product * products)
    memory_time = costs.moved(problem) / costs.constants(problem).copy
    time = times.launch + max(memory_time, cut.grid * program / problem.processors) + times.wait * loads
    return time + (0.0 if cut.direct else times.ordered)


def programs(problem: Problem) -> int:
    """Return the number of programs in the interpreter, where each step along taps and rows takes as long as one."""
    cut = narrow.cut(problem)
    return 1 + cut.grid * cut.rows * math.prod(cut.taps) * problem.C


def prepare(problem: Problem, depth: narrow.Depth | None = None) -> Product:
    """Prepare the launch; with a depth, images are the output slices of one phase of volumes."""
    cut, out, back = narrow.cut(problem), problem.groups * problem.M, problem.direction == TRANSPOSED
    in_depth = problem if depth is None else depth.with_depth(problem)
    strides, weights = depthwise_weights.strides(in_depth), None
    if not cut.direct:
        weights = depthwise_weights.prepare(in_depth, strides)
        _, S, C, width = weights.shape
        strides = TapStrides(1, 1, width, S * C * width, C * width)
    first, s_q, unroll, slices = cut.first[0] * strides.s_r + cut.first[1] * strides.s_s, 0, cut.unroll, None
    if depth is not None:
        if cut.rows * math.prod(cut.taps) * cut.vec > narrow.MOST_PRODUCTS // 2:
            unroll = 1  # more would spill
        slices, s_slice = depth.sizes, problem.geometry.h.kernel * strides.s_r
        first, s_q = first + depth.phase.taps[0] * s_slice, depth.phase.tap_step * s_slice
    vectors = out // cut.vec
    sizes = DepthwiseSizes(
        problem.N * cut.counts[1] * vectors, vectors, *cut.counts, *cut.read, *cut.written,
        *(axis.padding for axis in cut.axes),
    )  # fmt: skip
    down, across = (narrow.AxisTaps.of(*axis, back) for axis in zip(cut.axes, cut.phases, cut.periods, strict=True))
    tile = cut.tile.record(
        DepthwiseTile, C=problem.C, M=problem.M, BACK=back, SPREAD=not cut.direct, ACC=launch.acc(problem.dtype),
        UNROLL=unroll, ROWS=cut.step, VEC=cut.vec, BLOCK_R=cut.rows,
    )  # fmt: skip
    meta = {
        "down": down, "across": across, "depth": None if depth is None else depth.constants, "tile": tile,
        "epilogue": problem.epilogue, **dependent_launch.options(cut.grid, problem.target), **cut.tile.launch_options,
    }  # fmt: skip
    scalars = sizes, strides._replace(first=first, s_q=s_q), slices
    return Product(weights, launch.Prepared(conv_depthwise_kernel, (cut.grid,), scalars, meta))


run = Product.run
