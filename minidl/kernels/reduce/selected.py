"""The k largest or smallest elements of long rows, in the order of their places.

A program finds the k of one part of a row. It holds the part, and settles the k-th key bit by bit from the highest,
each time counting the keys that reach it: 32 or 64 counts whatever k is, where walking takes k. Of keys equal to the
k-th the first go along. Their places are counts of those before them. Launches shrink a row to k for each of its parts
until it is one part; nothing depends on scheduling.
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
    """The k leading elements of one of the parts of a row of x [K, R], whose sizes differ by one at most."""
    LOWEST: tl.constexpr = LOWEST_INTEGER if tl.int64 == KEY else -(2**31)
    BITS: tl.constexpr = 64 if tl.int64 == KEY else 32
    row = (tl.program_id(0) // parts).to(tl.int64) * R
    part = (tl.program_id(0) % parts).to(tl.int64)
    start = part * R // parts
    size = ((part + 1) * R // parts - start).to(tl.int32)
    o = tl.arange(0, BLOCK)
    m = o < size
    b_i = key(tl.load(p_x + row + start + o, mask=m, other=0), LARGEST, KEY)  # [BLOCK]
    # A bit of the unsigned key is set by turning it: the highest one of the lowest key, too.
    least = tl.full((), LOWEST, KEY)
    bit = tl.full((), LOWEST, KEY)
    for _ in range(BITS):
        tried = least ^ bit
        enough = tl.sum((m & (b_i >= tried)).to(tl.int32), axis=0) >= k
        least = tl.where(enough, tried, least)
        bit = (bit >> 1) & ~LOWEST
    above = (m & (b_i > least)).to(tl.int32)
    equal = (m & (b_i == least)).to(tl.int32)
    # Both counts so far in one number: each is at most BLOCK.
    counts = tl.cumsum(above + (equal << 16), axis=0)
    wanted = k - tl.sum(above, axis=0)
    n_above, n_equal = (counts & 0xFFFF) - above, (counts >> 16) - equal
    taken = (above == 1) | ((equal == 1) & (n_equal < wanted))
    to = tl.program_id(0).to(tl.int64) * k + n_above + tl.minimum(n_equal, wanted)
    b_at = start + o
    if p_at is not None:
        b_at = tl.load(p_at + row + start + o, mask=taken, other=0)
    # Read again: kept so long, values spill.
    tl.store(p_y + to, tl.load(p_x + row + start + o, mask=taken, other=0), mask=taken)
    tl.store(p_j + to, b_at, mask=taken)


def select(x: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows [K, R] the k leading elements, from 1 to PART / 2 of them or R <= PART, and their positions (int64)."""
    y, at = x.contiguous(), None
    K = len(x)
    while at is None or y.shape[1] > k:
        of, R = y, y.shape[1]
        parts = launch.cdiv(R, PART)
        block = min(PART, triton.next_power_of_2(R))
        y = torch.empty(K, parts * k, dtype=x.dtype, device=x.device)
        found = torch.empty(y.shape, dtype=torch.int64, device=x.device)
        launch.run(
            select_kernel, (K * parts,), of, at, y, found, R, parts, k, LARGEST=largest, KEY=key_type(x.dtype),
            BLOCK=block, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
        at = found
    return y, at
