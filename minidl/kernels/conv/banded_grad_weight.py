"""The weight gradient in the "banded" form, for few channels.

The gradient of the bands of `banded` is summed in shares of the rows, which are added in a fixed order; adding the G
entries of each weight folds it into dw. With a stride of 1 x and dy may be exchanged, with reversed taps, which is
faster if dy has fewer channels or better aligned rows. A non-finite value of either makes all weights NaN that a band
has in its column.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import reduce
from minidl.kernels.conv import banded, costs, tile_throughput
from minidl.kernels.conv.banded import Bands, group_of
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "banded"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_banded_grad_weight", "conv_band")
# Read time by bytes per load, relative to 16.
LOADS, FOLD = 2.5, 4.0  # time of loads across K, relative to loads along it; us of folding the bands
PIECES = {16: 1.0, 8: 1.2, 4: 3.0, 2: 6.0}


@triton.jit
def conv_banded_grad_weight_kernel(
    p_dy, p_x, p_partial, rows, H, in_h, share,
    bands: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """partial [shares, R * KP, NP]: the gradient of BLOCK_K rows of the bands, over one share of the rows of dy."""
    wait(EARLY)
    G: tl.constexpr = bands.G
    NP: tl.constexpr = bands.NP
    M: tl.constexpr = bands.M
    RK: tl.constexpr = bands.R * bands.KP
    o_rk = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_rk = o_rk < RK
    r = o_rk // bands.KP
    o_k = o_rk % bands.KP
    o_tap = r * (bands.IN_TAP_H * bands.WC) + o_k
    o_column = tl.arange(0, NP)
    first = tl.program_id(1) * share
    if bands.WIDE:
        first = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(first + share, rows)
    b_acc = tl.zeros((BLOCK_K, NP), dtype=bands.ACC)
    tl.assume(share > 0)
    for i in range(0, share, BLOCK_M):
        i_first = first + i
        n, q_h, g = group_of(i_first, BLOCK_M, bands, False)
        m_row = i_first + tl.arange(0, BLOCK_M) < end
        start = bands.IN_W + g * (G * bands.STEP)
        x_h = in_h + q_h * bands.IN_STEP_H
        h = x_h[:, None] + (r * bands.IN_TAP_H)[None, :]
        at = start[:, None] + o_k[None, :]
        m_x = (m_row[:, None] & m_rk[None, :]) & (h >= 0) & (h < H) & (at >= 0) & (at < bands.WC)
        o_x = (n * H + x_h) * bands.WC + start
        b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        o_dy = ((n * bands.QH + q_h) * bands.QW + g * G) * M
        limit = tl.minimum(G, bands.QW - g * G) * M
        m_dy = m_row[:, None] & (o_column[None, :] < limit[:, None])
        b_dy = tl.load(p_dy + o_dy[:, None] + o_column[None, :], mask=m_dy, other=0.0)  # [BLOCK_M, NP]
        b_acc = tl.dot(tl.trans(b_x), b_dy, b_acc, input_precision=bands.PRECISION, out_dtype=bands.ACC)
    p_partial += tl.program_id(1).to(tl.int64) * (RK * NP)
    tl.store(p_partial + o_rk[:, None] * NP + o_column[None, :], b_acc, mask=m_rk[:, None] & (o_column < NP)[None, :])


@triton.jit
def conv_band_fold_kernel(
    p_bands, p_dw, total, M, G,
    SC: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr,
    SWAPPED: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dw [M, R, SC]: the sums of each weight's entries in the bands [R, KP, NP], pixel by pixel.

    SWAPPED: dw [SC / S, R, S, M], from bands with reversed taps.
    """
    wait(EARLY)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_o = o < total
    if SWAPPED:
        column = o % M
        r = R - 1 - o // (M * S) % R
        sc = (S - 1 - o // M % S) * (SC // S) + o // (M * S * R)
    else:
        sc = o % SC
        r = o // SC % R
        column = o // (SC * R)
    o_first = (r * KP + sc) * NP + column
    b_dw = tl.zeros((BLOCK,), dtype=ACC)
    for p in range(G):
        b_dw += tl.load(p_bands + o_first + p * (STEP * NP + M), mask=m_o, other=0.0)
    tl.store(p_dw + o, b_dw.to(p_dw.dtype.element_ty), mask=m_o)


def able(problem: Problem) -> bool | Unsupported:
    supported, other = banded.able(problem), swapped(problem)
    return True if not supported and other is not None and banded.able(other) else supported


def swapped(problem: Problem) -> Problem | None:
    """Return the problem with x and dy exchanged; None with strides."""
    if any(axis.stride > 1 for axis in problem.geometry[:2]):
        return None
    h, w = (
        axis._replace(size=axis.output, output=axis.size, padding=axis.dilation * (axis.kernel - 1) - axis.padding)
        for axis in problem.geometry[:2]
    )
    return problem._replace(geometry=Geometry(h, w, problem.groups), C=problem.M, M=problem.C)


@launch.cached
def cheapest(problem: Problem) -> tuple[Problem, bool]:
    """Return the problem with faster bands, and whether it is swapped."""
    other = swapped(problem)
    if other is None or not banded.able(other):
        return problem, False
    if not banded.able(problem) or _microseconds(other) < _microseconds(problem):
        return other, True
    return problem, False


def estimate(problem: Problem) -> float:
    return _microseconds(cheapest(problem)[0])


def _microseconds(problem: Problem) -> float:
    """Estimate microseconds; rows not aligned to 16 bytes are read in smaller pieces.

    5x5 16->8 at 90x90, 80 images, 73 us, 13->6 330; 3x3 16->8 at 265x265, 264 images, 1041, 11->1 3706.
    """
    G, KP, NP = banded.groups_of(problem)
    x, dy = (PIECES[_bytes(problem, values)] for values in _rows(problem, G))
    loads = LOADS * (KP * x + NP * (1 + dy) / 2) / (KP + NP)  # the gradient's rows are shorter
    at = _cut(problem, costs.outputs(problem) // G)
    steps = tile_throughput.steps(problem, at.blocks, at.tile["BLOCK_M"])
    throughput = tile_throughput.of(problem, at.tile["BLOCK_K"], NP, "weight banded ", loads=loads)
    values = len(problem.at.down.taps) * KP * NP
    work = costs.Work(at.tiles, steps, throughput, "weight", at.shares, values)
    return costs.launch_time(problem, costs.microseconds(problem, work)) + costs.band_time(problem, values) + FOLD


class _Cut(NamedTuple):
    """The tile, the number of tiles of the bands, the blocks of rows, and the shares of these."""

    tile: launch.Tile
    tiles: int
    blocks: int
    shares: int


def _cut(problem: Problem, rows: int) -> _Cut:
    """Return the decomposition of `rows` groups of pixels."""
    G, KP, NP = banded.groups_of(problem)
    R = len(problem.at.down.taps)
    distance = _bytes(problem, _rows(problem, G)[1])
    tile = problem.tile("conv_banded_grad_weight", M=rows, K=R * KP, N=NP, APART=distance)
    tiles = launch.cdiv(R * KP, tile["BLOCK_K"])
    blocks = launch.cdiv(rows, tile["BLOCK_M"])
    share = launch.cdiv(blocks, max(1, min(4 * problem.processors // tiles, blocks // 8)))
    return _Cut(tile, tiles, blocks, launch.cdiv(blocks, share))


def _rows(problem: Problem, G: int) -> tuple[int, int]:
    """Return the greatest common divisor of the row offsets of x, and of dy, in values."""
    across, C, M = problem.at.across, problem.C, problem.M
    return math.gcd(across.in_start * C, G * across.in_step * C, problem.read[1] * C), math.gcd(G * M, across.count * M)


def _bytes(problem: Problem, values: int) -> int:
    """Return the bytes per load of rows whose offsets are multiples of `values`."""
    return math.gcd(values * problem.dtype.itemsize, 16)


class Prepared(NamedTuple):
    """The product, the shapes of its partial sums and of the gradient, and the launch that folds the bands."""

    launch: launch.Prepared
    partial: tuple[int, ...]
    shape: tuple[int, ...]
    fold: launch.Prepared
    swapped: bool


def prepare(problem: Problem) -> Prepared:
    shape = problem.shape
    problem, swap = cheapest(problem)
    M, R, S, C = problem.shape
    bands = Bands.of(problem)
    rows, RK = problem.N * bands.QH * bands.GROUPS, R * bands.KP
    tile, tiles, blocks, shares = _cut(problem, rows)
    share = launch.cdiv(blocks, shares)
    scalars = (rows, problem.read[0], problem.at.down.in_start, share * tile["BLOCK_M"])
    early = dependent_launch.options(target=problem.target)
    meta = {"bands": bands, **early, **tile.options}
    total = M * R * S * C
    block = problem.tile("conv_band", floor=1, total=total)
    fold = {
        "SC": S * C, "S": S, "STEP": bands.STEP, "R": R, "KP": bands.KP, "NP": bands.NP, "SWAPPED": swap,
        "ACC": bands.ACC, **early, **block.options,
    }  # fmt: skip
    return Prepared(
        launch.Prepared(conv_banded_grad_weight_kernel, (tiles, shares), scalars, meta),
        (shares, RK * bands.NP), shape,
        launch.Prepared(conv_band_fold_kernel, (launch.cdiv(total, block["BLOCK"]),), (total, M, bands.G), fold),
        swap,
    )  # fmt: skip


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    partial = torch.empty(prepared.partial, dtype=launch.acc_torch(t.x.dtype), device=t.x.device)
    dy, x = (t.x, t.w) if prepared.swapped else (t.w, t.x)
    prepared.launch.run(dy, x, partial)
    total = reduce.sum_rows(partial) if prepared.partial[0] > 1 else partial
    dw = torch.empty(prepared.shape, dtype=t.x.dtype, device=t.x.device)
    prepared.fold.run(total, dw)
    return dw
