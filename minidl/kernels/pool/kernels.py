"""The kernels of maximum and average pooling, also adaptive, their gradients, and the launchers.

    maximum   y = max over the window (NaN if any element is), i = the tap r S + s of the first maximum in row-major
              order, or of the last NaN, as torch         dx[pixel] = sum of dy over the windows whose tap i it is
    average   y = sum over the window / divisor           dx[pixel] = sum of dy / divisor over the windows around it

A program has BLOCK_P pixels x BLOCK_C channels of images [N, H, W, C]:

    forward   p p p p p     an output reads its window, R x S taps from (oh, ow) stride - padding
              p[x x x]x     p: padding, masked
              p[x x x]x
    gradient  . . . . .     `pool_grad_kernel`: a pixel x reads the NEAR_H x NEAR_W windows that may contain it
              .[.[x].].     `pool_spread_kernel`: if windows are disjoint, a window writes the STRIDE_H x STRIDE_W
              . . . . .     pixels from its first one
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import reduce
from minidl.kernels.division import reciprocal
from minidl.kernels.pool.geometry import Windows
from minidl.kernels.pool.problem import (
    SIZES,
    PoolTile,
    Problem,
    Window,
    bounds,
    in_image,
    inverse_divisor,
    load_tap,
    pixels,
)
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed

MINUS_INF = tl.constexpr(float("-inf"))
UNROLLED = 16  # as many taps, or a row of the window, are unrolled, so that their loads are in flight together


@triton.jit(do_not_specialize=SIZES)
def max_pool_kernel(
    p_x, p_y, p_i, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write maxima, and their taps unless p_i is None."""
    wait(EARLY)
    C = C_V * tile.VEC
    o_n, o_h, o_w, o_c, m_p, m_c, o_y, m_y = pixels(P, C, OH, OW, by_h, by_w, tile)
    h0, h1, w0, w1 = bounds(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window)
    end_h, end_w = (h1, w1) if window.ADAPTIVE else (H, W)
    p_first = (p_x + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    b_v = tl.full((tile.BLOCK_P, tile.BLOCK_C), MINUS_INF, tile.ACC)
    b_i = tl.full((tile.BLOCK_P, tile.BLOCK_C), 0, tl.int32)
    if p_i is not None and not window.INSIDE:
        # If all values are -inf, the first tap inside the image gets the gradient.
        first_h = (tl.maximum(-h0, 0) + window.DIL_H - 1) // window.DIL_H
        first_w = (tl.maximum(-w0, 0) + window.DIL_W - 1) // window.DIL_W
        b_i += (first_h * window.S + first_w).to(tl.int32)[:, None]
    for t in tl.range(0, window.R * window.S, loop_unroll_factor=tile.UNROLL):
        b_x = load_tap(p_first, t, h0, w0, end_h, end_w, m_p, m_c, W, C, window, MINUS_INF).to(tile.ACC)
        if p_i is not None:
            better = (b_x > b_v) | (b_x != b_x)
            b_v = tl.where(better, b_x, b_v)
            b_i = tl.where(better, t, b_i)
        else:
            b_v = tl.maximum(b_v, b_x, propagate_nan=tl.PropagateNan.ALL)
    tl.store(p_y + o_y, b_v.to(p_y.dtype.element_ty), mask=m_y)
    if p_i is not None:
        tl.store(p_i + o_y, b_i.to(p_i.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=SIZES)
def avg_pool_kernel(
    p_x, p_y, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write means."""
    wait(EARLY)
    C = C_V * tile.VEC
    o_n, o_h, o_w, o_c, m_p, m_c, o_y, m_y = pixels(P, C, OH, OW, by_h, by_w, tile)
    h0, h1, w0, w1 = bounds(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window)
    end_h, end_w = tl.minimum(h1, H), tl.minimum(w1, W)
    b_share = inverse_divisor(h0, h1, w0, w1, H, W, window, tile.ACC)
    p_first = (p_x + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    b_y = tl.full((tile.BLOCK_P, tile.BLOCK_C), 0.0, tile.ACC)
    for t in tl.range(0, window.R * window.S, loop_unroll_factor=tile.UNROLL):
        b_y += load_tap(p_first, t, h0, w0, end_h, end_w, m_p, m_c, W, C, window, 0).to(tile.ACC)
    tl.store(p_y + o_y, (b_y * b_share[:, None]).to(p_y.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=SIZES)
def pool_grad_kernel(
    p_dy, p_i, p_dx, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx of pixels; p_i is None for means."""
    wait(EARLY)
    C = C_V * tile.VEC
    o_n, o_h, o_w, o_c, m_p, m_c, o_x, m_x = pixels(P, C, H, W, by_h, by_w, tile)
    if window.ADAPTIVE:
        # Pixel i is in the windows from floor(i O / I) on: the same rule with the sizes exchanged.
        first_h = (o_h * OH) // H
        first_w = (o_w * OW) // W
    else:
        first_h = (o_h + pad_h) // window.STRIDE_H - (window.NEAR_H - 1)
        first_w = (o_w + pad_w) // window.STRIDE_W - (window.NEAR_W - 1)
    line = tl.cast(OW, tl.int64) * C
    o_first = (((o_n * OH + first_h) * OW + first_w) * C)[:, None] + o_c[None, :]
    b_dx = tl.full((tile.BLOCK_P, tile.BLOCK_C), 0.0, tile.ACC)
    for j in tl.range(0, window.NEAR_H * window.NEAR_W, loop_unroll_factor=tile.UNROLL):
        oh = first_h + j // window.NEAR_W
        ow = first_w + j % window.NEAR_W
        h0, h1, w0, w1 = bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window)
        m_t = m_p & in_image(oh, ow, OH, OW)
        if window.ADAPTIVE:
            r = o_h - h0
            s = o_w - w0
            m_t = m_t & (h0 <= o_h) & (o_h < h1) & (w0 <= o_w) & (o_w < w1)
        else:
            r = o_h + pad_h - oh * window.STRIDE_H
            s = o_w + pad_w - ow * window.STRIDE_W
            m_t = m_t & (r < window.R * window.DIL_H) & (s < window.S * window.DIL_W)
        if window.DIL_H > 1:
            m_t = m_t & (r % window.DIL_H == 0)
        if window.DIL_W > 1:
            m_t = m_t & (s % window.DIL_W == 0)
        o_t = o_first + ((j // window.NEAR_W) * line + (j % window.NEAR_W) * C)
        m_tc = m_t[:, None] & m_c[None, :]
        if p_i is not None:
            b_tap = ((r // window.DIL_H) * window.S + s // window.DIL_W).to(p_i.dtype.element_ty)
            b_i = tl.load(p_i + o_t, mask=m_tc, other=-1)  # [BLOCK_P, BLOCK_C]
            b_dy = tl.load(p_dy + o_t, mask=m_tc, other=0).to(tile.ACC)
            b_dx += tl.where(b_i == b_tap[:, None], b_dy, 0.0)
        else:
            b_share = inverse_divisor(h0, h1, w0, w1, H, W, window, tile.ACC)
            b_dx += tl.load(p_dy + o_t, mask=m_tc, other=0).to(tile.ACC) * b_share[:, None]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=SIZES)
def pool_spread_kernel(
    p_dy, p_i, p_dx, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx of disjoint windows; p_i is None for means."""
    wait(EARLY)
    C = C_V * tile.VEC
    rows = tl.cdiv(H + pad_h, window.STRIDE_H)
    columns = tl.cdiv(W + pad_w, window.STRIDE_W)
    o_n, oh, ow, o_c, m_p, m_c, _, _ = pixels(P, C, rows, columns, by_h, by_w, tile)
    m_y = m_p if window.EXACT else m_p & (oh < OH) & (ow < OW)
    m_yc = m_y[:, None] & m_c[None, :]
    o_y = (((o_n * OH + oh) * OW + ow) * C)[:, None] + o_c[None, :]
    h0, h1, w0, w1 = bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window)
    if p_i is not None:
        b_i = tl.load(p_i + o_y, mask=m_yc, other=-1).to(tl.int32)  # [BLOCK_P, BLOCK_C]
        b_dy = tl.load(p_dy + o_y, mask=m_yc, other=0)
    else:
        b_share = inverse_divisor(h0, h1, w0, w1, H, W, window, tile.ACC)
        b_dy = tl.load(p_dy + o_y, mask=m_yc, other=0).to(tile.ACC) * b_share[:, None]
        b_dy = b_dy.to(p_dx.dtype.element_ty)
    line = tl.cast(W, tl.int64) * C
    p_first = (p_dx + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    for j in tl.range(0, window.STRIDE_H * window.STRIDE_W, loop_unroll_factor=tile.UNROLL):
        r = j // window.STRIDE_W
        s = j % window.STRIDE_W
        m_t = m_p if window.EXACT else in_image(h0 + r, w0 + s, H, W) & m_p
        b_dx = b_dy
        i_h = r // window.DIL_H
        i_w = s // window.DIL_W
        if p_i is not None:
            is_tap = (r % window.DIL_H == 0) & (s % window.DIL_W == 0) & (i_h < window.R) & (i_w < window.S)
            b_dx = tl.where(is_tap & (b_i == i_h * window.S + i_w), b_dy, 0.0)
        elif window.STRIDE_H > window.R or window.STRIDE_W > window.S:
            b_dx = tl.where((r < window.R) & (s < window.S), b_dy, 0.0)
        p_t = p_first + (r * line + s * C)
        tl.store(p_t, b_dx.to(p_dx.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])


@launch.cached
def plan(problem: Problem) -> launch.Prepared:
    """Return the launch. It takes x, y (maximum: and the taps or None), or back dy, the taps (mean: None) and dx."""
    at, (R, S) = problem.at, problem.at.kernel
    if not problem.back:
        kernel, numbered, taps = avg_pool_kernel if problem.mean else max_pool_kernel, at.output, (R, S)
        fields: dict[str, Any] = {"INSIDE": at.inside}
    elif at.disjoint:
        kernel, numbered, taps = pool_spread_kernel, at.blocks, at.stride
        fields = {"EXACT": at.exact}
    else:
        kernel, numbered, taps = pool_grad_kernel, at.size, at.near
        fields = {"NEAR_H": at.near[0], "NEAR_W": at.near[1]}
    if problem.mean:
        fields |= {"DIVISOR": at.divisor or (R * S if at.full else 0), "PADDED": at.padded}
    P, C, count = problem.N * numbered[0] * numbered[1], problem.C, taps[0] * taps[1]
    tile = launch.tile("pool_grad" if problem.back else "pool", problem.dtype, target_=problem.target, P=P, C=C)
    # An adaptive window multiplies an index of one size by the other size.
    largest = max(P + tile["BLOCK_P"], *(2 * (a + 1) * (b + 1) for a, b in zip(at.size, at.output, strict=True)))
    index, unroll = tl.int32 if largest < 2**31 else tl.int64, count if count <= UNROLLED else min(taps[1], UNROLLED)
    # Channels as a number of vectors tell the compiler their alignment, for 8 and 24 as for 16. With vectors of 16 the
    # taps of maxima would be stored 16 at a time and move through shared memory to other threads.
    vector = math.gcd(C, 8)
    block = tile.record(PoolTile, VEC=vector, UNROLL=unroll, INDEX=index, ACC=launch.acc(problem.dtype))
    window = Window(*at.kernel, *at.stride, *at.dilation, at.adaptive, **fields)
    sizes = P, C // vector, *map(reciprocal, numbered), *at.size, *at.output, *at.padding
    grid = launch.cdiv(P, tile["BLOCK_P"]), launch.cdiv(C, tile["BLOCK_C"])
    meta = {"window": window, "tile": block, **dependent_launch.options(target=problem.target), **tile.launch_options}
    return launch.Prepared(kernel, grid, sizes, meta)


def last(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, H, W] as a contiguous [N, H, W, C]: a view if it is channels-last, else a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def planes(x: torch.Tensor) -> torch.Tensor | None:
    """Return x [N, C, H, W] as N C images of one channel, None unless that is its order in memory."""
    if x.shape[1] < 2 or not x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return None
    return x.flatten(0, 1).unsqueeze(1)


def joined(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return y.view(*like.shape[:2], *y.shape[2:])


def _plan(
    like: torch.Tensor, at: Windows, dtype: torch.dtype | None, mean: bool, back: bool
) -> tuple[launch.Prepared, torch.Tensor]:
    """Return the launch for tensors [N, C, ...], and memory [N, ..., C] for its result in dtype (None: that of
    `like`)."""
    N, C = like.shape[:2]
    result = torch.empty(N, *(at.size if back else at.output), C, dtype=dtype or like.dtype, device=like.device)
    return plan(Problem(at, N, C, like.dtype, mean, back, launch.target())), result


@replayed
def max_pool2d(
    x: torch.Tensor, at: Windows, keep: bool = False, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, the tap of each maximum in its window); the taps are for the gradient, None unless `keep`.

    `dtype` is the result's, here and below: one of several passes leaves the rounding to the last (None: x's).

    x [N, C, H, W]; y [N, C, OH, OW]; taps have y's shape, int8, or int32 for windows of over 127 taps.
    """
    if (alone := planes(x)) is not None:
        y, taps = max_pool2d(alone, at, keep, dtype)
        return joined(y, x), None if taps is None else joined(taps, x)
    prepared, y = _plan(x, at, dtype, mean=False, back=False)
    dtype_of_taps = torch.int8 if at.kernel[0] * at.kernel[1] <= 127 else torch.int32
    taps = torch.empty_like(y, dtype=dtype_of_taps) if keep else None
    prepared.run(last(x), y, taps)
    return y.permute(0, 3, 1, 2), None if taps is None else taps.permute(0, 3, 1, 2)


@replayed
def max_pool2d_grad(
    dy: torch.Tensor, taps: torch.Tensor, at: Windows, dtype: torch.dtype | None = None, contiguous: bool = False
) -> torch.Tensor:
    """Return dx [N, C, H, W] from dy and the taps of the maxima, both [N, C, OH, OW], channels-last or contiguous."""
    if contiguous and dy.shape[1] > 1:
        return joined(max_pool2d_grad(*(t.flatten(0, 1).unsqueeze(1) for t in (dy, taps)), at, dtype), dy)
    prepared, dx = _plan(dy, at, dtype, mean=False, back=True)
    prepared.run(last(dy), last(taps), dx)
    return dx.permute(0, 3, 1, 2)


@replayed
def avg_pool2d(x: torch.Tensor, at: Windows, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the means of windows, also adaptive: x [N, C, H, W] -> [N, C, OH, OW]."""
    if at.adaptive and at.output == (1, 1) and dtype in (None, x.dtype):
        if x.is_contiguous():  # a reduction splits the image over several programs
            return reduce.mean(x, (2, 3), keepdim=True)
        return reduce.mean(last(x), (1, 2), keepdim=True).permute(0, 3, 1, 2)
    if (alone := planes(x)) is not None:
        return joined(avg_pool2d(alone, at, dtype), x)
    prepared, y = _plan(x, at, dtype, mean=True, back=False)
    prepared.run(last(x), y)
    return y.permute(0, 3, 1, 2)


@replayed
def avg_pool2d_grad(
    dy: torch.Tensor, at: Windows, dtype: torch.dtype | None = None, contiguous: bool = False
) -> torch.Tensor:
    """Return dx [N, C, H, W] from dy [N, C, OH, OW], channels-last or contiguous."""
    if contiguous and dy.shape[1] > 1:
        return joined(avg_pool2d_grad(dy.flatten(0, 1).unsqueeze(1), at, dtype), dy)
    prepared, dx = _plan(dy, at, dtype, mean=True, back=True)
    prepared.run(last(dy), None, dx)
    return dx.permute(0, 3, 1, 2)
