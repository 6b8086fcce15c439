"""A batch norm's tensors in memory: rows of channels, or planes of pixels.

    rows    x [M, C]     value m of channel c at  m s_x + c             channels-last, any stride of rows
    planes  x [N, C, S]  value (n, s) of channel c at  (n C + c) S + s  contiguous, M = N S

Blocks have BLOCK_M values of BLOCK_C channels: consecutive rows, or PIXELS pixels of each of BLOCK_M / PIXELS images.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.reduce import as_multiple


class Sizes(NamedTuple):
    """M values of C channels, in planes of S pixels or in rows with the strides of x and of a tensor that is added to
    dx; band: the values of a band. 1 if not used."""

    M: int
    C: int
    s_x: int
    S: int = 1
    band: int = 1
    s_so_far: int = 1


class Tile(NamedTuple):
    """Constants: a block of BLOCK_M values of BLOCK_C channels, or of STEPS such blocks.

    ALIGN   values per vector load, up to 16 bytes: a divisor of C, or of S in planes
    APART   whether there are gaps between rows of x, a slice of channels of a wider tensor
    PIXELS  the pixels of an image in a block of planes; 0 for rows
    """

    ALIGN: int
    APART: bool
    ACC: Any
    BLOCK_M: int
    BLOCK_C: int
    STEPS: int = 1
    PIXELS: int = 0


@triton.jit
def channels(sizes, tile: tl.constexpr):
    """Return C."""
    if tile.PIXELS:
        return sizes.C
    else:
        return as_multiple(sizes.C, tile.ALIGN)


@triton.jit
def row_stride(s_x, C, tile: tl.constexpr):
    """Return the stride of rows of x."""
    if tile.APART:
        return as_multiple(s_x, tile.ALIGN)
    else:
        return C


@triton.jit
def block_values(start, end, i, sizes, tile: tl.constexpr):
    """Return the positions [BLOCK_M] of block i of the values [start, end), and their mask.

    A position is a row, or in planes an offset from the channel's first value. There the values are those of whole
    images, or a part of one image.
    """
    o_m = tl.arange(0, tile.BLOCK_M)
    if tile.PIXELS:
        S = as_multiple(sizes.S, tile.ALIGN)
        first = as_multiple(start % S, tile.ALIGN)
        width = tl.minimum(end - start, S)
        chunks = tl.cdiv(width, tile.PIXELS)
        image = start // S + (i // chunks) * (tile.BLOCK_M // tile.PIXELS) + o_m // tile.PIXELS
        pixel = (i % chunks) * tile.PIXELS + o_m % tile.PIXELS
        return image * S * sizes.C + first + pixel, (pixel < width) & (image * S < end)
    else:
        o_m += i * tile.BLOCK_M
        return start + o_m, o_m < (end - start).to(tl.int32)


@triton.jit
def blocks(start, end, sizes, tile: tl.constexpr):
    """Return the number of blocks of the values [start, end) of `block_values`, in 32 bits as a loop counts it."""
    if tile.PIXELS:
        images = tl.cdiv(end - start, sizes.S)
        width = tl.minimum(end - start, sizes.S)
        count = tl.cdiv(images, tile.BLOCK_M // tile.PIXELS) * tl.cdiv(width, tile.PIXELS)
    else:
        count = tl.cdiv(end - start, tile.BLOCK_M)
    return count.to(tl.int32)


@triton.jit
def row_offsets(o_m, stride, tile: tl.constexpr):
    """Return offsets [BLOCK_M, 1] of positions in a tensor whose rows have this stride."""
    if tile.PIXELS:
        return o_m[:, None]
    else:
        return (o_m * stride)[:, None]


@triton.jit
def channel_offsets(o_c, sizes, tile: tl.constexpr):
    """Return offsets [1, BLOCK_C] of channels."""
    if tile.PIXELS:
        return (o_c.to(tl.int64) * as_multiple(sizes.S, tile.ALIGN))[None, :]
    else:
        return o_c[None, :]


@triton.jit
def reverse_tile(sizes, tile: tl.constexpr):
    """Return positions and channels of a tile, the masks of channels and values, and whether it is a channel's first.

    Tiles are numbered from the last one: it reads the values that the sums read last, while they are in the cache.
    """
    M, tiles_c = sizes.M, tl.cdiv(sizes.C, tile.BLOCK_C)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    chunk = 0
    if tile.PIXELS:
        chunks = tl.cdiv(sizes.S, tile.PIXELS)
        chunk = i_tile % chunks
        i_tile //= chunks
        across = tile.BLOCK_M // tile.PIXELS * sizes.S
    else:
        across = tile.BLOCK_M
    group = i_tile // tiles_c
    start = group.to(tl.int64) * across
    end = tl.minimum(start + across, M)
    o_m, m_m = block_values(start, end, chunk, sizes, tile)
    o_c = (i_tile % tiles_c) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_c = o_c < sizes.C
    return o_m, o_c, m_c, m_m[:, None] & m_c[None, :], (group == 0) & (chunk == 0)


def in_planes(x: torch.Tensor) -> bool:
    """Whether the kernels read x [N, C, ...] as planes: it is contiguous, and not channels-last as well."""
    return x.dim() > 2 and x.is_contiguous() and not in_rows(x)


def in_rows(x: torch.Tensor) -> bool:
    """Whether x [N, C, ...] is channels-last, without gaps."""
    return x.permute(0, *range(2, x.dim()), 1).is_contiguous()


def dense(x: torch.Tensor, planes: bool) -> torch.Tensor:
    """Return x [N, C, ...] as a contiguous [N, C, S] if `planes`, else [M, C]; a view if it has this order in
    memory, else a copy."""
    return x.contiguous().view(*x.shape[:2], x.shape[2:].numel()) if planes else strided(x, planes).contiguous()


def strided(x: torch.Tensor, planes: bool) -> torch.Tensor:
    """Return `dense` x, or rows with any stride: a view if x is a slice of channels of a channels-last tensor."""
    if planes:
        return dense(x, planes)
    last = x.permute(0, *range(2, x.dim()), 1)
    rows = last.reshape(last.shape[:-1].numel(), x.shape[1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def shaped(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return [M, C] or [N, C, S] as a tensor of `shape`."""
    if values.dim() == 3:
        return values.view(shape)
    last = values.view(shape[0], *shape[2:], shape[1])
    return last.permute(0, last.dim() - 1, *range(1, last.dim() - 1))
