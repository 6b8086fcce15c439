"""Reductions over any axes: sum, mean, 2-norm, maximum, and the position of the maximum.

    x   any shape and strides          y   x's shape without the reduced axes (or with size 1 there)

x is seen as a matrix [K, R], kept index by reduced index, each of at most two levels of strides: the sums over N, H
and W of an [N, C, H, W] tensor need no copy. Other layouts are copied first. A program holds BLOCK_K x BLOCK_R lanes,
walks its share of R, and joins its lanes at the end; where K gives too few programs, R is shared out and a second
launch joins the shares in order. Up to 2^18 numbers, columns are summed in one launch, in narrow strips that hold all
rows in a few blocks. Results do not depend on scheduling. `depth` is the longest chain of additions, for error bounds.

Floating sums are accumulated in float32 (float64 for float64). Norms are accumulated in float64, in which the squares
of narrower types neither overflow nor vanish. Sums of integers and bools are int64. As in torch, the sum of nothing
is 0 and its mean NaN, NaN wins a maximum, and `argmax` gives the first of equal positions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.runtime import check, early, launch
from minidl.runtime.early import wait

SUM, SQUARES, EQUAL, MAX = map(tl.constexpr, range(4))
AS_IT_IS, OVER_COUNT, ROOT = map(tl.constexpr, range(3))

NOWHERE = tl.constexpr(2**62)
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
def lowest(shape: tl.constexpr, dtype: tl.constexpr):
    """A block of what no maximum is below."""
    if dtype.is_floating():
        return tl.full(shape, float("-inf"), dtype)
    else:
        return tl.full(shape, LOWEST_INTEGER, dtype)


@triton.jit
def by_outer(p, o, BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr, ALONG: tl.constexpr):
    """Pointers p + o [BLOCK_R, BLOCK_K1, BLOCK_K2], of which warps take outer indices: see `softmax.by_rows`.

    What warps share they join at the end: of [664, 9, 1040] in 62 us, and so in 7.
    """
    p += o
    if ALONG and BLOCK_K1 > 1:
        p = tl.max_contiguous(p, [1, 2, BLOCK_K2])
    return p


@triton.jit
def added(b_acc, p_x, mask, b_m, OP: tl.constexpr, ACC: tl.constexpr):
    """b_acc with one more block, of which lanes outside the mask add nothing."""
    b_x = tl.load(p_x, mask=mask, other=float("-inf") if OP == MAX and ACC.is_floating() else 0).to(ACC)
    if OP == MAX:
        if not ACC.is_floating():
            b_x = tl.where(mask, b_x, LOWEST_INTEGER)
        return tl.maximum(b_acc, b_x, propagate_nan=tl.PropagateNan.ALL)
    elif OP == EQUAL:
        return b_acc + (mask & (b_x == b_m)).to(ACC)
    elif OP == SQUARES:
        return b_acc + b_x * b_x
    else:
        return b_acc + b_x


@triton.jit
def reduce_kernel(
    p_x, p_m, p_y, K1, R, K2, R2, s_k1, s_k2, s_r1, s_r2, share, count,
    OP: tl.constexpr, FINISH: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
    R_LEVELS: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_K1: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K2: tl.constexpr,
):  # fmt: skip
    """y[i, k1, k2] = sum of f(x[k1, r, k2]) over share i of r: f(x) = x, x^2, or 1 where x equals m[k1, k2]; or the
    maximum.

    Loads take ALIGN neighbours at once, along k2 with COLUMNS, else along r, and there in the last block only where R
    is EVEN, a multiple of ALIGN.
    """
    wait(EARLY)
    tiles = tl.cdiv(K2, BLOCK_K2)
    o_k1 = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_K1 + tl.arange(0, BLOCK_K1)
    o_k2 = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_K2 + tl.arange(0, BLOCK_K2)
    m_k = (o_k1 < K1)[None, :, None] & (o_k2 < (whole(K2, ALIGN) if COLUMNS else K2))[None, None, :]
    o_k = (o_k1 * K2)[None, :, None] + o_k2[None, None, :]  # [1, BLOCK_K1, BLOCK_K2]
    if COLUMNS:
        p_x += whole(o_k1 * s_k1, ALIGN)[None, :, None] + (o_k2 * s_k2)[None, None, :]
    else:
        p_x += whole(o_k1 * s_k1, ALIGN)[None, :, None] + whole(o_k2 * s_k2, ALIGN)[None, None, :]
    start = tl.program_id(1).to(tl.int64) * share
    rows = tl.minimum(share, R - start)
    if OP == MAX:
        b_acc = lowest((BLOCK_R, BLOCK_K1, BLOCK_K2), ACC)
    else:
        b_acc = tl.zeros((BLOCK_R, BLOCK_K1, BLOCK_K2), dtype=ACC)
    if OP == EQUAL:
        b_m = tl.load(p_m + o_k, mask=m_k, other=0).to(ACC)
    else:
        b_m = None
    o_r = start + tl.arange(0, BLOCK_R)
    last = rows // BLOCK_R * BLOCK_R
    for r in range(0, last, BLOCK_R):
        o_x = offsets(r + o_r, R2, s_r1, s_r2, R_LEVELS)
        if COLUMNS:
            o_x = whole(o_x, ALIGN)
        p_r = by_outer(p_x, o_x[:, None, None], BLOCK_K1, BLOCK_K2, COLUMNS)
        b_acc = added(b_acc, p_r, m_k, b_m, OP, ACC)
    if last < rows:
        o_x = offsets(last + o_r, R2, s_r1, s_r2, R_LEVELS)
        if COLUMNS:
            o_x = whole(o_x, ALIGN)
        end = whole(R, ALIGN) if EVEN else R
        p_r = by_outer(p_x, o_x[:, None, None], BLOCK_K1, BLOCK_K2, COLUMNS)
        b_acc = added(b_acc, p_r, m_k & (last + o_r < end)[:, None, None], b_m, OP, ACC)
    if OP == MAX:
        # A maximum over lanes may drop NaN or keep it, so NaN is looked for by itself.
        missing = b_acc != b_acc
        b_missing = tl.max(missing.to(tl.int32), axis=0) > 0  # [BLOCK_K1, BLOCK_K2]
        b_y = tl.max(tl.where(missing, lowest((BLOCK_R, BLOCK_K1, BLOCK_K2), ACC), b_acc), axis=0)
        if ACC.is_floating():
            b_y = tl.where(b_missing, float("nan"), b_y)
    else:
        b_y = tl.sum(b_acc, axis=0)
    if FINISH == OVER_COUNT:
        b_y = b_y / count
    elif FINISH == ROOT:
        b_y = tl.sqrt(b_y)
    o_y = tl.program_id(1).to(tl.int64) * K1 * K2 + o_k
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty)[None, :, :], mask=m_k)


@triton.jit
def argmax_kernel(
    p_x, p_i, p_y, p_j, K, R, K2, R2, s_k1, s_k2, s_r1, s_r2, share,
    SHARES: tl.constexpr, LAST: tl.constexpr, INTEGERS: tl.constexpr,
    K_LEVELS: tl.constexpr, R_LEVELS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """j[i, k] = the first r where x[k, r] is largest over share i of r, and that maximum in y[i, k] unless LAST.

    With SHARES, x [shares, K] holds the maxima of shares, and i their positions.
    """
    o_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_k = o_k < K
    p_x += offsets(o_k, K2, s_k1, s_k2, K_LEVELS)[:, None]
    start = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(start + share, R)
    b_lowest = lowest((BLOCK_K, BLOCK_R), ACC)
    b_v = b_lowest
    b_j = tl.full((BLOCK_K, BLOCK_R), NOWHERE, dtype=tl.int64)
    for r in range(0, share, BLOCK_R):
        o_r = start + r + tl.arange(0, BLOCK_R)
        m_kr = m_k[:, None] & (o_r < end)[None, :]
        p_kr = p_x + offsets(o_r, R2, s_r1, s_r2, R_LEVELS)[None, :]
        b_x = tl.load(p_kr, mask=m_kr, other=0).to(ACC)  # [BLOCK_K, BLOCK_R]
        better = m_kr & ((b_x > b_v) | ((b_x != b_x) & (b_v == b_v)) | (b_j == NOWHERE))
        if SHARES:
            b_i = tl.load(p_i + o_k[:, None] + o_r[None, :] * K, mask=m_kr, other=0)  # [BLOCK_K, BLOCK_R]
            b_j = tl.where(better, b_i, b_j)
        else:
            b_j = tl.where(better, o_r[None, :], b_j)
        b_v = tl.where(better, b_x, b_v)
    # A maximum over lanes may drop NaN or keep it, so NaN is looked for by itself.
    missing = b_v != b_v
    b_missing = tl.max(missing.to(tl.int32), axis=1) > 0  # [BLOCK_K]
    b_top = tl.max(tl.where(missing, b_lowest, b_v), axis=1)
    o_y = tl.program_id(1).to(tl.int64) * K + o_k
    at_top = tl.where(b_missing[:, None], missing, b_v == b_top[:, None])
    b_first = tl.min(tl.where(at_top, b_j, NOWHERE), axis=1)
    tl.store(p_j + o_y, b_first, mask=m_k)
    if not LAST:
        if not INTEGERS:
            b_top = tl.where(b_missing, float("nan"), b_top)
        tl.store(p_y + o_y, b_top.to(p_y.dtype.element_ty), mask=m_k)


def sum(x: torch.Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The sum over `dims` (all when None), in x's dtype; int64 for integers and bools. An empty sum is 0."""
    return _reduced("sum", x, dims, keepdim)


def mean(x: torch.Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The mean over `dims` (all when None) of a floating tensor. An empty mean is NaN."""
    check.floating("mean", x=x)
    return _reduced("mean", x, dims, keepdim, finish=OVER_COUNT)


def norm(x: torch.Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """sqrt(sum of x^2) over `dims` (all when None) of a floating tensor."""
    check.floating("norm", x=x)
    return _reduced("norm", x, dims, keepdim, op=SQUARES, finish=ROOT)


def sum_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """x summed down to `shape`: the gradient of a broadcast from `shape` to x's shape."""
    shape = tuple(shape)
    if tuple(x.shape) == shape:
        return x
    new = x.dim() - len(shape)
    axes = [i for i, size in enumerate(x.shape) if i < new or (shape[i - new] == 1 and size != 1)]
    y = torch.empty(shape, dtype=_sum_dtype(x), device=x.device)
    return _sum(x, axes, y)


def sum_rows(x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of the rows of x [M, N], added in a fixed order, as [N] in `out_dtype` (default x's)."""
    y = torch.empty(x.shape[1:], dtype=out_dtype or x.dtype, device=x.device)
    return _sum(x, (0,), y)


def count_equal(x: torch.Tensor, y: torch.Tensor, dims: Sequence[int] | int | None = None) -> torch.Tensor:
    """How many elements of x along `dims` equal y, which has size 1 there: as y's shape, in the accumulate type."""
    axes = _axes("count_equal", dims, x.dim())
    counts = torch.empty(y.shape, dtype=launch.acc_torch(x.dtype), device=x.device)
    return _sum(x, axes, counts, op=EQUAL, m=y.contiguous())


def amax(x: torch.Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The maximum over `dims` (all when None); NaN where any element is NaN.

    Raises ValueError where there are no elements.
    """
    axes = _axes("amax", dims, x.dim())
    _not_empty("amax", x, axes)
    y = torch.empty(_shape(x, axes, keepdim), dtype=x.dtype, device=x.device)
    return y if x.numel() == 0 else _sum(x, axes, y, op=MAX)


def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """The first position of the maximum along `dim`, or in x flattened, as int64; the first NaN where there is one.

    Raises ValueError where there are no elements.
    """
    axes = _axes("argmax", dim, x.dim())
    _not_empty("argmax", x, axes)
    positions = torch.empty(_shape(x, axes, keepdim), dtype=torch.int64, device=x.device)
    _argmax(x, axes, positions)
    return positions


def kept_shape(x: torch.Tensor, dims: Sequence[int] | int | None) -> list[int]:
    """x's shape with size 1 in place of `dims` (all when None)."""
    return _shape(x, _axes("kept_shape", dims, x.dim()), keepdim=True)


def depth(K: int, R: int, dtype: torch.dtype) -> int:
    """The longest chain of additions that a term goes through when x of K outputs is summed over R, in any layout.

    A lane takes one term of each block of its share. The lanes of a block are joined as a tree over runs, together at
    most 64 deep: a thread of a GPU has at most 32 lanes of its own, and NumPy sums in pairs of runs of 16. Then come
    the shares. Between the fewest and the most of these that K outputs may have, the chain is longest at one end.
    """
    longest = 0
    for family in () if R < 2 else ("reduce_rows", "reduce_columns"):
        tile = launch.tile(family, dtype, K=K, R=R)
        along = 1
        while along <= tile["BLOCK_K"]:
            _, block, _ = _box(tile, max(K // along, 1), R, along, family == "reduce_columns")
            blocks = launch.cdiv(R, block)
            for programs in (launch.cdiv(K, tile["BLOCK_K"]), 2 * launch.cdiv(K, along)):
                shares = _shares(blocks, programs)
                longest = max(longest, launch.cdiv(blocks, shares) + min(block, 64) + shares)
            along *= 2
    return min(max(R - 1, 0), longest)


def band(rows: int, tiles: int, block: int) -> int:
    """Rows per program of `tiles` columns: whole blocks, so that there are at most 8 programs per multiprocessor."""
    bands = max(1, 8 * launch.processors() // max(tiles, 1))
    return max(1, launch.cdiv(launch.cdiv(rows, block), bands)) * block


class _Seen(NamedTuple):
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
        return self.K, self.R, self.k[0], self.r[0], self.k[1], self.k[2], self.r[1], self.r[2]


def _seen(x: torch.Tensor, axes: Sequence[int]) -> _Seen:
    kept = [i for i in range(x.dim()) if i not in axes]
    k = _levels([(x.shape[i], x.stride(i)) for i in kept])
    r = _levels([(x.shape[i], x.stride(i)) for i in axes])
    K, R = math.prod(x.shape[i] for i in kept), math.prod(x.shape[i] for i in axes)
    if len(k) > 2 or len(r) > 2:
        x = x.permute(*kept, *axes).contiguous()
        k, r = [(K, R)], [(R, 1)]
    return _Seen(x, K, R, _inner(k), _inner(r), len(k), len(r))


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


def _box(tile: launch.Tile, K1: int, R: int, K2: int, columns: bool) -> tuple[int, int, int]:
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


def _shares(blocks: int, programs: int) -> int:
    """Into how many shares R of so many blocks is cut: at most 8 programs per processor.

    R of fewer than 8 blocks takes one launch. On an H200 a second launch costs 2.5 us with the gap before it.
    """
    return max(1, min(8 * launch.processors() // max(programs, 1), blocks // LEAST if blocks >= 8 else 1))


def _reduced(
    name: str, x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool, **how: tl.constexpr
) -> torch.Tensor:
    axes = _axes(name, dims, x.dim())
    y = torch.empty(_shape(x, axes, keepdim), dtype=_sum_dtype(x), device=x.device)
    return _sum(x, axes, y, **how)


def _sum(
    x: torch.Tensor,
    axes: Sequence[int],
    y: torch.Tensor,
    op: tl.constexpr = SUM,
    finish: tl.constexpr = AS_IT_IS,
    m: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill y, contiguous in the order of the kept axes, and return it."""
    if x.numel() == 0:
        return y.fill_(math.nan if finish == OVER_COUNT else 0)
    seen = _seen(x, axes)
    _run_sum(seen, y, seen.R, op, finish, m, _wide(x, op), None)
    return y


def _wide(x: torch.Tensor, op: tl.constexpr) -> torch.dtype:
    """What is accumulated."""
    if not x.is_floating_point():
        return torch.int64
    if op == MAX:
        # Triton's maximum of bfloat16 is one of float32.
        return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    return torch.float64 if op == SQUARES else launch.acc_torch(x.dtype)


_ACC = {torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64}


def _run_sum(
    seen: _Seen,
    y: torch.Tensor,
    count: int,
    op: tl.constexpr,
    finish: tl.constexpr,
    m: torch.Tensor | None,
    wide: torch.dtype,
    shares: int | None,
) -> None:
    K1, R, K2 = seen.boxes
    columns = seen.family == "reduce_columns"
    tile = launch.tile(seen.family, seen.x.dtype, K=seen.K, R=R)
    block_k1, block_r, block_k2 = _box(tile, K1, R, K2, columns)
    programs, blocks = launch.cdiv(K1, block_k1) * launch.cdiv(K2, block_k2), launch.cdiv(R, block_r)
    share = launch.cdiv(blocks, shares or _shares(blocks, programs)) * block_r
    shares = launch.cdiv(R, share)
    partial = y if shares == 1 else torch.empty(shares, seen.K, dtype=wide, device=y.device)
    launch.run(
        reduce_kernel, (programs, shares), seen.x, m, partial, K1, R, K2, seen.r[0], *seen.box_strides, *seen.r[1:],
        share, count, OP=op, FINISH=finish if shares == 1 else AS_IT_IS, COLUMNS=columns and seen.k[2] == 1,
        ALIGN=seen.align, EVEN=R % seen.align == 0, R_LEVELS=seen.r_levels, ACC=_ACC[wide],
        BLOCK_K1=block_k1, BLOCK_R=block_r, BLOCK_K2=block_k2, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **early.options(),
    )  # fmt: skip
    if shares > 1:
        _run_sum(_seen(partial, (0,)), y, count, MAX if op == MAX else SUM, finish, None, wide, 1)


def _argmax(
    x: torch.Tensor,
    axes: Sequence[int],
    positions: torch.Tensor,
    of_shares: torch.Tensor | None = None,
    shares: int | None = None,
) -> None:
    """Fill the positions; `of_shares` are those of the maxima of shares in x [shares, K], taken in one share."""
    if x.numel() == 0:
        return
    seen, joins = _seen(x, axes), shares is not None
    tile = launch.tile(seen.family, x.dtype, K=seen.K, R=seen.R)
    programs, blocks = launch.cdiv(seen.K, tile["BLOCK_K"]), launch.cdiv(seen.R, tile["BLOCK_R"])
    share = launch.cdiv(blocks, shares or _shares(blocks, programs)) * tile["BLOCK_R"]
    shares = launch.cdiv(seen.R, share)
    integers = not x.is_floating_point()
    top, first = None, positions
    if shares > 1:
        top = torch.empty(shares, seen.K, dtype=x.dtype, device=x.device)
        first = torch.empty(shares, seen.K, dtype=torch.int64, device=x.device)
    launch.run(
        argmax_kernel, (programs, shares), seen.x, of_shares, top, first, *seen.extents,
        share, SHARES=joins, LAST=shares == 1, INTEGERS=integers, K_LEVELS=seen.k_levels, R_LEVELS=seen.r_levels,
        ACC=tl.int64 if integers else launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    if top is not None:
        _argmax(top, (0,), positions, first, 1)


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.int64


def _axes(name: str, dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """The axes to reduce, counted from the front and in order. Raises IndexError, or ValueError for one named twice."""
    listed = (dims,) if isinstance(dims, int) else tuple(dims or ())
    if not listed:  # no dimensions are all of them, as in torch
        return tuple(range(rank))
    # torch lets a scalar have a dimension 0.
    axes = tuple(sorted(check.axis(name, d, max(rank, 1)) for d in listed))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: dims {list(listed)} name a dimension twice")
    return axes if rank else ()


def _shape(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> list[int]:
    return [1 if i in axes else size for i, size in enumerate(x.shape) if keepdim or i not in axes]


def _not_empty(name: str, x: torch.Tensor, axes: Sequence[int]) -> None:
    if any(x.shape[i] == 0 for i in axes):
        raise ValueError(
            f"{name}: no maximum along dims {list(axes)} of a tensor of shape {list(x.shape)}: it is empty there"
        )
