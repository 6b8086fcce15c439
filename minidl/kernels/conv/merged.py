"""The "merge" form: with a stride of 2, two phases of a transposed convolution share a tile, for few output channels.

Two adjacent output columns read inputs from one window, so the pair counts as one pixel of twice the channels, with a
stride of 1 along the row:

    y[n, oh, q, (p, m)] = sum over c, r, l of x[n, ih(oh, r), q + low + l, c] w[c, m, r, s(p, l)]
    s(p, l) = p + padding - 2 (low + l); the weight is 0 if that is outside the filter

With few output channels a tile mostly reads inputs; here both columns share them, in exchange for products with zeros:
5 taps in a row become 3 with twice the outputs (1,000 images, 128 to 64 channels, 16x16 to 32x32, 5x5). `batch_back`
computes the product. A non-finite input makes all outputs NaN whose window it is in.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import batch_back, costs
from minidl.kernels.conv.epilogue import repeated
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.prepared import Copy, Product
from minidl.kernels.conv.problem import NO_BOXES, TRANSPOSED, Problem, Tensors, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "merge"
DIRECTIONS = (TRANSPOSED,)
FAMILIES = ("conv_back", "conv_batch_narrow", "conv_band")

MOST = 64  # maximum output channels; two columns then fill a tile


@triton.jit
def conv_merge_kernel(
    p_w, p_merged, total, s_c, s_m, s_r, s_s, M, last,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, REACH: tl.constexpr, TURN: tl.constexpr, EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write merged [2 * M, R, REACH, C] of w [C, M, R, S], with TURN [C, R, REACH, 2 * M].

    `last` is s(0, REACH - 1); low + REACH - 1 is the padding of the merged axis. Taps along the row are in the order of
    a filter: the last one reads the first input of the window.
    """
    wait(EARLY)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if TURN:
        column = o % (2 * M)
        tap = o // (2 * M)
        c = tap // (R * REACH)
    else:
        c = o % C
        tap = o // C
        column = tap // (R * REACH)
    tap = tap % (R * REACH)
    s = last + column // M + 2 * (tap % REACH)
    m_w = (o < total) & (s >= 0) & (s < S)
    o_w = c.to(tl.int64) * s_c + (column % M).to(tl.int64) * s_m + (tap // REACH).to(tl.int64) * s_r
    b_w = tl.load(p_w + o_w + s.to(tl.int64) * s_s, mask=m_w, other=0.0)  # [BLOCK]
    tl.store(p_merged + o, b_w, mask=o < total)


def able(problem: Problem) -> bool | Unsupported:
    v = problem.geometry.w
    return (
        (problem.groups == 1 or Unsupported("more than one group"))
        and ((v.stride == 2 and v.size > 0 and v.size % 2 == 0) or Unsupported("a stride other than 2, or odd columns"))
        and batch_back.able(problem)
        and ((pairs_of(v).output > 0 and _row(problem) * problem.dtype.itemsize % 16 == 0) or NO_BOXES)
    )


def estimate(problem: Problem) -> float:
    """Estimate microseconds by those of `batch_back`, times the additional products; inputs are read once.

    1,000 images, 128 to 64 channels, 5x5, float16: 0.215 ms in place of 0.235, with 1.2 times the products. With more
    channels two columns are two tiles, without shared reads. Split-precision products are slower: generators in float32
    3.80 ms in place of 3.59, with the same 1.2.
    """
    products = 2 * pairs_of(problem.geometry.w).kernel / problem.geometry.w.kernel
    split = problem.dtype == torch.float32 and problem.precision != "tf32" and problem.target != "interpreted"
    gains = problem.M <= MOST and not split
    gain = costs.relative(problem, NAME) if gains else 1.0
    # 960->1816 2x2: 7 million values of a band, 76 us.
    band = 2 * problem.M * problem.geometry.h.kernel * pairs_of(problem.geometry.w).kernel * problem.C
    extra = 0.0 if gains else costs.band_time(problem, band)
    return max(gain * products, 0.9 if gains else 1.05) * batch_back.estimate(problem) + extra


def prepare(problem: Problem) -> Product:
    C, M, (h, axis, _) = problem.C, problem.M, problem.geometry
    R, S = h.kernel, axis.kernel
    v = pairs_of(axis)
    # Tensor cores read 16-bit operands in either order, float32 along K only.
    turn = problem.dtype.itemsize == 2 and M % 4 == 0
    shape = (C, R, v.kernel, 2 * M) if turn else (2 * M, R, v.kernel, C)
    total = 2 * M * R * v.kernel * C
    tile = problem.tile("conv_band", floor=1, total=total)
    scalars = (total, *problem.strides, M, axis.padding - 2 * v.padding)
    meta = {
        "C": C, "R": R, "S": S, "REACH": v.kernel, "TURN": turn,
        **dependent_launch.options(target=problem.target), **tile.options,
    }  # fmt: skip
    # The strides of the merged weights, which are read in place.
    strides = (R * v.kernel * 2 * M, 1, v.kernel * 2 * M, 2 * M) if turn else ()
    pairs = problem._replace(geometry=Geometry(h, v), M=2 * M, strides=strides, w_aligned=True)
    merge = launch.Prepared(conv_merge_kernel, (launch.cdiv(total, tile["BLOCK"]),), scalars, meta)
    return Product(Copy(shape, merge), batch_back.prepare(pairs).launch)


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t._replace(bias=repeated(t.bias), scale=repeated(t.scale)))


def _row(problem: Problem) -> int:
    """Return the number of values in a row of the merged weights."""
    return problem.geometry.h.kernel * pairs_of(problem.geometry.w).kernel * problem.C


def pairs_of(v: Axis) -> Axis:
    """Return the axis of pairs, whose filter is the window that a pair reads."""
    phases = [phase for phase in v.backward() if phase.in_step]
    low = min(phase.in_start for phase in phases)
    high = max(phase.in_start + len(phase.taps) for phase in phases)
    return Axis(v.size // 2, high - low, v.output, 1, high - 1, 1)
