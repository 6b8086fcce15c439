"""Rows of a tensor for the softmax kernels: addresses, vector widths, tiles, and row maxima and sums."""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import exponential
from minidl.kernels.reduce import as_multiple
from minidl.runtime import launch

MINUS_INF = tl.constexpr(float("-inf"))
# The largest block for strided elements.
SCATTERED = 1024
# Longer 16-bit rows that are not 16-byte aligned use the loop kernel: 6680x14626 takes 157 us, 395 in one block;
# 12275x4538 91 and 144 (H100).
LONGEST_ODD = {"softmax": 2048}
# More lanes than any block has.
WHOLE_ROWS = 2**20


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
def columns(BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """Return positions in a row [pieces, 1, lanes]; one warp reads LANES of them, so that no row spans two warps."""
    if LANES < BLOCK_N:
        return (tl.arange(0, BLOCK_N // LANES) * LANES)[:, None, None] + tl.arange(0, LANES)[None, None, :]
    else:
        return tl.arange(0, BLOCK_N)[None, None, :]


@triton.jit
def row_pointers(p, o, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """Return pointers p + o [pieces, rows, lanes], with warps assigned to rows.

    Triton assigns dimensions to threads by contiguity, and pieces and rows tie: Triton 3.6 assigned warps to pieces,
    and rows of 197 took 3 times as long.
    """
    p += o
    if LANES < BLOCK_N:
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


def rows_of(family: str, loop: str, axis: int, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], launch.Tile, bool]:
    """Return tensors of one shape as [outer, N, inner] with rows along `axis`, the tile, and whether rows fit it.

    The tile is from `family` if rows fit it, else from `loop`. Tensors are views if possible; if the kernel needs
    contiguous rows, all are copied to [R, N, 1].
    """
    shape = tensors[0].shape
    outer, N, inner = shape[:axis].numel(), shape[axis], shape[axis + 1 :].numel()
    rows = [t.reshape(outer, N, inner) for t in tensors]
    tile = launch.tile(family, tensors[0].dtype, M=outer * inner, N=N)
    fits = fits_block(family, tile, tensors[0].dtype, N, _step(rows))
    if (not fits or tile["BLOCK_N"] > SCATTERED) and (inner > 1 or any(t.stride(1) != 1 for t in rows)):
        rows = [t.transpose(1, 2).reshape(outer * inner, N, 1).contiguous() for t in rows]
    if not fits:
        tile = loop_tile(loop, tensors[0].dtype, outer * inner, N, _step(rows))
    return rows, tile, fits


def fits_block(family: str, tile: launch.Tile, dtype: torch.dtype, N: int, step: int) -> bool:
    """Whether rows of N elements with stride `step` fit a block of the family's tile."""
    odd = dtype.itemsize == 2 and (N | step) % 8 != 0 and launch.target() != "interpreted"
    return tile["BLOCK_N"] >= N and not (odd and LONGEST_ODD.get(family, N) < N)


def _step(rows: list[torch.Tensor]) -> int:
    return math.gcd(*(t.stride(0) for t in rows)) if rows[0].shape[0] > 1 else rows[0].shape[1]


def loop_tile(family: str, dtype: torch.dtype, rows: int, N: int, step: int) -> launch.Tile:
    """Return the loop tile for rows of N elements with stride `step`. P is the largest power of 2 that divides both."""
    return launch.tile(family, dtype, M=rows, N=N, P=(N | step) & -(N | step))


def vectors(*tensors: torch.Tensor) -> int:
    """Return the elements per vector load, up to 16 bytes, that divide N and the strides of rows [outer, N, inner].

    It is 1 if rows are not contiguous.
    """
    N = tensors[0].shape[1]
    steps = [N, 16 // tensors[0].element_size()]
    for rows in tensors:
        outer, _, inner = rows.shape
        if N > 1 and rows.stride(1) != 1:
            return 1
        steps += [rows.stride(0)] * (outer > 1) + [rows.stride(2)] * (inner > 1)
    step = math.gcd(*steps)
    return step & -step


def lanes(align: int, tile: launch.Tile, *tensors: torch.Tensor) -> int:
    """Return LANES for rows [outer, N, inner]: the elements that one warp loads at once, so that no two share a row.

    It exceeds all rows if there are more warps than rows or rows are not contiguous.
    """
    scattered = any(rows.stride(1) != 1 for rows in tensors)
    return WHOLE_ROWS if launch.INTERPRETED or scattered or tile.num_warps > tile["BLOCK_M"] else 32 * align


def loop_alignment(align: int, *tensors: torch.Tensor) -> tuple[int, bool]:
    """Return (ALIGN, ENDS) of loops over rows [R, N, 1] with vector loads of `align` elements.

    If these are less than 16 bytes, but all tensors are misaligned alike, loops start at a row's first multiple of 16.
    """
    R, N, _ = tensors[0].shape
    most = 16 // tensors[0].element_size()
    if align == most or 2 * most > N or (R > 1 and any((rows.stride(0) - N) % most for rows in tensors)):
        return align, False
    return most, True


def row_strides(rows: torch.Tensor) -> tuple[int, int, int]:
    """Return strides of rows [outer, N, inner] for `reduce.offsets`: two of the row index, one along the row."""
    outer, along, inner = rows.stride()
    return outer, inner if rows.shape[2] > 1 else outer, along


def levels(rows: torch.Tensor) -> int:
    """Return how many strides the row index of rows [outer, N, inner] needs."""
    return 2 if rows.shape[0] > 1 and rows.shape[2] > 1 else 1


def in_shape(rows: torch.Tensor, shape: torch.Size, axis: int) -> torch.Tensor:
    """Return contiguous rows [outer, N, inner] or [R, N, 1] as a contiguous tensor of `shape`."""
    if rows.shape[2] == 1:
        rest = shape[:axis].numel(), shape[axis + 1 :].numel(), shape[axis]
        rows = rows.view(rest).transpose(1, 2).contiguous()
    return rows.view(shape)
