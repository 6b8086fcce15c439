"""Mean and rstd of each channel of a batch: one launch for bands of rows, and a second one that joins them.

    x [band, BLOCK_C] -> mean, m2 [bands, C]        mean, m2 [bands, BLOCK_C] -> mean, rstd [C], running statistics

The bands can also come from the kernel that wrote x (`gemm.fused_statistics`), or be the shards of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.memory_layout import contiguous
from minidl.kernels.norm.launches import Buffers, Statistics, copy_back, plan_of
from minidl.kernels.norm.layout import (
    Sizes,
    block_values,
    blocks,
    channel_offsets,
    channels,
    in_planes,
    row_offsets,
    row_stride,
    strided,
)
from minidl.kernels.reduce import as_multiple
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def count_batch(p_tracked, first):
    """Increase the batch counter, in the first program."""
    tl.store(p_tracked, tl.load(p_tracked, mask=first, other=0) + 1, mask=first)


@triton.jit
def batch_norm_stats_kernel(p_x, p_mean, p_m2, p_tracked, sizes, tile: tl.constexpr, EARLY: tl.constexpr):
    """Write mean (minus the first value) and sum of squared distances from it per band, [bands, C]; count the batch."""
    wait(EARLY)
    C = channels(sizes, tile)
    s_x = row_stride(sizes.s_x, C, tile)
    o_c = tl.program_id(0) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_c = o_c < C
    start = tl.program_id(1).to(tl.int64) * sizes.band
    end = tl.minimum(start + sizes.band, sizes.M)
    o_channel = channel_offsets(o_c, sizes, tile)
    b_first = tl.load(p_x + o_channel, mask=m_c[None, :], other=0).to(tile.ACC)  # [1, BLOCK_C]
    b_mean = tl.full((tile.BLOCK_M, tile.BLOCK_C), 0.0, tile.ACC)
    b_m2 = tl.full((tile.BLOCK_M, tile.BLOCK_C), 0.0, tile.ACC)
    b_count = tl.full((tile.BLOCK_M if tile.PIXELS else 1, 1), 0.0, tile.ACC)
    for i in range(blocks(start, end, sizes, tile)):
        o_m, m_m = block_values(start, end, i, sizes, tile)
        m_mc = m_m[:, None] & m_c[None, :]
        p_m = p_x + row_offsets(o_m, s_x, tile)
        b_x = tl.load(p_m + o_channel, mask=m_mc, other=0).to(tile.ACC)  # [BLOCK_M, BLOCK_C]
        b_x -= b_first
        if tile.PIXELS:
            b_count += m_m.to(tile.ACC)[:, None]
        else:
            b_count += 1.0
        b_delta = tl.where(m_mc, b_x - b_mean, 0.0)
        b_mean += b_delta * (1.0 / (tl.maximum(b_count, 1.0) if tile.PIXELS else b_count))
        b_m2 += b_delta * (b_x - b_mean)
    b_n = b_count  # the number of values of each lane
    if not tile.PIXELS:
        lanes = tl.maximum((end - start - tl.arange(0, tile.BLOCK_M) + (tile.BLOCK_M - 1)) // tile.BLOCK_M, 0)
        b_n = lanes.to(tile.ACC)[:, None]  # [BLOCK_M, 1]
    b_all = (tl.sum((b_n * b_mean).to(tl.float64), axis=0) / (end - start).to(tl.float64)).to(tile.ACC)  # [BLOCK_C]
    # A lane without rows has count 0, but its squared distance may not be finite.
    b_delta = tl.where(b_n > 0.0, b_mean - b_all[None, :], 0.0)
    b_m2 = tl.sum((b_m2 + b_n * (b_delta * b_delta)).to(tl.float64), axis=0)
    o_y = tl.program_id(1).to(tl.int64) * C + o_c
    tl.store(p_mean + o_y, b_all, mask=m_c)
    tl.store(p_m2 + o_y, b_m2.to(tile.ACC), mask=m_c)
    if p_tracked is not None:
        count_batch(p_tracked, (tl.program_id(0) == 0) & (tl.program_id(1) == 0))


@triton.jit
def load_running(p_running_mean, p_running_var, o_c, m_c):
    """Load the running statistics in float64, or zeros: long before they are updated, as waiting takes a us."""
    b_mean = tl.zeros((o_c.shape[0],), dtype=tl.float64)
    b_var = b_mean
    if p_running_mean is not None:
        b_mean = tl.load(p_running_mean + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
        b_var = tl.load(p_running_var + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
    return b_mean, b_var


@triton.jit
def store_statistics(
    b_mean, b_m2, b_count, b_share, b_old_mean, b_old_var, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_c,
    EPS: tl.constexpr,
):  # fmt: skip
    """Store mean and rstd (without EPS the variance), and move the running statistics by b_share towards them; all
    [BLOCK_C] in float64."""
    b_rstd = b_m2 / b_count
    if EPS is not None:
        b_rstd = 1.0 / tl.sqrt(b_rstd + EPS)
    tl.store(p_mean + o_c, b_mean.to(p_mean.dtype.element_ty), mask=m_c)
    tl.store(p_rstd + o_c, b_rstd.to(p_rstd.dtype.element_ty), mask=m_c)
    if p_running_mean is not None:
        b_new = (1.0 - b_share) * b_old_mean + b_share * b_mean
        tl.store(p_running_mean + o_c, b_new.to(p_running_mean.dtype.element_ty), mask=m_c)
        b_new = (1.0 - b_share) * b_old_var + b_share * (b_m2 / (b_count - 1.0))
        tl.store(p_running_var + o_c, b_new.to(p_running_var.dtype.element_ty), mask=m_c)
    return b_rstd


@triton.jit
def load_bands(p, o_b, bands, across, o_c, m_c):
    """Load a value of each band and channel, with its mask; `across` is the stride of bands."""
    m_bc = (o_b < bands)[:, None] & m_c[None, :]
    return tl.load(p + (o_b * across)[:, None] + o_c[None, :], mask=m_bc, other=0), m_bc  # [BLOCK_B, BLOCK_C]


class JoinTile(NamedTuple):
    """Constants of the join: ONE_BLOCK if all bands fit BLOCK_B, MOMENTUM None for the mean over all batches."""

    EPS: float | None
    MOMENTUM: float | None
    ALIGN: int
    ONE_BLOCK: bool
    BLOCK_B: int
    BLOCK_C: int


@triton.jit
def band_sizes(p_share, M, o_b, bands, band):
    """Return the number of values of each band, [BLOCK_B, 1]: `band`, fewer for the last one; or a share of M."""
    if p_share is not None:
        return tl.load(p_share + o_b, mask=o_b < bands, other=0)[:, None] * M
    else:
        return tl.minimum(M - o_b * band, band).to(tl.float64)[:, None]


@triton.jit
def batch_norm_join_kernel(
    p_x, p_share, p_means, p_m2s, p_mean, p_rstd, p_running_mean, p_running_var, p_tracked, sizes, bands,
    tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the bands to mean and rstd of each channel, in float64, and update the running statistics.

    The means are relative to the first value of x, unless x is None. With p_share the bands are shards: a row of means,
    then variances instead of m2s. If one block has all bands, it loads everything at once, since latency dominates.
    """
    wait(EARLY)
    M, band, C = sizes.M, sizes.band, as_multiple(sizes.C, tile.ALIGN)
    o_c = tl.program_id(0) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_c = o_c < C
    o_b = tl.arange(0, tile.BLOCK_B).to(tl.int64)
    across = C
    if p_share is not None:
        across = 2 * C
    if tile.ONE_BLOCK:
        b_means, m_bc = load_bands(p_means, o_b, bands, across, o_c, m_c)
        b_m2s, m_bc = load_bands(p_m2s, o_b, bands, across, o_c, m_c)
    b_old_mean, b_old_var = load_running(p_running_mean, p_running_var, o_c, m_c)
    if tile.MOMENTUM is None:
        b_share = 1.0 / (tl.full((tile.BLOCK_C,), 0.0, tl.float64) + tl.load(p_tracked))
    else:
        b_share = tl.full((tile.BLOCK_C,), tile.MOMENTUM, tl.float64)
    b_count = tl.full((tile.BLOCK_C,), 0.0, tl.float64) + M
    if tile.ONE_BLOCK:
        b_n = band_sizes(p_share, M, o_b, bands, band)
        if p_share is not None:
            b_m2s *= b_n
        b_all = tl.sum(b_n * b_means.to(tl.float64), axis=0) / b_count  # [BLOCK_C]
        b_delta = b_means.to(tl.float64) - b_all[None, :]
        b_sum = tl.where(m_bc, b_m2s.to(tl.float64) + b_n * (b_delta * b_delta), 0.0)
    else:
        b_sum = tl.full((tile.BLOCK_B, tile.BLOCK_C), 0.0, tl.float64)
        for i in range(0, bands, tile.BLOCK_B):
            b_n = band_sizes(p_share, M, i + o_b, bands, band)
            b_mean, m_bc = load_bands(p_means, i + o_b, bands, across, o_c, m_c)
            b_sum += b_n * b_mean.to(tl.float64)
        b_all = tl.sum(b_sum, axis=0) / b_count  # [BLOCK_C]
        b_sum = tl.full((tile.BLOCK_B, tile.BLOCK_C), 0.0, tl.float64)
        for i in range(0, bands, tile.BLOCK_B):
            b_n = band_sizes(p_share, M, i + o_b, bands, band)
            b_mean, m_bc = load_bands(p_means, i + o_b, bands, across, o_c, m_c)
            b_m2, m_bc = load_bands(p_m2s, i + o_b, bands, across, o_c, m_c)
            if p_share is not None:
                b_m2 *= b_n
            b_delta = b_mean.to(tl.float64) - b_all[None, :]
            b_sum += tl.where(m_bc, b_m2.to(tl.float64) + b_n * (b_delta * b_delta), 0.0)
    b_first = tl.full((tile.BLOCK_C,), 0.0, tl.float64)
    if p_x is not None:
        b_first = tl.load(p_x + o_c.to(tl.int64) * sizes.S, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
    store_statistics(
        b_all + b_first, tl.sum(b_sum, axis=0), b_count, b_share, b_old_mean, b_old_var, p_mean, p_rstd,
        p_running_mean, p_running_var, o_c, m_c, tile.EPS,
    )  # fmt: skip


@triton.jit
def batch_norm_handed_kernel(
    p_s, p_mean, p_m2, p_tracked, C, band, bands,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Join every BLOCK_B bands of s [bands, 2, C] (`gemm.fused_statistics`) into one, [., C] in float64; count the
    batch."""
    wait(EARLY)
    C = as_multiple(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_b = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    b_mean, m_bc = load_bands(p_s, 2 * o_b, 2 * bands, C, o_c, m_c)
    b_m2, m_bc = load_bands(p_s + C, 2 * o_b, 2 * bands, C, o_c, m_c)
    b_mean = b_mean.to(tl.float64)
    count = tl.minimum(bands - tl.program_id(1) * BLOCK_B, BLOCK_B)
    b_all = tl.sum(b_mean, axis=0) / count.to(tl.float64)  # [BLOCK_C]
    b_delta = tl.where(m_bc, b_mean - b_all[None, :], 0.0)
    o_y = tl.program_id(1).to(tl.int64) * C + o_c
    tl.store(p_mean + o_y, b_all, mask=m_c)
    tl.store(p_m2 + o_y, tl.sum(b_m2.to(tl.float64) + band * (b_delta * b_delta), axis=0), mask=m_c)
    if p_tracked is not None:
        count_batch(p_tracked, (tl.program_id(0) == 0) & (tl.program_id(1) == 0))


@replayed
def batch_statistics(
    x: torch.Tensor, eps: float | None, momentum: float | None, buffers: Buffers | None,
    fused_statistics: torch.Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Return the statistics of x [N, C, ...], and move the running ones towards them by `momentum`.

    fused_statistics  [bands, 2, C] from the kernel that wrote x: then x is not read
    momentum          None makes the running statistics the mean over all batches, counted by buffers.batches, which
                      increases by 1 unless it is None. Running statistics may have any strides.
    eps               None returns mean and variance, in float64, for `join_shards`, and updates nothing
    """
    values = strided(x, in_planes(x))
    batches = None if buffers is None else buffers.batches
    plan = plan_of("norm_stats", values)
    sizes = plan.sizes
    M, C = sizes.M, sizes.C
    align = 1 if plan.tile.PIXELS else plan.tile.ALIGN
    if fused_statistics is None:
        means, m2s = (torch.empty(plan.grid[1], C, dtype=launch.acc_torch(x.dtype), device=x.device) for _ in range(2))
        plan.run(batch_norm_stats_kernel, values, means, m2s, batches, sizes)
    else:
        tile = launch.tile("norm_handed", x.dtype, C=C)
        count = len(fused_statistics)
        bands = launch.cdiv(count, tile["BLOCK_B"])
        sizes = sizes._replace(band=M // count * tile["BLOCK_B"])
        means, m2s = (torch.empty(bands, C, dtype=torch.float64, device=x.device) for _ in range(2))
        launch.run(
            batch_norm_handed_kernel, (launch.cdiv(C, tile["BLOCK_C"]), bands), fused_statistics, means, m2s, batches,
            C, M // count, count, ALIGN=align, **dependent_launch.options(), **tile.options,
        )  # fmt: skip
    first, updated = values if fused_statistics is None else None, None if eps is None else buffers
    return _join(first, None, means, m2s, sizes, x.dtype, eps, momentum, updated, align)


@replayed
def join_shards(
    rows: torch.Tensor, shares: torch.Tensor, M: int, dtype: torch.dtype, eps: float, momentum: float | None,
    buffers: Buffers | None,
) -> Statistics:  # fmt: skip
    """Return statistics of a batch of `dtype` with M values per channel, from the means and variances of its shards.

    rows [shards, 2C] and shares [shards], the fraction of the batch in each shard, are float64. The rest is as in
    `batch_statistics`, but the batch is already counted.
    """
    means, variances = rows.view(len(rows), 2, -1).unbind(1)
    sizes = Sizes(M, means.shape[1], 1)
    return _join(None, shares, means, variances, sizes, dtype, eps, momentum, buffers, 1)


def _join(
    first: torch.Tensor | None, shares: torch.Tensor | None, means: torch.Tensor, m2s: torch.Tensor, sizes: Sizes,
    dtype: torch.dtype, eps: float | None, momentum: float | None, buffers: Buffers | None, align: int,
) -> Statistics:  # fmt: skip
    """Launch the join, of bands of sizes.band values or of shares."""
    bands, C = means.shape
    result_dtype = torch.float64 if eps is None else launch.acc_torch(dtype)
    statistics = Statistics(*(torch.empty(C, dtype=result_dtype, device=means.device) for _ in range(2)))
    tile = launch.tile("norm_join", dtype, B=bands, C=C)
    if momentum is not None or buffers is None:
        momentum = float(momentum or 0)
    record = tile.record(
        JoinTile, EPS=None if eps is None else float(eps), MOMENTUM=momentum, ALIGN=align,
        ONE_BLOCK=bands <= tile["BLOCK_B"],
    )  # fmt: skip
    old, batches = ((None, None), None) if buffers is None else (buffers[:2], buffers.batches)
    # The kernel reads and writes contiguous buffers.
    updated = [contiguous(buffer) for buffer in old]
    launch.run(
        batch_norm_join_kernel, (launch.cdiv(C, record.BLOCK_C),), first, shares, means, m2s, *statistics, *updated,
        batches, sizes, bands, tile=record, **dependent_launch.options(), **tile.launch_options,
    )  # fmt: skip
    copy_back(old, updated)
    return statistics
