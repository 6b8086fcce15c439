"""Batches of pictures: gather, shift, mirror and standardise in one pass.

    y[b, h, w, c] = (x[index[b], h', w', c] - mean[c]) / std[c]
    h' = h - dy[b]        w' = w - dx[b], or W - 1 - (w - dx[b]) where flip[b]

    x          [N, H, W, C]  uint8, the whole data set on the device
    index      [B]           int64: pictures of the batch
    moves      [B, 3]        int32: dy, dx, flip (0 or 1), or none
    mean, std  [C]           float32
    y          [B, H, W, C]  floating
Pixels outside a picture are 0 before standardising; with REPLICATE they equal the nearest edge pixel.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.runtime import launch


@triton.jit
def pick_kernel(
    p_x, p_index, p_moves, p_y, p_mean, p_std, rows, H, W, C,
    MOVED: tl.constexpr, REPLICATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile of y as a matrix: rows are the pixel rows of the batch, columns the W C values of a row."""
    columns = W * C
    tiles_n = tl.cdiv(columns, BLOCK_N)
    o_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    m_n = o_n < columns
    b_b = o_m // H
    b_c = o_n % C
    b_image = tl.load(p_index + b_b, mask=m_m, other=0)  # [BLOCK_M]
    b_h = o_m % H
    m_mn = m_m[:, None] & m_n[None, :]
    if MOVED:
        p_move = p_moves + 3 * b_b
        b_h -= tl.load(p_move, mask=m_m, other=0)
        b_w = (o_n // C)[None, :] - tl.load(p_move + 1, mask=m_m, other=0)[:, None]  # [BLOCK_M, BLOCK_N]
        b_flip = tl.load(p_move + 2, mask=m_m, other=0)[:, None]
        b_w = tl.where(b_flip != 0, W - 1 - b_w, b_w)
        if REPLICATE:
            b_h = tl.minimum(tl.maximum(b_h, 0), H - 1)
            b_w = tl.minimum(tl.maximum(b_w, 0), W - 1)
            m_x = m_mn
        else:
            m_x = m_mn & ((b_h >= 0) & (b_h < H))[:, None] & (b_w >= 0) & (b_w < W)
        o_x = ((b_image * H + b_h) * columns)[:, None] + b_w * C + b_c[None, :]
        b_x = tl.load(p_x + o_x, mask=m_x, other=0)  # [BLOCK_M, BLOCK_N]
    else:
        b_x = tl.load((p_x + (b_image * H + b_h) * columns)[:, None] + o_n[None, :], mask=m_mn, other=0)
    b_mean = tl.load(p_mean + b_c, mask=m_n, other=0.0)  # [BLOCK_N]
    b_std = tl.load(p_std + b_c, mask=m_n, other=1.0)
    b_y = (b_x.to(tl.float32) - b_mean[None, :]) / b_std[None, :]
    tl.store((p_y + o_m * columns)[:, None] + o_n[None, :], b_y.to(p_y.dtype.element_ty), mask=m_mn)


def pick(
    x: torch.Tensor,
    index: torch.Tensor,
    moves: torch.Tensor | None,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
    replicate: bool = False,
) -> torch.Tensor:
    """Return the pictures `index` of x as network input [B, C, H, W] of `dtype`, channels-last.

    Shapes and dtypes as above, on one device; indices must lie in [0, N). Raises TypeError for pixels that are not
    uint8, ValueError for shapes that do not fit.
    """
    check_pictures("pick", x, mean, std)
    if index.dim() != 1 or (moves is not None and moves.shape != (len(index), 3)):
        got = None if moves is None else list(moves.shape)
        raise ValueError(f"pick: index has shape {list(index.shape)}, moves {got}; expected [B] and [B, 3]")
    _, H, W, C = x.shape
    y = torch.empty(len(index), H, W, C, dtype=dtype, device=x.device)
    return write_pictures(
        pick_kernel, y, x.contiguous(), index.contiguous(), None if moves is None else moves.contiguous(), y,
        mean.contiguous(), std.contiguous(), len(index) * H, H, W, C, MOVED=moves is not None, REPLICATE=replicate,
    )  # fmt: skip


def check_pictures(op: str, x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Raise TypeError for pictures that are not uint8, ValueError for shapes other than [N, H, W, C], [C] and [C]."""
    if x.dtype != torch.uint8:
        raise TypeError(f"{op}: x has dtype {x.dtype}, expected torch.uint8")
    if x.dim() != 4 or mean.shape != x.shape[3:] or std.shape != x.shape[3:]:
        raise ValueError(
            f"{op}: x has shape {list(x.shape)}, mean {list(mean.shape)}, std {list(std.shape)}; expected "
            "[N, H, W, C], [C] and [C]"
        )


def write_pictures(kernel: Any, y: torch.Tensor, *args: Any, **constants: Any) -> torch.Tensor:
    """Launch a kernel that writes y [B, H, W, C] as a matrix of pixel rows, and return y as [B, C, H, W]."""
    B, H, W, C = y.shape
    tile = launch.tile("images", y.dtype, M=B * H, N=W * C)
    grid = (launch.cdiv(B * H, tile["BLOCK_M"]) * launch.cdiv(W * C, tile["BLOCK_N"]),)
    launch.run(kernel, grid, *args, **constants, **tile.options)
    return y.permute(0, 3, 1, 2)
