"""Normalise rows by their mean and variance: layer norm, RMS norm, group norm and instance norm.

    y = (x - mean) rstd w + b               rstd = 1 / sqrt(mean (x - mean)^2 + eps)
    y = x rstd w                            rstd = 1 / sqrt(mean x^2 + eps)                  (RMS)

    with g = w dy and v = (x - mean) rstd:  dx = rstd (g - mean g - v mean (g v)), dw = sum dy v, db = sum dy
                                            (RMS: without mean g)

Layer norm: x is [images, L] with rows of L numbers; w and b are [L]. Group norm: x is [images, C, S], contiguous or
channels-last ([images, S, C]); a row is one of G groups of C / G channels of an image, and w and b are [C]. Instance
norm has C groups. Sums are in float32 (float64 for float64), in a fixed order.

A row that fits BLOCK_N is read once. So are x and dy in the backward pass, where a layer norm's programs accumulate dw
and db over their rows to partial sums, which one more launch adds. A longer row is read twice for mean and variance,
and once more for y. If a channel has several numbers in a row (S > 1), or if rows are long, the sums of dy and dy v are
computed first, for S > 1 per channel; added over images, these are dw and db. Read `kernels`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minidl.kernels import elementwise, memory_layout, reduce
from minidl.kernels.row_norm.kernels import row_norm_grad_kernel, row_norm_kernel, row_stats_kernel, row_sums_kernel
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


class Rows(NamedTuple):
    """A tensor as rows: each of `images` has `groups` rows of L elements, of `channels` channels of S elements.

    s_image and s_group are strides; if `spread`, a row consists of runs of `run` elements with the stride s_run."""

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
    """Return x, contiguous, with rows along its last `dims` dimensions."""
    L = x.shape[x.dim() - dims :].numel()
    images = x.shape[: x.dim() - dims].numel()
    return x.contiguous(), Rows(images, 1, L, 1, L, L, 0, L, max(L, 1), spread=False)


def groups(x: torch.Tensor, count: int) -> tuple[torch.Tensor, Rows]:
    """Return x [N, C, ...], copied unless contiguous or channels-last, with the rows of `count` groups of channels."""
    N, C = x.shape[:2]
    S, each = x.shape[2:].numel(), C // count
    if memory_layout.channels_last(x) and S > 1 and C > 1:
        return x, Rows(N, count, each * S, S, each, C * S, each, C, each, spread=True)
    return x.contiguous(), Rows(N, count, each * S, max(S, 1), each, C * S, each * S, 0, 1, spread=False)


class Normed(NamedTuple):
    """A result, and the mean and rstd of its rows in the accumulation dtype."""

    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


@replayed
def forward(
    x: torch.Tensor, rows: Rows, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, rms: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Normed:  # fmt: skip
    """Normalise rows from `layers` or `groups`; weight and bias have one number for each channel.

    They may have another dtype than x. The result has `out_dtype`, or x's dtype if it is None.
    """
    R, L = rows.count, rows.L
    y = torch.empty_like(x, dtype=out_dtype)
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


@replayed
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
    """Return (dx, dweight, dbias), None if not needed; x is from `layers` or `groups`, dy has its shape.

    dx has x's dtype, the others the weight's, or x's without a weight.
    """
    need_x, need_w, need_b = needs
    affine_dtype = x.dtype if weight is None else weight.dtype
    G, L = rows.groups, rows.L
    dx = torch.empty_like(x) if need_x else None
    if x.numel() == 0:
        dw, db = (
            torch.zeros(G * rows.channels, dtype=affine_dtype, device=x.device) if need else None
            for need in (need_w, need_b)
        )
        return dx, dw, db
    if dy.stride() != x.stride():
        dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    weight = _dense(weight)
    tile = launch.tile("row_norm_grad", x.dtype, M=rows.images, N=L)
    meta = {"RMS": rms, "SPREAD": rows.spread, "ACC": launch.acc(x.dtype)}
    layer = G == 1 and rows.S == 1
    by_channel = (need_w or need_b) and not layer
    fits = tile["BLOCK_N"] >= L and not by_channel
    dw = db = g = gv = None
    if by_channel:
        g, gv = _sums(dy, x, rows, None, mean, rstd, meta, channels=True)
        dw, db = (reduce.sum_rows(s, affine_dtype) if need else None for s, need in ((gv, need_w), (g, need_b)))
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
        dw, db = (None if part is None else reduce.sum_rows(part, affine_dtype) for part in parts)
    return dx, dw, db


def _sums(dy, x, rows, weight, mean, rstd, meta, channels):
    """Return the sums of g and g v of each row, or with `channels` of dy and dy v of each channel of an image."""
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
    """Add sums per channel [images, C], times their weights, for each group."""
    if weight is not None:
        sums = elementwise.mul(sums, weight.to(sums.dtype))
    return reduce.sum(sums.view(rows.count, rows.channels), 1)


def depth(rows: Rows, dtype: torch.dtype) -> int:
    """Return the longest chain of additions in a sum over a row, forward or backward."""
    blocks = [launch.tile(family, dtype, N=rows.L)["BLOCK_N"] for family in ("row_norm", "row_norm_grad")]
    within = max(launch.cdiv(rows.L, block) + min(block, block // 16 + 32) for block in blocks)
    return min(rows.L, within) + (rows.channels if rows.S > 1 or rows.groups > 1 else 0)


def _dense(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()
