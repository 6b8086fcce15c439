"""Rows of a tensor, as softmax and cross-entropy read them: addresses, maxima and sums, and the plan of a launch.

Tensors are [outer, N, inner], as R = outer * inner rows of N elements. A block of rows that fit BLOCK_N is
[pieces, BLOCK_M, LANES], so that no row spans two warps; a block of longer rows is [BLOCK_M, BLOCK_N]:

    row | head | body: as many blocks as it takes, from a 16-byte boundary | tail |        head and tail only with ENDS
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import exponential
from minidl.kernels.plan import LaunchPlan
from minidl.kernels.reduce import as_multiple
from minidl.runtime import dependent_launch, launch

MINUS_INF = tl.constexpr(float("-inf"))
# The largest block for strided elements.
SCATTERED = 1024
# Longer 16-bit rows that are not 16-byte aligned use the loop kernel.
LONGEST_ODD = {"softmax": 2048}
# More lanes than any block has.
WHOLE_ROWS = 2**20


class Sizes(NamedTuple):
    """R rows of N elements that fit a block; strides s_x of the first tensor and s_y of the result: two of the row
    index, which is i INNER + j, and one along the row."""

    R: int
    N: int
    INNER: int
    s_x1: int
    s_x2: int
    s_xn: int
    s_y1: int
    s_y2: int
    s_yn: int


class Block(NamedTuple):
    """Constants for rows that fit a block.

    LEVELS  how many strides the row index needs
    ALIGN   elements per vector load, up to 16 bytes
    LANES   the elements that one warp loads at once
    """

    LEVELS: int
    ALIGN: int
    LANES: int
    ACC: Any
    BLOCK_M: int
    BLOCK_N: int


class LoopSizes(NamedTuple):
    """R contiguous rows of N elements; rows of the first tensor have the stride s_x, those of the result N."""

    R: int
    N: int
    s_x: int


class Loop(NamedTuple):
    """Constants for longer rows.

    ALIGN       elements per vector load
    ENDS        whether blocks begin at the first multiple of ALIGN in a row; its head and tail are loaded separately
    BLOCK_KEPT  elements that stay in registers between two passes
    WHOLE       whether blocks fill the rows and the kept parts exactly
    """

    ALIGN: int
    ENDS: bool
    ACC: Any
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_KEPT: int = 0
    WHOLE: bool = False


@triton.jit
def row_max(b_x):
    """Return the maximum of each row, with NaN as -inf because tl.max orders NaN differently between machines."""
    return tl.max(tl.where(b_x == b_x, b_x, MINUS_INF), axis=1)


@triton.jit
def block_max(b_x):
    """Return the maximum of each row of [pieces, rows, lanes], with NaN as in `row_max`."""
    return tl.max(tl.max(tl.where(b_x == b_x, b_x, MINUS_INF), axis=0), axis=1)


@triton.jit
def row_sum(b_x):
    """Return the sum of each row of [pieces, rows, lanes]."""
    return tl.sum(tl.sum(b_x, axis=0), axis=1)


@triton.jit
def columns(tile: tl.constexpr):
    """Return positions in a row [pieces, 1, lanes]; one warp reads LANES of them, so that no row spans two warps."""
    if tile.LANES < tile.BLOCK_N:
        o_piece = tl.arange(0, tile.BLOCK_N // tile.LANES) * tile.LANES
        return o_piece[:, None, None] + tl.arange(0, tile.LANES)[None, None, :]
    else:
        return tl.arange(0, tile.BLOCK_N)[None, None, :]


@triton.jit
def row_pointers(p, o, tile: tl.constexpr):
    """Return pointers p + o [pieces, rows, lanes], with warps assigned to rows.

    Triton assigns dimensions to threads by contiguity, and pieces and rows tie: Triton 3.6 assigned warps to pieces,
    and rows of 197 took 3 times as long.
    """
    LANES: tl.constexpr = tile.LANES
    p += o
    if LANES < tile.BLOCK_N:
        p = tl.max_contiguous(p, [1, 2, LANES])
    return p


@triton.jit
def shift(b_m):
    """Return the running maximum b_m, with 0 in place of -inf, which would make x - m NaN."""
    return tl.where(b_m == MINUS_INF, 0.0, b_m)


@triton.jit
def online(b_x, b_m, b_s):
    """Return (m, s) updated with one more block of the rows; lanes beyond a row hold -inf."""
    b_new = tl.maximum(b_m, row_max(b_x))
    b_shift = shift(b_new)
    b_s = b_s * exponential(b_m - b_shift) + tl.sum(exponential(b_x - b_shift[:, None]), axis=1)
    return b_new, b_s


@triton.jit
def ends(o_x, N, ALIGN: tl.constexpr):
    """Return the lengths of head and body of rows that begin at o_x: the body begins at the first multiple of ALIGN.

    A body has a multiple of ALIGN elements; the elements after it are the tail.
    """
    b_head = (ALIGN - o_x % ALIGN) % ALIGN
    return b_head, as_multiple(N - b_head, ALIGN)


@triton.jit
def end_columns(b_head, b_body, N, ALIGN: tl.constexpr):
    """Return the positions of head and tail of each row and their mask, both [rows, 2 ALIGN]."""
    o_e = tl.arange(0, 2 * ALIGN)[None, :]
    o_n = o_e + tl.where(o_e < b_head[:, None], 0, b_body[:, None])
    return o_n, o_n < N


class Problem(NamedTuple):
    """Rows along the middle of tensors of one shape [outer, N, inner] with these strides; the result is contiguous."""

    family: str
    shape: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    target: str


@dataclass(frozen=True, slots=True)
class RowsPlan(LaunchPlan):
    """The launch of a kernel of the family: the one for rows that fit a block if `fits`, else the one with a loop.

    copied  whether tensors are copied to contiguous rows [R, N, 1]
    """

    fits: bool
    copied: bool


@launch.cached
def plan(problem: Problem) -> RowsPlan:
    family, (outer, N, inner), strides, dtype, target = problem
    R = outer * inner
    tile = launch.tile(family, dtype, M=R, N=N)
    fits = fits_block(family, tile, dtype, N, _step(outer, N, strides))
    scattered = inner > 1 or any(along != 1 for _, along, _ in strides)
    copied = (not fits or tile["BLOCK_N"] > SCATTERED) and scattered
    if copied:
        outer, inner, strides = R, 1, ((N, 1, 1),) * len(strides)
    if not fits:
        tile = loop_tile(f"{family}_loop", dtype, R, N, _step(outer, N, strides))
    x, y = strides[0], (N * inner, inner, 1)
    most = 16 // dtype.itemsize  # elements of the widest vector load
    align = 1
    if N == 1 or x[1] == y[1] == 1:
        align = math.gcd(most, N, *(first for first, _, _ in (x, y) if outer > 1), *((x[2], y[2]) if inner > 1 else ()))
        align &= -align
    grid, acc = (launch.cdiv(R, tile["BLOCK_M"]),), launch.acc(dtype)
    if fits:
        levels = 2 if outer > 1 and inner > 1 else 1
        per_warp = lanes(align, tile, x[1] != 1 or y[1] != 1)
        block = tile.record(Block, LEVELS=levels, ALIGN=align, LANES=per_warp, ACC=acc)
        rows = ((first, last if inner > 1 else first, along) for first, along, last in (x, y))
        sizes = Sizes(R, N, inner, *next(rows), *next(rows))
        early = dependent_launch.options(1 if family == "cross_entropy" else grid[0], target)
        return RowsPlan(grid, sizes, block, {**early, **tile.launch_options}, True, copied)
    # If vector loads are narrower, but all tensors are misaligned alike, loops start at a row's first multiple of 16 B.
    ends_apart = align < most and 2 * most <= N and (R == 1 or (x[0] - N) % most == 0)
    loop = tile.record(Loop, ALIGN=most if ends_apart else align, ENDS=ends_apart, ACC=acc)
    if "BLOCK_KEPT" in tile.sizes and not ends_apart and R % loop.BLOCK_M == 0 and N >= loop.BLOCK_KEPT:
        loop = loop._replace(WHOLE=(N - loop.BLOCK_KEPT) % loop.BLOCK_N == 0)
    return RowsPlan(grid, LoopSizes(R, N, x[0]), loop, tile.launch_options, False, copied)


def rows_of(family: str, axis: int, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], RowsPlan]:
    """Return tensors of one shape as [outer, N, inner] with rows along `axis`, views if possible, and their plan."""
    shape = tensors[0].shape
    outer, N, inner = shape[:axis].numel(), shape[axis], shape[axis + 1 :].numel()
    rows = [t.reshape(outer, N, inner) for t in tensors]
    strides: Any = tuple(t.stride() for t in rows)
    chosen = plan(Problem(family, (outer, N, inner), strides, tensors[0].dtype, launch.target()))
    if chosen.copied:
        rows = [t.transpose(1, 2).reshape(outer * inner, N, 1).contiguous() for t in rows]
    return rows, chosen


def fits_block(family: str, tile: launch.Tile, dtype: torch.dtype, N: int, step: int) -> bool:
    """Whether rows of N elements with stride `step` fit a block of the family's tile."""
    odd = dtype.itemsize == 2 and (N | step) % 8 != 0 and launch.target() != "interpreted"
    return tile["BLOCK_N"] >= N and not (odd and LONGEST_ODD.get(family, N) < N)


def _step(outer: int, N: int, strides: tuple[tuple[int, int, int], ...]) -> int:
    return math.gcd(*(first for first, _, _ in strides)) if outer > 1 else N


def loop_tile(family: str, dtype: torch.dtype, rows: int, N: int, step: int) -> launch.Tile:
    """Return the loop tile for rows of N elements with stride `step`. P is the largest power of 2 that divides both."""
    return launch.tile(family, dtype, M=rows, N=N, P=(N | step) & -(N | step))


def lanes(align: int, tile: launch.Tile, scattered: bool) -> int:
    """Return LANES: more than all rows if there are more warps than rows or rows are not contiguous."""
    return WHOLE_ROWS if launch.INTERPRETED or scattered or tile.num_warps > tile["BLOCK_M"] else 32 * align


def in_shape(rows: torch.Tensor, shape: torch.Size, axis: int) -> torch.Tensor:
    """Return contiguous rows [outer, N, inner] or [R, N, 1] as a contiguous tensor of `shape`."""
    if rows.shape[2] == 1:
        rest = shape[:axis].numel(), shape[axis + 1 :].numel(), shape[axis]
        rows = rows.view(rest).transpose(1, 2).contiguous()
    return rows.view(shape)
