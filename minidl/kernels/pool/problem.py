"""The records of the pooling kernels, and where pixels, windows and taps are."""

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


class PoolTile(NamedTuple):
    """The block of a program; C is a multiple of VEC, indices have the type INDEX, loops are unrolled UNROLL times."""

    BLOCK_P: int
    BLOCK_C: int
    VEC: int
    UNROLL: int
    INDEX: Any
    ACC: Any


@triton.jit
def pixels(P, C, rows, columns, by_h, by_w, tile: tl.constexpr):
    """Return (image, row, column) of this program's pixels in images of rows x columns, its channels, their masks, and
    offsets and mask [BLOCK_P, BLOCK_C] of the pixels in memory."""
    o_p = tl.program_id(0).to(tile.INDEX) * tile.BLOCK_P + tl.arange(0, tile.BLOCK_P)
    row = fast_divide(o_p, columns, by_w, tile.INDEX)
    image = fast_divide(row, rows, by_h, tile.INDEX)
    o_h = row - image * rows
    o_w = o_p - row * columns
    o_c = tl.program_id(1) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_p = o_p < P
    m_c = o_c < C
    o_pc = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    return image.to(tl.int64), o_h, o_w, o_c, m_p, m_c, o_pc, m_p[:, None] & m_c[None, :]


@triton.jit
def in_image(h, w, H, W):
    """Return the mask of pixels inside the image."""
    return (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def bounds(oh, ow, H, W, OH, OW, pad_h, pad_w, window: tl.constexpr):
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
    """Return tap t [BLOCK_P, BLOCK_C] of windows that begin at (h0, w0) and p_first; OTHER outside of the image and
    from (end_h, end_w) on."""
    r = (t // window.S) * window.DIL_H
    s = (t % window.S) * window.DIL_W
    m_t = m_p if window.INSIDE else in_image(h0 + r, w0 + s, end_h, end_w) & m_p
    p_t = p_first + (r * (tl.cast(W, tl.int64) * C) + s * C)
    return tl.load(p_t, mask=m_t[:, None] & m_c[None, :], other=OTHER)


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
