"""The "depthwise" form: an output channel reads one or a few input channels; without tensor cores, memory-bound.

    y[n, q, o] = act(scale[o] * sum over taps j, c < C of x[n, at(q, j), o // M * C + c] w[j, c, o] + bias[o])

    x  [N, H, W, groups * C]     w  the convolution's weights in any strides, or reordered to [R, S, C, groups * M]
    y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

A row of outputs of all images is split into vectors of VEC channels, and a program computes BLOCK_K vectors in BLOCK_R
rows. For one column of taps it loads each row of inputs once for all rows of outputs that read it: the compiler merges
loads with identical expressions (3x3, four rows: 18 loads in place of 36). With one load per tap, L1 instructions would
be the bottleneck.

All phases of a transposed convolution are one launch, in which every phase has the taps of the longest one.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, depthwise_weights, narrow
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import FORWARD, INT32_LIMIT, TRANSPOSED, Problem, Tensors, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "depthwise"
DIRECTIONS = FORWARD, TRANSPOSED
FAMILIES = (narrow.FAMILY, "conv_turn")
# Input channels per output, whose loop is unrolled.
MOST_CHANNELS = 4


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
    p_x, p_w, p_bias, p_scale, p_y, p_z,
    total, vectors, QH, QW, H, W, OH, OW, pad_h, pad_w, D, QD, OD, in_d, out_d, first, s_g, s_m, s_c, s_q, s_r, s_s,
    JD: tl.constexpr, IN_STEP_D: tl.constexpr, IN_TAP_D: tl.constexpr, OUT_STEP_D: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BACK: tl.constexpr, SPREAD: tl.constexpr, VEC: tl.constexpr,
    WALKS_H: tl.constexpr, KERNEL_H: tl.constexpr, STRIDE_H: tl.constexpr, PERIOD_H: tl.constexpr,
    INVERSE_H: tl.constexpr, DILATION_H: tl.constexpr,
    WALKS_W: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_W: tl.constexpr, PERIOD_W: tl.constexpr,
    INVERSE_W: tl.constexpr, DILATION_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, UNROLL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute at most QH x QW outputs per phase; a row of all images has `total` vectors of VEC channels.

    With JD taps in depth, images are slices of volumes: QD outputs of D slices, written to OD slices.
    """
    wait(EARLY)
    JH: tl.constexpr = (KERNEL_H + PERIOD_H - 1) // PERIOD_H
    JW: tl.constexpr = (KERNEL_W + PERIOD_W - 1) // PERIOD_W
    PARTS: tl.constexpr = (JH + ROWS - 1) // ROWS
    # Rows of taps that every part and every phase has.
    SURE: tl.constexpr = JH - (PARTS - 1) * ROWS - (1 if KERNEL_H % PERIOD_H != 0 else 0)
    IN_STEP_H: tl.constexpr = 1 if BACK else STRIDE_H
    IN_STEP_W: tl.constexpr = 1 if BACK else STRIDE_W
    IN_TAP_H: tl.constexpr = -(DILATION_H * PERIOD_H // STRIDE_H) if BACK else DILATION_H
    IN_TAP_W: tl.constexpr = -(DILATION_W * PERIOD_W // STRIDE_W) if BACK else DILATION_W
    OUT_STEP_H: tl.constexpr = STRIDE_H if BACK else 1
    OUT_STEP_W: tl.constexpr = STRIDE_W if BACK else 1
    i_tile = tl.program_id(0)
    i_h = i_tile % WALKS_H
    i_w = i_tile // WALKS_H % WALKS_W
    i_tile = i_tile // (WALKS_H * WALKS_W)
    tiles_r = tl.cdiv(QH, BLOCK_R)
    i_row = i_tile % tiles_r * BLOCK_R
    o_k = i_tile // tiles_r * BLOCK_K + tl.arange(0, BLOCK_K)
    o_p = o_k // vectors
    o_c = (o_k % vectors * VEC)[:, None] + tl.arange(0, VEC)[None, :]  # [BLOCK_K, VEC]
    n = (o_p // QW).to(tl.int64)
    n_y = n
    if JD > 0:
        x_d = in_d + o_p // QW % QD * IN_STEP_D
        n_y = n // QD * OD + out_d + n % QD * OUT_STEP_D
        n = n // QD * D + x_d
    q_w = o_p % QW
    if BACK:
        tap_h, in_h, rows = phase_of(i_h, OH, pad_h, KERNEL_H, STRIDE_H, PERIOD_H, INVERSE_H, DILATION_H)
        tap_w, in_w, columns = phase_of(i_w, OW, pad_w, KERNEL_W, STRIDE_W, PERIOD_W, INVERSE_W, DILATION_W)
        m_y = (o_k < total) & (q_w < columns)
        m_k = m_y & (tap_h < KERNEL_H) & (tap_w < KERNEL_W)
    else:
        tap_h, in_h, rows = 0, -pad_h, QH
        tap_w, in_w = 0, -pad_w
        m_y = o_k < total
        m_k = m_y
    x_w = in_w + q_w * IN_STEP_W
    x_h = in_h + i_row * IN_STEP_H
    OUT = vectors * VEC
    CHANNELS = OUT // M * C
    if C == 1 and M == 1:
        o_in = o_c
    else:
        o_in = o_c // M * C
    p_x += ((n * H * W + x_w) * CHANNELS)[:, None] + o_in
    p_w += first
    if SPREAD:
        p_w += o_c
    elif M == 1:
        p_w += o_c.to(tl.int64) * s_g
    else:
        p_w += (o_c // M).to(tl.int64) * s_g + o_c % M * s_m
    b_sums = ()
    for _ in tl.static_range(BLOCK_R):
        b_sums += (tl.zeros((BLOCK_K, VEC), dtype=ACC),)
    for i in tl.range(0, JW * PARTS * max(JD, 1), loop_unroll_factor=UNROLL):
        m_d = m_k
        p_d = p_x
        p_q = p_w
        if JD > 0:
            d = x_d + i // (JW * PARTS) * IN_TAP_D
            m_d = m_k & (d >= 0) & (d < D)
            p_d += tl.cast(i // (JW * PARTS) * IN_TAP_D, tl.int64) * H * W * CHANNELS
            p_q += i // (JW * PARTS) * s_q
        if PARTS == 1 and JD <= 1:
            s = i
            first_r = 0
        else:
            s = i % JW
            first_r = i // JW % PARTS * ROWS
        w = x_w + s * IN_TAP_W
        m_w = m_d
        if BACK:
            m_w = m_w & (tap_w + s * PERIOD_W < KERNEL_W)
        m_x = m_w & (w >= 0) & (w < W)
        for c in tl.static_range(C):
            b_ws = ()
            for r in tl.static_range(ROWS):
                tap = tap_h + (first_r + r) * PERIOD_H
                p_tap = p_q + (tap * s_r + (tap_w + s * PERIOD_W) * s_s + c * s_c)
                m_tap = m_w
                if r >= SURE:
                    m_tap = m_w & (tap < KERNEL_H)
                b_ws += (tl.load(p_tap, mask=m_tap[:, None], other=0.0).to(ACC),)  # [BLOCK_K, VEC]
            b_next = ()
            for b in tl.static_range(BLOCK_R):
                b_sum = b_sums[b]
                for r in tl.static_range(ROWS):
                    h = x_h + first_r * IN_TAP_H + (b * IN_STEP_H + r * IN_TAP_H)
                    o_tap = (h * W + s * IN_TAP_W) * CHANNELS + c
                    b_x = tl.load(p_d + o_tap, mask=(m_x & (h >= 0) & (h < H))[:, None], other=0.0)  # [BLOCK_K, VEC]
                    if r >= SURE:
                        # A separate mask would prevent the compiler from merging the load.
                        b_x = tl.where(tap_h + (first_r + r) * PERIOD_H < KERNEL_H, b_x, 0.0)
                    b_sum += b_x.to(ACC) * b_ws[r]
                b_next += (b_sum,)
            b_sums = b_next
    for b in tl.static_range(BLOCK_R):
        b_sum = b_sums[b]
        if HAS_SCALE:
            b_sum *= tl.load(p_scale + o_c, mask=m_y[:, None], other=0.0).to(ACC)
        if HAS_BIAS:
            b_sum += tl.load(p_bias + o_c, mask=m_y[:, None], other=0.0).to(ACC)
        o_row = (n_y * OH + i_h + (i_row + b) * OUT_STEP_H) * OW + i_w + q_w * OUT_STEP_W
        o_y = (o_row * OUT)[:, None] + o_c
        m_row = (m_y & (i_row + b < rows))[:, None]
        if SAVE_Z:
            tl.store(p_z + o_y, b_sum.to(p_z.dtype.element_ty), mask=m_row)
        tl.store(p_y + o_y, activate(b_sum, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_row)


def able(problem: Problem) -> bool | Unsupported:
    if problem.pool:
        return Unsupported("a pool")
    return fits(problem) and (problem.M == 1 or problem.C == 1 or Unsupported("several channels to several channels"))


def fits(problem: Problem) -> bool | Unsupported:
    """Return whether groups are narrow enough, and sizes small enough, for the depthwise kernels."""
    (H, W), (OH, OW) = problem.read, problem.written
    h, v, _ = problem.geometry
    if problem.groups == 1 or problem.C > MOST_CHANNELS:
        return Unsupported(f"more than {MOST_CHANNELS} channels to a sum, or one group")
    reach = (v.kernel - 1) * v.dilation  # offsets start this far outside the image
    images = max((H * W + reach) * problem.C, OH * OW * problem.M) * problem.groups
    weights = h.kernel * v.kernel * problem.C * problem.groups * problem.M
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
    cut, out = narrow.cut(problem), problem.groups * problem.M
    in_depth = problem if depth is None else depth.with_depth(problem)
    strides = depthwise_weights.strides(in_depth)
    weights = None
    if not cut.direct:
        weights = depthwise_weights.prepare(in_depth, strides)
        _, S, C, width = weights.shape
        strides = 1, 1, width, S * C * width, C * width
    depth_sizes: tuple[int, ...] = (0, 0, 0, 0, 0)
    unroll = cut.unroll
    first_q = s_q = 0
    if depth is not None:
        if cut.rows * math.prod(cut.taps) * cut.vec > narrow.MOST_PRODUCTS // 2:
            unroll = 1  # 24 channels at 16x16x16 back: 84 bytes of spills
        phase, slice_ = depth.phase, problem.geometry.h.kernel * strides[3]
        depth_sizes = depth.size, phase.count, depth.written, phase.in_start, phase.out_start
        first_q, s_q = phase.taps[0] * slice_, phase.tap_step * slice_
    options = cut.tile.options
    del options["VEC"]
    meta = {
        "C": problem.C, "M": problem.M, "BACK": problem.direction == TRANSPOSED, "SPREAD": not cut.direct,
        "ACC": launch.acc(problem.dtype),
        **dependent_launch.options(cut.grid, problem.target), **problem.flags("POOL"),
        "UNROLL": unroll, "ROWS": cut.step,
        **options, "VEC": cut.vec, "BLOCK_R": cut.rows,
        **(narrow.NO_DEPTH if depth is None else depth.constants),
    }  # fmt: skip
    for name, axis, phases, period in zip("HW", cut.axes, cut.phases, cut.periods, strict=True):
        # Backward, taps first, first + period, ... solve tap * dilation = remainder (mod stride).
        inverse = pow(axis.dilation // math.gcd(axis.stride, axis.dilation), -1, period)
        constants = {
            "WALKS": phases, "KERNEL": axis.kernel, "STRIDE": axis.stride, "PERIOD": period, "INVERSE": inverse,
            "DILATION": axis.dilation,
        }  # fmt: skip
        meta |= {f"{key}_{name}": value for key, value in constants.items()}
    vectors = out // cut.vec
    down, across = cut.first
    scalars = (
        problem.N * cut.count[1] * vectors, vectors, *cut.count, *cut.read, *cut.written,
        *(axis.padding for axis in cut.axes), *depth_sizes, first_q + down * strides[3] + across * strides[4],
        *strides[:3], s_q, *strides[3:],
    )  # fmt: skip
    return Product(weights, launch.Prepared(conv_depthwise_kernel, (cut.grid,), scalars, meta))


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)
