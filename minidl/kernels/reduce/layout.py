"""How a tensor that is reduced is seen, and how blocks of it are addressed.

As a matrix [K, R], kept index by reduced index, each of at most two levels of strides, so that the sums over N, H and W
of an [N, C, H, W] tensor need no copy; other layouts are copied first. A block has the kept index in two levels, k1 and
k2, too: [BLOCK_R, BLOCK_K1, BLOCK_K2].
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.runtime import dependent_launch, launch

LOWEST_INTEGER = tl.constexpr(-(2**63))


@triton.jit
def offsets(o, extent, s_1, s_2, LEVELS: tl.constexpr):
    """Memory offsets of indices o = i * extent + j, with strides s_1 of i and s_2 of j."""
    if LEVELS == 2:
        return (o // extent) * s_1 + (o % extent) * s_2
    else:
        return o * s_2


@triton.jit
def whole(o, ALIGN: tl.constexpr):
    """o, a multiple of ALIGN, such that the compiler knows it."""
    return o // ALIGN * ALIGN


@triton.jit
def again(b_x, OPAQUE: tl.constexpr):
    """b_x, hidden from the compiler, which would otherwise also keep float32 copies of 16-bit numbers."""
    if OPAQUE:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)
    return b_x


@triton.jit
def lowest(shape: tl.constexpr, dtype: tl.constexpr):
    """A block of what no maximum is below."""
    if dtype.is_floating():
        return tl.full(shape, float("-inf"), dtype)
    else:
        return tl.full(shape, LOWEST_INTEGER, dtype)


@triton.jit
def turned(b_x, TURN: tl.constexpr):
    """b_x in the opposite order where TURN: the maximum of what is turned is the minimum. Turned twice, it is b_x."""
    if TURN:
        b_x = b_x * -1 if b_x.dtype.is_floating() else ~b_x
    return b_x


@triton.jit
def by_outer(p, o, BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr, ALONG: tl.constexpr):
    """Pointers p + o [BLOCK_R, BLOCK_K1, BLOCK_K2], of which warps take outer indices: see `softmax.rows.by_rows`.

    What warps share they join at the end: of [664, 9, 1040] in 62 us, and so in 7.
    """
    p += o
    if ALONG and BLOCK_K1 > 1:
        p = tl.max_contiguous(p, [1, 2, BLOCK_K2])
    return p


@triton.jit
def kept(p_x, K1, K2, s_k1, s_k2, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K1: tl.constexpr,
         BLOCK_K2: tl.constexpr):  # fmt: skip
    """Of this program's kept indices: where they are in x, their number, and which there are [1, BLOCK_K1, BLOCK_K2].

    Loads take ALIGN neighbours at once, along k2 with COLUMNS, else along r.
    """
    tiles = tl.cdiv(K2, BLOCK_K2)
    o_k1 = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_K1 + tl.arange(0, BLOCK_K1)
    o_k2 = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_K2 + tl.arange(0, BLOCK_K2)
    m_k = (o_k1 < K1)[None, :, None] & (o_k2 < (whole(K2, ALIGN) if COLUMNS else K2))[None, None, :]
    o_k = (o_k1 * K2)[None, :, None] + o_k2[None, None, :]
    if COLUMNS:
        p_x += whole(o_k1 * s_k1, ALIGN)[None, :, None] + (o_k2 * s_k2)[None, None, :]
    else:
        p_x += whole(o_k1 * s_k1, ALIGN)[None, :, None] + whole(o_k2 * s_k2, ALIGN)[None, None, :]
    return p_x, o_k, m_k


@triton.jit
def block(p_x, o_r, R2, s_r1, s_r2, R_LEVELS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
          BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr):  # fmt: skip
    """Pointers [BLOCK_R, BLOCK_K1, BLOCK_K2] to reduced indices o_r of what is kept at p_x."""
    o_x = offsets(o_r, R2, s_r1, s_r2, R_LEVELS)
    if COLUMNS:
        o_x = whole(o_x, ALIGN)
    return by_outer(p_x, o_x[:, None, None], BLOCK_K1, BLOCK_K2, COLUMNS)


class Cut(NamedTuple):
    """A launch's programs, blocks by shares; how much of R a share has; the sizes of a block with warps and stages."""

    grid: tuple[int, int]
    share: int
    options: dict[str, int]

    @property
    def shares(self) -> int:
        return self.grid[1]


class Seen(NamedTuple):
    """x seen as a matrix [K, R]: for each index its inner extent and its two strides."""

    x: torch.Tensor
    K: int
    R: int
    k: tuple[int, int, int]  # inner extent, outer stride, inner stride
    r: tuple[int, int, int]
    k_levels: int
    r_levels: int

    @property
    def family(self) -> str:
        """Rows where the reduced index runs along memory, columns where the kept one does."""
        columns = self.K > 1 and 0 < self.k[2] < self.r[2]
        return "reduce_columns" if columns else "reduce_rows"

    @property
    def boxes(self) -> tuple[int, int, int]:
        """(K1, R, K2): the kept index in two levels."""
        K2 = self.k[0] if self.k_levels == 2 or self.family == "reduce_columns" else 1
        return self.K // K2, self.R, K2

    @property
    def align(self) -> int:
        """How many elements a load may take at once: what divides the strides of all other indices, up to 16 bytes."""
        columns = self.family == "reduce_columns"
        K1, _, K2 = self.boxes
        if columns:
            if self.k[2] != 1:
                return 1
            steps = [K2, self.r[2], self.r[1], self.k[1] * (K1 > 1)]
        elif self.r[2] != 1 or self.r_levels == 2:
            return 1
        else:
            s_k1, s_k2 = self.box_strides
            steps = [s_k1 * (K1 > 1), s_k2 * (K2 > 1)]
        step = math.gcd(16 // self.x.element_size(), *steps)
        return step & -step

    @property
    def box_strides(self) -> tuple[int, int]:
        """Strides of k1 and k2."""
        return (self.k[1], self.k[2]) if self.boxes[2] > 1 or self.family == "reduce_columns" else (self.k[2], 0)

    @property
    def extents(self) -> tuple[int, ...]:
        """K1, R, K2, R2 and the strides of k1, k2, r1 and r2, as kernels take them."""
        K1, R, K2 = self.boxes
        return K1, R, K2, self.r[0], *self.box_strides, *self.r[1:]

    @property
    def options(self) -> dict[str, Any]:
        """Constants of a launch that follow from the layout."""
        return {
            "COLUMNS": self.family == "reduce_columns" and self.k[2] == 1, "ALIGN": self.align,
            "EVEN": self.R % self.align == 0, "R_LEVELS": self.r_levels, **dependent_launch.options(),
        }  # fmt: skip

    def cut(self, shares: int | None) -> Cut:
        """The blocks of a launch, in so many shares or as many as are best."""
        K1, R, K2 = self.boxes
        tile = launch.tile(self.family, self.x.dtype, K=self.K, R=R)
        k1, r, k2 = box(tile, K1, R, K2, self.family == "reduce_columns")
        programs, blocks = launch.cdiv(K1, k1) * launch.cdiv(K2, k2), launch.cdiv(R, r)
        share = launch.cdiv(blocks, shares or shares_of(blocks, programs)) * r
        options = {"BLOCK_K1": k1, "BLOCK_R": r, "BLOCK_K2": k2, "num_warps": tile.num_warps}
        return Cut((programs, launch.cdiv(R, share)), share, {**options, "num_stages": tile.num_stages})


def seen(x: torch.Tensor, axes: Sequence[int]) -> Seen:
    kept = [i for i in range(x.dim()) if i not in axes]
    k = _levels([(x.shape[i], x.stride(i)) for i in kept])
    r = _levels([(x.shape[i], x.stride(i)) for i in axes])
    K, R = math.prod(x.shape[i] for i in kept), math.prod(x.shape[i] for i in axes)
    if len(k) > 2 or len(r) > 2:
        x = x.permute(*kept, *axes).contiguous()
        k, r = [(K, R)], [(R, 1)]
    return Seen(x, K, R, _inner(k), _inner(r), len(k), len(r))


def _levels(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) of each dimension, without those of size 1 and with neighbours merged where strides allow."""
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


# A middle of so few numbers leaves lanes to several outer indices, 4 times as many where the inner extent is WIDE.
# 34403x360x17 takes 0.18 ms with one and 0.31 with several, 19303x104x46 takes 0.097 and 0.093.
SHORT, WIDE = 32, 40
# The most lanes that few inner indices leave to the middle: 45615x4428x2 takes 0.27 ms with 1024, and 1.2 with 4096.
LANES = 1024
# The fewest blocks of a share: 4x24125 takes 2.6 us with 1 and 2.9 with 4.
LEAST = 2


def box(tile: launch.Tile, K1: int, R: int, K2: int, columns: bool) -> tuple[int, int, int]:
    """(BLOCK_K1, BLOCK_R, BLOCK_K2) of a tile for [K1, R, K2].

    Of columns, a block has as many inner indices as leave at most a quarter of its lanes idle, or else as few as any.
    Lanes that are left are those of other outer indices where the middle is SHORT, or else of more of the middle.
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
    """Into how many shares R of so many blocks is cut: at most 8 programs per processor.

    R of fewer than 8 blocks takes one launch. On an H200 a second launch costs 2.5 us with the gap before it.
    """
    return max(1, min(8 * launch.processors() // max(programs, 1), blocks // LEAST if blocks >= 8 else 1))
