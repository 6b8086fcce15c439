"""The weight gradient in the banded form, for few channels.

The product of `banded` turned round: the gradient of the bands, in shares of the rows whose sums are added in order,
folded back by adding the G places of each weight. An input that is not finite makes all weights NaN that a band has at
its column.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import reduce
from minidl.kernels.conv import banded, bands, costs
from minidl.kernels.conv.bands import group_of
from minidl.kernels.conv.problem import GRAD_WEIGHT, MANY, No, Problem, Tensors
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "banded"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_banded_grad_weight", "conv_band")


@triton.jit
def conv_banded_grad_weight_kernel(
    p_dy, p_x, p_partial, rows, H, in_h, share,
    QH: tl.constexpr, QW: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, WC: tl.constexpr, IN_W: tl.constexpr, STEP: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_TAP_H: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    KP: tl.constexpr, NP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial [shares, R * KP, NP]: the gradient of BLOCK_K rows of the bands, over one share of the rows of dy."""
    wait(EARLY)
    o_rk = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_rk = o_rk < R * KP
    r = o_rk // KP
    o_k = o_rk % KP
    o_tap = r * (IN_TAP_H * WC) + o_k
    o_column = tl.arange(0, NP)
    first = tl.program_id(1) * share
    if WIDE:
        first = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(first + share, rows)
    b_acc = tl.zeros((BLOCK_K, NP), dtype=ACC)
    tl.assume(share > 0)
    for i in range(0, share, BLOCK_M):
        i_first = first + i
        n, q_h, g = group_of(i_first, BLOCK_M, QH, GROUPS, False)
        m_row = i_first + tl.arange(0, BLOCK_M) < end
        start = IN_W + g * (G * STEP)
        x_h = in_h + q_h * IN_STEP_H
        h = x_h[:, None] + (r * IN_TAP_H)[None, :]
        at = start[:, None] + o_k[None, :]
        m_x = (m_row[:, None] & m_rk[None, :]) & (h >= 0) & (h < H) & (at >= 0) & (at < WC)
        o_x = (n * H + x_h) * WC + start
        b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        o_dy = ((n * QH + q_h) * QW + g * G) * M
        limit = tl.minimum(G, QW - g * G) * M
        m_dy = m_row[:, None] & (o_column[None, :] < limit[:, None])
        b_dy = tl.load(p_dy + o_dy[:, None] + o_column[None, :], mask=m_dy, other=0.0)  # [BLOCK_M, NP]
        b_acc = tl.dot(tl.trans(b_x), b_dy, b_acc, input_precision=PRECISION, out_dtype=ACC)
    p_partial += tl.program_id(1).to(tl.int64) * (R * KP * NP)
    tl.store(p_partial + o_rk[:, None] * NP + o_column[None, :], b_acc, mask=m_rk[:, None] & (o_column < NP)[None, :])


@triton.jit
def conv_band_fold_kernel(
    p_bands, p_dw, total, M, G,
    SC: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw [M, R, SC]: the places of each weight in the bands [R, KP, NP], added pixel by pixel."""
    wait(EARLY)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_o = o < total
    sc = o % SC
    r = o // SC % R
    column = o // (SC * R)
    o_first = (r * KP + sc) * NP + column
    b_dw = tl.zeros((BLOCK,), dtype=ACC)
    for p in range(G):
        b_dw += tl.load(p_bands + o_first + p * (STEP * NP + M), mask=m_o, other=0.0)
    tl.store(p_dw + o, b_dw.to(p_dw.dtype.element_ty), mask=m_o)


def able(problem: Problem) -> bool | No:
    return banded.able(problem)


def estimate(problem: Problem) -> float:
    """With two launches more; small ones take 17 to 21 us, 3->32 3x3 stride 2 at 224x224 1.5 times the products.

    3->64 3x3 at 224x224, 18 images: 144 us; 2x2 stride 2, 8->53 at 242x242, whose rows begin at no multiple of 4 bytes:
    480 us.
    """
    time = costs.microseconds(problem, NAME, banded.products(problem))
    if problem.paced and problem.M > banded.LEAST_APART and problem.M % 2:
        time *= costs.relative(problem, "banded, weight, odd")
    return costs.beside_tiles(problem, "banded, weight", time)


class Prepared(NamedTuple):
    """The product, whose partial sums and gradient have these shapes, and how the bands are folded."""

    launch: launch.Prepared
    partial: tuple[int, ...]
    shape: tuple[int, ...]
    fold: launch.Prepared


def prepare(problem: Problem) -> Prepared:
    M, R, S, C = problem.shape
    G, KP, NP = banded.groups_of(problem)
    constants = bands.constants(problem, G, KP, NP)
    rows = problem.N * constants["QH"] * constants["GROUPS"]
    tile = problem.tile("conv_banded_grad_weight", M=rows, K=R * KP, N=NP)
    tiles = launch.cdiv(R * KP, tile["BLOCK_K"])
    blocks = launch.cdiv(rows, tile["BLOCK_M"])
    share = launch.cdiv(blocks, max(1, min(4 * problem.processors // tiles, blocks // 8)))
    shares = launch.cdiv(blocks, share)
    scalars = (rows, problem.read[0], problem.at.h.in_start, share * tile["BLOCK_M"])
    meta = {**constants, "WIDE": rows >= MANY, **tile.options}
    total = M * R * S * C
    block = problem.tile("conv_band", floor=1, total=total)
    shared = {name: constants[name] for name in ("STEP", "R", "KP", "NP", "ACC")}
    fold = {"SC": S * C, **shared, **early.options(target=problem.target), **block.options}
    return Prepared(
        launch.Prepared(conv_banded_grad_weight_kernel, (tiles, shares), scalars, meta),
        (shares, R * KP * NP), problem.shape,
        launch.Prepared(conv_band_fold_kernel, (launch.cdiv(total, block["BLOCK"]),), (total, M, G), fold),
    )  # fmt: skip


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    partial = torch.empty(prepared.partial, dtype=launch.acc_torch(t.x.dtype), device=t.x.device)
    prepared.launch.run(t.w, t.x, partial)
    found = reduce.sum_rows(partial) if prepared.partial[0] > 1 else partial
    dw = torch.empty(prepared.shape, dtype=t.x.dtype, device=t.x.device)
    prepared.fold.run(found, dw)
    return dw
