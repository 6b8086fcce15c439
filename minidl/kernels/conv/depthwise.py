"""The depthwise form: each output channel reads a channel or a few of its own, so no tensor cores; bound by memory.

    y[n, q, o] = act(scale[o] * sum over taps j, c < C of x[n, at(q, j), o // M * C + c] w[j, c, o] + bias[o])

    x  [N, H, W, groups * C]     w  the convolution's own in any strides, or ordered as [R, S, C, groups * M]
    y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

A row of outputs of all images is cut into vectors of VEC channels, whatever the number of channels is, and a program
takes BLOCK_K of them in BLOCK_R rows. For one column of taps it loads each row of inputs once, for all the rows of
outputs that read it: the compiler merges the loads, whose text is the same (3x3, four rows: 18 loads in place of 36). A
load for each tap makes the first cache's instructions the bound.

All walks of a transposed convolution are one launch, with as many taps as the longest of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, spread
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import FORWARD, MANY, TRANSPOSED, No, Problem, Tensors
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "depthwise"
DIRECTIONS = FORWARD, TRANSPOSED
FAMILIES = ("conv_depthwise", "conv_turn")
# Rows of taps, and channels that an output reads: both are unrolled.
MOST_ROWS = 32
MOST_CHANNELS = 4
# Products up to which weights are read as they lie, few of them side by side, for ordering them is another launch.
# 144 channels 3x3 at 7x7, 144 images, on an H100: 3.0 us, ordered 3.6; 15 images of 960 channels: 3.9, ordered 3.4.
DIRECT = 3 * 2**20
VEC_DIRECT = 2
# Programs of each multiprocessor that rows are cut for, if there are as many; as many read the same weights as they lie
# at a time.
PROGRAMS = 2
PROGRAMS_DIRECT = 0.25
# Programs of each multiprocessor, and taps, up to which columns are unrolled: all loads are then under way at once.
FEW_PROGRAMS = 16
FEW_TAPS = 25


@triton.jit
def walk_back(
    i, size, pad,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PERIOD: tl.constexpr, INVERSE: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """(first tap, KERNEL if there is none; the input that it reads at q = 0; outputs) of walk i; the next taps are
    PERIOD apart: output i + q STRIDE reads by tap r input (i + q STRIDE + pad - r DILATION) / STRIDE, if whole."""
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
    total, vectors, QH, QW, H, W, OH, OW, pad_h, pad_w, s_g, s_m, s_c, s_r, s_s,
    C: tl.constexpr, M: tl.constexpr, BACK: tl.constexpr, SPREAD: tl.constexpr, VEC: tl.constexpr,
    WALKS_H: tl.constexpr, KERNEL_H: tl.constexpr, STRIDE_H: tl.constexpr, PERIOD_H: tl.constexpr,
    INVERSE_H: tl.constexpr, DILATION_H: tl.constexpr,
    WALKS_W: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_W: tl.constexpr, PERIOD_W: tl.constexpr,
    INVERSE_W: tl.constexpr, DILATION_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, UNROLL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of at most QH x QW outputs for each walk; `total` vectors of VEC channels in a row of all images."""
    wait(EARLY)
    JH: tl.constexpr = (KERNEL_H + PERIOD_H - 1) // PERIOD_H
    JW: tl.constexpr = (KERNEL_W + PERIOD_W - 1) // PERIOD_W
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
    q_w = o_p % QW
    if BACK:
        tap_h, in_h, rows = walk_back(i_h, OH, pad_h, KERNEL_H, STRIDE_H, PERIOD_H, INVERSE_H, DILATION_H)
        tap_w, in_w, columns = walk_back(i_w, OW, pad_w, KERNEL_W, STRIDE_W, PERIOD_W, INVERSE_W, DILATION_W)
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
    if SPREAD:
        p_w += o_c
    elif M == 1:
        p_w += o_c.to(tl.int64) * s_g
    else:
        p_w += (o_c // M).to(tl.int64) * s_g + o_c % M * s_m
    b_sums = ()
    for _ in tl.static_range(BLOCK_R):
        b_sums += (tl.zeros((BLOCK_K, VEC), dtype=ACC),)
    for s in tl.range(0, JW, loop_unroll_factor=UNROLL):
        w = x_w + s * IN_TAP_W
        m_w = m_k
        if BACK:
            m_w = m_w & (tap_w + s * PERIOD_W < KERNEL_W)
        m_x = m_w & (w >= 0) & (w < W)
        for c in tl.static_range(C):
            b_ws = ()
            for r in tl.static_range(JH):
                p_tap = p_w + ((tap_h + r * PERIOD_H) * s_r + (tap_w + s * PERIOD_W) * s_s + c * s_c)
                m_tap = m_w
                if BACK and r == JH - 1:
                    m_tap = m_w & (tap_h + r * PERIOD_H < KERNEL_H)
                b_ws += (tl.load(p_tap, mask=m_tap[:, None], other=0.0).to(ACC),)  # [BLOCK_K, VEC]
            b_next = ()
            for b in tl.static_range(BLOCK_R):
                b_sum = b_sums[b]
                for r in tl.static_range(JH):
                    h = x_h + (b * IN_STEP_H + r * IN_TAP_H)
                    o_tap = (h * W + s * IN_TAP_W) * CHANNELS + c
                    b_x = tl.load(p_x + o_tap, mask=(m_x & (h >= 0) & (h < H))[:, None], other=0.0)  # [BLOCK_K, VEC]
                    if BACK and r == JH - 1 and KERNEL_H % PERIOD_H != 0:
                        # A mask of its own would keep the load from being merged.
                        b_x = tl.where(tap_h + r * PERIOD_H < KERNEL_H, b_x, 0.0)
                    b_sum += b_x.to(ACC) * b_ws[r]
                b_next += (b_sum,)
            b_sums = b_next
    for b in tl.static_range(BLOCK_R):
        b_sum = b_sums[b]
        if HAS_SCALE:
            b_sum *= tl.load(p_scale + o_c, mask=m_y[:, None], other=0.0).to(ACC)
        if HAS_BIAS:
            b_sum += tl.load(p_bias + o_c, mask=m_y[:, None], other=0.0).to(ACC)
        o_row = (n * OH + i_h + (i_row + b) * OUT_STEP_H) * OW + i_w + q_w * OUT_STEP_W
        o_y = (o_row * OUT)[:, None] + o_c
        m_row = (m_y & (i_row + b < rows))[:, None]
        if SAVE_Z:
            tl.store(p_z + o_y, b_sum.to(p_z.dtype.element_ty), mask=m_row)
        tl.store(p_y + o_y, activate(b_sum, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_row)


def able(problem: Problem) -> bool | No:
    if problem.pool:
        return No("a pool")
    return fits(problem) and (problem.M == 1 or problem.C == 1 or No("several channels to several channels"))


def fits(problem: Problem) -> bool | No:
    """Whether groups are as narrow and numbers as small as the kernels of this form need it."""
    (H, W), (OH, OW) = problem.read, problem.written
    h, v, _ = problem.geometry
    if problem.groups == 1 or problem.C > MOST_CHANNELS:
        return No(f"more than {MOST_CHANNELS} channels to a sum, or one group")
    if h.kernel > MOST_ROWS:
        return No(f"more than {MOST_ROWS} rows of taps")
    reach = (v.kernel - 1) * v.dilation  # beside the image, from where a tap inside is counted
    images = max((H * W + reach) * problem.C, OH * OW * problem.M) * problem.groups
    weights = h.kernel * v.kernel * problem.C * problem.groups * problem.M
    row = problem.N * max(W, OW) * problem.groups * problem.M
    if max(images, weights, row) >= MANY:
        return No("images or weights of more values than 32 bits count")
    return True


def estimate(problem: Problem) -> float:
    found = cut(problem)
    products = costs.outputs(problem) * problem.groups * problem.M * problem.C * costs.taps(problem)
    return costs.of_each_channel(problem, NAME, products, found.grid * found.rows * found.taps * problem.C)


class Cut(NamedTuple):
    """How a problem is cut into programs.

    read, written  sizes of the images; a single row where no tap reads another pixel than its own
    walks          of the way back, down and across
    count          rows of a walk, and pixels of a row, at most
    rows           of a program
    direct, vec    whether weights are read as they lie, and values that are read at once
    taps, unroll   of a walk, and columns of them that are unrolled
    """

    read: tuple[int, int]
    written: tuple[int, int]
    walks: tuple[int, int]
    count: tuple[int, int]
    tile: launch.Tile
    rows: int
    direct: bool
    vec: int
    taps: int
    unroll: int
    grid: int


def cut(problem: Problem) -> Cut:
    h, v = _axes(problem)
    back, out = problem.direction == TRANSPOSED, problem.groups * problem.M
    read, (OH, OW) = joined(problem)
    walks = (min(h.stride, h.size), min(v.stride, v.size)) if back else (1, 1)
    QH, QW = (launch.cdiv(OH, h.stride), launch.cdiv(OW, v.stride)) if back else (OH, OW)
    tile = problem.tile(
        FAMILIES[0], floor=1, R=QH, K=problem.images * QW * out, T=h.kernel * v.kernel, S=1 if back else h.stride
    )
    taps = math.prod(-(-axis.kernel // _period(problem, axis)) for axis in (h, v))
    # The weights of single taps lie in order.
    single = h.kernel * v.kernel * problem.C == 1
    direct = single or problem.images * OH * OW * out * problem.C * taps <= DIRECT
    vec = vector(out, problem, min(VEC_DIRECT, tile["VEC"]) if direct and not single else tile["VEC"])
    of_a_row = max(1, math.prod(walks) * launch.cdiv(problem.images * QW * (out // vec), tile["BLOCK_K"]))
    wanted = int((PROGRAMS_DIRECT if direct and not single else PROGRAMS) * problem.processors) // of_a_row
    rows = launch.cdiv(QH, max(launch.cdiv(QH, tile["BLOCK_R"]), min(QH, wanted)))
    unroll = -(-v.kernel // _period(problem, v))
    if taps > FEW_TAPS or launch.cdiv(QH, rows) * of_a_row > FEW_PROGRAMS * problem.processors:
        unroll = 1
    tiles = launch.cdiv(QH, rows) * launch.cdiv(problem.N * QW * (out // vec), tile["BLOCK_K"])
    return Cut(read, (OH, OW), walks, (QH, QW), tile, rows, direct, vec, taps, unroll, math.prod(walks) * tiles)


def prepare(problem: Problem) -> Product:
    found, (h, v), out = cut(problem), _axes(problem), problem.groups * problem.M
    strides = spread.strides(problem)
    weights = None
    if not found.direct:
        weights = spread.prepare(problem, strides)
        _, S, C, width = weights.shape
        strides = 1, 1, width, S * C * width, C * width
    options = found.tile.options
    del options["VEC"]
    meta = {
        "C": problem.C, "M": problem.M, "BACK": problem.direction == TRANSPOSED, "SPREAD": not found.direct,
        **_constants(problem, "H", h, found.walks[0]), **_constants(problem, "W", v, found.walks[1]),
        "UNROLL": found.unroll,
        "ACC": launch.acc(problem.dtype), **early.options(found.grid, problem.target), **problem.flags("POOL"),
        **options, "VEC": found.vec, "BLOCK_R": found.rows,
    }  # fmt: skip
    vectors = out // found.vec
    scalars = (
        problem.N * found.count[1] * vectors, vectors, *found.count, *found.read, *found.written, h.padding, v.padding,
        *strides,
    )  # fmt: skip
    return Product(weights, launch.Prepared(conv_depthwise_kernel, (found.grid,), scalars, meta))


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def vector(channels: int, problem: Problem, most: int = 16) -> int:
    """Channels that are read at once: a divisor of their number, at most 16 bytes."""
    return math.gcd(channels, min(most, 16 // problem.dtype.itemsize))


def joined(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes of the images that are read and written; a single row where no tap reads another pixel than its own."""
    (H, W), (OH, OW) = problem.read, problem.written
    own = all(
        (axis.kernel, axis.stride, axis.padding) == (1, 1, 0) and axis.size == axis.output for axis in _axes(problem)
    )
    if own and problem.N * H * W * problem.groups * max(problem.C, problem.M) < MANY:
        return (1, H * W), (1, OH * OW)
    return (H, W), (OH, OW)


def _axes(problem: Problem) -> tuple[Axis, Axis]:
    return problem.geometry.h, problem.geometry.w


def _period(problem: Problem, axis: Axis) -> int:
    """From one tap of a walk to the next."""
    return axis.stride // math.gcd(axis.stride, axis.dilation) if problem.direction == TRANSPOSED else 1


def _constants(problem: Problem, name: str, axis: Axis, walks: int) -> dict[str, int]:
    """Of an axis. On the way back taps r = first, first + PERIOD, ... solve r * dilation = remainder (mod stride)."""
    period = _period(problem, axis)
    found = {
        "WALKS": walks, "KERNEL": axis.kernel, "STRIDE": axis.stride, "PERIOD": period,
        "INVERSE": pow(axis.dilation // math.gcd(axis.stride, axis.dilation), -1, period), "DILATION": axis.dilation,
    }  # fmt: skip
    return {f"{key}_{name}": value for key, value in found.items()}
