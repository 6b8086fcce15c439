"""The matrix view of a reduced tensor, and the addresses of its blocks.

The view is [K, R], output index by reduced index. Each index has at most two strides, so that sums over N, H and W of
an [N, C, H, W] tensor need no copy; other layouts are copied first. A block is [BLOCK_R, BLOCK_K1, BLOCK_K2], with the
output index in two levels, k1 and k2.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.division import as_multiple
from minidl.runtime import dependent_launch, launch

LOWEST_INTEGER = tl.constexpr(-(2**63))


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
def outer_pointers(p, o, BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr, ALONG: tl.constexpr):
    """Return pointers p + o [BLOCK_R, BLOCK_K1, BLOCK_K2], with warps assigned to k1: see `softmax.rows.row_pointers`.

    Otherwise warps share outputs and must join them: [664, 9, 1040] takes 62 us, and 7 with this.
    """
    p += o
    if ALONG and BLOCK_K1 > 1:
        p = tl.max_contiguous(p, [1, 2, BLOCK_K2])
    return p


@triton.jit
def output_block(p_x, K1, K2, s_k1, s_k2, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K1: tl.constexpr,
         BLOCK_K2: tl.constexpr):  # fmt: skip
    """Return pointers into x, indices and mask [1, BLOCK_K1, BLOCK_K2] of this program's outputs.

    Loads take ALIGN elements at once, along k2 with COLUMNS, else along r.
    """
    tiles = tl.cdiv(K2, BLOCK_K2)
    o_k1 = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_K1 + tl.arange(0, BLOCK_K1)
    o_k2 = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_K2 + tl.arange(0, BLOCK_K2)
    m_k = (o_k1 < K1)[None, :, None] & (o_k2 < (as_multiple(K2, ALIGN) if COLUMNS else K2))[None, None, :]
    o_k = (o_k1 * K2)[None, :, None] + o_k2[None, None, :]
    if COLUMNS:
        p_x += as_multiple(o_k1 * s_k1, ALIGN)[None, :, None] + (o_k2 * s_k2)[None, None, :]
    else:
        p_x += as_multiple(o_k1 * s_k1, ALIGN)[None, :, None] + as_multiple(o_k2 * s_k2, ALIGN)[None, None, :]
    return p_x, o_k, m_k


@triton.jit
def reduced_pointers(p_x, o_r, R2, s_r1, s_r2, R_LEVELS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
          BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr):  # fmt: skip
    """Return pointers [BLOCK_R, BLOCK_K1, BLOCK_K2] to the elements o_r of the outputs at p_x."""
    o_x = offsets(o_r, R2, s_r1, s_r2, R_LEVELS)
    if COLUMNS:
        o_x = as_multiple(o_x, ALIGN)
    return outer_pointers(p_x, o_x[:, None, None], BLOCK_K1, BLOCK_K2, COLUMNS)


class Partition(NamedTuple):
    """The grid of a launch, blocks by shares; the elements of R per share; block sizes, warps and stages."""

    grid: tuple[int, int]
    share: int
    options: dict[str, int]

    @property
    def shares(self) -> int:
        return self.grid[1]


class MatrixView(NamedTuple):
    """x as a matrix [K, R]: for each index its inner extent and its two strides."""

    x: torch.Tensor
    K: int
    R: int
    k: tuple[int, int, int]  # inner extent, outer stride, inner stride
    r: tuple[int, int, int]
    k_levels: int
    r_levels: int

    @property
    def family(self) -> str:
        """The tile family: rows if the reduced index is contiguous in memory, columns if the output index is."""
        columns = self.K > 1 and 0 < self.k[2] < self.r[2]
        return "reduce_columns" if columns else "reduce_rows"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(K1, R, K2), with the output index in two levels."""
        K2 = self.k[0] if self.k_levels == 2 or self.family == "reduce_columns" else 1
        return self.K // K2, self.R, K2

    @property
    def align(self) -> int:
        """The elements per vector load, up to 16 bytes: a divisor of the strides of all other indices."""
        columns = self.family == "reduce_columns"
        K1, _, K2 = self.sizes
        if columns:
            if self.k[2] != 1:
                return 1
            steps = [K2, self.r[2], self.r[1], self.k[1] * (K1 > 1)]
        elif self.r[2] != 1 or self.r_levels == 2:
            return 1
        else:
            s_k1, s_k2 = self.output_strides
            steps = [s_k1 * (K1 > 1), s_k2 * (K2 > 1)]
        step = math.gcd(16 // self.x.element_size(), *steps)
        return step & -step

    @property
    def output_strides(self) -> tuple[int, int]:
        """Strides of k1 and k2."""
        return (self.k[1], self.k[2]) if self.sizes[2] > 1 or self.family == "reduce_columns" else (self.k[2], 0)

    @property
    def extents(self) -> tuple[int, ...]:
        """K1, R, K2, R2 and the strides of k1, k2, r1 and r2: arguments of the kernels."""
        K1, R, K2 = self.sizes
        return K1, R, K2, self.r[0], *self.output_strides, *self.r[1:]

    @property
    def options(self) -> dict[str, Any]:
        """The constexpr arguments that follow from the layout."""
        return {
            "COLUMNS": self.family == "reduce_columns" and self.k[2] == 1, "ALIGN": self.align,
            "EVEN": self.R % self.align == 0, "R_LEVELS": self.r_levels, **dependent_launch.options(),
        }  # fmt: skip

    def partition(self, shares: int | None) -> Partition:
        """Return the grid and blocks of a launch with `shares` shares of R, or the best number if None."""
        K1, R, K2 = self.sizes
        tile = launch.tile(self.family, self.x.dtype, K=self.K, R=R)
        k1, r, k2 = block_sizes(tile, K1, R, K2, self.family == "reduce_columns")
        programs, blocks = launch.cdiv(K1, k1) * launch.cdiv(K2, k2), launch.cdiv(R, r)
        share = launch.cdiv(blocks, shares or shares_of(blocks, programs)) * r
        options = {"BLOCK_K1": k1, "BLOCK_R": r, "BLOCK_K2": k2, "num_warps": tile.num_warps}
        return Partition((programs, launch.cdiv(R, share)), share, {**options, "num_stages": tile.num_stages})


def as_matrix(x: torch.Tensor, axes: Sequence[int]) -> MatrixView:
    """Return the view of x that reduces `axes`, of a copy if its strides have more than two levels."""
    outputs = [i for i in range(x.dim()) if i not in axes]
    k = _levels([(x.shape[i], x.stride(i)) for i in outputs])
    r = _levels([(x.shape[i], x.stride(i)) for i in axes])
    K, R = math.prod(x.shape[i] for i in outputs), math.prod(x.shape[i] for i in axes)
    if len(k) > 2 or len(r) > 2:
        x = x.permute(*outputs, *axes).contiguous()
        k, r = [(K, R)], [(R, 1)]
    return MatrixView(x, K, R, _inner(k), _inner(r), len(k), len(r))


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


def _inner(levels: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    if not levels:
        return 1, 0, 0
    return levels[-1][0], levels[0][1] if len(levels) == 2 else 0, levels[-1][1]


# With R <= SHORT, or 4 SHORT if K2 >= WIDE, a block spans several outer indices k1.
# 34403x360x17 takes 0.18 ms with one and 0.31 with several, 19303x104x46 takes 0.097 and 0.093.
SHORT, WIDE = 32, 40
# Most lanes of a block with small K2: 45615x4428x2 takes 0.27 ms with 1024, and 1.2 with 4096.
LANES = 1024
# The fewest blocks of a share: 4x24125 takes 2.6 us with 1 and 2.9 with 4.
LEAST = 2


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


def shares_of(blocks: int, programs: int) -> int:
    """Return the number of shares of R, `blocks` blocks long, for at most 8 programs per multiprocessor.

    R of fewer than 8 blocks has one share. On an H200 a second launch costs 2.5 us with the gap before it.
    """
    return max(1, min(8 * launch.processors() // max(programs, 1), blocks // LEAST if blocks >= 8 else 1))
