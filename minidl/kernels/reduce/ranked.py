"""The k largest or smallest elements along a dimension, in order, with their positions (top-k).

In `leading_kernel` a program takes blocks of rows and makes k passes over each. A pass finds the largest element after
the previous one, in the order of values and, for equal values, of positions: no state is needed but that element, and R
may have any size. Values are compared as integers with the same order, NaN above all.

If passes would be long, `select_kernel` first reduces rows, and the remaining elements are sorted (radix select). A
program selects k elements of one part of a row, which it holds in registers. It determines the k-th key bit by bit from
the highest, each time counting the keys that reach it: 32 or 64 counts for any k. Of keys equal to the k-th it takes
the first. An element's output index is the number of selected elements before it. Launches reduce a row to k elements
for each of its parts until one part is left; nothing depends on scheduling.

    row  | part 0       | part 1       | part 2       |   one program per part
         | k elements   | k elements   | k elements   |   in the order of positions; again until R = k
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import check, memory_layout
from minidl.kernels.reduce.layout import LOWEST_INTEGER, output_block, plan
from minidl.kernels.reduce.sorting import key, key_type, sort
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

PART = 4096  # elements of a part
LONG_NOWHERE, NOWHERE = tl.constexpr(2**62), tl.constexpr(2**31 - 1)
MANY = 2**31 - 2**16  # from this size on, positions take 64 bits, also those of a block beyond the end
# The most blocks that a program reads, unless FEW_PASSES passes of programs that fill the device take less than
# `select`.
MOST_BLOCKS, FEW_PASSES = 16, 8


@triton.jit
def leading_kernel(
    p_x, p_y, p_j, sizes, J, inner,
    LARGEST: tl.constexpr, LONG: tl.constexpr, KEY: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write the first J elements of rows of x in order to y [outer, J, inner], and their positions to j."""
    LOWEST: tl.constexpr = LOWEST_INTEGER if tl.int64 == KEY else -(2**31)
    NONE: tl.constexpr = LONG_NOWHERE if LONG else NOWHERE
    INDEX: tl.constexpr = tl.int64 if LONG else tl.int32
    p_x, o_k, m_k = output_block(p_x, sizes, tile)
    o_y = o_k // inner * J * inner + o_k % inner  # [1, BLOCK_K1, BLOCK_K2]
    o_r = tl.arange(0, tile.BLOCK_R).to(INDEX)
    # Key and position of the previous element; initially before all elements.
    b_key = tl.full((1, tile.BLOCK_K1, tile.BLOCK_K2), -LOWEST - 1, KEY)
    b_at = tl.full((1, tile.BLOCK_K1, tile.BLOCK_K2), -1, INDEX)
    for _ in range(J):
        b_top = tl.full((tile.BLOCK_R, tile.BLOCK_K1, tile.BLOCK_K2), LOWEST, KEY)
        b_j = tl.full((tile.BLOCK_R, tile.BLOCK_K1, tile.BLOCK_K2), NONE, INDEX)
        for r in range(0, sizes.R, tile.BLOCK_R):
            b_r = (r + o_r)[:, None, None]
            p_r = p_x + b_r.to(tl.int64) * sizes.s_r2
            m_r = m_k & (b_r < sizes.R)
            b_i = key(tl.load(p_r, mask=m_r, other=0), LARGEST, KEY)
            after = m_r & ((b_i < b_key) | ((b_i == b_key) & (b_r > b_at)))
            better = after & ((b_i > b_top) | ((b_i == b_top) & (b_r < b_j)))
            b_top = tl.where(better, b_i, b_top)
            b_j = tl.where(better, b_r, b_j)
        b_key = tl.max(b_top, axis=0)[None, :, :]
        b_at = tl.min(tl.where(b_top == b_key, b_j, NONE), axis=0)[None, :, :]
        o_x = b_at.to(tl.int64) * sizes.s_r2
        tl.store(p_y + o_y, tl.load(p_x + o_x, mask=m_k, other=0), mask=m_k)
        tl.store(p_j + o_y, b_at.to(tl.int64), mask=m_k)
        o_y += inner


@triton.jit
def select_kernel(
    p_x, p_at, p_y, p_j, R, parts, k, LARGEST: tl.constexpr, KEY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Select the k leading elements of one part of a row of x [K, R]; the sizes of parts differ by at most 1."""
    LOWEST: tl.constexpr = LOWEST_INTEGER if tl.int64 == KEY else -(2**31)
    BITS: tl.constexpr = 64 if tl.int64 == KEY else 32
    row = (tl.program_id(0) // parts).to(tl.int64) * R
    part = (tl.program_id(0) % parts).to(tl.int64)
    start = part * R // parts
    size = ((part + 1) * R // parts - start).to(tl.int32)
    o = tl.arange(0, BLOCK)
    m = o < size
    b_i = key(tl.load(p_x + row + start + o, mask=m, other=0), LARGEST, KEY)  # [BLOCK]
    # XOR sets a bit of the unsigned key, also the sign bit of the lowest key.
    threshold = tl.full((), LOWEST, KEY)
    bit = tl.full((), LOWEST, KEY)
    for _ in range(BITS):
        candidate = threshold ^ bit
        enough = tl.sum((m & (b_i >= candidate)).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, candidate, threshold)
        bit = (bit >> 1) & ~LOWEST
    above = (m & (b_i > threshold)).to(tl.int32)
    equal = (m & (b_i == threshold)).to(tl.int32)
    # Both running counts in one integer: each is at most BLOCK.
    counts = tl.cumsum(above + (equal << 16), axis=0)
    missing = k - tl.sum(above, axis=0)
    n_above, n_equal = (counts & 0xFFFF) - above, (counts >> 16) - equal
    selected = (above == 1) | ((equal == 1) & (n_equal < missing))
    o_y = tl.program_id(0).to(tl.int64) * k + n_above + tl.minimum(n_equal, missing)
    b_at = start + o
    if p_at is not None:
        b_at = tl.load(p_at + row + start + o, mask=selected, other=0)
    # Load the values again: kept in registers, they would spill.
    tl.store(p_y + o_y, tl.load(p_x + row + start + o, mask=selected, other=0), mask=selected)
    tl.store(p_j + o_y, b_at, mask=selected)


@replayed
def leading(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest elements along `dim` (or smallest, NaN last), ties by position, and their positions.

    Both results have x's shape, with k along `dim`; positions are int64. Raises ValueError unless 0 <= k <= x's size
    there, IndexError for a dimension out of range.
    """
    at, k = check.axis("topk", dim, max(x.dim(), 1)), check.integer("topk", "k", k)
    size = x.shape[at] if x.dim() else 1
    if not 0 <= k <= size:
        raise ValueError(f"topk: k is {k}, expected 0 to {size}, the size of dim {dim}")
    if x.dim() == 0:
        y, positions = leading(x.reshape(1), k, 0, largest)
        return y.reshape(()) if k else y, positions.reshape(()) if k else positions
    dims = memory_layout.dims(x)
    if dims != sorted(dims):  # results get x's memory layout
        y, positions = leading(x.permute(dims), k, dims.index(at), largest)
        return y.permute(memory_layout.back(dims)), positions.permute(memory_layout.back(dims))
    shape = [*x.shape[:at], k, *x.shape[at + 1 :]]
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    positions = torch.empty(shape, dtype=torch.int64, device=x.device)
    if y.numel() == 0:
        return y, positions
    planned = plan(x, (at,), shares=1)
    R, programs = planned.sizes.R, planned.grid[0]
    tile = planned.tile._replace(COLUMNS=False, ALIGN=1, EVEN=False, R_LEVELS=1)
    passes = k * launch.cdiv(R, tile.BLOCK_R)
    if passes > MOST_BLOCKS and (k > FEW_PASSES or programs < 4 * launch.processors()):
        y, positions = _by_selection(x.movedim(at, -1), k, largest)
        return y.movedim(-1, at).contiguous(), positions.movedim(-1, at).contiguous()
    wide = key_type(x.dtype) == tl.int64
    launch.run(
        leading_kernel, (programs,), planned.source(x), y, positions, planned.sizes, k, y.shape[at + 1 :].numel(),
        LARGEST=largest, LONG=R >= MANY, KEY=key_type(x.dtype), tile=tile,
        **{**planned.options, "num_warps": 8 if wide else min(planned.options["num_warps"], 8)},  # others spill
    )  # fmt: skip
    return y, positions


def _by_selection(x: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `leading` along the last dimension by selection and sort, or by sort alone if parts keep half or more."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[1] > PART and 2 * k > PART:
        y, positions = (part[:, :k] for part in sort(rows, largest))
    else:
        values, at = select(rows, k, largest)
        y, positions = sort(values, largest, at)
    return y.reshape(*x.shape[:-1], k), positions.reshape(*x.shape[:-1], k)


def select(x: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k leading elements of rows [K, R] and their positions (int64); 1 <= k <= PART / 2, or R <= PART."""
    y, at = x.contiguous(), None
    K = len(x)
    while at is None or y.shape[1] > k:
        source, R = y, y.shape[1]
        parts = launch.cdiv(R, PART)
        block = min(PART, triton.next_power_of_2(R))
        y = torch.empty(K, parts * k, dtype=x.dtype, device=x.device)
        positions = torch.empty(y.shape, dtype=torch.int64, device=x.device)
        launch.run(
            select_kernel, (K * parts,), source, at, y, positions, R, parts, k, LARGEST=largest, KEY=key_type(x.dtype),
            BLOCK=block, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
        at = positions
    return y, at
