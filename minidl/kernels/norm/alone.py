"""Batch norm in training and its gradient, each in one launch, for few values per channel.

Formulas and memory layout are as in `norm`. A program holds all values of BLOCK_C channels, [STEPS, BLOCK_M, BLOCK_C],
in registers, with the steps of a lane in one thread. This saves launches, of which `norm` needs three forward and three
backward: at 2 us each they dominate up to a few thousand rows. The mean is computed before distances from it are
squared. Lanes are joined in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import Activation, activate
from minidl.kernels.memory_layout import contiguous
from minidl.kernels.norm.launches import Buffers, Statistics, channel, copy_back, epilogue_of, plan_of
from minidl.kernels.norm.layout import dense, in_planes, row_stride, shaped, strided
from minidl.kernels.norm.statistics import count_batch, load_running, store_statistics
from minidl.kernels.norm.values import shifted_and_dz
from minidl.kernels.reduce import as_multiple, opaque
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed

MOST = 1024  # values per channel; more are faster in bands


@triton.jit
def row_numbers(tile: tl.constexpr):
    """Return the numbers of all rows [STEPS, BLOCK_M]."""
    return (tl.arange(0, tile.STEPS) * tile.BLOCK_M)[:, None] + tl.arange(0, tile.BLOCK_M)[None, :]


@triton.jit
def channel_block(M, C, s_x, tile: tl.constexpr):
    """Return this program's channels [BLOCK_C] and their mask; offsets of all their values in y and x, and the mask."""
    o_c = tl.program_id(0) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_c = o_c < C
    o_m = row_numbers(tile)
    o_mc = (o_m * C)[:, :, None] + o_c[None, None, :]
    o_x = o_mc
    if tile.APART:
        o_x = (o_m.to(tl.int64) * row_stride(s_x, C, tile))[:, :, None] + o_c[None, None, :]
    return o_c, m_c, o_mc, o_x, (o_m < M)[:, :, None] & m_c[None, None, :]


@triton.jit
def channel_sum(b_x):
    """Return the sum [BLOCK_C] of all values of channels [STEPS, BLOCK_M, BLOCK_C], in float64."""
    return tl.sum(tl.sum(b_x, axis=0).to(tl.float64), axis=0)


@triton.jit
def batch_norm_alone_kernel(
    p_x, p_y, p_mean, p_rstd, p_weight, p_bias, p_running_mean, p_running_var, p_tracked, sizes, EPS: tl.constexpr,
    MOMENTUM: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """Write statistics of BLOCK_C channels and y, and update the running statistics."""
    wait(EARLY)
    M, C = sizes.M, as_multiple(sizes.C, tile.ALIGN)
    o_c, m_c, o_mc, o_x, m_mc = channel_block(M, C, sizes.s_x, tile)
    b_in = tl.load(p_x + o_x, mask=m_mc, other=0)  # [STEPS, BLOCK_M, BLOCK_C]
    b_first = tl.load(p_x + o_c, mask=m_c, other=0).to(tile.ACC)  # [BLOCK_C]
    b_old_mean, b_old_var = load_running(p_running_mean, p_running_var, o_c, m_c)
    b_mean = channel_sum(tl.where(m_mc, b_in.to(tile.ACC) - b_first[None, None, :], 0.0)) / M
    b_in = opaque(b_in, OPAQUE)
    b_delta = b_in.to(tile.ACC) - b_first[None, None, :] - b_mean.to(tile.ACC)[None, None, :]
    b_delta = tl.where(m_mc, b_delta, 0.0)
    b_m2 = channel_sum(b_delta * b_delta)
    b_mean += b_first.to(tl.float64)
    b_count = tl.full((tile.BLOCK_C,), 0.0, tl.float64) + M
    b_share = tl.full((tile.BLOCK_C,), MOMENTUM, tl.float64)
    b_rstd = store_statistics(
        b_mean, b_m2, b_count, b_share, b_old_mean, b_old_var, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_c,
        EPS,
    )  # fmt: skip
    if p_tracked is not None:
        count_batch(p_tracked, tl.program_id(0) == 0)
    b_scale = (b_rstd.to(tile.ACC)[None, :] * channel(p_weight, o_c, m_c, 1.0, tile.ACC))[None, :, :]
    b_bias = channel(p_bias, o_c, m_c, 0.0, tile.ACC)[None, :, :]
    b_x = opaque(b_in, OPAQUE).to(tile.ACC)
    b_y = activate((b_x - b_mean.to(tile.ACC)[None, None, :]) * b_scale + b_bias, epilogue.ACT, epilogue.SLOPE)
    tl.store(p_y + o_mc, b_y.to(p_y.dtype.element_ty), mask=m_mc)


@triton.jit
def batch_norm_grad_alone_kernel(
    p_dy, p_x, p_so_far, p_dx, p_dweight, p_dbias, p_mean, p_rstd, p_weight, p_bias, sizes,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """Write dweight, dbias and dx of BLOCK_C channels; `so_far` is added to dx."""
    wait(EARLY)
    M, C = sizes.M, as_multiple(sizes.C, tile.ALIGN)
    o_c, m_c, o_mc, o_x, m_mc = channel_block(M, C, sizes.s_x, tile)
    b_mean = channel(p_mean, o_c, m_c, 0.0, tile.ACC)[None, :, :]
    b_rstd = channel(p_rstd, o_c, m_c, 0.0, tile.ACC)
    b_scale = (b_rstd * channel(p_weight, o_c, m_c, 1.0, tile.ACC))[None, :, :]
    b_bias = channel(p_bias, o_c, m_c, 0.0, tile.ACC)[None, :, :]
    b_in = tl.load(p_x + o_x, mask=m_mc, other=0)  # [STEPS, BLOCK_M, BLOCK_C]
    b_dy = tl.load(p_dy + o_mc, mask=m_mc, other=0)  # [STEPS, BLOCK_M, BLOCK_C]
    b_x, b_dz = shifted_and_dz(b_in, b_dy, b_mean, b_scale, b_bias, m_mc, epilogue, tile.ACC)
    b_sum = channel_sum(b_dz).to(tile.ACC)[None, :]
    # A row past the end has dz = 0, but the mean may not be finite.
    b_sum_n = channel_sum(b_dz * tl.where(m_mc, b_x, 0.0)).to(tile.ACC)[None, :] * b_rstd
    if p_dweight is not None:
        tl.store((p_dweight + o_c)[None, :], b_sum_n.to(p_dweight.dtype.element_ty), mask=m_c[None, :])
    if p_dbias is not None:
        tl.store((p_dbias + o_c)[None, :], b_sum.to(p_dbias.dtype.element_ty), mask=m_c[None, :])
    b_share = 1.0 / (tl.full((1, tile.BLOCK_C), 0.0, tile.ACC) + M)
    b_sum = (b_sum * b_share)[None, :, :]
    b_sum_n = (b_sum_n * b_share * b_rstd)[None, :, :]
    b_in, b_dy = opaque(b_in, OPAQUE), opaque(b_dy, OPAQUE)
    b_x, b_dz = shifted_and_dz(b_in, b_dy, b_mean, b_scale, b_bias, m_mc, epilogue, tile.ACC)
    b_dx = (b_dz - (b_sum + b_x * b_sum_n)) * b_scale
    if p_so_far is not None:
        o_so_far = (row_numbers(tile).to(tl.int64) * sizes.s_so_far)[:, :, None] + o_c[None, None, :]
        b_dx += tl.load(p_so_far + o_so_far, mask=m_mc, other=0).to(tile.ACC)
    tl.store(p_dx + o_mc, b_dx.to(p_dx.dtype.element_ty), mask=m_mc)


def fits(x: torch.Tensor) -> bool:
    """Whether x [N, C, ...] has few enough values per channel, in rows."""
    return not in_planes(x) and 0 < x.numel() <= min(MOST * x.shape[1], 2**31 - 1)


def _opaque(x: torch.Tensor) -> bool:
    return x.dtype.itemsize == 2 and not launch.INTERPRETED


@replayed
def normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, buffers: Buffers | None, momentum: float,
    eps: float, act: Activation,
) -> tuple[torch.Tensor, Statistics]:  # fmt: skip
    """Return `norm.normalise` of x [N, C, ...] with its `norm.batch_statistics`, and these statistics."""
    rows = strided(x, planes=False)
    C = x.shape[1]
    plan = plan_of("norm_alone", rows)
    y = rows.new_empty(rows.shape)
    statistics = Statistics(*(torch.empty(C, dtype=launch.acc_torch(x.dtype), device=x.device) for _ in range(2)))
    old, batches = ((None, None), None) if buffers is None else (buffers[:2], buffers.batches)
    updated = [contiguous(buffer) for buffer in old]
    plan.run(
        batch_norm_alone_kernel, rows, y, *statistics, *map(contiguous, (weight, bias)), *updated, batches, plan.sizes,
        EPS=float(eps), MOMENTUM=float(momentum), epilogue=epilogue_of(act), OPAQUE=_opaque(x),
    )  # fmt: skip
    copy_back(old, updated)
    return shaped(y, x.shape), statistics


@replayed
def normalised_grad(
    dy: torch.Tensor, x: torch.Tensor, with_: Statistics, weight: torch.Tensor | None, bias: torch.Tensor | None,
    act: Activation, so_far: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return (dx, dweight, dbias) as `norm.normalise_grad` in training; None for a missing weight or bias."""
    rows_dy, rows, rows_so_far = (
        dense(dy, planes=False),
        strided(x, planes=False),
        None if so_far is None else strided(so_far, planes=False),
    )
    plan = plan_of("norm_alone", rows)
    sizes = plan.sizes._replace(s_so_far=0 if rows_so_far is None else rows_so_far.stride(0))
    dx = rows.new_empty(rows.shape)
    dweight, dbias = (
        None if vector is None else torch.empty(x.shape[1], dtype=vector.dtype, device=x.device)
        for vector in (weight, bias)
    )
    plan.run(
        batch_norm_grad_alone_kernel, rows_dy, rows, rows_so_far, dx, dweight, dbias, *with_, contiguous(weight),
        contiguous(bias), sizes, epilogue=epilogue_of(act), OPAQUE=_opaque(x),
    )  # fmt: skip
    return shaped(dx, x.shape), dweight, dbias
