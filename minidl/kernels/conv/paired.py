"""The "pair" form: two adjacent pixels count as one of twice the channels, for few channels and many images.

Channels-last, x [N, H, W, C] is also x [N, H, W / 2, 2 C], and likewise y. A convolution with S taps across has
(S + 1) / 2 taps over pairs, and its weights are a band, of which a sixth are zeros for S = 5. In exchange each input is
read (S + 1) / 2 times rather than S, in rows of twice the length; reads are the bottleneck of `batch_tiled`, which
computes the product. A non-finite input makes all outputs NaN whose pairs reach it.
"""

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import bands, batch_tiled, costs
from minidl.kernels.conv.epilogue import affine, pool_four, repeated
from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import CORRELATIONS, NO_BOXES, PHASE, Phases, Problem, Tensors, Unsupported, all_inside
from minidl.kernels.gemm.tiled import split_columns
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model import selection
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "pair"
ADDED = 8
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_pair_pool", "conv_band")


@triton.jit
def conv_paired_pool_kernel(
    d_x, d_w, p_bias, p_scale, p_y, N, W, QH, QW, M, in_h, in_w, steps, reach,
    ROW: tl.constexpr, IN_STEP_H: tl.constexpr, IN_TAP_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, POOL: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    NP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute y [N, QH, QW, M]: for a run of images, a pair of outputs and the pair below it, pooled to one pixel.

    x is viewed as [N, H * W * ROW], W pairs of ROW values in a row, and the bands as [2 * M, steps * BLOCK_K], `reach`
    values per filter row; every tap is inside. Columns from M on belong to the right pixel of each pair.
    """
    wait(EARLY)
    runs = tl.cdiv(N, BLOCK_M)
    n = tl.program_id(0) % runs * BLOCK_M
    q = tl.program_id(0) // runs
    q_w = q % QW
    q_h = q // QW
    first = ((in_h + 2 * q_h * IN_STEP_H) * W + in_w + q_w) * ROW
    below = IN_STEP_H * W * ROW
    b_up = tl.zeros((BLOCK_M, NP), dtype=ACC)
    b_down = tl.zeros((BLOCK_M, NP), dtype=ACC)
    tl.assume(steps > 0)
    for i in range(steps):
        k = i * BLOCK_K
        o_x = first + k // reach * (IN_TAP_H * W * ROW) + k % reach
        b_w = d_w.load([0, k]).T  # [BLOCK_K, NP]
        b_x = d_x.load([n, o_x])  # [BLOCK_M, BLOCK_K]
        b_up = tl.dot(b_x, b_w, b_up, input_precision=PRECISION, out_dtype=ACC)
        b_x = d_x.load([n, o_x + below])
        b_down = tl.dot(b_x, b_w, b_down, input_precision=PRECISION, out_dtype=ACC)
    b_up = affine(b_up, p_bias, p_scale, 0, 2 * M, 0, HAS_BIAS, HAS_SCALE)
    b_down = affine(b_down, p_bias, p_scale, 0, 2 * M, 0, HAS_BIAS, HAS_SCALE)
    b_0, b_1 = split_columns(activate(b_up, ACT, SLOPE))
    b_2, b_3 = split_columns(activate(b_down, ACT, SLOPE))
    b_y = pool_four(b_0, b_1, b_2, b_3, POOL)
    o_n = n + tl.arange(0, BLOCK_M)
    o_m = tl.arange(0, NP // 2)
    o_y = (o_n.to(tl.int64) * (QH * QW) + q_h * QW + q_w) * M
    tl.store(p_y + o_y[:, None] + o_m[None, :], b_y.to(p_y.dtype.element_ty), mask=(o_n < N)[:, None] & (o_m < M))


def able(problem: Problem) -> bool | Unsupported:
    h, v = problem.at.h, problem.at.v
    return (
        (problem.groups == 1 or Unsupported("more than one group"))
        and (h.out_step == v.in_step == v.in_tap == v.out_step == 1 or Unsupported("a stride or dilation"))
        and (problem.read[1] % 2 == v.count % 2 == v.in_start % 2 == 0 or Unsupported("an odd number of columns"))
        and (len(v.taps) % 2 == 1 < len(v.taps) or Unsupported("a kernel width other than 3, 5, 7 ..."))
        and ((problem.C % 16 == 0 < problem.C and problem.M > 0) or Unsupported("input channels, not a multiple of 16"))
        and ((problem.x_boxes and problem.boxes(2 * problem.taps * problem.C)) or NO_BOXES)
        and (problem.pool is None or _can_pool(problem) or Unsupported("a padded pool, or channels that fill no tile"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """Estimate microseconds: a pixel has (S + 1) / S times the products; pairs of up to 32 channels fill a tile.

    32->64 5x5, 10,000 images of 12x12: 0.139 ms in place of 0.172; 64->32 0.198 in place of 0.316. Large images, whose
    runs touch many pages, showed no gain.
    """
    if problem.paced and not problem.pool:
        # Stored value by value: 1x5 272->9 at 18x18, 326 images, 855 us.
        odd = costs.relative(problem, "pair, odd") if problem.M % 2 else 1.0
        band = 2 * problem.M * len(problem.at.h.taps) * (len(problem.at.v.taps) + 1) * problem.C
        return (
            odd * batch_tiled.estimate(_pairs(problem))
            + 3 * selection.of(problem.target).launch
            + costs.band_time(problem, band)
        )
    S = len(problem.at.v.taps)
    factor = (S + 1) / S * (1.0 if problem.M > 32 else 32 / costs.LEAST_COLUMNS)
    if min(problem.C, problem.M) > 32:
        factor *= costs.relative(problem, "pair, full")
    if costs.pages(problem) > 1:
        factor = costs.relative(problem, "pair, large") * costs.reading(problem) * costs.pages(problem)
    products = factor * costs.dense(problem)
    time = costs.microseconds(problem, NAME, products, costs.outputs(problem) / 2)
    return costs.run_factor(problem, problem.images) * time


def prepare(problem: Problem) -> Product:
    h, v, _, _ = problem.at
    taps = (len(v.taps) + 1) // 2
    band = bands.prepare(problem, 2, taps * 2 * problem.C, 2 * problem.M, transposed=True)
    if problem.pool:
        return Product(band, _prepare_pooled(problem, h, _pair_phase(v), taps * 2 * problem.C))
    return Product(band, batch_tiled.prepare(_pairs(problem)))


def run(prepared: Product, t: Tensors) -> None:
    band = prepared.weights.of(t.w)
    bias, scale = repeated(t.bias), repeated(t.scale)
    if prepared.launch.kernel is conv_paired_pool_kernel:
        prepared.launch.run(t.x, band, bias, scale, t.y)
    else:
        batch_tiled.run(prepared.launch, Tensors(t.x, band, t.y, bias, scale, t.z))


def _pair_phase(v: Phase) -> Phase:
    """Return the phase from pairs to pairs."""
    return Phase(0, 1, v.count // 2, v.in_start // 2, 1, 1, tuple(range((len(v.taps) + 1) // 2)))


def _pairs(problem: Problem) -> Problem:
    """Return the problem of pairs, with twice the channels."""
    h, v, (H, W), (OH, OW) = problem.at
    phases = Phases(h, _pair_phase(v), (H, W // 2), (OH, OW // 2))
    return problem._replace(direction=PHASE, C=2 * problem.C, M=2 * problem.M, strides=(), phases=phases)


def _can_pool(problem: Problem) -> bool:
    """Return whether both pixels of a pair are in one tile, and every tap is inside."""
    h, v, (H, W), _ = problem.at
    C, M = problem.C, problem.M
    one_tile = M >= 16 and M & (M - 1) == 0 and M <= 64 and 2 * C & -2 * C >= 32
    return one_tile and all_inside(h, H) and all_inside(v, W) and h.out_start == 0 and min(h.count, v.count) > 1


def _prepare_pooled(problem: Problem, h: Phase, v: Phase, reach: int) -> launch.Prepared:
    """Prepare the pooled launch, on x [N, H, W / 2, 2 * C] and bands [2 * M, R, reach]."""
    H, W = problem.read[0], problem.read[1] // 2
    QH, QW = problem.written
    M, R, row = problem.M, len(h.taps), 2 * problem.C
    tile = problem.tile("conv_pair_pool", M=problem.images, K=row & -row)
    sizes = {**tile.options, "BLOCK_K": min(tile["BLOCK_K"], row & -row)}  # a block must end at a pair's last channel
    scalars = (problem.N, W, QH, QW, M, h.in_start, v.in_start, R * reach // sizes["BLOCK_K"], reach)
    meta = {
        "ROW": row, "IN_STEP_H": h.in_step, "IN_TAP_H": h.in_tap, "NP": 2 * M, **problem.constants,
        **problem.flags("SAVE_Z"), **dependent_launch.options(target=problem.target), **sizes,
    }  # fmt: skip
    descriptors = (
        Box.of_rows(problem.N, H * W * row, (tile["BLOCK_M"], sizes["BLOCK_K"])),
        Box.of_rows(2 * M, R * reach, (2 * M, sizes["BLOCK_K"])),
    )
    grid = launch.cdiv(problem.N, tile["BLOCK_M"]) * QH * QW
    return launch.Prepared(conv_paired_pool_kernel, (grid,), scalars, meta, descriptors)
