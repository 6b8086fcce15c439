"""Select the k largest or smallest elements of long rows, in the order of their positions (radix select).

A program selects k elements of one part of a row, which it holds in registers. It determines the k-th key bit by bit
from the highest, each time counting the keys that reach it: 32 or 64 counts for any k. Of keys equal to the k-th it
takes the first. An element's output index is the number of selected elements before it. Launches reduce a row to k
elements for each of its parts until one part is left; nothing depends on scheduling.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels.reduce.keys import key, key_type
from minidl.kernels.reduce.layout import LOWEST_INTEGER
from minidl.runtime import launch

PART = 4096


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
