"""The banded form, for few channels: one row of the GEMM is a group of neighbouring output pixels.

With 1, 3 or 12 channels a tap has too few values to load at once and to fill a matrix instruction with. But in
channels-last memory the inputs that G neighbouring outputs need from one row of an image lie side by side, and so do
the G * M results. So for every row r of the filter

    y[n, oh, g, (p, m)] += sum over k of x[n, h(oh, r), start(g) + k] band[r, k, (p, m)]
    band[r, (p * stride + s) * C + c, (p, m)] = w[m, r, s, c],  0 elsewhere

a product with a band (Toeplitz) matrix, made once per call. It multiplies zeros, on matrix units that would be idle,
and in exchange loads and stores whole rows. Padding is a mask. An input that is not finite makes outputs NaN within the
width of the band, and with `two_rows` in the other row of a pair. The weight gradient is the same product turned round:
the gradient of the band, in shares of the rows whose sums are added in order, folded back by adding the G places of
each weight.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.kernels import early, launch, reduce
from minidl.kernels.conv import held, two_rows
from minidl.kernels.conv.bands import band, bands_of, group_of, in_rows, near, padded, store_groups
from minidl.kernels.conv.geometry import Geometry, Walk
from minidl.kernels.conv.problem import MANY, Epilogue
from minidl.kernels.early import wait


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
    # Without padding every filter row lies in the image; and where the last group ends inside it, every column.
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


def takes(x: torch.Tensor, w: torch.Tensor, h: Walk, v: Walk, groups: int, pool: bool = False) -> bool:
    """Whether the form can correlate x [N, H, W, C] with w [M, JH, JW, C] on these walks."""
    plain = groups == 1 and v.in_tap == 1 and h.out_step == 1 and v.out_step == 1 and near(x, h)
    return plain and w.numel() > 0 and band(w.shape[3], w.shape[0], w.shape[2], v.in_step, v.count, pool) is not None


def takes_grad_weight(x: torch.Tensor, dy: torch.Tensor, geometry: Geometry) -> bool:
    """Whether the form can find the weight gradient of x [N, H, W, C] and dy [N, OH, OW, M]."""
    h, v = geometry.h.forward(), geometry.w.forward()
    plain = geometry.groups == 1 and v.in_tap == 1 and near(x, h)
    return plain and band(x.shape[3], dy.shape[3], len(v.taps), v.in_step, v.count, False) is not None


def correlate(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, h: Walk, v: Walk, epilogue: Epilogue, precision: str
) -> None:
    """Write the outputs of one pair of walks into y. x [N, H, W, C], w [M, JH, JW, C], y [N, OH, OW, M] or pooled."""
    N, H, W, C = x.shape
    M, R, S, _ = w.shape
    if two_rows.takes(x, w, h, v, epilogue):
        two_rows.correlate(x, w, y, h, v, epilogue, precision)
        return
    if held.takes(x, w, h, v, epilogue, precision):
        held.correlate(x, w, y, h, v, epilogue, precision)
        return
    found = band(C, M, S, v.in_step, v.count, epilogue.pool is not None)
    assert found is not None
    G, KP, NP = found
    step = v.in_step * C
    bands = bands_of(w, G, step, KP, NP, pool=epilogue.pool is not None)
    q_h, q_w = (h.count // 2 * 2, v.count // 2 * 2) if epilogue.pool else (h.count, v.count)
    groups = launch.cdiv(q_w, G)
    rows = N * q_h * groups
    tile = launch.tile("conv_banded", x.dtype, floor=16, precision=precision, M=rows, K=KP, N=NP)
    sizes = _sizes(tile, KP)
    # Small bands stay in L1: the 7x7 layer of one channel takes 0.70 ms, and 0.86 ms through boxes; with 128 rows of
    # bands (12 channels) it is 1.06 and 0.97 ms.
    boxes = launch.boxes() and x.dtype != torch.float64 and KP >= 64
    band_: Any = bands
    if boxes:
        band_ = TensorDescriptor(bands.view(R * KP, NP), [R * KP, NP], [NP, 1], [sizes["BLOCK_K"], NP])
    launch.run(
        conv_banded_kernel, (launch.cdiv(rows, tile["BLOCK_M"]),), x, band_, epilogue.bias, epilogue.scale, y,
        epilogue.z, rows, H, h.in_start,
        QH=q_h, QW=q_w, G=G, GROUPS=groups, M=M, R=R, WC=W * C, IN_W=v.in_start * C, STEP=step,
        IN_STEP_H=h.in_step, IN_TAP_H=h.in_tap, PADDED_H=padded(h, H), WIDE=rows >= MANY, BOXES=boxes,
        ACC=launch.acc(x.dtype), PRECISION=precision, KP=KP, NP=NP, **epilogue.flags, **early.options(), **sizes,
    )  # fmt: skip


def grad_weight(x: torch.Tensor, dy: torch.Tensor, geometry: Geometry, precision: str) -> torch.Tensor:
    """The weight gradient [M, R, S, C] of a convolution of x [N, H, W, C] with output gradient dy [N, OH, OW, M]."""
    N, H, W, C = x.shape
    h, v, M = geometry.h.forward(), geometry.w.forward(), dy.shape[3]
    R, S = len(h.taps), len(v.taps)
    found = band(C, M, S, v.in_step, v.count, False)
    assert found is not None
    G, KP, NP = found
    step = v.in_step * C
    groups = launch.cdiv(v.count, G)
    rows = N * h.count * groups
    tile = launch.tile("conv_banded_grad_weight", x.dtype, floor=16, precision=precision, M=rows, K=R * KP, N=NP)
    tiles = launch.cdiv(R * KP, tile["BLOCK_K"])
    blocks = launch.cdiv(rows, tile["BLOCK_M"])
    share = launch.cdiv(blocks, max(1, min(4 * launch.processors() // tiles, blocks // 8)))
    shares = launch.cdiv(blocks, share)
    partial = torch.empty(shares, R, KP, NP, dtype=launch.acc_torch(x.dtype), device=x.device)
    launch.run(
        conv_banded_grad_weight_kernel, (tiles, shares), dy, x, partial,
        rows, H, h.in_start, share * tile["BLOCK_M"],
        QH=h.count, QW=v.count, G=G, GROUPS=groups, M=M, R=R, WC=W * C, IN_W=v.in_start * C, STEP=step,
        IN_STEP_H=h.in_step, IN_TAP_H=h.in_tap, WIDE=rows >= MANY,
        ACC=launch.acc(x.dtype), PRECISION=precision, KP=KP, NP=NP, **early.options(), **tile.options,
    )  # fmt: skip
    bands = reduce.sum_rows(partial.view(shares, R * KP * NP)) if shares > 1 else partial
    dw = torch.empty(M, R, S, C, dtype=x.dtype, device=x.device)
    block = launch.tile("conv_band", x.dtype, total=dw.numel())
    launch.run(
        conv_band_fold_kernel, (launch.cdiv(dw.numel(), block["BLOCK"]),), bands, dw, dw.numel(), M, G,
        SC=S * C, STEP=step, R=R, KP=KP, NP=NP, ACC=launch.acc(x.dtype), **early.options(), **block.options,
    )  # fmt: skip
    return dw


def _sizes(tile: launch.Tile, KP: int) -> dict[str, int]:
    """The tile's sizes and options; a band has whole blocks of K."""
    return {**tile.options, "BLOCK_K": min(tile["BLOCK_K"], KP)}
