"""Mix pictures with others of their batch, and their targets (mixup: Zhang et al., arXiv 1710.09412; cutmix: Yun et
al., arXiv 1905.04899).

    y[b, h, w]  = x[partner[b], h, w]                                      within the box of b
                = share[b] x[b, h, w] + (1 - share[b]) x[partner[b], h, w]  elsewhere
    target[b]   = part[b] e(labels[b]) + (1 - part[b]) e(labels[partner[b]]),  e(k) the unit vector of class k

    x        [B, H, W, C]  floating
    partner  [B]           int64, in [0, B)
    share    [B]           float32, from 0 to 1; 1 to mix only inside the box
    box      [B, 4]        int32: top, left, bottom, right (exclusive)
    part     [B]           float32: weight of the picture's label in the target
    labels   [B]           int64
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.images import write_pictures
from minidl.runtime import launch


@triton.jit
def mix_kernel(
    p_x, p_partner, p_share, p_box, p_y, rows, H, W, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write a tile of y as a matrix: rows are the pixel rows of the batch, columns the W C values of a row."""
    columns = W * C
    tiles_n = tl.cdiv(columns, BLOCK_N)
    o_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    m = m_m[:, None] & (o_n < columns)[None, :]
    b_b, b_h = o_m // H, (o_m % H)[:, None]
    b_partner = tl.load(p_partner + b_b, mask=m_m, other=0)
    b_share = tl.load(p_share + b_b, mask=m_m, other=1.0)[:, None]  # [BLOCK_M, 1]
    p_edge = p_box + 4 * b_b
    b_top = tl.load(p_edge, mask=m_m, other=0)[:, None]
    b_left = tl.load(p_edge + 1, mask=m_m, other=0)[:, None]
    b_bottom = tl.load(p_edge + 2, mask=m_m, other=0)[:, None]
    b_right = tl.load(p_edge + 3, mask=m_m, other=0)[:, None]
    b_w = (o_n // C)[None, :]
    inside = (b_h >= b_top) & (b_h < b_bottom) & (b_w >= b_left) & (b_w < b_right)
    b_share = tl.where(inside, 0.0, b_share)  # [BLOCK_M, BLOCK_N]
    o_other = (b_partner * H + o_m % H) * columns
    b_own = tl.load((p_x + o_m * columns)[:, None] + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    b_other = tl.load((p_x + o_other)[:, None] + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    b_y = b_share * b_own + (1.0 - b_share) * b_other
    tl.store((p_y + o_m * columns)[:, None] + o_n[None, :], b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def targets_kernel(
    p_labels, p_partner, p_part, p_y, rows, classes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    tiles_n = tl.cdiv(classes, BLOCK_N)
    o_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    b_own = tl.load(p_labels + o_m, mask=m_m, other=0)  # [BLOCK_M]
    b_other = tl.load(p_labels + tl.load(p_partner + o_m, mask=m_m, other=0), mask=m_m, other=0)
    b_part = tl.load(p_part + o_m, mask=m_m, other=1.0)[:, None]
    b_y = tl.where(b_own[:, None] == o_n[None, :], b_part, 0.0)  # [BLOCK_M, BLOCK_N]
    b_y += tl.where(b_other[:, None] == o_n[None, :], 1.0 - b_part, 0.0)
    p_row = (p_y + o_m * classes)[:, None]
    tl.store(p_row + o_n[None, :], b_y, mask=m_m[:, None] & (o_n < classes)[None, :])


def mix(x: torch.Tensor, partner: torch.Tensor, share: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    """Return mixed pictures [B, C, H, W], channels-last, from x of the same shape and any memory layout.

    Computed in float32. Raises TypeError for pictures that are not floating, ValueError for shapes that do not fit.
    """
    if not x.is_floating_point():
        raise TypeError(f"mix: x has dtype {x.dtype}, expected a floating one")
    if x.dim() != 4 or partner.shape != x.shape[:1] or share.shape != x.shape[:1] or box.shape != (len(x), 4):
        raise ValueError(
            f"mix: x has shape {list(x.shape)}, partner {list(partner.shape)}, share {list(share.shape)}, box "
            f"{list(box.shape)}; expected [B, C, H, W], [B], [B] and [B, 4]"
        )
    last = x.permute(0, 2, 3, 1).contiguous()
    B, H, W, C = last.shape
    y = torch.empty_like(last)
    return write_pictures(
        mix_kernel, y, last, partner.contiguous(), share.contiguous(), box.contiguous(), y, B * H, H, W, C,
        enable_fp_fusion=False,
    )  # fmt: skip


def mix_targets(labels: torch.Tensor, partner: torch.Tensor, part: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the targets of mixed pictures, float32 probabilities [B, classes]. Raises ValueError for wrong shapes."""
    if labels.dim() != 1 or not labels.shape == partner.shape == part.shape:
        raise ValueError(
            f"mix_targets: labels have shape {list(labels.shape)}, partner {list(partner.shape)}, part "
            f"{list(part.shape)}; expected [B] of each"
        )
    y = torch.empty(len(labels), classes, dtype=torch.float32, device=labels.device)
    tile = launch.tile("images", torch.float32, M=len(labels), N=classes)
    grid = (launch.cdiv(len(labels), tile["BLOCK_M"]) * launch.cdiv(classes, tile["BLOCK_N"]),)
    launch.run(
        targets_kernel, grid, labels.contiguous(), partner.contiguous(), part.contiguous(), y, len(labels), classes,
        **tile.options,
    )  # fmt: skip
    return y
