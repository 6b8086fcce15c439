"""Batch norm with its activation, for training and with running statistics, and its gradient.

    x, y  [N, C, ...]     weight, bias, running_mean, running_var  [C]     M = values per channel

    y = act(z)      z = (x - mean) rstd weight + bias      rstd = 1 / sqrt(var + eps)
    mean = sum x / M        var = sum (x - mean)^2 / M
    running_mean += momentum (mean - running_mean)         running_var += momentum (var M / (M - 1) - running_var)

    dz = dy act'(z)         dbias = sum dz                 dweight = sum dz n,  n = (x - mean) rstd
    dx = weight rstd (dz - (dbias + n dweight) / M)        with running statistics  dx = weight rstd dz

Ioffe and Szegedy, arXiv 1502.03167. Memory is channels-last inside, a matrix [M, C]. Each program sums a band of rows
of BLOCK_C channels, so that few channels fill a GPU as well; a second launch joins the bands in order.

Statistics do not cancel where the mean is large: values are taken relative to the channel's first, and each lane of a
band updates its mean and its sum of squared distances from the mean value by value (Welford, Technometrics 4(3),
1962); lanes and then bands are joined, in float64, by sum_i [M2_i + n_i (mean_i - mean)^2] (Chan, Golub and LeVeque,
The American Statistician 37(3), 1983). For the gradient x is kept with mean and rstd, and z is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, reduce
from minidl.kernels.activation import NONE, RELU, Activation, activate, activate_grad
from minidl.kernels.reduce import whole
from minidl.runtime import check, early, launch
from minidl.runtime.early import wait


@triton.jit
def band_statistics(
    p_x, o_c, m_c, start, rows, band, C,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean (less the first row, which is returned as well) and sum of squared distances from it of `rows` rows."""
    b_first = tl.load(p_x + o_c, mask=m_c, other=0).to(ACC)  # [BLOCK_C]
    b_mean = tl.zeros((BLOCK_M, BLOCK_C), dtype=ACC)
    b_m2 = tl.zeros((BLOCK_M, BLOCK_C), dtype=ACC)
    b_count = tl.zeros((1, 1), dtype=ACC)
    for m in range(0, band, BLOCK_M):
        o_m = m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < rows)[:, None] & m_c[None, :]
        p_m = p_x + (start + o_m) * C
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
    b_apart = b_mean - b_all[None, :]
    b_m2 = tl.sum((b_m2 + b_n * (b_apart * b_apart)).to(tl.float64), axis=0)
    return b_first, b_all, b_m2


@triton.jit
def batch_norm_stats_kernel(
    p_x, p_mean, p_m2, p_tracked, M, C, band,
    TRACKED: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean (less the first row) and sum of squared distances from it of each band, [bands, C]; counts the batch."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    start = tl.program_id(1).to(tl.int64) * band
    rows = tl.minimum(M - start, band)
    _, b_all, b_m2 = band_statistics(p_x, o_c, m_c, start, rows, band, C, ACC, BLOCK_M, BLOCK_C)
    o_y = tl.program_id(1).to(tl.int64) * C + o_c
    tl.store(p_mean + o_y, b_all, mask=m_c)
    tl.store(p_m2 + o_y, b_m2.to(ACC), mask=m_c)
    if TRACKED:
        count_batch(p_tracked, (tl.program_id(0) == 0) & (tl.program_id(1) == 0))


@triton.jit
def count_batch(p_tracked, first):
    """One batch more, counted by the first program."""
    tl.store(p_tracked, tl.load(p_tracked, mask=first, other=0) + 1, mask=first)


@triton.jit
def settle(
    b_mean, b_m2, b_count, b_share, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_c,
    EPS: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """Write mean and rstd, and move the running statistics by a share towards them; all [BLOCK_C] in float64."""
    b_rstd = 1.0 / tl.sqrt(b_m2 / b_count + EPS)
    tl.store(p_mean + o_c, b_mean.to(p_mean.dtype.element_ty), mask=m_c)
    tl.store(p_rstd + o_c, b_rstd.to(p_rstd.dtype.element_ty), mask=m_c)
    if RUNNING:
        b_old = tl.load(p_running_mean + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
        b_new = (1.0 - b_share) * b_old + b_share * b_mean
        tl.store(p_running_mean + o_c, b_new.to(p_running_mean.dtype.element_ty), mask=m_c)
        b_old = tl.load(p_running_var + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
        b_new = (1.0 - b_share) * b_old + b_share * (b_m2 / (b_count - 1.0))
        tl.store(p_running_var + o_c, b_new.to(p_running_var.dtype.element_ty), mask=m_c)
    return b_rstd


@triton.jit
def batch_norm_join_kernel(
    p_x, p_means, p_m2s, p_mean, p_rstd, p_running_mean, p_running_var, p_tracked, M, C, band, bands,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr, RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mean and rstd of each channel from its bands, in float64, and the running statistics moved towards them."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_sum = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float64)
    for i in range(0, bands, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B).to(tl.int64)
        b_n = tl.minimum(M - o_b * band, band).to(tl.float64)
        m_bc = (o_b < bands)[:, None] & m_c[None, :]
        p_b = p_means + o_b * C
        b_mean = tl.load(p_b[:, None] + o_c[None, :], mask=m_bc, other=0).to(tl.float64)  # [BLOCK_B, BLOCK_C]
        b_sum += b_n[:, None] * b_mean
    b_count = tl.full((BLOCK_C,), 0.0, tl.float64) + M
    b_all = tl.sum(b_sum, axis=0) / b_count  # [BLOCK_C]
    b_sum = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float64)
    for i in range(0, bands, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B).to(tl.int64)
        b_n = tl.minimum(M - o_b * band, band).to(tl.float64)
        m_bc = (o_b < bands)[:, None] & m_c[None, :]
        o_bc = (o_b * C)[:, None] + o_c[None, :]
        b_apart = tl.load(p_means + o_bc, mask=m_bc, other=0).to(tl.float64) - b_all[None, :]  # [BLOCK_B, BLOCK_C]
        b_m2 = tl.load(p_m2s + o_bc, mask=m_bc, other=0).to(tl.float64)  # [BLOCK_B, BLOCK_C]
        b_sum += tl.where(m_bc, b_m2 + b_n[:, None] * (b_apart * b_apart), 0.0)
    b_m2 = tl.sum(b_sum, axis=0)
    b_all += tl.load(p_x + o_c, mask=m_c, other=0).to(tl.float64)
    b_share = tl.full((BLOCK_C,), MOMENTUM, tl.float64)
    if RUNNING and CUMULATIVE:
        b_share = 1.0 / (tl.full((BLOCK_C,), 0.0, tl.float64) + tl.load(p_tracked))
    settle(
        b_all, b_m2, b_count, b_share, p_mean, p_rstd, p_running_mean, p_running_var, o_c, m_c, EPS, RUNNING
    )  # fmt: skip


@triton.jit
def channel(p, o_c, m_c, GIVEN: tl.constexpr, ELSE: tl.constexpr, ACC: tl.constexpr):
    """A row [1, BLOCK_C] of values per channel, ELSE where there are none."""
    if GIVEN:
        return tl.load(p + o_c, mask=m_c, other=0).to(ACC)[None, :]
    else:
        return tl.full((1, o_c.shape[0]), ELSE, ACC)


@triton.jit
def through(b_dy, b_z, m, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """dy act'(z), and 0 outside the mask, where act' of the bias alone may not be finite."""
    if ACT == RELU:
        return tl.where(b_z <= 0.0, 0.0, b_dy)
    else:
        return tl.where(m, b_dy * activate_grad(b_z, ACT, SLOPE), 0.0)


@triton.jit
def rows_back(
    p_dy, p_x, b_mean, b_scale, b_bias, o_mc, m_mc, ACT: tl.constexpr, SLOPE: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """x - mean and dz of a block [BLOCK_M, BLOCK_C]."""
    b_x = tl.load(p_x + o_mc, mask=m_mc, other=0).to(ACC) - b_mean
    b_dz = tl.load(p_dy + o_mc, mask=m_mc, other=0).to(ACC)
    if ACT != NONE:
        b_dz = through(b_dz, b_x * b_scale + b_bias, m_mc, ACT, SLOPE)
    return b_x, b_dz


@triton.jit
def band_sums(
    p_dy, p_x, b_mean, b_scale, b_bias, o_c, m_c, start, end, band, C,
    ACT: tl.constexpr, SLOPE: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_C] of dz and of dz (x - mean) over rows start (64 bits) to end, `band` of them or fewer."""
    b_dbias = tl.zeros((BLOCK_M, BLOCK_C), dtype=ACC)
    b_dweight = tl.zeros((BLOCK_M, BLOCK_C), dtype=ACC)
    for m in range(0, band, BLOCK_M):
        o_m = start + m + tl.arange(0, BLOCK_M)
        m_mc = (o_m < end)[:, None] & m_c[None, :]
        o_mc = (o_m * C)[:, None] + o_c[None, :]
        b_x, b_dz = rows_back(p_dy, p_x, b_mean, b_scale, b_bias, o_mc, m_mc, ACT, SLOPE, ACC)
        b_dbias += b_dz
        b_dweight += b_dz * b_x
    return tl.sum(b_dbias.to(tl.float64), axis=0).to(ACC), tl.sum(b_dweight.to(tl.float64), axis=0).to(ACC)


@triton.jit
def backwards(M, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows and channels of a tile, and their masks.

    Tiles are numbered from the last one: what the sums read at the end is read first, while the cache has it.
    """
    tiles_c = tl.cdiv(C, BLOCK_C)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_m = (i_tile // tiles_c).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_c = (i_tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    return o_m, o_c, m_c, (o_m < M)[:, None] & m_c[None, :]


@triton.jit
def batch_norm_kernel(
    p_x, p_y, p_mean, p_rstd, p_weight, p_bias, M, C,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    C = whole(C, ALIGN)
    o_m, o_c, m_c, m_mc = backwards(M, C, BLOCK_M, BLOCK_C)
    b_mean = channel(p_mean, o_c, m_c, True, 0.0, ACC)
    b_scale = channel(p_rstd, o_c, m_c, True, 0.0, ACC) * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    o_mc = (o_m * C)[:, None] + o_c[None, :]
    b_z = tl.load(p_x + o_mc, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
    b_z = (b_z - b_mean) * b_scale + channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    tl.store(p_y + o_mc, activate(b_z, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_mc)


@triton.jit
def batch_norm_sums_kernel(
    p_dy, p_x, p_sums, p_mean, p_rstd, p_weight, p_bias, M, C, band,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sums of dz and of dz n over each band of rows: [bands, 2, C]."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    start = tl.program_id(1).to(tl.int64) * band
    end = tl.minimum(start + band, M)
    b_mean = channel(p_mean, o_c, m_c, True, 0.0, ACC)
    b_rstd = channel(p_rstd, o_c, m_c, True, 0.0, ACC)
    b_scale = b_rstd * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    b_bias = channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    b_dbias, b_dweight = band_sums(
        p_dy, p_x, b_mean, b_scale, b_bias, o_c, m_c, start, end, band, C, ACT, SLOPE, ACC, BLOCK_M, BLOCK_C
    )  # fmt: skip
    o_y = tl.program_id(1).to(tl.int64) * (2 * C) + o_c
    tl.store(p_sums + o_y, b_dbias, mask=m_c)
    tl.store((p_sums + o_y + C)[None, :], b_dweight[None, :] * b_rstd, mask=m_c[None, :])


@triton.jit
def batch_norm_grad_kernel(
    p_dy, p_x, p_dx, p_sums, p_dweight, p_dbias, p_mean, p_rstd, p_weight, p_bias, M, C,
    TRAINING: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx, in training from the sums [2, C] over all rows; copies these to dweight and dbias where given."""
    wait(EARLY)
    C = whole(C, ALIGN)
    o_m, o_c, m_c, m_mc = backwards(M, C, BLOCK_M, BLOCK_C)
    b_rstd = channel(p_rstd, o_c, m_c, True, 0.0, ACC)
    b_scale = b_rstd * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    o_mc = (o_m * C)[:, None] + o_c[None, :]
    b_dz = tl.load(p_dy + o_mc, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
    if TRAINING or ACT != NONE:
        b_x = tl.load(p_x + o_mc, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
        b_x -= channel(p_mean, o_c, m_c, True, 0.0, ACC)
    if ACT != NONE:
        b_bias = channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
        b_dz = through(b_dz, b_x * b_scale + b_bias, m_mc, ACT, SLOPE)
    if TRAINING:
        b_share = 1.0 / (tl.full((1, BLOCK_C), 0.0, ACC) + M)
        b_dbias = channel(p_sums, o_c, m_c, True, 0.0, ACC) * b_share
        b_dweight = channel(p_sums + C, o_c, m_c, True, 0.0, ACC) * b_share * b_rstd
        b_dz -= b_dbias + b_x * b_dweight
    m_first = m_c & (tl.num_programs(0) - 1 - tl.program_id(0) < tl.cdiv(C, BLOCK_C))
    if p_dweight is not None:
        b_dweight = channel(p_sums + C, o_c, m_c, True, 0.0, ACC)
        tl.store((p_dweight + o_c)[None, :], b_dweight.to(p_dweight.dtype.element_ty), mask=m_first[None, :])
    if p_dbias is not None:
        b_dbias = channel(p_sums, o_c, m_c, True, 0.0, ACC)
        tl.store((p_dbias + o_c)[None, :], b_dbias.to(p_dbias.dtype.element_ty), mask=m_first[None, :])
    tl.store(p_dx + o_mc, (b_dz * b_scale).to(p_dx.dtype.element_ty), mask=m_mc)


class Statistics(NamedTuple):
    """What a channel is normalised with: mean and rstd [C], in the accumulate type."""

    mean: torch.Tensor
    rstd: torch.Tensor


class Buffers(NamedTuple):
    """running_mean and running_var [C], and batches [] int64 counted so far (or None): all changed in training."""

    mean: torch.Tensor
    var: torch.Tensor
    batches: torch.Tensor | None = None


def batch_statistics(x: torch.Tensor, eps: float, momentum: float | None, buffers: Buffers | None) -> Statistics:
    """Statistics of x [N, C, ...], with the running ones moved towards them by `momentum`.

    With momentum None they become the mean over all batches, of which buffers.batches is the count; it is increased by
    1 if given. Running statistics may have any strides.
    """
    rows = rows_of(x)
    M, C = rows.shape
    acc = launch.acc_torch(x.dtype)
    tile, band = _bands("norm_stats", M, C, x.dtype)
    bands = launch.cdiv(M, band)
    means, m2s = (torch.empty(bands, C, dtype=acc, device=x.device) for _ in range(2))
    batches = None if buffers is None else buffers.batches
    launch.run(
        batch_norm_stats_kernel, (launch.cdiv(C, tile["BLOCK_C"]), bands), rows, means, m2s, batches, M, C, band,
        TRACKED=batches is not None, ACC=launch.acc(x.dtype), **options(rows), **tile.options,
    )  # fmt: skip
    found = Statistics(*(torch.empty(C, dtype=acc, device=x.device) for _ in range(2)))
    tile = launch.tile("norm_join", x.dtype, B=bands, C=C)
    running = (None, None) if buffers is None else buffers[:2]
    # The kernel reads and writes C numbers in a row.
    moved = [dense(buffer) for buffer in running]
    launch.run(
        batch_norm_join_kernel, (launch.cdiv(C, tile["BLOCK_C"]),), rows, means, m2s, *found, *moved, batches,
        M, C, band, bands, EPS=float(eps), MOMENTUM=0.0 if momentum is None else float(momentum),
        RUNNING=buffers is not None, CUMULATIVE=momentum is None, **options(rows), **tile.options,
    )  # fmt: skip
    copy_back(running, moved)
    return found


def options(rows: torch.Tensor) -> dict[str, Any]:
    """ALIGN, how many channels of rows [M, C] a load may take at once, up to 16 bytes, and EARLY."""
    return {"ALIGN": math.gcd(rows.shape[1], 16 // rows.element_size()) or 1, **early.options()}


def copy_back(running: Sequence[torch.Tensor | None], moved: Sequence[torch.Tensor | None]) -> None:
    """Copy running statistics to where they are kept, where the kernel moved a copy that is dense."""
    for buffer, new in zip(running, moved, strict=True):
        if buffer is not None and new is not None and new is not buffer:
            buffer.copy_(new)


def normalise(
    x: torch.Tensor,
    with_: Statistics,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    act: Activation,
) -> torch.Tensor:
    """act((x - mean) rstd weight + bias), in x's shape and dtype, channels-last."""
    name, slope = activation.parse(act)
    rows = rows_of(x)
    y = torch.empty_like(rows)
    M, C = rows.shape
    tile = launch.tile("norm", x.dtype, M=M, C=C)
    grid = (launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(C, tile["BLOCK_C"]),)
    launch.run(
        batch_norm_kernel, grid, rows, y, *with_, dense(weight), dense(bias), M, C,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, ACT=activation.CODES[name], SLOPE=slope,
        ACC=launch.acc(x.dtype), **options(rows), **tile.options,
    )  # fmt: skip
    return shaped(y, x.shape)


def normalise_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    with_: Statistics,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    act: Activation,
    training: bool,
    *,
    want_x: bool = True,
    want_affine: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias), of which only those wanted are computed; the last two in the dtypes of weight and bias.

    In `training` the statistics depend on x, so dx includes the gradient through them.
    """
    name, slope = activation.parse(act)
    rows_dy, rows = rows_of(dy), rows_of(x)
    M, C = rows.shape
    vectors = *with_, dense(weight), dense(bias)
    meta = {
        "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "ACT": activation.CODES[name], "SLOPE": slope,
        "ACC": launch.acc(x.dtype), **options(rows),
    }  # fmt: skip
    sums, dx = None, None
    dweight, dbias = (
        torch.empty(C, dtype=launch.acc_torch(x.dtype) if given is None else given.dtype, device=x.device)
        if want_affine else None for given in (weight, bias)
    )  # fmt: skip
    if want_affine or (training and want_x):
        tile, band = _bands("norm_sums", M, C, x.dtype)
        bands = launch.cdiv(M, band)
        partial = torch.empty(bands, 2, C, dtype=launch.acc_torch(x.dtype), device=x.device)
        launch.run(
            batch_norm_sums_kernel, (launch.cdiv(C, tile["BLOCK_C"]), bands), rows_dy, rows, partial, *vectors,
            M, C, band, **meta, **tile.options,
        )  # fmt: skip
        sums = (reduce.sum_rows(partial.view(bands, 2 * C)) if bands != 1 else partial).view(2, C)
    if want_x:
        tile = launch.tile("norm_grad", x.dtype, M=M, C=C)
        dx = torch.empty_like(rows)
        grid = (launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(C, tile["BLOCK_C"]),)
        launch.run(
            batch_norm_grad_kernel, grid, rows_dy, rows, dx, sums, dweight, dbias, *vectors, M, C,
            TRAINING=training, **meta, **tile.options,
        )  # fmt: skip
        dx = shaped(dx, x.shape)
    if sums is not None and dweight is not None and dbias is not None and (dx is None or M == 0):
        dweight, dbias = sums[1].to(dweight.dtype), sums[0].to(dbias.dtype)
    return dx, dweight, dbias


def depth(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """The longest chain of additions of a band: "norm_stats" or "norm_sums", or the same in one launch.

    Lanes are joined in float64.
    """
    tile, band = _bands(family, M, C, dtype)
    alone = launch.tile("norm_alone", dtype, M=M, C=C)["BLOCK_M"]
    chains = ((lanes, launch.cdiv(rows, lanes)) for lanes, rows in ((tile["BLOCK_M"], band), (alone, M)))
    return max(chain + (lanes if dtype == torch.float64 else 2) for lanes, chain in chains)


def bands(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """How many bands of rows there are."""
    return launch.cdiv(M, _bands(family, M, C, dtype)[1])


def _bands(family: str, M: int, C: int, dtype: torch.dtype) -> tuple[launch.Tile, int]:
    """The tile, and the rows of a band."""
    tile = launch.tile(family, dtype, M=M, C=C)
    return tile, reduce.band(M, launch.cdiv(C, tile["BLOCK_C"]), tile["BLOCK_M"])


def check_arguments(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    eps: float,
) -> None:
    """Raise ValueError or TypeError for arguments of a batch norm that do not fit together."""
    check.floating("batch_norm", x=x)
    if x.dim() < 2:
        raise ValueError(f"batch_norm: x has shape {list(x.shape)}, expected [N, C] or [N, C, ...]")
    check_vectors(
        "batch_norm", "x's channels", x, x.shape[1], eps, running_mean=running_mean, running_var=running_var,
        weight=weight, bias=bias,
    )  # fmt: skip
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm: got one of running_mean and running_var, expected both or none")
    if not training and running_mean is None:
        raise ValueError("batch_norm: expected running_mean and running_var to be given when training=False")
    if training and x.numel() <= x.shape[1] and x.shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {list(x.shape)}; "
            "take a larger batch, or call .eval() to use the running statistics"
        )
    if training and eps == 0:
        raise ValueError("batch_norm: eps is 0, expected a positive number in training")


def check_vectors(op: str, what: str, x: torch.Tensor, C: int, eps: float, **vectors: torch.Tensor | None) -> None:
    check.floating(op, x=x)
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}, expected 0 or more")
    for name, vector in vectors.items():
        check.floating(op, **{name: vector})
        if vector is None:
            continue
        if vector.shape != (C,):
            raise ValueError(f"{op}: {name} has shape {list(vector.shape)}, expected [{C}] for {what}")
        if vector.device != x.device:
            raise ValueError(f"{op}: {name} is on {vector.device}, expected {x.device}; move it with .to()")


def dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [N, C, ...] as a contiguous [M, C]: a view where x is channels-last, else a copy."""
    last = x.permute(0, *range(2, x.dim()), 1).contiguous()
    return last.view(last.shape[:-1].numel(), x.shape[1])


def shaped(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    last = rows.view(shape[0], *shape[2:], shape[1])
    return last.permute(0, last.dim() - 1, *range(1, last.dim() - 1))
