"""Batch norm in training and its gradient, each in two launches, for what has few bands of rows.

Formulas, memory and the launches over bands are those of `norm`. Here each program of the second launch joins the bands
of its channels itself, before it walks its own band, so that nothing waits for a launch that does only this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels import activation
from minidl.kernels.activation import Activation, activate
from minidl.kernels.norm import (
    Buffers,
    Statistics,
    batch_norm_stats_kernel,
    batch_norm_sums_kernel,
    channel,
    copy_back,
    dense,
    options,
    rows_back,
    rows_of,
    settle,
    shaped,
)  # fmt: skip
from minidl.kernels.reduce import whole
from minidl.runtime import launch
from minidl.runtime.early import wait


@triton.jit
def batch_norm_pair_kernel(
    p_x, p_y, p_means, p_m2s, p_mean, p_rstd, p_weight, p_bias, p_running_mean, p_running_var, p_tracked,
    M, C, band, bands,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr, RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_C channels from all of their bands, at most BLOCK_B; y of one band."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_b = tl.arange(0, BLOCK_B).to(tl.int64)
    m_bc = (o_b < bands)[:, None] & m_c[None, :]
    o_bc = (o_b * C)[:, None] + o_c[None, :]
    b_means = tl.load(p_means + o_bc, mask=m_bc, other=0).to(tl.float64)  # [BLOCK_B, BLOCK_C]
    b_m2s = tl.load(p_m2s + o_bc, mask=m_bc, other=0).to(tl.float64)  # [BLOCK_B, BLOCK_C]
    b_n = tl.where(o_b < bands, tl.minimum(M - o_b * band, band), 0).to(tl.float64)[:, None]
    b_count = tl.full((BLOCK_C,), 0.0, tl.float64) + M
    b_mean = tl.sum(b_n * b_means, axis=0) / b_count
    b_apart = b_means - b_mean[None, :]
    b_m2 = tl.sum(b_m2s + b_n * (b_apart * b_apart), axis=0)
    b_mean += tl.load(p_x + o_c, mask=m_c, other=0).to(tl.float64)
    b_share = tl.full((BLOCK_C,), MOMENTUM, tl.float64)
    if RUNNING and CUMULATIVE:
        b_share = 1.0 / (tl.full((BLOCK_C,), 0.0, tl.float64) + tl.load(p_tracked))
    m_first = m_c & (tl.program_id(1) == 0)
    b_rstd = settle(
        b_mean, b_m2, b_count, b_share, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_first, EPS, RUNNING
    )  # fmt: skip
    b_mean = b_mean.to(ACC)[None, :]
    b_scale = b_rstd.to(ACC)[None, :] * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    b_bias = channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    start = tl.program_id(1).to(tl.int64) * band
    end = tl.minimum(start + band, M)
    for m in range(0, band, BLOCK_M):
        o_m = start + m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < end)[:, None] & m_c[None, :]
        o_mc = (o_m * C)[:, None] + o_c[None, :]
        b_z = tl.load(p_x + o_mc, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
        b_y = activate((b_z - b_mean) * b_scale + b_bias, ACT, SLOPE)
        tl.store(p_y + o_mc, b_y.to(p_y.dtype.element_ty), mask=m_mc)


@triton.jit
def batch_norm_grad_pair_kernel(
    p_dy, p_x, p_dx, p_sums, p_dweight, p_dbias, p_mean, p_rstd, p_weight, p_bias, M, C, band, bands,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of BLOCK_C channels from the sums [bands, 2, C]; dx of one band."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_b = tl.arange(0, BLOCK_B).to(tl.int64)
    m_bc = (o_b < bands)[:, None] & m_c[None, :]
    o_bc = (o_b * (2 * C))[:, None] + o_c[None, :]
    b_sum = tl.sum(tl.load(p_sums + o_bc, mask=m_bc, other=0), axis=0)[None, :]  # [1, BLOCK_C]
    b_sum_n = tl.sum(tl.load(p_sums + C + o_bc, mask=m_bc, other=0), axis=0)[None, :]  # [1, BLOCK_C]
    b_mean = channel(p_mean, o_c, m_c, True, 0.0, ACC)
    b_rstd = channel(p_rstd, o_c, m_c, True, 0.0, ACC)
    b_scale = b_rstd * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    b_bias = channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    o_row, m_row = o_c[None, :], (m_c & (tl.program_id(1) == 0))[None, :]
    if p_dweight is not None:
        tl.store(p_dweight + o_row, b_sum_n.to(p_dweight.dtype.element_ty), mask=m_row)
    if p_dbias is not None:
        tl.store(p_dbias + o_row, b_sum.to(p_dbias.dtype.element_ty), mask=m_row)
    b_share = 1.0 / (tl.full((1, BLOCK_C), 0.0, ACC) + M)
    b_sum *= b_share
    b_sum_n = b_sum_n * b_share * b_rstd
    start = tl.program_id(1).to(tl.int64) * band
    end = tl.minimum(start + band, M)
    for m in range(0, band, BLOCK_M):
        o_m = start + m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < end)[:, None] & m_c[None, :]
        o_mc = (o_m * C)[:, None] + o_c[None, :]
        b_x, b_dz = rows_back(p_dy, p_x, b_mean, b_scale, b_bias, o_mc, m_mc, ACT, SLOPE, ACC)
        b_dx = (b_dz - (b_sum + b_x * b_sum_n)) * b_scale
        tl.store(p_dx + o_mc, b_dx.to(p_dx.dtype.element_ty), mask=m_mc)


MOST, PROGRAMS = 64, 264


def _bands(M, C, tile):
    tiles = launch.cdiv(C, tile["BLOCK_C"])
    wanted = max(1, min(MOST, PROGRAMS // tiles))
    band = launch.cdiv(launch.cdiv(M, tile["BLOCK_M"]), wanted) * tile["BLOCK_M"]
    bands = launch.cdiv(M, band)
    return band, bands, (tiles, bands)


def normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    buffers: Buffers | None,
    momentum: float | None,
    eps: float,
    act: Activation,
) -> tuple[torch.Tensor, Statistics]:
    """What `norm.normalise` makes of x [N, C, ...] with the statistics of `norm.batch_statistics`, and these."""
    name, slope = activation.parse(act)
    rows = rows_of(x)
    M, C = rows.shape
    tile = launch.tile("norm_pair", x.dtype, M=M, C=C)
    band, bands, grid = _bands(M, C, tile)
    acc = launch.acc_torch(x.dtype)
    means, m2s = (torch.empty(bands, C, dtype=acc, device=x.device) for _ in range(2))
    running, batches = ((None, None), None) if buffers is None else (buffers[:2], buffers.batches)
    moved = [dense(buffer) for buffer in running]
    launch.run(
        batch_norm_stats_kernel, grid, rows, means, m2s, batches, M, C, band, TRACKED=batches is not None,
        ACC=launch.acc(x.dtype), **options(rows), **tile.options,
    )  # fmt: skip
    y = torch.empty_like(rows)
    found = Statistics(*(torch.empty(C, dtype=acc, device=x.device) for _ in range(2)))
    launch.run(
        batch_norm_pair_kernel, grid, rows, y, means, m2s, *found, dense(weight), dense(bias), *moved, batches,
        M, C, band, bands, EPS=float(eps), MOMENTUM=0.0 if momentum is None else float(momentum),
        RUNNING=buffers is not None, CUMULATIVE=momentum is None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, ACT=activation.CODES[name], SLOPE=slope, ACC=launch.acc(x.dtype),
        BLOCK_B=triton.next_power_of_2(bands), **options(rows), **tile.options,
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
    tile = launch.tile("norm_pair", x.dtype, M=M, C=C)
    band, bands, grid = _bands(M, C, tile)
    vectors = *with_, dense(weight), dense(bias)
    meta = {
        "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "ACT": activation.CODES[name], "SLOPE": slope,
        "ACC": launch.acc(x.dtype), **options(rows), **tile.options,
    }  # fmt: skip
    sums = torch.empty(bands, 2, C, dtype=launch.acc_torch(x.dtype), device=x.device)
    launch.run(batch_norm_sums_kernel, grid, rows_dy, rows, sums, *vectors, M, C, band, **meta)
    dx = torch.empty_like(rows)
    dweight, dbias = (
        None if given is None else torch.empty(C, dtype=given.dtype, device=x.device) for given in (weight, bias)
    )
    launch.run(
        batch_norm_grad_pair_kernel, grid, rows_dy, rows, dx, sums, dweight, dbias, *vectors, M, C, band, bands,
        BLOCK_B=triton.next_power_of_2(bands), **meta,
    )  # fmt: skip
    return shaped(dx, x.shape), dweight, dbias
