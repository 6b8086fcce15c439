"""The kernels of maximum and average pooling, also adaptive, their gradients, and the launchers.

    maximum   y = max over the window (NaN if any element is), i = the tap r S + s of the first maximum in row-major
              order, or of the last NaN, as torch         dx[pixel] = sum of dy over the windows whose tap i it is
    average   y = sum over the window / divisor           dx[pixel] = sum of dy / divisor over the windows around it

Images are [N, H, W, C] in memory. `problem` has the walks over taps and windows.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels import reduce
from minidl.kernels.division import reciprocal
from minidl.kernels.pool.geometry import Windows
from minidl.kernels.pool.problem import (
    SIZES,
    Block,
    Problem,
    Window,
    first_window,
    load_tap,
    output_index,
    spread,
    tap_in,
    window_bounds,
)
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed

MINUS_INF = tl.constexpr(float("-inf"))
# Windows of up to this many taps are unrolled, so that all of their loads are in flight together.
UNROLLED = 16


@triton.jit(do_not_specialize=SIZES)
def max_pool_kernel(
    p_x, p_y, p_i, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the maxima, and their taps unless p_i is None."""
    wait(EARLY)
    C = C_V * block.VEC
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, OH, OW, by_h, by_w, block)
    h0, h1, w0, w1 = window_bounds(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window)
    end_h = tl.where(m_p, h1 if window.ADAPTIVE else H, 0)
    end_w = w1 if window.ADAPTIVE else W
    p_first = (p_x + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    b_v = tl.full((block.BLOCK_P, block.BLOCK_C), MINUS_INF, block.ACC)
    b_i = tl.zeros((block.BLOCK_P, block.BLOCK_C), tl.int32)
    if p_i is not None and not window.INSIDE:
        # If all values are -inf, the first tap inside the image gets the gradient.
        first_h = (tl.maximum(-h0, 0) + window.DIL_H - 1) // window.DIL_H
        first_w = (tl.maximum(-w0, 0) + window.DIL_W - 1) // window.DIL_W
        b_i += (first_h * window.S + first_w).to(tl.int32)[:, None]
    for t in tl.range(0, window.R * window.S, loop_unroll_factor=block.UNROLL):
        b_x = load_tap(p_first, t, h0, w0, end_h, end_w, m_p, m_c, W, C, window, MINUS_INF).to(block.ACC)
        if p_i is not None:
            better = (b_x > b_v) | (b_x != b_x)
            b_v = tl.where(better, b_x, b_v)
            b_i = tl.where(better, t, b_i)
        else:
            b_v = tl.maximum(b_v, b_x, propagate_nan=tl.PropagateNan.ALL)
    o_y = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    m_y = m_p[:, None] & m_c[None, :]
    tl.store(p_y + o_y, b_v.to(p_y.dtype.element_ty), mask=m_y)
    if p_i is not None:
        tl.store(p_i + o_y, b_i.to(p_i.dtype.element_ty), mask=m_y)


@triton.jit
def inverse_divisor(h0, h1, w0, w1, H, W, window: tl.constexpr, ACC: tl.constexpr):
    """Return 1 / divisor of windows; finite also outside the valid windows."""
    if window.DIVISOR != 0:
        return tl.full(h0.shape, 1.0, ACC) / window.DIVISOR
    elif window.PADDED:
        return 1.0 / tl.maximum((h1 - h0) * (w1 - w0), 1).to(ACC)
    else:
        height = tl.minimum(h1, H) - tl.maximum(h0, 0)
        width = tl.minimum(w1, W) - tl.maximum(w0, 0)
        return 1.0 / tl.maximum(height * width, 1).to(ACC)


@triton.jit(do_not_specialize=SIZES)
def avg_pool_kernel(
    p_x, p_y, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the means."""
    wait(EARLY)
    C = C_V * block.VEC
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, OH, OW, by_h, by_w, block)
    h0, h1, w0, w1 = window_bounds(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window)
    b_share = inverse_divisor(h0, h1, w0, w1, H, W, window, block.ACC)
    end_h = tl.where(m_p, tl.minimum(h1, H), 0)
    end_w = tl.minimum(w1, W)
    p_first = (p_x + ((o_n * H + h0) * W + w0) * C)[:, None] + o_c[None, :]
    b_y = tl.zeros((block.BLOCK_P, block.BLOCK_C), dtype=block.ACC)
    for t in tl.range(0, window.R * window.S, loop_unroll_factor=block.UNROLL):
        b_y += load_tap(p_first, t, h0, w0, end_h, end_w, m_p, m_c, W, C, window, 0).to(block.ACC)
    o_y = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_y + o_y, (b_y * b_share[:, None]).to(p_y.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=SIZES)
def max_pool_grad_kernel(
    p_dy, p_i, p_dx, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx of pixels."""
    wait(EARLY)
    C = C_V * block.VEC
    line = tl.cast(OW, tl.int64) * C
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, H, W, by_h, by_w, block)
    first_h, first_w = first_window(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window)
    o_first = (((o_n * OH + first_h) * OW + first_w) * C)[:, None] + o_c[None, :]
    b_dx = tl.zeros((block.BLOCK_P, block.BLOCK_C), dtype=block.ACC)
    for j in tl.range(0, window.NEAR_H * window.NEAR_W, loop_unroll_factor=block.UNROLL):
        j_h = j // window.NEAR_W
        j_w = j % window.NEAR_W
        r, s, inside = tap_in(o_h, o_w, first_h + j_h, first_w + j_w, H, W, OH, OW, pad_h, pad_w, window)
        m_t = m_p & inside
        if window.DIL_H > 1:
            m_t = m_t & (r % window.DIL_H == 0)
        if window.DIL_W > 1:
            m_t = m_t & (s % window.DIL_W == 0)
        b_tap = ((r // window.DIL_H) * window.S + s // window.DIL_W).to(p_i.dtype.element_ty)
        o_t = o_first + (j_h * line + j_w * C)
        m_tc = m_t[:, None] & m_c[None, :]
        b_i = tl.load(p_i + o_t, mask=m_tc, other=-1)  # [BLOCK_P, BLOCK_C]
        b_dy = tl.load(p_dy + o_t, mask=m_tc, other=0).to(block.ACC)  # [BLOCK_P, BLOCK_C]
        b_dx += tl.where(b_i == b_tap[:, None], b_dy, 0.0)
    o_x = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=SIZES)
def avg_pool_grad_kernel(
    p_dy, p_dx, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx of pixels."""
    wait(EARLY)
    C = C_V * block.VEC
    line = tl.cast(OW, tl.int64) * C
    o_p, o_n, o_h, o_w, o_c, m_p, m_c = output_index(P, C, H, W, by_h, by_w, block)
    first_h, first_w = first_window(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window)
    p_first = (p_dy + ((o_n * OH + first_h) * OW + first_w) * C)[:, None] + o_c[None, :]
    b_dx = tl.zeros((block.BLOCK_P, block.BLOCK_C), dtype=block.ACC)
    for j in tl.range(0, window.NEAR_H * window.NEAR_W, loop_unroll_factor=block.UNROLL):
        oh = first_h + j // window.NEAR_W
        ow = first_w + j % window.NEAR_W
        _, _, inside = tap_in(o_h, o_w, oh, ow, H, W, OH, OW, pad_h, pad_w, window)
        h0, h1, w0, w1 = window_bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window)
        b_share = inverse_divisor(h0, h1, w0, w1, H, W, window, block.ACC)
        p_t = p_first + ((j // window.NEAR_W) * line + (j % window.NEAR_W) * C)
        b_dy = tl.load(p_t, mask=(m_p & inside)[:, None] & m_c[None, :], other=0).to(block.ACC)  # [BLOCK_P, BLOCK_C]
        b_dx += b_dy * b_share[:, None]
    o_x = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=SIZES)
def max_pool_spread_kernel(
    p_dy, p_i, p_dx, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx of disjoint windows."""
    wait(EARLY)
    C = C_V * block.VEC
    rows = tl.cdiv(H + pad_h, window.STRIDE_H)
    columns = tl.cdiv(W + pad_w, window.STRIDE_W)
    _, o_n, oh, ow, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, block)
    m_y = m_p if window.EXACT else m_p & (oh < OH) & (ow < OW)
    o_y = (((o_n * OH + oh) * OW + ow) * C)[:, None] + o_c[None, :]
    m_yc = m_y[:, None] & m_c[None, :]
    b_i = tl.load(p_i + o_y, mask=m_yc, other=-1).to(tl.int32)  # [BLOCK_P, BLOCK_C]
    b_dy = tl.load(p_dy + o_y, mask=m_yc, other=0)  # [BLOCK_P, BLOCK_C]
    spread(p_dx, b_dy, b_i, o_n, oh, ow, o_c, m_p, m_c, H, W, C, pad_h, pad_w, window, block.UNROLL)


@triton.jit(do_not_specialize=SIZES)
def avg_pool_spread_kernel(
    p_dy, p_dx, P, C_V, by_h, by_w, H, W, OH, OW, pad_h, pad_w,
    window: tl.constexpr, block: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx of disjoint windows."""
    wait(EARLY)
    C = C_V * block.VEC
    rows = tl.cdiv(H + pad_h, window.STRIDE_H)
    columns = tl.cdiv(W + pad_w, window.STRIDE_W)
    _, o_n, oh, ow, o_c, m_p, m_c = output_index(P, C, rows, columns, by_h, by_w, block)
    m_y = m_p if window.EXACT else m_p & (oh < OH) & (ow < OW)
    o_y = (((o_n * OH + oh) * OW + ow) * C)[:, None] + o_c[None, :]
    b_dy = tl.load(p_dy + o_y, mask=m_y[:, None] & m_c[None, :], other=0).to(block.ACC)  # [BLOCK_P, BLOCK_C]
    h0, h1, w0, w1 = window_bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window)
    b_share = inverse_divisor(h0, h1, w0, w1, H, W, window, block.ACC)
    b_dy = (b_dy * b_share[:, None]).to(p_dx.dtype.element_ty)
    spread(p_dx, b_dy, None, o_n, oh, ow, o_c, m_p, m_c, H, W, C, pad_h, pad_w, window, block.UNROLL)


@launch.cached
def plan(problem: Problem) -> launch.Prepared:
    """Return the launch, which takes x and y (maximum: and the taps or None), or back dy (and the taps) and dx."""
    at, mean = problem.at, problem.mean
    (R, S), fields = at.kernel, {}
    if not problem.back:
        kernel = avg_pool_kernel if mean else max_pool_kernel
        numbered, taps, fields = at.output, at.kernel, {"INSIDE": at.inside}
    elif at.disjoint:
        kernel = avg_pool_spread_kernel if mean else max_pool_spread_kernel
        numbered, taps, fields = at.blocks, at.stride, {"EXACT": at.exact}
    else:
        kernel = avg_pool_grad_kernel if mean else max_pool_grad_kernel
        numbered, taps, fields = at.size, at.near, {"NEAR_H": at.near[0], "NEAR_W": at.near[1]}
    if mean:
        fields |= {"DIVISOR": at.divisor or (R * S if at.full else 0), "PADDED": at.padded}
    P, C, count = problem.N * numbered[0] * numbered[1], problem.C, taps[0] * taps[1]
    tile = launch.tile("pool_grad" if problem.back else "pool", problem.dtype, target_=problem.target, P=P, C=C)
    # An adaptive window multiplies an index of one size by the other size.
    largest = max(P + tile["BLOCK_P"], *(2 * (a + 1) * (b + 1) for a, b in zip(at.size, at.output, strict=True)))
    # Channels as a number of vectors tell the compiler their alignment, for 8 and 24 as for 16. With vectors of 16 the
    # taps of maxima would be stored 16 at a time and move through shared memory to other threads.
    vector = math.gcd(C, 8)
    block = tile.record(
        Block, VEC=vector, UNROLL=count if count <= UNROLLED else 1,
        INDEX=tl.int32 if largest < 2**31 else tl.int64, ACC=launch.acc(problem.dtype),
    )  # fmt: skip
    window = Window(*at.kernel, *at.stride, *at.dilation, at.adaptive, **fields)
    sizes = P, C // vector, *map(reciprocal, numbered), *at.size, *at.output, *at.padding
    grid = launch.cdiv(P, tile["BLOCK_P"]), launch.cdiv(C, tile["BLOCK_C"])
    meta = {"window": window, "block": block, **dependent_launch.options(target=problem.target), **tile.launch_options}
    return launch.Prepared(kernel, grid, sizes, meta)


def last(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, H, W] as a contiguous [N, H, W, C]: a view if it is channels-last, else a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def _plan(like: torch.Tensor, at: Windows, mean: bool, back: bool) -> tuple[launch.Prepared, torch.Tensor]:
    """Return the launch for tensors [N, C, ...], and memory [N, ..., C] for its result."""
    result = torch.empty(
        like.shape[0], *(at.size if back else at.output), like.shape[1], dtype=like.dtype, device=like.device
    )
    return plan(Problem(at, like.shape[0], like.shape[1], like.dtype, mean, back, launch.target())), result


@replayed
def max_pool2d(x: torch.Tensor, at: Windows, keep: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, the tap of each maximum in its window); the taps are for the gradient, None unless `keep`.

    x [N, C, H, W]; y [N, C, OH, OW]; taps have y's shape, int8, or int32 for windows of over 127 taps.
    """
    prepared, y = _plan(x, at, mean=False, back=False)
    short = at.kernel[0] * at.kernel[1] <= 127
    taps = torch.empty_like(y, dtype=torch.int8 if short else torch.int32) if keep else None
    prepared.run(last(x), y, taps)
    return y.permute(0, 3, 1, 2), None if taps is None else taps.permute(0, 3, 1, 2)


@replayed
def max_pool2d_grad(dy: torch.Tensor, taps: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return dx [N, C, H, W] from dy and the taps of the maxima, both [N, C, OH, OW]."""
    prepared, dx = _plan(dy, at, mean=False, back=True)
    prepared.run(last(dy), last(taps), dx)
    return dx.permute(0, 3, 1, 2)


@replayed
def avg_pool2d(x: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return the means of windows, also adaptive: x [N, C, H, W] -> [N, C, OH, OW].

    A single adaptive window is a reduction, which splits the image over several programs.
    """
    if at.adaptive and at.output == (1, 1):
        return reduce.mean(last(x), (1, 2), keepdim=True).permute(0, 3, 1, 2)
    prepared, y = _plan(x, at, mean=True, back=False)
    prepared.run(last(x), y)
    return y.permute(0, 3, 1, 2)


@replayed
def avg_pool2d_grad(dy: torch.Tensor, at: Windows) -> torch.Tensor:
    """Return dx [N, C, H, W] from dy [N, C, OH, OW]."""
    prepared, dx = _plan(dy, at, mean=True, back=True)
    prepared.run(last(dy), dx)
    return dx.permute(0, 3, 1, 2)
