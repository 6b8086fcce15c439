"""Tiles of the "unfolded" weight gradient, and where they are in dw.

column of a tile   | tap j, unit 0 | tap j, unit 1 | tap j + 1, unit 0 | ..    a unit: UNIT adjacent channels
row                  channel m of dy, or SWAPPED of x
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class UnfoldedTile(NamedTuple):
    """BLOCK_M rows and BLOCK_N columns of the gradient of each group, in steps of BLOCK_K pixels.

    M rows of a group, columns in units of UNIT adjacent channels of one tap
    INSIDE   every tap of every pixel is inside the image
    SWAPPED  dw is [groups * C, J, M], else [groups * M, J, C]
    """

    GROUPS: int
    M: int
    UNIT: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    INSIDE: bool
    SWAPPED: bool
    ACC: Any
    PRECISION: str


@triton.jit
def tile_at(i_tile, taps: tl.constexpr, tile: tl.constexpr):
    """Return (group, first row, tap and channel of each column, possibly out of range)."""
    UNIT: tl.constexpr = tile.UNIT
    UNITS: tl.constexpr = (taps.C + UNIT - 1) // UNIT
    tiles_n: tl.constexpr = (taps.JH * taps.JW * UNITS * UNIT + tile.BLOCK_N - 1) // tile.BLOCK_N
    o = tl.arange(0, tile.BLOCK_N)
    unit = i_tile % tiles_n * (tile.BLOCK_N // UNIT) + o // UNIT
    i_group = i_tile // tiles_n % tile.GROUPS
    return i_group, i_tile // (tiles_n * tile.GROUPS) * tile.BLOCK_M, unit // UNITS, unit % UNITS * UNIT + o % UNIT


@triton.jit
def positions(i_group, o_m, j, o_c, taps: tl.constexpr, tile: tl.constexpr):
    """Return offsets and mask of a tile's values in dw."""
    C: tl.constexpr = taps.C
    J: tl.constexpr = taps.JH * taps.JW
    M: tl.constexpr = tile.M
    mask = (o_m < M)[:, None] & ((j < J) & (o_c < C))[None, :]
    if tile.SWAPPED:
        return ((i_group * C + o_c) * J + j)[None, :] * M + o_m[:, None], mask
    else:
        return (i_group * M + o_m)[:, None] * (J * C) + (j * C + o_c)[None, :], mask
