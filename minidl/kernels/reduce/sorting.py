"""Sort rows, with positions: rank small pieces, then merge pairs of sorted runs until a row is one run.

    x, y  [K, R], contiguous          positions  int64 [K, R]

    | piece | piece | piece | piece |    `rank_kernel`: pieces of PIECE elements, BLOCK_K per program
    |      run      |      run      |    `join_kernel`: pairs of runs, BLOCK elements per program; again until
    |             run               |                  the row is one run

Elements are compared as integers with the same order, NaN above all. A program ranks the PIECE elements of a piece by
counting the elements before each. Then each launch merges pairs of runs: an element's new index is its index in its run
plus the number of elements before it in the other, by binary search. The sort is stable, so nothing depends on
scheduling. 2^20 elements of 32 bits take 14 launches, each of which reads and writes everything once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

PIECE = 128
LONG = 2**30  # from this size on, positions take 64 bits
# Elements of a program; a piece is compared with STEP elements at a time.
LANES, JOINED = (16384, 16384) if launch.INTERPRETED else (256, 512)
STEP = 8


@triton.jit
def key(b_x, LARGEST: tl.constexpr, KEY: tl.constexpr):
    """Return integers in the order of the values, or the opposite one; NaN is above all values, and -0 equals 0."""
    if b_x.dtype.is_floating():
        b_f = b_x.to(tl.float64 if tl.int64 == KEY else tl.float32)
        b_f = tl.where(b_f == 0, 0.0, b_f)
        b_i = b_f.to(KEY, bitcast=True)
        b_i = tl.where(b_i < 0, b_i ^ (0x7FFFFFFFFFFFFFFF if tl.int64 == KEY else 0x7FFFFFFF), b_i)
        b_i = tl.where(b_f != b_f, 0x7FFFFFFFFFFFFFFF if tl.int64 == KEY else 0x7FFFFFFF, b_i)
    else:
        b_i = b_x.to(KEY)
    return b_i if LARGEST else ~b_i


def key_type(dtype: torch.dtype) -> Any:
    """Return the KEY type of a dtype."""
    return tl.int64 if dtype == torch.float64 or not dtype.is_floating_point else tl.int32


@triton.jit
def rank_kernel(
    p_x, p_at, p_y, p_j, K, R, parts, LARGEST: tl.constexpr, KEY: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sort BLOCK_K pieces of at most BLOCK_R elements; positions are 0, 1, ... in the row, or are loaded from p_at."""
    o_k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    o_part = o_k % parts * BLOCK_R
    o_row = (o_k // parts * R + o_part)[None, :, None]
    left = tl.where(o_k < K * parts, R - o_part, 0)[None, :, None]
    o_r = tl.arange(0, BLOCK_R)[None, None, :]
    m = o_r < left
    b_x = tl.load(p_x + o_row + o_r, mask=m, other=0)  # [1, BLOCK_K, BLOCK_R]
    b_i = key(b_x, LARGEST, KEY)
    b_rank = tl.zeros((1, BLOCK_K, BLOCK_R), tl.int32)
    for start in range(0, BLOCK_R, STEP):
        o_s = (start + tl.arange(0, STEP))[:, None, None]
        m_s = o_s < tl.minimum(left, BLOCK_R)
        b_s = key(tl.load(p_x + o_row + o_s, mask=m_s, other=0), LARGEST, KEY)  # [STEP, BLOCK_K, 1]
        before = m_s & ((b_s > b_i) | ((b_s == b_i) & (o_s < o_r)))
        b_rank += tl.sum(before.to(tl.int32), axis=0)[None, :, :]
    b_at = o_part[None, :, None] + o_r
    if p_at is not None:
        b_at = tl.load(p_at + o_row + o_r, mask=m, other=0)
    tl.store(p_y + o_row + b_rank, b_x, mask=m)
    tl.store(p_j + o_row + b_rank, b_at.to(p_j.dtype.element_ty), mask=m)


@triton.jit
def join_kernel(
    p_x, p_at, p_y, p_j, R, blocks, bits, LARGEST: tl.constexpr, KEY: tl.constexpr, PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge pairs of sorted runs of 2^bits elements (the last of a row may be shorter) into runs of twice the size."""
    row = (tl.program_id(0) // blocks).to(tl.int64) * R
    o = (tl.program_id(0) % blocks).to(PLACE) * BLOCK + tl.arange(0, BLOCK)
    m = o < R
    b_x = tl.load(p_x + row + o, mask=m, other=0)  # [BLOCK]
    b_i = key(b_x, LARGEST, KEY)
    run = o >> bits
    other = (run ^ 1) << bits
    second_run = (run & 1) == 1
    low = tl.zeros((BLOCK,), PLACE)
    high = tl.where(m, tl.minimum(tl.maximum(R - other, 0), (low + 1) << bits), 0)
    for _ in range(bits + 1):
        open_ = low < high
        half = (low + high) >> 1
        b_h = key(tl.load(p_x + row + other + half, mask=open_, other=0), LARGEST, KEY)
        ahead = open_ & ((b_h > b_i) | (second_run & (b_h == b_i)))
        low = tl.where(ahead, half + 1, low)
        high = tl.where(open_ & (ahead == 0), half, high)
    o_y = ((run >> 1) << (bits + 1)) + (o - (run << bits)) + low
    tl.store(p_y + row + o_y, b_x, mask=m)
    tl.store(p_j + row + o_y, tl.load(p_at + row + o, mask=m, other=0).to(p_j.dtype.element_ty), mask=m)


@replayed
def sort(x: torch.Tensor, descending: bool, origins: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [K, R] in stable order, and the positions of their elements (or those of `origins`)."""
    K, R = x.shape
    x = x.contiguous()
    y, positions = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64, device=x.device)
    if x.numel() == 0:
        return y, positions
    wide = R >= LONG or origins is not None
    types = {"LARGEST": descending, "KEY": key_type(x.dtype)}

    def results(last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        short = torch.int64 if wide else torch.int32
        return (y, positions) if last else (torch.empty_like(x), torch.empty(x.shape, dtype=short, device=x.device))

    block = min(PIECE, max(triton.next_power_of_2(R), STEP))
    parts = launch.cdiv(R, block)
    pieces = min(LANES // block, triton.next_power_of_2(K * parts))
    target = results(parts == 1)
    launch.run(
        rank_kernel, (launch.cdiv(K * parts, pieces),), x, origins, *target, K, R, parts, **types, BLOCK_K=pieces,
        BLOCK_R=block, STEP=STEP, num_warps=4,
    )  # fmt: skip
    bits = block.bit_length() - 1
    blocks = launch.cdiv(R, JOINED)
    while 2**bits < R:
        source, target = target, results(2 ** (bits + 1) >= R)
        launch.run(
            join_kernel, (K * blocks,), *source, *target, R, blocks, bits, **types,
            PLACE=tl.int64 if R >= LONG else tl.int32, BLOCK=JOINED, num_warps=4,
        )  # fmt: skip
        bits += 1
    return y, positions
