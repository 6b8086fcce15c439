"""All walks back of a strided convolution in the batch-tiled form, in one launch.

A stride of 2 leaves four walks, one for each remainder of a row and of a column. One after another, each ends with idle
processors; together the tiles of those with most taps go first, and the short ones fill the gaps. A tile finds its walk
from its number: with rho = (input + padding) mod stride along one axis, the taps are rho, rho + stride ... below R, so
a smaller rho has as many taps or one more.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import early, launch
from minidl.kernels.conv.batch_tiled import WHOLE, boxes_of, conv_batch_tile
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import Epilogue
from minidl.kernels.early import wait


@triton.jit
def walk_back(rho, size, R, PADDING: tl.constexpr, STRIDE: tl.constexpr):
    """(out_start, count, in_start, taps) of the walk of one remainder, over inputs of `size`."""
    first = (rho + (STRIDE - PADDING % STRIDE)) % STRIDE
    count = (tl.maximum(size - first, 0) + (STRIDE - 1)) // STRIDE
    taps = (tl.maximum(R - rho, 0) + (STRIDE - 1)) // STRIDE
    return first, count, (first + PADDING - rho) // STRIDE - (taps - 1), taps


@triton.jit
def conv_back_kernel(
    d_x, d_w, p_bias, p_scale, p_y, p_z, N, H, W, OH, OW, M, GROUPS, R, S, w_row, w_tap,
    C: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    TURN: tl.constexpr, ROW_OF_TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One tile, of the walk that its number falls into."""
    wait(EARLY)
    i_tile = tl.program_id(0)
    across = tl.cdiv(M, BLOCK_N) * GROUPS * tl.cdiv(N, BLOCK_M)
    rho = 0
    before = 0
    end = 0
    for i in tl.static_range(STRIDE_H * STRIDE_W):
        _, rows, _, _ = walk_back(i // STRIDE_W, OH, R, PADDING_H, STRIDE_H)
        _, columns, _, _ = walk_back(i % STRIDE_W, OW, S, PADDING_W, STRIDE_W)
        beyond = i_tile >= end
        rho = tl.where(beyond, i, rho)
        before = tl.where(beyond, end, before)
        end += rows * columns * across
    out_h, _, in_h, taps_h = walk_back(rho // STRIDE_W, OH, R, PADDING_H, STRIDE_H)
    out_w, columns, in_w, taps_w = walk_back(rho % STRIDE_W, OW, S, PADDING_W, STRIDE_W)
    last_h = rho // STRIDE_W + (taps_h - 1) * STRIDE_H
    last_w = rho % STRIDE_W + (taps_w - 1) * STRIDE_W
    conv_batch_tile(
        i_tile - before, d_x, d_w, p_bias, p_scale, p_y, p_z,
        N, H, W, columns, OH, OW, M, GROUPS, in_h, in_w, out_h, out_w,
        last_h * w_row + last_w * w_tap, -STRIDE_H * w_row, -STRIDE_W * w_tap, 0, 0,
        C, taps_h, taps_w, 1, 1, 1, 1, STRIDE_H, STRIDE_W, ROW_OF_TAPS, TURN,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, 1, PIECES, WHOLE, True,
    )  # fmt: skip


def takes(geometry: Geometry) -> bool:
    """Whether there are several walks, and all alike but for where they begin and end."""
    h, v = geometry.h, geometry.w
    return h.stride * v.stride > 1 and h.dilation == v.dilation == 1 and max(h.stride, v.stride) <= 4


def correlate(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    geometry: Geometry,
    epilogue: Epilogue,
    precision: str,
    *,
    turn: bool,
) -> None:
    """Write all outputs of the way back into y.

    x [N, H, W, groups * C] and y [N, OH, OW, groups * M] contiguous; w all weights, contiguous, as
    [groups * M, R, S, C] or, to turn, as [groups * C, R, S, M].
    """
    h, v, groups = geometry.h, geometry.w, geometry.groups
    N, H, W, channels = x.shape
    M, C = y.shape[3] // groups, channels // groups
    # A short K leaves no time for wide epilogues.
    family = "conv_batch_narrow" if x.dtype != torch.float32 and C % 64 else "conv_back"
    tile = launch.tile(family, x.dtype, floor=16, precision=precision, M=N, N=M, K=C & -C, pixels=h.size * v.size)
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "PIECES", "num_warps", "num_stages")
    options = {name: value for name, value in tile.options.items() if name in names}
    if epilogue.z is not None:
        options["num_warps"] = 8  # two results and their addresses in the registers of 4 would spill
    options["BLOCK_K"] = min(tile["BLOCK_K"], C & -C)  # boxes end where a pixel's channels end
    tiles = launch.cdiv(M, tile["BLOCK_N"]) * groups * launch.cdiv(N, tile["BLOCK_M"]) * h.size * v.size
    flags = {name: value for name, value in epilogue.flags.items() if name != "POOL"}
    launch.run(
        conv_back_kernel, (tiles,), boxes_of(x, tile["BLOCK_M"], options["BLOCK_K"]),
        boxes_of(w, options["BLOCK_K"], tile["BLOCK_N"]) if turn else boxes_of(w, tile["BLOCK_N"], options["BLOCK_K"]),
        epilogue.bias, epilogue.scale, y, epilogue.z,
        N, H, W, h.size, v.size, M, groups, h.kernel, v.kernel, w.shape[2] * w.shape[3], w.shape[3],
        C=C, PADDING_H=h.padding, PADDING_W=v.padding, STRIDE_H=h.stride, STRIDE_W=v.stride,
        TURN=turn, ROW_OF_TAPS=turn and groups == 1, ACC=launch.acc(x.dtype), PRECISION=precision, **early.options(),
        **flags, **options,
    )  # fmt: skip
