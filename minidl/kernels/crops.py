"""Batches of image crops: crop, resize with antialiasing, mirror and standardise in one pass.

    y[b, i, j, c] = (sum_u sum_v p_i(u) q_j(v) x[index[b], u, v, c] / (sum_u p_i(u) sum_v q_j(v)) - mean[c]) / std[c]
    p_i(u) = max(0, 1 - |u + 1/2 - top - (i + 1/2) s| / max(s, 1)),  s = rows of the part / h, for rows u of the part
    q_j(v) likewise for columns, with w - 1 - j in place of j if the part is mirrored

as torch resizes a crop with mode="bilinear", antialias=True: a triangle filter whose half-width is the sampling step,
or one pixel if the part is enlarged.

    x          [N, H, W, C]  uint8, the whole data set on the device
    index      [B]           int64: picture of each crop
    parts      [B, 5]        int32: top, left, rows (at most H), columns (at most W), mirrored (0 or 1)
    mean, std  [C]           float32
    y          [B, h, w, C]  floating
A part may reach beyond its picture: pixels there are 0, or with REPLICATE the nearest edge pixel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.images import check_pictures, write_pictures
from minidl.runtime import launch


class Sizes(NamedTuple):
    """The pixel rows of y, the pictures [H, W, C] and the crops [h, w, C]."""

    rows: int
    H: int
    W: int
    C: int
    h: int
    w: int


@triton.jit
def triangle(b_pixel, b_centre, b_reach, b_first, b_count):
    """Return the filter weights of pixels around b_centre, 0 outside the part."""
    b_weight = 1.0 - tl.abs(b_pixel.to(tl.float32) + 0.5 - b_centre) / b_reach
    inside = (b_pixel >= b_first) & (b_pixel < b_first + b_count)
    return tl.where(inside, tl.maximum(b_weight, 0.0), 0.0)


@triton.jit
def crop_kernel(
    p_x, p_index, p_parts, p_y, p_mean, p_std, sizes,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, REPLICATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile of y as a matrix: rows are the pixel rows of the batch, columns the w C values of a row."""
    columns = sizes.w * sizes.C
    tiles_n = tl.cdiv(columns, BLOCK_N)
    o_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < sizes.rows, o_n < columns
    m = m_m[:, None] & m_n[None, :]
    b_b, b_c = o_m // sizes.h, (o_n % sizes.C)[None, :]
    b_image = tl.load(p_index + b_b, mask=m_m, other=0)[:, None]  # [BLOCK_M, 1]
    p_part = p_parts + 5 * b_b
    b_top = tl.load(p_part, mask=m_m, other=0)[:, None]
    b_left = tl.load(p_part + 1, mask=m_m, other=0)[:, None]
    b_high = tl.load(p_part + 2, mask=m_m, other=1)[:, None]
    b_wide = tl.load(p_part + 3, mask=m_m, other=1)[:, None]
    b_flip = tl.load(p_part + 4, mask=m_m, other=0)[:, None]
    b_j = (o_n // sizes.C)[None, :]
    b_j = tl.where(b_flip != 0, sizes.w - 1 - b_j, b_j)  # [BLOCK_M, BLOCK_N]
    b_scale_h = b_high.to(tl.float32) / sizes.h
    b_scale_w = b_wide.to(tl.float32) / sizes.w
    b_reach_h, b_reach_w = tl.maximum(b_scale_h, 1.0), tl.maximum(b_scale_w, 1.0)
    b_centre_h = b_top.to(tl.float32) + ((o_m % sizes.h)[:, None].to(tl.float32) + 0.5) * b_scale_h
    b_centre_w = b_left.to(tl.float32) + (b_j.to(tl.float32) + 0.5) * b_scale_w
    b_u0 = tl.floor(b_centre_h - b_reach_h - 0.5).to(tl.int32) + 1  # the first pixel that may have a weight
    b_v0 = tl.floor(b_centre_w - b_reach_w - 0.5).to(tl.int32) + 1
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    b_all_h = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    b_all_w = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_v in range(TAPS_W):
        b_all_w += triangle(b_v0 + i_v, b_centre_w, b_reach_w, b_left, b_wide)
    for i_u in range(TAPS_H):
        b_u = b_u0 + i_u
        b_p = triangle(b_u, b_centre_h, b_reach_h, b_top, b_high)  # [BLOCK_M, 1]
        b_all_h += b_p
        m_u = (b_p > 0.0) & m
        if REPLICATE:
            b_u = tl.minimum(tl.maximum(b_u, 0), sizes.H - 1)
        else:
            m_u &= (b_u >= 0) & (b_u < sizes.H)
        for i_v in range(TAPS_W):
            b_v = b_v0 + i_v
            b_q = triangle(b_v, b_centre_w, b_reach_w, b_left, b_wide)  # [BLOCK_M, BLOCK_N]
            m_x = m_u & (b_q > 0.0)
            if REPLICATE:
                b_v = tl.minimum(tl.maximum(b_v, 0), sizes.W - 1)
            else:
                m_x &= (b_v >= 0) & (b_v < sizes.W)
            o_x = ((b_image * sizes.H + b_u) * sizes.W + b_v) * sizes.C + b_c
            b_x = tl.load(p_x + o_x, mask=m_x, other=0)  # [BLOCK_M, BLOCK_N]
            b_sum += b_p * b_q * b_x.to(tl.float32)
    b_mean = tl.load(p_mean + b_c, mask=m_n[None, :], other=0.0)  # [1, BLOCK_N]
    b_std = tl.load(p_std + b_c, mask=m_n[None, :], other=1.0)
    b_y = (b_sum / (b_all_h * b_all_w) - b_mean) / b_std
    tl.store((p_y + o_m * columns)[:, None] + o_n[None, :], b_y.to(p_y.dtype.element_ty), mask=m)


def crop(
    x: torch.Tensor,
    index: torch.Tensor,
    parts: torch.Tensor,
    size: tuple[int, int],
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
    replicate: bool = False,
) -> torch.Tensor:
    """Return parts of the pictures `index` of x as network input [B, C, h, w] of `size` (h, w), channels-last.

    Shapes and dtypes as above, on one device; indices must lie in [0, N). Raises TypeError for pixels that are not
    uint8, ValueError for shapes that do not fit.
    """
    check_pictures("crop", x, mean, std)
    if min(size) < 1:
        raise ValueError(f"crop: size is {size}, expected a height and width of 1 or more")
    if index.dim() != 1 or parts.shape != (len(index), 5):
        raise ValueError(
            f"crop: index has shape {list(index.shape)}, parts {list(parts.shape)}; expected [B] and [B, 5]"
        )
    _, H, W, C = x.shape
    h, w = size
    y = torch.empty(len(index), h, w, C, dtype=dtype, device=x.device)
    # A triangle of reach r covers at most 2 r pixels, rounded up.
    taps_h, taps_w = launch.cdiv(2 * max(H, h), h), launch.cdiv(2 * max(W, w), w)
    return write_pictures(
        crop_kernel, y, x.contiguous(), index.contiguous(), parts.contiguous(), y, mean.contiguous(),
        std.contiguous(), Sizes(len(index) * h, H, W, C, h, w), TAPS_H=taps_h, TAPS_W=taps_w, REPLICATE=replicate,
    )  # fmt: skip
