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
computed first, for S > 1 per channel; added over images, these are dw and db. Read `kernels` first.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minidl.kernels import elementwise, memory_layout, reduce
from minidl.kernels.row_norm.kernels import (
    Sizes,
    Tile,
    row_norm_grad_kernel,
    row_norm_kernel,
    row_stats_kernel,
    row_sums_kernel,
)
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


class Rows(NamedTuple):
    """A tensor as rows: each of `images` has rows of `sizes`; `spread` as SPREAD."""

    images: int
    sizes: Sizes
    spread: bool

    @property
    def total(self) -> int:
        return self.images * self.sizes.G

    @property
    def of_channels(self) -> "Rows":
        """Each channel of an image as a row."""
        G, _, S, channels, s_image, _, s_run, _ = self.sizes
        sizes = Sizes(G * channels, S, S, 1, s_image, 1 if self.spread else S, s_run, 1)
        return Rows(self.images, sizes, self.spread)


def layers(x: torch.Tensor, dims: int) -> tuple[torch.Tensor, Rows]:
    """Return x, contiguous, with rows along its last `dims` dimensions."""
    return x.contiguous(), _layers(x.shape, dims)


@functools.lru_cache(maxsize=4096)
def _layers(shape: torch.Size, dims: int) -> Rows:
    L, images = shape[len(shape) - dims :].numel(), shape[: len(shape) - dims].numel()
    return Rows(images, Sizes(1, L, 1, max(L, 1), L, L, 0, L), spread=False)


def groups(x: torch.Tensor, count: int) -> tuple[torch.Tensor, Rows]:
    """Return x [N, C, ...], copied unless contiguous or channels-last, with the rows of `count` groups of channels."""
    N, C = x.shape[:2]
    S, each = x.shape[2:].numel(), C // count
    if memory_layout.channels_last(x) and S > 1 and C > 1:
        return x, Rows(N, Sizes(count, each * S, S, each, C * S, each, C, each), spread=True)
    return x.contiguous(), Rows(N, Sizes(count, each * S, max(S, 1), each, C * S, each * S, 0, 1), spread=False)


class Normed(NamedTuple):
    """A result, and the mean and rstd of its rows in the accumulation dtype."""

    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


@replayed
def forward(
    x: torch.Tensor, rows: Rows, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, rms: bool = False,
    out_dtype: torch.dtype | None = None, added: torch.Tensor | None = None, total: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """Normalise rows from `layers` or `groups`; weight and bias have one number for each channel.

    They may have another dtype than x. The result has `out_dtype`, or x's dtype if it is None.
    added: x + added, like x, is normalised and written to `total`.
    """
    R = rows.total
    y = torch.empty_like(x, dtype=out_dtype)
    mean, rstd = (torch.empty(R, dtype=launch.acc_torch(x.dtype), device=x.device) for _ in range(2))
    if x.numel() == 0:
        return Normed(y, mean, rstd)
    L = rows.sizes.L
    tile = _tile(rows, x.dtype)
    fits = tile["BLOCK_N"] >= L
    if added is not None and not fits:
        x, added, total = elementwise.add(x, added, out=total), None, None
    grid = launch.cdiv(R, tile["BLOCK_M"]), launch.cdiv(L, tile["BLOCK_N"])
    constants = {"EPS": eps, **_constants(tile, rows, x.dtype, rms, fits, forward=True)}
    if not fits:
        launch.run(row_stats_kernel, grid[:1], x, mean, rstd, R, rows.sizes, **constants)
    launch.run(
        row_norm_kernel, grid, x, added, total, *map(memory_layout.contiguous, (weight, bias)), y, mean, rstd, R,
        rows.sizes, **constants,
    )  # fmt: skip
    return Normed(y, mean, rstd)


@replayed
def backward(
    dy: torch.Tensor, x: torch.Tensor, rows: Rows, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor,
    rms: bool = False, needs: Sequence[bool] = (True, True, True), added: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return (dx, dweight, dbias), None if not needed; x is from `layers` or `groups`, dy has its shape.

    `added`, like x, is added to dx.
    dx has x's dtype, the others the weight's, or x's without a weight.
    """
    need_x, *need_affine = needs
    affine_dtype = x.dtype if weight is None else weight.dtype
    G, L, S, channels, *_ = rows.sizes
    dx = torch.empty_like(x) if need_x else None
    if x.numel() == 0:
        dw, db = (
            torch.zeros(G * channels, dtype=affine_dtype, device=x.device) if need else None for need in need_affine
        )
        return dx, dw, db
    if dy.stride() != x.stride():
        dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    weight = memory_layout.contiguous(weight)
    tile = launch.tile("row_norm_grad", x.dtype, M=rows.images, N=L)
    layer = G == 1 and S == 1
    adds = layer and any(need_affine)
    fits = tile["BLOCK_N"] >= L
    dw = db = g = gv = None
    if any(need_affine) and not layer:
        fits = False
        g, gv = _sums(dy, x, rows.of_channels, channels, None, mean, rstd, rms)
        dw, db = (reduce.sum_rows(s, affine_dtype) if need else None for s, need in ((gv, needs[1]), (g, needs[2])))
        g, gv = (_over_groups(s, rows, weight) for s in (g, gv))
    elif need_x and not fits:
        g, gv = _sums(dy, x, rows, 1, weight, mean, rstd, rms)
    columns = launch.cdiv(L, tile["BLOCK_N"])
    per = reduce.band(rows.images, columns, tile["BLOCK_M"]) if adds else tile["BLOCK_M"]
    grid = launch.cdiv(rows.images, per) * G, columns
    parts = [
        torch.empty(grid[0], L, dtype=mean.dtype, device=x.device) if layer and need else None for need in need_affine
    ]
    if need_x or adds:
        launch.run(
            row_norm_grad_kernel, grid, x, dy, weight, mean, rstd, g, gv, added, dx, *parts, rows.images,
            rows.sizes, per, **_constants(tile, rows, x.dtype, rms, fits),
        )  # fmt: skip
    if layer:
        dw, db = (None if part is None else reduce.sum_rows(part, affine_dtype) for part in parts)
    return dx, dw, db


def _tile(rows: Rows, dtype: torch.dtype) -> launch.Tile:
    return launch.tile("row_norm", dtype, M=rows.total, N=rows.sizes.L, G=_side_by_side(rows))


def _side_by_side(rows: Rows) -> int:
    """Return the rows of an image that lie side by side, so that blocks of several read entire lines: the channels of
    channels-last images if each is a row, else 0."""
    return rows.sizes.G if rows.spread and rows.sizes.RUN == 1 else 0


def _sums(dy, x, rows, per, weight, mean, rstd, rms):
    """Return the sums of g and g v of each row, [images, G]; `per` rows share mean and rstd."""
    g, gv = (torch.empty(rows.images, rows.sizes.G, dtype=mean.dtype, device=x.device) for _ in range(2))
    tile = launch.tile("row_norm_grad", x.dtype, M=rows.total, N=rows.sizes.L)
    launch.run(
        row_sums_kernel, (launch.cdiv(rows.total, tile["BLOCK_M"]),), x, dy, weight, mean, rstd, g, gv, rows.total,
        rows.sizes, per, **_constants(tile, rows, x.dtype, rms, False),
    )  # fmt: skip
    return g, gv


def _constants(
    tile: launch.Tile, rows: Rows, dtype: torch.dtype, rms: bool, fits: bool, forward: bool = False
) -> dict[str, Any]:
    channels = _side_by_side(rows) if forward and dtype != torch.float64 else 0
    side_by_side = channels > 0 and channels % tile["BLOCK_M"] == 0
    record = tile.record(
        Tile, RMS=rms, WHOLE=fits, SPREAD=rows.spread, SIDE_BY_SIDE=side_by_side, ACC=launch.acc(dtype)
    )
    return {"tile": record, **tile.launch_options}


def _over_groups(sums, rows, weight):
    """Add sums per channel [images, C], times their weights, for each group."""
    if weight is not None:
        sums = elementwise.mul(sums, weight.to(sums.dtype))
    return reduce.sum(sums.view(rows.total, rows.sizes.CHANNELS), 1)


def depth(rows: Rows, dtype: torch.dtype) -> int:
    """Return the longest chain of additions in a sum over a row, forward or backward."""
    G, L, S, channels, *_ = rows.sizes
    blocks = [tile["BLOCK_N"] for tile in (_tile(rows, dtype), launch.tile("row_norm_grad", dtype, N=L))]
    within = max(launch.cdiv(L, block) + min(block, block // 16 + 32) for block in blocks)
    return min(L, within) + (channels if S > 1 or G > 1 else 0)
