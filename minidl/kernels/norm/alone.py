"""Batch norm in training and its gradient, each in one launch, for few values per channel.

Formulas and memory are those of `norm`. A program has all rows of BLOCK_C channels: it walks them for their statistics
(or sums), and once more, from the cache, for the result. So nothing waits for other launches, of which `norm` has three
forward and three back: at 2 us each they are most of the time up to a few thousand rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels import activation
from minidl.kernels.activation import Activation, activate
from minidl.kernels.norm.gradient import band_sums, rows_back
from minidl.kernels.norm.rows import channel, dense, options, rows_of, shaped
from minidl.kernels.norm.statistics import Buffers, Statistics, band_statistics, copy_back, count_batch, settle
from minidl.kernels.reduce import whole
from minidl.runtime import launch
from minidl.runtime.early import wait

# The most values per channel, and those of a FEW channels. On an H100, forward and back, 64 channels of 1024 take 11 us
# in place of 12, 11 of 1800 take 8 in place of 11, but 512 of 3920 take 31 in place of 25, 64 of 2883 22 for 15.
MOST, MOST_OF_FEW, FEW = 1024, 2048, 64


@triton.jit
def batch_norm_alone_kernel(
    p_x, p_y, p_mean, p_rstd, p_weight, p_bias, p_running_mean, p_running_var, p_tracked, M, C,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr, RUNNING: tl.constexpr, TRACKED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_C channels, the running ones moved towards them, and y."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    none = tl.full((), 0, tl.int64)
    rows = none + M
    b_first, b_mean, b_m2 = band_statistics(p_x, o_c, m_c, none, rows, M, C, ACC, BLOCK_M, BLOCK_C)
    b_mean = b_mean.to(tl.float64) + b_first.to(tl.float64)
    b_count = tl.full((BLOCK_C,), 0.0, tl.float64) + M
    b_share = tl.full((BLOCK_C,), MOMENTUM, tl.float64)
    b_rstd = settle(
        b_mean, b_m2, b_count, b_share, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_c, EPS, RUNNING
    )  # fmt: skip
    if TRACKED:
        count_batch(p_tracked, tl.program_id(0) == 0)
    b_mean = b_mean.to(ACC)[None, :]
    b_scale = b_rstd.to(ACC)[None, :] * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    b_bias = channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    for m in range(0, M, BLOCK_M):
        o_m = m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < M)[:, None] & m_c[None, :]
        o_mc = (o_m.to(tl.int64) * C)[:, None] + o_c[None, :]
        b_z = tl.load(p_x + o_mc, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
        b_y = activate((b_z - b_mean) * b_scale + b_bias, ACT, SLOPE)
        tl.store(p_y + o_mc, b_y.to(p_y.dtype.element_ty), mask=m_mc)


@triton.jit
def batch_norm_grad_alone_kernel(
    p_dy, p_x, p_dx, p_dweight, p_dbias, p_mean, p_rstd, p_weight, p_bias, M, C,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dweight, dbias and dx of BLOCK_C channels."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_mean = channel(p_mean, o_c, m_c, True, 0.0, ACC)
    b_rstd = channel(p_rstd, o_c, m_c, True, 0.0, ACC)
    b_scale = b_rstd * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    b_bias = channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    none = tl.full((), 0, tl.int64)
    b_sum, b_sum_n = band_sums(
        p_dy, p_x, b_mean, b_scale, b_bias, o_c, m_c, none, none + M, M, C, ACT, SLOPE, ACC, BLOCK_M, BLOCK_C
    )  # fmt: skip
    b_sum = b_sum[None, :]
    b_sum_n = b_sum_n[None, :] * b_rstd
    o_row, m_row = o_c[None, :], m_c[None, :]
    if p_dweight is not None:
        tl.store(p_dweight + o_row, b_sum_n.to(p_dweight.dtype.element_ty), mask=m_row)
    if p_dbias is not None:
        tl.store(p_dbias + o_row, b_sum.to(p_dbias.dtype.element_ty), mask=m_row)
    b_share = 1.0 / (tl.full((1, BLOCK_C), 0.0, ACC) + M)
    b_sum *= b_share
    b_sum_n = b_sum_n * b_share * b_rstd
    for m in range(0, M, BLOCK_M):
        o_m = m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < M)[:, None] & m_c[None, :]
        o_mc = (o_m.to(tl.int64) * C)[:, None] + o_c[None, :]
        b_x, b_dz = rows_back(p_dy, p_x, b_mean, b_scale, b_bias, o_mc, m_mc, ACT, SLOPE, ACC)
        b_dx = (b_dz - (b_sum + b_x * b_sum_n)) * b_scale
        tl.store(p_dx + o_mc, b_dx.to(p_dx.dtype.element_ty), mask=m_mc)


def fits(x: torch.Tensor) -> bool:
    """Whether x [N, C, ...] has few enough values per channel."""
    return 0 < x.numel() <= (MOST_OF_FEW if MOST and x.shape[1] <= FEW else MOST) * x.shape[1]


def normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    buffers: Buffers | None,
    momentum: float,
    eps: float,
    act: Activation,
) -> tuple[torch.Tensor, Statistics]:
    """What `norm.normalise` makes of x [N, C, ...] with the statistics of `norm.batch_statistics`, and these."""
    name, slope = activation.parse(act)
    rows = rows_of(x)
    M, C = rows.shape
    tile = launch.tile("norm_alone", x.dtype, M=M, C=C)
    y = torch.empty_like(rows)
    found = Statistics(*(torch.empty(C, dtype=launch.acc_torch(x.dtype), device=x.device) for _ in range(2)))
    running, batches = ((None, None), None) if buffers is None else (buffers[:2], buffers.batches)
    moved = [dense(buffer) for buffer in running]
    launch.run(
        batch_norm_alone_kernel, (launch.cdiv(C, tile["BLOCK_C"]),), rows, y, *found, dense(weight), dense(bias),
        *moved, batches, M, C, EPS=float(eps), MOMENTUM=float(momentum), RUNNING=buffers is not None,
        TRACKED=batches is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        ACT=activation.CODES[name], SLOPE=slope, ACC=launch.acc(x.dtype), **options(rows), **tile.options,
    )  # fmt: skip
    copy_back(running, moved)
    return shaped(y, x.shape), found


def normalised_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    with_: Statistics,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    act: Activation,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias) of `norm.normalise_grad` in training, the last two where there is a weight or a bias."""
    name, slope = activation.parse(act)
    rows_dy, rows = rows_of(dy), rows_of(x)
    M, C = rows.shape
    tile = launch.tile("norm_alone", x.dtype, M=M, C=C)
    dx = torch.empty_like(rows)
    dweight, dbias = (
        None if given is None else torch.empty(C, dtype=given.dtype, device=x.device) for given in (weight, bias)
    )
    launch.run(
        batch_norm_grad_alone_kernel, (launch.cdiv(C, tile["BLOCK_C"]),), rows_dy, rows, dx, dweight, dbias, *with_,
        dense(weight), dense(bias), M, C, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        ACT=activation.CODES[name], SLOPE=slope, ACC=launch.acc(x.dtype), **options(rows), **tile.options,
    )  # fmt: skip
    return shaped(dx, x.shape), dweight, dbias
