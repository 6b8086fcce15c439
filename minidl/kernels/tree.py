"""Sums of rows in one fixed binary tree, with the same bits however the tree is split over launches or devices.

    y = ((w_0 x_0 + w_1 x_1) + (w_2 x_2 + w_3 x_3)) + ((w_4 x_4 + w_5 x_5) + (w_6 x_6 + w_7 x_7))

x  [rows, n], row v is leaf v; w [rows] or none (then no product), float32 (float64 for float64); y [n] of any dtype

A node is a range of 2^k leaves that begins at a multiple of 2^k. Missing leaves are skipped: a node with one child
equals that child, so that no zero is added (-0.0 + 0.0 is 0.0). Values are computed in float32 (float64 for float64)
and rounded when stored. Sums are not contracted with products, so one launch gives the same bits as several that store
the sums of nodes in the accumulation dtype in between.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.runtime import launch

MOST = 64  # leaves
BLOCK = 512  # values at most: of 64 rows, 1024 in float16 spill on sm_80


@triton.constexpr_function
def _row_of(present, leaf):
    """Return the row of a leaf: missing leaves have no row."""
    return (present & ((1 << leaf) - 1)).bit_count()


@triton.constexpr_function
def _has_any(present, leaf, size):
    return (present >> leaf) & ((1 << size) - 1) != 0


@triton.jit
def node(
    p_x, p_w, across, m, LEAF: tl.constexpr, SIZE: tl.constexpr, PRESENT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Return the sum of SIZE leaves from LEAF on; bit v of PRESENT is set if leaf v exists."""
    if SIZE == 1:
        ROW: tl.constexpr = _row_of(PRESENT, LEAF)
        b_x = tl.load(p_x + ROW * across, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
        if HAS_WEIGHT:
            b_x *= tl.load(p_w + ROW).to(ACC)
        return b_x
    else:
        HALF: tl.constexpr = SIZE // 2
        if not _has_any(PRESENT, LEAF + HALF, HALF):
            return node(p_x, p_w, across, m, LEAF, HALF, PRESENT, HAS_WEIGHT, ACC)
        elif not _has_any(PRESENT, LEAF, HALF):
            return node(p_x, p_w, across, m, LEAF + HALF, HALF, PRESENT, HAS_WEIGHT, ACC)
        else:
            b_left = node(p_x, p_w, across, m, LEAF, HALF, PRESENT, HAS_WEIGHT, ACC)
            return b_left + node(p_x, p_w, across, m, LEAF + HALF, HALF, PRESENT, HAS_WEIGHT, ACC)


@triton.jit
def tree_kernel(
    p_x, p_w, p_y, n, across, segment, apart, SIZE: tl.constexpr, PRESENT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    CUT: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write y, or with CUT its segments of `segment` values, `apart` values apart."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    b_y = node(p_x + o_n, p_w, across, m_n, 0, SIZE, PRESENT, HAS_WEIGHT, ACC)
    if CUT:
        o_n = o_n // segment * apart + o_n % segment
    tl.store(p_y + o_n, b_y.to(p_y.dtype.element_ty), mask=m_n)


def leaves(count: int) -> int:
    """Return the number of leaves of a tree for `count` rows, including missing ones."""
    return triton.next_power_of_2(count)


def nodes(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """Return (start, size) of the fewest nodes that cover the rows from `first` up to `end`, exclusive, of `count`."""
    most = leaves(count)
    if end == count:
        end = most  # the remaining leaves are missing
    result = []
    while first < min(end, count):
        size = min(first & -first or most, 1 << (end - first).bit_length() - 1)
        result.append((first, size))
        first += size
    return result


def sum_rows(
    x: torch.Tensor, starts: Sequence[int], size: int, weight: torch.Tensor | None = None, y: torch.Tensor | None = None
) -> torch.Tensor:
    """Return y [n], the sum of x [rows, n] as a node of `size` leaves; row i is the node that starts at starts[i].

    `weight` [rows] are factors of the rows. The result is written to y if it is not None, which may also be segments
    [., n / segments] with gaps between rows. Raises ValueError for more than MOST leaves.
    """
    check.floating("sum_rows", x=x)
    if not 1 <= size <= MOST or len(starts) != len(x):
        raise ValueError(f"sum_rows: got {len(x)} rows of {size} leaves at {list(starts)}, expected 1 to {MOST} leaves")
    n = x.shape[1]
    if y is None:
        y = torch.empty(n, dtype=x.dtype, device=x.device)
    gaps = y.dim() == 2
    options = {**launch.tile("elementwise", x.dtype, N=n).options}
    if not launch.INTERPRETED:
        options["BLOCK_N"] = min(options["BLOCK_N"], BLOCK)
    launch.run(
        tree_kernel, (launch.cdiv(n, options["BLOCK_N"]),), x, weight, y, n, x.stride(0), y.shape[1] if gaps else n,
        y.stride(0) if gaps else 0, SIZE=size, PRESENT=sum(1 << start for start in starts),
        HAS_WEIGHT=weight is not None, CUT=gaps, ACC=launch.acc(x.dtype), enable_fp_fusion=False, **options,
    )  # fmt: skip
    return y
