"""The records of the pooling kernels, and the walks over windows that maxima and means share.

BLOCK_C channels x BLOCK_P pixels per program; here a 3x3 window with stride 2 and padding 1:

forward     p p p p p    one output reads its window, R x S taps from (o_h, o_w) = (oh, ow) * stride - padding
(load_tap)  p[x x x]x
            p[x x x]x    p: padding, masked

gradient    one pixel reads the NEAR_H x NEAR_W windows that may contain it (`tap_in`);
            if windows are disjoint, one window writes the STRIDE_H x STRIDE_W pixels from its first one (`spread`)
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.division import fast_divide
from minidl.kernels.pool.geometry import Windows

# The integer arguments; kernels are not specialised for their divisibility.
SIZES = ("P", "C_V", "by_h", "by_w", "H", "W", "OH", "OW", "pad_h", "pad_w")


class Problem(NamedTuple):
    """A pooling of images [N, C, H, W], or its gradient (`back`): a mean, else a maximum. `target` as in `launch`."""

    at: Windows
    N: int
    C: int
    dtype: torch.dtype
    mean: bool
    back: bool
    target: str


class Window(NamedTuple):
    """What is constant of windows of R x S taps; fields that a kernel does not read have their default.

    INSIDE           whether every window lies in the image
    DIVISOR, PADDED  the divisor of means; 0 for the window's size, with padding if PADDED
    NEAR_H, NEAR_W   the most windows along each axis that contain one pixel
    EXACT            whether disjoint windows cover exactly the image
    """

    R: int
    S: int
    STRIDE_H: int
    STRIDE_W: int
    DIL_H: int
    DIL_W: int
    ADAPTIVE: bool
    INSIDE: bool = False
    DIVISOR: int = 0
    PADDED: bool = True
    NEAR_H: int = 0
    NEAR_W: int = 0
    EXACT: bool = False


class Block(NamedTuple):
    """The block of a program; C is a multiple of VEC, indices have the type INDEX, loops are unrolled UNROLL times."""

    BLOCK_P: int
    BLOCK_C: int
    VEC: int
    UNROLL: int
    INDEX: Any
    ACC: Any


@triton.jit
def output_index(P, C, rows, columns, by_h, by_w, block: tl.constexpr):
    """Return (index, image, row, column) of this program's pixels in images of rows x columns, its channels, masks."""
    o_p = tl.program_id(0).to(block.INDEX) * block.BLOCK_P + tl.arange(0, block.BLOCK_P)
    row = fast_divide(o_p, columns, by_w, block.INDEX)
    image = fast_divide(row, rows, by_h, block.INDEX)
    o_h = row - image * rows
    o_w = o_p - row * columns
    o_c = tl.program_id(1) * block.BLOCK_C + tl.arange(0, block.BLOCK_C)
    return o_p, image.to(tl.int64), o_h, o_w, o_c, o_p < P, o_c < C


@triton.jit
def in_image(h, w, H, W):
    """Return the mask of pixels inside the image."""
    return (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def window_bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window: tl.constexpr):
    """Return the rows [h0, h1) and columns [w0, w1) of windows without dilation, including padding."""
    if window.ADAPTIVE:
        h0 = (oh * H) // OH
        h1 = ((oh + 1) * H + (OH - 1)) // OH
        w0 = (ow * W) // OW
        w1 = ((ow + 1) * W + (OW - 1)) // OW
    else:
        h0 = oh * window.STRIDE_H - pad_h
        h1 = tl.minimum(h0 + window.R, H + pad_h)
        w0 = ow * window.STRIDE_W - pad_w
        w1 = tl.minimum(w0 + window.S, W + pad_w)
    return h0, h1, w0, w1


@triton.jit
def load_tap(p_first, t, h0, w0, end_h, end_w, m_p, m_c, W, C, window: tl.constexpr, OTHER: tl.constexpr):
    """Return tap t of windows that begin at (h0, w0) and p_first, OTHER from (end_h, end_w) on."""
    r = (t // window.S) * window.DIL_H
    s = (t % window.S) * window.DIL_W
    m_t = m_p if window.INSIDE else in_image(h0 + r, w0 + s, end_h, end_w)
    p_t = p_first + (r * (tl.cast(W, tl.int64) * C) + s * C)
    return tl.load(p_t, mask=m_t[:, None] & m_c[None, :], other=OTHER)  # [BLOCK_P, BLOCK_C]


@triton.jit
def first_window(o_h, o_w, H, W, OH, OW, pad_h, pad_w, window: tl.constexpr):
    """Return the first of the NEAR_H x NEAR_W windows that may contain pixels."""
    if window.ADAPTIVE:
        # Pixel i is in the windows from floor(i O / I) on: the same rule with the sizes exchanged.
        return (o_h * OH) // H, (o_w * OW) // W
    else:
        first_h = (o_h + pad_h) // window.STRIDE_H - (window.NEAR_H - 1)
        return first_h, (o_w + pad_w) // window.STRIDE_W - (window.NEAR_W - 1)


@triton.jit
def tap_in(o_h, o_w, oh, ow, H, W, OH, OW, pad_h, pad_w, window: tl.constexpr):
    """Return the row and column of pixels in windows, and whether they are inside; dilation is not considered."""
    m = in_image(oh, ow, OH, OW)
    if window.ADAPTIVE:
        h0, h1, w0, w1 = window_bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window)
        return o_h - h0, o_w - w0, m & (o_h >= h0) & (o_h < h1) & (o_w >= w0) & (o_w < w1)
    else:
        r = o_h + pad_h - oh * window.STRIDE_H
        s = o_w + pad_w - ow * window.STRIDE_W
        return r, s, m & (r < window.R * window.DIL_H) & (s < window.S * window.DIL_W)


@triton.jit
def spread(
    p_dx, b_dy, b_i, o_n, oh, ow, o_c, m_p, m_c, H, W, C, pad_h, pad_w, window: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """Write dx of the STRIDE_H x STRIDE_W pixels from the first one of each window: dy, 0 where no tap reads the pixel,
    or unless it is tap b_i."""
    o_h = oh * window.STRIDE_H - pad_h
    o_w = ow * window.STRIDE_W - pad_w
    p_first = (p_dx + ((o_n * H + o_h) * W + o_w) * C)[:, None] + o_c[None, :]
    for j in tl.range(0, window.STRIDE_H * window.STRIDE_W, loop_unroll_factor=UNROLL):
        r = j // window.STRIDE_W
        s = j % window.STRIDE_W
        m_t = m_p if window.EXACT else in_image(o_h + r, o_w + s, H, W) & m_p
        i_h = r // window.DIL_H
        i_w = s // window.DIL_W
        b_dx = b_dy
        if b_i is not None:
            is_tap = (r % window.DIL_H == 0) & (s % window.DIL_W == 0) & (i_h < window.R) & (i_w < window.S)
            b_dx = tl.where(is_tap & (b_i == i_h * window.S + i_w), b_dy, 0.0)
        elif window.STRIDE_H > window.R or window.STRIDE_W > window.S:
            b_dx = tl.where((r < window.R) & (s < window.S), b_dy, 0.0)
        p_t = p_first + (r * (tl.cast(W, tl.int64) * C) + s * C)
        tl.store(p_t, b_dx.to(p_dx.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])
