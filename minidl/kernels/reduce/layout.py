"""The matrix view of a reduced tensor: its plan, and the addresses of its blocks.

x is viewed as a matrix [K, R], output index by reduced index. Each index has at most two strides, so that sums over N,
H and W of an [N, C, H, W] tensor need no copy; other layouts are copied first. A program reads blocks [BLOCK_R,
BLOCK_K1, BLOCK_K2] of one share of R:

              R ->
            +----------+----------+
          K |          | #### ->  |   program (i, j): the outputs BLOCK_K1 x BLOCK_K2 of block i, share j of R,
          | |          |          |   BLOCK_R elements of each at a time
          v +----------+----------+
             share 0     share 1

A plan depends on shape, strides, dtype and device alone, and is cached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.division import as_multiple
from minidl.kernels.plan import LaunchPlan
from minidl.runtime import launch

LOWEST_INTEGER = tl.constexpr(-(2**63))


class Sizes(NamedTuple):
    """A matrix [K, R]: k = k1 K2 + k2 has the strides s_k1 and s_k2, r = r1 R2 + r2 the strides s_r1 and s_r2."""

    K1: int
    R: int
    K2: int
    R2: int
    s_k1: int
    s_k2: int
    s_r1: int
    s_r2: int


class ReduceTile(NamedTuple):
    """The block of a program.

    COLUMNS   loads go along k2, else along r
    ALIGN     elements per load, up to 16 bytes: a divisor of the strides of all other indices
    EVEN      R is a multiple of ALIGN
    R_LEVELS  levels of r: 1 if s_r2 alone is its stride
    """

    COLUMNS: bool
    ALIGN: int
    EVEN: bool
    R_LEVELS: int
    BLOCK_K1: int
    BLOCK_R: int
    BLOCK_K2: int


@triton.jit
def offsets(o, extent, s_1, s_2, LEVELS: tl.constexpr):
    """Return memory offsets of indices o = i * extent + j, with strides s_1 of i and s_2 of j."""
    if LEVELS == 2:
        return (o // extent) * s_1 + (o % extent) * s_2
    else:
        return o * s_2


@triton.jit
def opaque(b_x, OPAQUE: tl.constexpr):
    """Return b_x through an opaque instruction: otherwise the compiler also keeps float32 copies of 16-bit numbers."""
    if OPAQUE:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)
    return b_x


@triton.jit
def lowest(shape: tl.constexpr, dtype: tl.constexpr):
    """Return a block of the identity of the maximum."""
    if dtype.is_floating():
        return tl.full(shape, float("-inf"), dtype)
    else:
        return tl.full(shape, LOWEST_INTEGER, dtype)


@triton.jit
def reverse_order(b_x, REVERSE: tl.constexpr):
    """Return b_x, mapped to the opposite order with REVERSE, so that a maximum gives the minimum; self-inverse."""
    if REVERSE:
        b_x = b_x * -1 if b_x.dtype.is_floating() else ~b_x
    return b_x


@triton.jit
def load_extreme(p_x, mask, SMALLEST: tl.constexpr, ACC: tl.constexpr):
    """Return a block of elements, for a minimum in reverse order; the identity of the maximum where masked out."""
    if ACC.is_floating():
        b_x = tl.load(p_x, mask=mask, other=float("inf") if SMALLEST else float("-inf")).to(ACC)
    else:
        b_x = tl.load(p_x, mask=mask, other=0).to(ACC)
    b_x = reverse_order(b_x, SMALLEST)
    if not ACC.is_floating():
        b_x = tl.where(mask, b_x, LOWEST_INTEGER)
    return b_x


@triton.jit
def largest(b_v, shape: tl.constexpr, ACC: tl.constexpr):
    """Return (where b_v is NaN, whether any is along axis 0, the maximum of the others along it).

    tl.max over lanes may drop or propagate NaN, so NaN is detected separately.
    """
    missing = b_v != b_v
    b_missing = tl.max(missing.to(tl.int32), axis=0) > 0  # [BLOCK_K1, BLOCK_K2]
    return missing, b_missing, tl.max(tl.where(missing, lowest(shape, ACC), b_v), axis=0)


@triton.jit
def extreme_value(b_top, b_missing, SMALLEST: tl.constexpr, ACC: tl.constexpr):
    """Return the result of `load_extreme` and `largest` in the order of values, NaN where one is missing."""
    b_top = reverse_order(b_top, SMALLEST)
    if ACC.is_floating():
        b_top = tl.where(b_missing, float("nan"), b_top)
    return b_top


@triton.jit
def output_block(p_x, sizes, tile: tl.constexpr):
    """Return pointers into x, indices and mask [1, BLOCK_K1, BLOCK_K2] of this program's outputs."""
    ALIGN: tl.constexpr = tile.ALIGN
    tiles = tl.cdiv(sizes.K2, tile.BLOCK_K2)
    o_k1 = (tl.program_id(0) // tiles).to(tl.int64) * tile.BLOCK_K1 + tl.arange(0, tile.BLOCK_K1)
    o_k2 = (tl.program_id(0) % tiles).to(tl.int64) * tile.BLOCK_K2 + tl.arange(0, tile.BLOCK_K2)
    end = as_multiple(sizes.K2, ALIGN) if tile.COLUMNS else sizes.K2
    m_k = (o_k1 < sizes.K1)[None, :, None] & (o_k2 < end)[None, None, :]
    o_k = (o_k1 * sizes.K2)[None, :, None] + o_k2[None, None, :]
    o_x = o_k2 * sizes.s_k2
    if not tile.COLUMNS:
        o_x = as_multiple(o_x, ALIGN)
    p_x += as_multiple(o_k1 * sizes.s_k1, ALIGN)[None, :, None] + o_x[None, None, :]
    return p_x, o_k, m_k


@triton.jit
def reduced_pointers(p_x, o_r, sizes, tile: tl.constexpr):
    """Return pointers [BLOCK_R, BLOCK_K1, BLOCK_K2] to the elements o_r of the outputs at p_x.

    Warps are assigned to k1 (see `softmax.rows.row_pointers`): otherwise they share outputs and must join them.
    """
    o_x = offsets(o_r, sizes.R2, sizes.s_r1, sizes.s_r2, tile.R_LEVELS)
    if tile.COLUMNS:
        o_x = as_multiple(o_x, tile.ALIGN)
    p_x += o_x[:, None, None]
    if tile.COLUMNS and tile.BLOCK_K1 > 1:
        BLOCK_K2: tl.constexpr = tile.BLOCK_K2
        p_x = tl.max_contiguous(p_x, [1, 2, BLOCK_K2])
    return p_x


@dataclass(frozen=True, slots=True)
class ReducePlan(LaunchPlan):
    """The launch of a reduction of x to K outputs: grid (blocks, shares), and `share` elements of R per share.

    order   the permutation in which x is copied, None if it is read in place
    """

    order: tuple[int, ...] | None
    K: int
    share: int

    def source(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the kernel reads, x or a copy."""
        return x if self.order is None else x.permute(self.order).contiguous()


def plan(x: torch.Tensor, axes: Sequence[int], shares: int | None = None) -> ReducePlan:
    """Return the plan that reduces `axes` of x in `shares` shares of R, or in the best number if None."""
    return _plan(x.shape, x.stride(), x.dtype, tuple(axes), shares, launch.target(), launch.processors())


@launch.cached
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, ...], shares: int | None,
    target: str, processors: int,
) -> ReducePlan:  # fmt: skip
    outputs = [i for i in range(len(shape)) if i not in axes]
    k, r = (_levels([(shape[i], strides[i]) for i in part]) for part in (outputs, axes))
    K, R = (math.prod(shape[i] for i in part) for part in (outputs, axes))
    order = None
    if len(k) > 2 or len(r) > 2:
        order = *outputs, *axes
        k, r = [(K, R)], [(R, 1)]
    (k_inner, s_k1, s_k2), (R2, s_r1, s_r2) = _two(k), _two(r)
    # Rows: the reduced index is contiguous in memory. Columns: the output index is.
    columns = K > 1 and 0 < s_k2 < s_r2
    K2 = k_inner if len(k) == 2 or columns else 1
    if K2 == 1 and not columns:
        s_k1, s_k2 = s_k2, 0
    sizes = Sizes(K // K2, R, K2, R2, s_k1, s_k2, s_r1, s_r2)
    if columns:
        align = _alignment(dtype, K2, s_r2, s_r1, s_k1 * (sizes.K1 > 1)) if s_k2 == 1 else 1
    else:
        align = _alignment(dtype, s_k1 * (sizes.K1 > 1), s_k2 * (K2 > 1)) if s_r2 == 1 and len(r) < 2 else 1
    tile = launch.tile("reduce_columns" if columns else "reduce_rows", dtype, target_=target, K=K, R=R)
    block_k1, block_r, block_k2 = block_sizes(tile, sizes.K1, R, K2, columns)
    block = ReduceTile(columns and s_k2 == 1, align, R % align == 0, len(r), block_k1, block_r, block_k2)
    programs, blocks = launch.cdiv(sizes.K1, block_k1) * launch.cdiv(K2, block_k2), launch.cdiv(R, block_r)
    share = launch.cdiv(blocks, shares or shares_of(blocks, programs, processors)) * block_r
    return ReducePlan((programs, launch.cdiv(R, share)), sizes, block, tile.launch_options, order, K, share)


def _alignment(dtype: torch.dtype, *steps: int) -> int:
    """Return the largest power of two that divides all steps, up to 16 bytes."""
    step = math.gcd(16 // dtype.itemsize, *steps)
    return step & -step


def _levels(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (size, stride) of each dimension, without size-1 ones and with neighbours merged if strides allow."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def _two(levels: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return (inner extent, outer stride, inner stride) of up to two levels."""
    if not levels:
        return 1, 0, 0
    return levels[-1][0], levels[0][1] if len(levels) == 2 else 0, levels[-1][1]


# With R <= SHORT, or 4 SHORT if K2 >= WIDE, a block spans several outer indices k1.
SHORT, WIDE = 32, 40
LANES = 1024  # at most, of a block with small K2
LEAST = 2  # blocks of a share


def block_sizes(tile: launch.Tile, K1: int, R: int, K2: int, columns: bool) -> tuple[int, int, int]:
    """Return (BLOCK_K1, BLOCK_R, BLOCK_K2) of a tile for [K1, R, K2].

    For columns, BLOCK_K2 is the largest size that leaves at most a quarter of the lanes idle, else the one with the
    fewest idle lanes. The remaining lanes go to more outer indices if R is SHORT, else to more of R.
    """
    K, r = tile["BLOCK_K"], tile["BLOCK_R"]
    if not columns:
        return (K, r, 1) if K1 >= K2 else (1, r, K)
    sizes = [min(K, triton.next_power_of_2(K2))]
    while sizes[-1] > 16:
        sizes.append(sizes[-1] // 2)
    idle = [launch.cdiv(K2, size) * size for size in sizes]
    along = next((size for size, lanes in zip(sizes, idle, strict=True) if 4 * lanes <= 5 * K2), None)
    along = along or sizes[idle.index(min(idle))]
    outer = min(K // along, triton.next_power_of_2(K1)) if R <= SHORT or (R <= 4 * SHORT and K2 >= WIDE) else 1
    r = max(r, min(r * (K // (along * outer)), LANES // along))
    return outer, min(r, triton.next_power_of_2(R)), along


def shares_of(blocks: int, programs: int, processors: int) -> int:
    """Return the number of shares of R, `blocks` blocks long, for at most 8 programs per multiprocessor.

    R of fewer than 8 blocks has one share: a second launch takes as long.
    """
    return max(1, min(8 * processors // max(programs, 1), blocks // LEAST if blocks >= 8 else 1))
