"""Rows normalised by their own mean and variance: layer norm, RMS norm, group norm and instance norm.

    y = (x - mean) rstd w + b               rstd = 1 / sqrt(mean (x - mean)^2 + eps)
    y = x rstd w                            rstd = 1 / sqrt(mean x^2 + eps)                  (RMS)

    with g = w dy and v = (x - mean) rstd:  dx = rstd (g - mean g - v mean (g v)), dw = sum dy v, db = sum dy
                                            (RMS: without mean g)

Layer norm: x is [images, L], every row one of L numbers, w and b have L of them. Group norm: x is [images, C, S], in
this order in memory or as [images, S, C]; a row is one of G groups of C / G channels of an image, w and b have C
numbers. Instance norm has C groups. Sums are in float32 (float64 for float64), in a fixed order.

A row that fits BLOCK_N is read once, and so are x and dy on the way back, where a layer norm's programs keep sums for
dw and db over their rows: partial sums, which one more launch adds. A longer row is walked twice for its mean and its
variance, and once more for y. Where a channel has several numbers in a row (S > 1), and where rows are long, the sums
of dy and dy v are made first, those of S by channel, which are dw and db before they are added over images.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import elementwise, reduce
from minidl.runtime import launch, order


@triton.jit
def places(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD: tl.constexpr):
    """Where the elements o_n of rows o_m lie. A row is one run, or with SPREAD many of RUN elements, s_run apart."""
    o_row = (o_m // G) * s_image + (o_m % G) * s_group
    if SPREAD:
        o_n = (o_n // RUN) * s_run + o_n % RUN
    return o_row[:, None] + o_n[None, :]


@triton.jit
def of_channel(p, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD: tl.constexpr, ACC: tl.constexpr):
    """What p has for the channel of each element [BLOCK_M, BLOCK_N]; a row has CHANNELS of them."""
    if SPREAD:
        o_c = o_n % RUN
    else:
        o_c = o_n // S
    o_c = (o_m % G * CHANNELS)[:, None] + o_c[None, :]
    return tl.load(p + o_c, mask=m_mn, other=0.0).to(ACC)


@triton.jit
def deviations(b_x, m_mn, L, RMS: tl.constexpr):
    """(x - mean, mean) of whole rows, 0 beyond them; the mean is 0 with RMS."""
    if RMS:
        return b_x, tl.sum(b_x, axis=1) * 0.0
    else:
        b_mean = tl.sum(b_x, axis=1) / L
        return tl.where(m_mn, b_x - b_mean[:, None], 0.0), b_mean


@triton.jit
def row_stats_kernel(
    p_x, p_mean, p_rstd, R, G, L, s_image, s_group, s_run, RUN,
    EPS: tl.constexpr, RMS: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Mean and rstd of BLOCK_M rows, walked once for each."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < R
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if not RMS:
        for n in range(0, L, BLOCK_N):
            o_n = n + tl.arange(0, BLOCK_N)
            o_x = places(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
            b_sum += tl.load(p_x + o_x, mask=m_m[:, None] & (o_n < L)[None, :], other=0.0).to(ACC)
    b_mean = tl.sum(b_sum, axis=1) / L
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for n in range(0, L, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = places(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
        b_x = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_d = tl.where(m_mn, b_x - b_mean[:, None], 0.0)
        b_sum += b_d * b_d
    tl.store(p_mean + o_m, b_mean, mask=m_m)
    tl.store(p_rstd + o_m, 1.0 / tl.sqrt(tl.sum(b_sum, axis=1) / L + EPS), mask=m_m)


@triton.jit
def row_norm_kernel(
    p_x, p_w, p_b, p_y, p_mean, p_rstd, R, G, L, S, CHANNELS, s_image, s_group, s_run, RUN,
    EPS: tl.constexpr, RMS: tl.constexpr, WHOLE: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N elements of BLOCK_M rows; with WHOLE these are rows, whose statistics are made and kept."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < R
    m_mn = m_m[:, None] & (o_n < L)[None, :]
    o_x = places(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
    b_x = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    if WHOLE:
        b_d, b_mean = deviations(b_x, m_mn, L, RMS)
        b_rstd = 1.0 / tl.sqrt(tl.sum(b_d * b_d, axis=1) / L + EPS)
        tl.store(p_mean + o_m, b_mean, mask=m_m)
        tl.store(p_rstd + o_m, b_rstd, mask=m_m)
    else:
        b_d = b_x
        if not RMS:
            b_d = b_x - tl.load(p_mean + o_m, mask=m_m, other=0.0)[:, None]
        b_rstd = tl.load(p_rstd + o_m, mask=m_m, other=0.0)
    b_y = b_d * b_rstd[:, None]
    if p_w is not None:
        b_y *= of_channel(p_w, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD, ACC)
    if p_b is not None:
        b_y += of_channel(p_b, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD, ACC)
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=m_mn)


@triton.jit
def row_sums_kernel(
    p_x, p_dy, p_w, p_mean, p_rstd, p_g, p_gv, R, G, L, PER_STATISTIC, s_image, s_group, s_run, RUN,
    RMS: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of g and g v over each row; w has the row's length. PER_STATISTIC rows share a mean and an rstd."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < R
    b_rstd = tl.load(p_rstd + o_m // PER_STATISTIC, mask=m_m, other=0.0)
    b_g = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    b_gv = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for n in range(0, L, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = places(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
        b_v = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_dy = tl.load(p_dy + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        if p_w is not None:
            b_dy *= tl.load(p_w + o_n, mask=o_n < L, other=0.0).to(ACC)[None, :]
        if not RMS:
            b_v -= tl.load(p_mean + o_m // PER_STATISTIC, mask=m_m, other=0.0)[:, None]
        b_g += b_dy
        b_gv += tl.where(m_mn, b_dy * (b_v * b_rstd[:, None]), 0.0)
    tl.store(p_g + o_m, tl.sum(b_g, axis=1), mask=m_m)
    tl.store(p_gv + o_m, tl.sum(b_gv, axis=1), mask=m_m)


@triton.jit
def row_norm_grad_kernel(
    p_x, p_dy, p_w, p_mean, p_rstd, p_g, p_gv, p_dx, p_dw, p_db, images, G, L, S, CHANNELS, s_image, s_group, s_run,
    RUN, per,
    RMS: tl.constexpr, WHOLE: tl.constexpr, SPREAD: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK_N elements of `per` rows, of one group of as many images; and their parts of dw and db.

    With WHOLE these are whole rows, whose sums of g and g v are made; else they are read.
    """
    i_share = tl.program_id(0) // G
    i_group = tl.program_id(0) % G
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_dw = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    b_db = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for n in range(0, per, BLOCK_M):
        o_image = i_share.to(tl.int64) * per + n + tl.arange(0, BLOCK_M)
        o_m = o_image * G + i_group
        m_m = o_image < images
        m_mn = m_m[:, None] & (o_n < L)[None, :]
        o_x = places(o_m, o_n, G, s_image, s_group, s_run, RUN, SPREAD)
        b_v = tl.load(p_x + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_dy = tl.load(p_dy + o_x, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_rstd = tl.load(p_rstd + o_m, mask=m_m, other=0.0)[:, None]
        if not RMS:
            b_v -= tl.load(p_mean + o_m, mask=m_m, other=0.0)[:, None]
        b_v = tl.where(m_mn, b_v * b_rstd, 0.0)
        if p_dw is not None:
            b_dw += b_dy * b_v
        if p_db is not None:
            b_db += b_dy
        if p_dx is not None:
            b_g = b_dy
            if p_w is not None:
                b_g *= of_channel(p_w, o_m, o_n, m_mn, G, S, RUN, CHANNELS, SPREAD, ACC)
            if WHOLE:
                b_mean_gv = tl.sum(b_g * b_v, axis=1) / L
            else:
                b_mean_gv = tl.load(p_gv + o_m, mask=m_m, other=0.0) / L
            b_dx = b_g - b_v * b_mean_gv[:, None]
            if not RMS:
                if WHOLE:
                    b_mean_g = tl.sum(b_g, axis=1) / L
                else:
                    b_mean_g = tl.load(p_g + o_m, mask=m_m, other=0.0) / L
                b_dx -= b_mean_g[:, None]
            tl.store(p_dx + o_x, (b_dx * b_rstd).to(p_dx.dtype.element_ty), mask=m_mn)
    if p_dw is not None:
        tl.store(p_dw + i_share * L + o_n, tl.sum(b_dw, axis=0), mask=o_n < L)
    if p_db is not None:
        tl.store(p_db + i_share * L + o_n, tl.sum(b_db, axis=0), mask=o_n < L)


class Rows(NamedTuple):
    """How a tensor is seen as rows: `groups` rows of L elements in each of `images`, CHANNELS channels of S elements
    in each; strides of images and groups, and where a row is no one run, those of its runs of RUN elements."""

    images: int
    groups: int
    L: int
    S: int
    channels: int
    s_image: int
    s_group: int
    s_run: int
    run: int
    spread: bool

    @property
    def count(self) -> int:
        return self.images * self.groups

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self.s_image, self.s_group, self.s_run, self.run


def layers(x: torch.Tensor, dims: int) -> tuple[torch.Tensor, Rows]:
    """x, copied unless it is contiguous, with rows along its last `dims` dimensions."""
    L = x.shape[x.dim() - dims :].numel()
    images = x.shape[: x.dim() - dims].numel()
    return x.contiguous(), Rows(images, 1, L, 1, L, L, 0, L, max(L, 1), spread=False)


def groups(x: torch.Tensor, count: int) -> tuple[torch.Tensor, Rows]:
    """x [N, C, ...], copied unless it is dense, with the rows of `count` groups of its channels."""
    N, C = x.shape[:2]
    S, each = x.shape[2:].numel(), C // count
    if order.channels_last(x) and S > 1 and C > 1:
        return x, Rows(N, count, each * S, S, each, C * S, each, C, each, spread=True)
    return x.contiguous(), Rows(N, count, each * S, max(S, 1), each, C * S, each * S, 0, 1, spread=False)


class Normed(NamedTuple):
    """A result, and the mean and rstd of its rows in the accumulate type."""

    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def forward(
    x: torch.Tensor, rows: Rows, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, rms: bool = False
) -> Normed:
    """The normalised rows of what `layers` or `groups` gave; weight and bias have one number for each channel."""
    R, L = rows.count, rows.L
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(R, dtype=launch.acc_torch(x.dtype), device=x.device) for _ in range(2))
    if x.numel() == 0:
        return Normed(y, mean, rstd)
    tile = launch.tile("row_norm", x.dtype, M=R, N=L)
    fits = tile["BLOCK_N"] >= L
    programs = launch.cdiv(R, tile["BLOCK_M"])
    meta = {"EPS": eps, "RMS": rms, "SPREAD": rows.spread, "ACC": launch.acc(x.dtype), **tile.options}
    if not fits:
        launch.run(row_stats_kernel, (programs,), x, mean, rstd, R, rows.groups, L, *rows.strides, **meta)
    launch.run(
        row_norm_kernel, (programs, launch.cdiv(L, tile["BLOCK_N"])), x, _dense(weight), _dense(bias), y, mean, rstd,
        R, rows.groups, L, rows.S, rows.channels, *rows.strides, WHOLE=fits, **meta,
    )  # fmt: skip
    return Normed(y, mean, rstd)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rows: Rows,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rms: bool = False,
    needs: Sequence[bool] = (True, True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias), None for what is not needed; x as `layers` or `groups` gave it, dy in its shape."""
    need_x, need_w, need_b = needs
    G, L = rows.groups, rows.L
    dx = torch.empty_like(x) if need_x else None
    if x.numel() == 0:
        dw, db = (
            torch.zeros(G * rows.channels, dtype=x.dtype, device=x.device) if need else None
            for need in (need_w, need_b)
        )
        return dx, dw, db
    if dy.stride() != x.stride():
        dy = torch.empty_like(x).copy_(dy)
    weight = _dense(weight)
    tile = launch.tile("row_norm_grad", x.dtype, M=rows.images, N=L)
    meta = {"RMS": rms, "SPREAD": rows.spread, "ACC": launch.acc(x.dtype)}
    layer = G == 1 and rows.S == 1
    by_channel = (need_w or need_b) and not layer
    fits = tile["BLOCK_N"] >= L and not by_channel
    dw = db = g = gv = None
    if by_channel:
        g, gv = _sums(dy, x, rows, None, mean, rstd, meta, channels=True)
        dw, db = (reduce.sum_rows(s, x.dtype) if need else None for s, need in ((gv, need_w), (g, need_b)))
        g, gv = (_over_groups(s, rows, weight) for s in (g, gv))
    elif not fits and need_x:
        g, gv = _sums(dy, x, rows, weight, mean, rstd, meta, channels=False)
    columns = launch.cdiv(L, tile["BLOCK_N"])
    adds = layer and (need_w or need_b)
    per = reduce.band(rows.images, columns, tile["BLOCK_M"]) if adds else tile["BLOCK_M"]
    shares = launch.cdiv(rows.images, per)
    parts = [
        torch.empty(shares, L, dtype=mean.dtype, device=x.device) if layer and need else None
        for need in (need_w, need_b)
    ]
    if need_x or adds:
        launch.run(
            row_norm_grad_kernel, (shares * G, columns), x, dy, weight, mean, rstd, g, gv, dx, *parts, rows.images, G,
            L, rows.S, rows.channels, *rows.strides, per, WHOLE=fits, **meta, **tile.options,
        )  # fmt: skip
    if layer:
        dw, db = (None if part is None else reduce.sum_rows(part, x.dtype) for part in parts)
    return dx, dw, db


def _sums(dy, x, rows, weight, mean, rstd, meta, channels):
    """The sums of g and g v of each row, or with `channels` those of dy and dy v of each channel of an image."""
    R, G, L, strides, per = rows.count, rows.groups, rows.L, rows.strides, 1
    if channels:
        per, L = rows.channels, rows.S
        R, G = R * per, G * per
        strides = (rows.s_image, 1, rows.s_run, 1) if rows.spread else (rows.s_image, rows.S, 0, 1)
    shape = (rows.images, G) if channels else (R,)
    g, gv = (torch.empty(shape, dtype=mean.dtype, device=x.device) for _ in range(2))
    tile = launch.tile("row_norm_grad", x.dtype, M=R, N=L)
    launch.run(
        row_sums_kernel, (launch.cdiv(R, tile["BLOCK_M"]),), x, dy, weight, mean, rstd, g, gv, R, G, L, per, *strides,
        **meta, **tile.options,
    )  # fmt: skip
    return g, gv


def _over_groups(sums, rows, weight):
    """Sums over channels [images, C], times their weights, added for each group."""
    if weight is not None:
        sums = elementwise.mul(sums, weight.to(sums.dtype))
    return reduce.sum(sums.view(rows.count, rows.channels), 1)


def depth(rows: Rows, dtype: torch.dtype) -> int:
    """The longest chain of additions in a sum over a row, on either way."""
    blocks = [launch.tile(family, dtype, N=rows.L)["BLOCK_N"] for family in ("row_norm", "row_norm_grad")]
    within = max(launch.cdiv(rows.L, block) + min(block, block // 16 + 32) for block in blocks)
    return min(rows.L, within) + (rows.channels if rows.S > 1 or rows.groups > 1 else 0)


def _dense(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()
