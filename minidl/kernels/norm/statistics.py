"""Mean and deviation of each channel of a batch: bands of rows, and a second launch that joins them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.norm.rows import apart, apart_rows, dense, in_bands, lying, options
from minidl.kernels.reduce import whole
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def count_batch(p_tracked, first):
    """One batch more, counted by the first program."""
    tl.store(p_tracked, tl.load(p_tracked, mask=first, other=0) + 1, mask=first)


@triton.jit
def batch_norm_stats_kernel(
    p_x, p_mean, p_m2, p_tracked, M, C, s_x, band,
    TRACKED: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean (less the first row) and sum of squared distances from it of each band, [bands, C]; counts the batch."""
    wait(EARLY)
    C = whole(C, ALIGN)
    s_x = apart(s_x, C, ALIGN, APART)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    start = tl.program_id(1).to(tl.int64) * band
    rows = tl.minimum(M - start, band)
    b_first = tl.load(p_x + o_c, mask=m_c, other=0).to(ACC)  # [BLOCK_C]
    b_mean = tl.zeros((BLOCK_M, BLOCK_C), dtype=ACC)
    b_m2 = tl.zeros((BLOCK_M, BLOCK_C), dtype=ACC)
    b_count = tl.zeros((1, 1), dtype=ACC)
    for m in range(0, band, BLOCK_M):
        o_m = m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < rows)[:, None] & m_c[None, :]
        p_m = p_x + (start + o_m) * s_x
        b_x = tl.load(p_m[:, None] + o_c[None, :], mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
        b_x -= b_first[None, :]
        b_count += 1.0
        b_delta = tl.where(m_mc, b_x - b_mean, 0.0)
        b_mean += b_delta * (1.0 / b_count)
        b_m2 += b_delta * (b_x - b_mean)
    # How many rows each lane has had.
    o_m = tl.arange(0, BLOCK_M)
    b_n = tl.maximum((rows - o_m + (BLOCK_M - 1)) // BLOCK_M, 0).to(ACC)[:, None]  # [BLOCK_M, 1]
    b_all = (tl.sum((b_n * b_mean).to(tl.float64), axis=0) / rows.to(tl.float64)).to(ACC)  # [BLOCK_C]
    # A lane without rows has the count 0, but the square of what it is apart may not be finite.
    b_apart = tl.where(b_n > 0.0, b_mean - b_all[None, :], 0.0)
    b_m2 = tl.sum((b_m2 + b_n * (b_apart * b_apart)).to(tl.float64), axis=0)
    o_y = tl.program_id(1).to(tl.int64) * C + o_c
    tl.store(p_mean + o_y, b_all, mask=m_c)
    tl.store(p_m2 + o_y, b_m2.to(ACC), mask=m_c)
    if TRACKED:
        count_batch(p_tracked, (tl.program_id(0) == 0) & (tl.program_id(1) == 0))


@triton.jit
def running(p_running_mean, p_running_var, o_c, m_c, RUNNING: tl.constexpr):
    """The running statistics so far, in float64, or zeros: read long before they are moved, as waiting takes a us."""
    b_mean = tl.zeros((o_c.shape[0],), dtype=tl.float64)
    b_var = b_mean
    if RUNNING:
        b_mean = tl.load(p_running_mean + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
        b_var = tl.load(p_running_var + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
    return b_mean, b_var


@triton.jit
def settle(
    b_mean, b_m2, b_count, b_share, b_old_mean, b_old_var, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_c,
    EPS: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """Write mean and rstd (without EPS the variance), and move the running statistics by a share towards them; all
    [BLOCK_C] in float64."""
    b_rstd = b_m2 / b_count
    if EPS is not None:
        b_rstd = 1.0 / tl.sqrt(b_rstd + EPS)
    tl.store(p_mean + o_c, b_mean.to(p_mean.dtype.element_ty), mask=m_c)
    tl.store(p_rstd + o_c, b_rstd.to(p_rstd.dtype.element_ty), mask=m_c)
    if RUNNING:
        b_new = (1.0 - b_share) * b_old_mean + b_share * b_mean
        tl.store(p_running_mean + o_c, b_new.to(p_running_mean.dtype.element_ty), mask=m_c)
        b_new = (1.0 - b_share) * b_old_var + b_share * (b_m2 / (b_count - 1.0))
        tl.store(p_running_var + o_c, b_new.to(p_running_var.dtype.element_ty), mask=m_c)
    return b_rstd


@triton.jit
def of_bands(p, o_b, bands, across, o_c, m_c):
    """A number of each band and channel, with its mask; bands lie so far apart."""
    m_bc = (o_b < bands)[:, None] & m_c[None, :]
    return tl.load(p + (o_b * across)[:, None] + o_c[None, :], mask=m_bc, other=0), m_bc  # [BLOCK_B, BLOCK_C]


@triton.jit
def values_of(p_share, M, o_b, bands, band):
    """How many of the M values each band has, [BLOCK_B, 1]: `band`, the last one what is left; or a share of them."""
    if p_share is not None:
        return tl.load(p_share + o_b, mask=o_b < bands, other=0)[:, None] * M
    else:
        return tl.minimum(M - o_b * band, band).to(tl.float64)[:, None]


@triton.jit
def batch_norm_join_kernel(
    p_x, p_share, p_means, p_m2s, p_mean, p_rstd, p_running_mean, p_running_var, p_tracked, M, C, band, bands,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr, RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
    HELD: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mean and rstd of each channel from its bands, in float64, and the running statistics moved towards them.

    Means are less the first row of x where that is given. With shares the bands are shards: a row of means, then
    variances in place of m2s.
    With HELD a block has all bands, and everything is read at once: the time goes into waiting for memory.
    """
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_b = tl.arange(0, BLOCK_B).to(tl.int64)
    across = C
    if p_share is not None:
        across = 2 * C
    if HELD:
        b_held, m_bc = of_bands(p_means, o_b, bands, across, o_c, m_c)
        b_held_m2, m_bc = of_bands(p_m2s, o_b, bands, across, o_c, m_c)
    b_first = tl.zeros((BLOCK_C,), dtype=tl.float64)
    if p_x is not None:
        b_first = tl.load(p_x + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
    b_old_mean, b_old_var = running(p_running_mean, p_running_var, o_c, m_c, RUNNING)
    b_share = tl.full((BLOCK_C,), MOMENTUM, tl.float64)
    if RUNNING and CUMULATIVE:
        b_share = 1.0 / (tl.full((BLOCK_C,), 0.0, tl.float64) + tl.load(p_tracked))
    b_count = tl.full((BLOCK_C,), 0.0, tl.float64) + M
    if HELD:
        b_n = values_of(p_share, M, o_b, bands, band)
        if p_share is not None:
            b_held_m2 *= b_n
        b_all = tl.sum(b_n * b_held.to(tl.float64), axis=0) / b_count  # [BLOCK_C]
        b_apart = b_held.to(tl.float64) - b_all[None, :]
        b_sum = tl.where(m_bc, b_held_m2.to(tl.float64) + b_n * (b_apart * b_apart), 0.0)
    else:
        b_sum = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float64)
        for i in range(0, bands, BLOCK_B):
            b_n = values_of(p_share, M, i + o_b, bands, band)
            b_mean, m_bc = of_bands(p_means, i + o_b, bands, across, o_c, m_c)
            b_sum += b_n * b_mean.to(tl.float64)
        b_all = tl.sum(b_sum, axis=0) / b_count  # [BLOCK_C]
        b_sum = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float64)
        for i in range(0, bands, BLOCK_B):
            b_n = values_of(p_share, M, i + o_b, bands, band)
            b_mean, m_bc = of_bands(p_means, i + o_b, bands, across, o_c, m_c)
            b_m2, m_bc = of_bands(p_m2s, i + o_b, bands, across, o_c, m_c)
            if p_share is not None:
                b_m2 *= b_n
            b_apart = b_mean.to(tl.float64) - b_all[None, :]
            b_sum += tl.where(m_bc, b_m2.to(tl.float64) + b_n * (b_apart * b_apart), 0.0)
    settle(
        b_all + b_first, tl.sum(b_sum, axis=0), b_count, b_share, b_old_mean, b_old_var, p_mean, p_rstd,
        p_running_mean, p_running_var, o_c, m_c, EPS, RUNNING,
    )  # fmt: skip


@triton.jit
def batch_norm_handed_kernel(
    p_s, p_mean, p_m2, p_tracked, C, band, bands,
    TRACKED: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Every BLOCK_B bands of s [bands, 2, C] (`gemm.fused_statistics`) as one, [., C] in float64; counts the batch."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_b = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    b_mean, m_bc = of_bands(p_s, 2 * o_b, 2 * bands, C, o_c, m_c)
    b_m2, m_bc = of_bands(p_s + C, 2 * o_b, 2 * bands, C, o_c, m_c)
    b_mean = b_mean.to(tl.float64)
    joined = tl.minimum(bands - tl.program_id(1) * BLOCK_B, BLOCK_B)
    b_all = tl.sum(b_mean, axis=0) / joined.to(tl.float64)  # [BLOCK_C]
    b_apart = tl.where(m_bc, b_mean - b_all[None, :], 0.0)
    o_y = tl.program_id(1).to(tl.int64) * C + o_c
    tl.store(p_mean + o_y, b_all, mask=m_c)
    tl.store(p_m2 + o_y, tl.sum(b_m2.to(tl.float64) + band * (b_apart * b_apart), axis=0), mask=m_c)
    if TRACKED:
        count_batch(p_tracked, (tl.program_id(0) == 0) & (tl.program_id(1) == 0))


class Statistics(NamedTuple):
    """What a channel is normalised with: mean and rstd [C], in the accumulate type."""

    mean: torch.Tensor
    rstd: torch.Tensor


class Buffers(NamedTuple):
    """running_mean and running_var [C], and batches [] int64 counted so far (or None): all changed in training."""

    mean: torch.Tensor
    var: torch.Tensor
    batches: torch.Tensor | None = None


@replayed
def batch_statistics(
    x: torch.Tensor, eps: float | None, momentum: float | None, buffers: Buffers | None,
    fused_statistics: torch.Tensor | None = None,
) -> Statistics:  # fmt: skip
    """Statistics of x [N, C, ...], with the running ones moved towards them by `momentum`; x is not read where what
    made it has `fused_statistics` on those of its tiles [bands, 2, C], which are joined.

    With momentum None they become the mean over all batches, of which buffers.batches is the count; it is increased by
    1 if given. Running statistics may have any strides. With eps None it is mean and variance, in float64, for
    `join_shards`, and the running statistics stay as they are.
    """
    rows = apart_rows(x)
    M, C = rows.shape
    acc = launch.acc_torch(x.dtype)
    batches = None if buffers is None else buffers.batches
    counted = {"TRACKED": batches is not None, **options(rows)}
    if fused_statistics is None:
        tile, band = in_bands("norm_stats", M, C, x.dtype)
        bands = launch.cdiv(M, band)
        means, m2s = (torch.empty(bands, C, dtype=acc, device=x.device) for _ in range(2))
        launch.run(
            batch_norm_stats_kernel, (launch.cdiv(C, tile["BLOCK_C"]), bands), rows, means, m2s, batches, M, C,
            rows.stride(0), band, ACC=launch.acc(x.dtype), **lying(rows), **counted, **tile.options,
        )  # fmt: skip
    else:
        tile = launch.tile("norm_handed", x.dtype, C=C)
        bands = launch.cdiv(len(fused_statistics), tile["BLOCK_B"])
        band = M // len(fused_statistics) * tile["BLOCK_B"]
        means, m2s = (torch.empty(bands, C, dtype=torch.float64, device=x.device) for _ in range(2))
        launch.run(
            batch_norm_handed_kernel, (launch.cdiv(C, tile["BLOCK_C"]), bands), fused_statistics, means, m2s, batches,
            C, M // len(fused_statistics), len(fused_statistics), **counted, **tile.options,
        )  # fmt: skip
    first, moved = rows if fused_statistics is None else None, None if eps is None else buffers
    return _join(first, None, means, m2s, M, band, x.dtype, eps, momentum, moved, options(rows))


@replayed
def join_shards(
    rows: torch.Tensor, shares: torch.Tensor, M: int, dtype: torch.dtype, eps: float, momentum: float | None,
    buffers: Buffers | None,
) -> Statistics:  # fmt: skip
    """Statistics of a batch of `dtype` with M values per channel, from the means and variances of its shards.

    rows [shards, 2C] and shares [shards], how much of the batch each shard is, are float64. All else is as of
    `batch_statistics`, but the batch has been counted.
    """
    means, variances = rows.view(len(rows), 2, -1).unbind(1)
    how = {"ALIGN": 1, **dependent_launch.options()}
    return _join(None, shares, means, variances, M, 0, dtype, eps, momentum, buffers, how)


def _join(
    first: torch.Tensor | None, shares: torch.Tensor | None, means: torch.Tensor, m2s: torch.Tensor, M: int, band: int,
    dtype: torch.dtype, eps: float | None, momentum: float | None, buffers: Buffers | None, how: dict[str, Any],
) -> Statistics:  # fmt: skip
    """The second launch: from bands of `band` values, or of shares."""
    bands, C = means.shape
    kept = torch.float64 if eps is None else launch.acc_torch(dtype)
    found = Statistics(*(torch.empty(C, dtype=kept, device=means.device) for _ in range(2)))
    tile = launch.tile("norm_join", dtype, B=bands, C=C)
    old, batches = ((None, None), None) if buffers is None else (buffers[:2], buffers.batches)
    # The kernel reads and writes C numbers in a row.
    moved = [dense(buffer) for buffer in old]
    launch.run(
        batch_norm_join_kernel, (launch.cdiv(C, tile["BLOCK_C"]),), first, shares, means, m2s, *found, *moved, batches,
        M, C, band, bands,
        EPS=None if eps is None else float(eps), MOMENTUM=0.0 if momentum is None else float(momentum),
        RUNNING=buffers is not None, CUMULATIVE=momentum is None, HELD=bands <= tile["BLOCK_B"], **how, **tile.options,
    )  # fmt: skip
    copy_back(old, moved)
    return found


def copy_back(running: Sequence[torch.Tensor | None], moved: Sequence[torch.Tensor | None]) -> None:
    """Copy running statistics to where they are kept, where the kernel moved a copy that is dense."""
    for buffer, new in zip(running, moved, strict=True):
        if buffer is not None and new is not None and new is not buffer:
            buffer.copy_(new)
