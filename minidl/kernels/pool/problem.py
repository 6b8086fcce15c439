"""Helpers of the pooling kernels: pixel indices, and the grid and constants of a launch."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels.division import fast_divide, reciprocal
from minidl.kernels.pool.geometry import Windows
from minidl.runtime import dependent_launch, launch

# Windows of up to this many taps are unrolled, so that all of their loads are in flight together.
UNROLLED = 16
# The integer arguments; kernels are not specialised for their divisibility.
SIZES = ("P", "C_V", "rows", "columns", "by_h", "by_w", "H", "W", "OH", "OW", "pad_h", "pad_w")


@triton.jit
def output_index(
    P, C, rows, columns, by_h, by_w, INDEX: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Return (index, image, row, column) of this program's pixels in images of rows x columns, its channels, masks."""
    o_p = tl.program_id(0).to(INDEX) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = fast_divide(o_p, columns, by_w, INDEX)
    image = fast_divide(row, rows, by_h, INDEX)
    o_h = row - image * rows
    o_w = o_p - row * columns
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    return o_p, image.to(tl.int64), o_h, o_w, o_c, o_p < P, o_c < C


@triton.jit
def in_image(h, w, H, W):
    """Return the mask of pixels inside the image."""
    return (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def window(o, size, outputs, padding, K: tl.constexpr, STRIDE: tl.constexpr, ADAPTIVE: tl.constexpr):
    """Return start and end (exclusive) of the window of output o along one axis, including padding."""
    if ADAPTIVE:
        return (o * size) // outputs, ((o + 1) * size + (outputs - 1)) // outputs
    else:
        start = o * STRIDE - padding
        return start, tl.minimum(start + K, size + padding)


def last(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, H, W] as a contiguous [N, H, W, C]: a view if it is channels-last, else a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def empty(like: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return memory [N, *size, C] for an image or its windows `like` [N, C, ...]."""
    return torch.empty(like.shape[0], *size, like.shape[1], dtype=like.dtype, device=like.device)


def plan(
    family: str, y: torch.Tensor, at: Windows, numbered: tuple[int, int], taps: int
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """Return (grid, SIZES, constants) of a launch that writes y [N, ..., C].

    The grid covers `numbered` rows and columns per image, and each position loops over `taps`.
    """
    P, C = y.shape[0] * numbered[0] * numbered[1], y.shape[3]
    tile = launch.tile(family, y.dtype, P=P, C=C)
    # An adaptive window multiplies an index of one size by the other size.
    largest = max(P + tile["BLOCK_P"], *(2 * (a + 1) * (b + 1) for a, b in zip(at.size, at.output, strict=True)))
    # Channels as a number of vectors tell the compiler their alignment, for 8 and 24 as for 16. With vectors of 16 the
    # taps of maxima would be stored 16 at a time and move through shared memory to other threads.
    vector = math.gcd(C, 8)
    sizes = (P, C // vector, *numbered, *map(reciprocal, numbered), *at.size, *at.output, *at.padding)
    meta = {
        "VEC": vector, "R": at.kernel[0], "S": at.kernel[1], "STRIDE_H": at.stride[0], "STRIDE_W": at.stride[1],
        "UNROLL": taps if taps <= UNROLLED else 1, "INDEX": tl.int32 if largest < 2**31 else tl.int64,
        "ACC": launch.acc(y.dtype), **dependent_launch.options(), **tile.options,
    }  # fmt: skip
    return (launch.cdiv(P, tile["BLOCK_P"]), launch.cdiv(C, tile["BLOCK_C"])), sizes, meta


def grad(scatter: Any, gather: Any, at: Windows, *windows: torch.Tensor, **constants: Any) -> torch.Tensor:
    """Return dx [N, C, H, W] from values of `windows` [N, C, OH, OW], dy first.

    With disjoint windows the kernel `scatter` writes each window's pixels; else `gather` reads each pixel's windows.
    """
    dx = empty(windows[0], at.size)
    if at.disjoint:
        kernel, numbered, taps, flags = scatter, at.blocks, at.stride, {"EXACT": at.exact}
    else:
        kernel, numbered, taps, flags = gather, at.size, at.near, {"NEAR_H": at.near[0], "NEAR_W": at.near[1]}
    grid, sizes, meta = plan("pool_grad", dx, at, numbered, taps[0] * taps[1])
    launch.run(kernel, grid, *map(last, windows), dx, *sizes, **flags, **constants, **meta)
    return dx.permute(0, 3, 1, 2)
