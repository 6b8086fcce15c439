"""Embedding: look up rows of a table by index, and the gradient of the table.

    y[b] = w[i_b]                     dw[v] = sum of dy[b] over all b with i_b = v, in the order of b

    i int64 or int32 [B], w [V, H]  ->  y [B, H]

The gradient needs the positions of equal indices next to each other. A radix sort of four bits per pass orders them:
blocks count their digits, one program computes prefix sums, and blocks write their positions in order (Knuth, The Art
of Computer Programming 3, 5.2.5). The sort is stable, so sums have a fixed order without atomic operations. Then the
program at the first position of each index adds all of its rows, BLOCK_M at a time.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

DIGITS = tl.constexpr(16)
# Keys per program; their digits are a block [KEYS, DIGITS].
KEYS = 16384 if launch.ON_CPU else 1024
SORTING = {"BLOCK": KEYS, "num_warps": 8}


@triton.jit
def gather_kernel(
    p_i, p_w, p_y, p_wrong, B, V, H, s_w, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write BLOCK_N columns of BLOCK_M rows; NaN for an index out of range, which p_wrong counts."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_i = tl.load(p_i + o_b, mask=o_b < B, other=0).to(tl.int64)  # [BLOCK_M]
    m_i = (b_i >= 0) & (b_i < V)
    m_n = (o_n < H)[None, :]
    b_w = tl.load(p_w + b_i[:, None] * s_w + o_n[None, :], mask=m_i[:, None] & m_n, other=float("nan"))
    tl.store(p_y + o_b[:, None] * H + o_n[None, :], b_w, mask=(o_b < B)[:, None] & m_n)
    if p_wrong is not None:
        tl.store(p_wrong + tl.program_id(0), tl.sum((m_i == 0).to(tl.int32), axis=0), mask=tl.program_id(1) == 0)


@triton.jit
def digits(p_key, B, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block's offsets, keys, digits, and the one-hot digits [BLOCK, DIGITS]."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_key = tl.load(p_key + o, mask=o < B, other=0)  # [BLOCK]
    b_digit = ((b_key >> SHIFT) & (DIGITS - 1)).to(tl.int32)
    b_has = (b_digit[:, None] == tl.arange(0, DIGITS)[None, :]) & (o < B)[:, None]
    return o, b_key, b_digit, b_has.to(tl.int32)


@triton.jit
def digit_counts_kernel(p_key, p_count, B, blocks, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Write how often a block has each digit, at [DIGITS, blocks]."""
    _, _, _, b_has = digits(p_key, B, SHIFT, BLOCK)
    tl.store(p_count + tl.arange(0, DIGITS) * blocks + tl.program_id(0), tl.sum(b_has, axis=0))


@triton.jit
def digit_places_kernel(p_count, n, BLOCK: tl.constexpr):
    """Replace counts by their exclusive prefix sums."""
    before = 0
    for start in range(0, n, BLOCK):
        o = start + tl.arange(0, BLOCK)
        b_count = tl.load(p_count + o, mask=o < n, other=0)  # [BLOCK]
        tl.store(p_count + o, tl.cumsum(b_count, axis=0) - b_count + before, mask=o < n)
        before += tl.sum(b_count, axis=0)


@triton.jit
def digit_sort_kernel(
    p_key, p_at, p_place, p_sorted, p_order, B, blocks, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write keys and their positions in the order of one digit; positions are 0, 1, ... if p_at is None."""
    o, b_key, b_digit, b_has = digits(p_key, B, SHIFT, BLOCK)
    b_rank = tl.sum(tl.cumsum(b_has, axis=0) * b_has, axis=1) - 1
    b_index = b_rank + tl.load(p_place + b_digit * blocks + tl.program_id(0), mask=o < B, other=0)
    b_at = o.to(tl.int32)
    if p_at is not None:
        b_at = tl.load(p_at + o, mask=o < B, other=0)
    tl.store(p_sorted + b_index, b_key, mask=o < B)
    tl.store(p_order + b_index, b_at, mask=o < B)


@triton.jit
def scatter_sum_kernel(
    p_key, p_order, p_dy, p_dw, B, V, H, s_dy, padding, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the sum of dy over the positions of an index, if this program has the first of them."""
    k = tl.program_id(0).to(tl.int64)
    key = tl.load(p_key + k)
    first = k == 0
    if k > 0:
        first = tl.load(p_key + k - 1) != key
    if first & (key >= 0) & (key < V) & (key != padding):
        o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = (o_n < H)[None, :]
        b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        more = 1
        while more > 0:
            o_k = k + tl.arange(0, BLOCK_M)
            m_k = tl.load(p_key + o_k, mask=o_k < B, other=-1) == key
            b_at = tl.load(p_order + o_k, mask=m_k, other=0).to(tl.int64)  # [BLOCK_M]
            b_sum += tl.load(p_dy + b_at[:, None] * s_dy + o_n[None, :], mask=m_k[:, None] & m_n, other=0.0).to(ACC)
            k += BLOCK_M
            more = tl.min(m_k.to(tl.int32), axis=0)
        b_dw = tl.sum(b_sum, axis=0)
        tl.store(p_dw + key.to(tl.int64) * H + o_n, b_dw.to(p_dw.dtype.element_ty), mask=o_n < H)


@replayed
def embedding(index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return weight[index], in weight's dtype: index of any shape, weight [V, H] -> [*, H].

    Raises TypeError for dtypes, ValueError for a weight that is not a matrix, and on the CPU IndexError for an index
    out of range; on a GPU, where the check would wait for the device, its row is NaN.
    """
    check.floating("embedding", weight=weight)
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: input has dtype {index.dtype}, expected int64 or int32 indices")
    if weight.dim() != 2:
        raise ValueError(f"embedding: weight has shape {list(weight.shape)}, expected [V, H]")
    if index.device != weight.device:
        raise ValueError(f"embedding: input is on {index.device} and weight on {weight.device}; move one with .to()")
    V, H = weight.shape
    weight = weight if weight.stride(1) == 1 or H < 2 else weight.contiguous()
    index = index.contiguous()
    y = torch.empty(*index.shape, H, dtype=weight.dtype, device=weight.device)
    B = index.numel()
    tile = launch.tile("elementwise_tile", weight.dtype, M=B, N=H)
    grid = launch.cdiv(B, tile["BLOCK_M"]), launch.cdiv(H, tile["BLOCK_N"])
    wrong = torch.zeros(grid[0], dtype=torch.int32, device=index.device) if launch.ON_CPU else None
    launch.run(
        gather_kernel, grid, index, weight, y, wrong, B, V, H, weight.stride(0), ACC=launch.acc(weight.dtype),
        **tile.options,
    )  # fmt: skip
    if wrong is not None:
        launch.note_indirect(tuple)  # the check below depends on values: it is never replayed
    if wrong is not None and any(wrong.tolist()):
        value = next(i for i in index.flatten().tolist() if not 0 <= i < V)
        raise IndexError(f"embedding: input holds {value}, expected indices from 0 to {V - 1}")
    return y


def embedding_grad(dy: torch.Tensor, index: torch.Tensor, V: int, padding: int = -1) -> torch.Tensor:
    """Return dweight [V, H] from dy [*, H]; the row `padding` stays 0."""
    H, B = dy.shape[-1], index.numel()
    dw = torch.zeros(V, H, dtype=dy.dtype, device=dy.device)
    if B == 0 or H == 0:
        return dw
    rows = dy.reshape(B, H)
    rows = rows if rows.stride(1) == 1 or H < 2 else rows.contiguous()
    keys, order = sort(index.reshape(-1), V)
    tile = launch.tile("elementwise_tile", dy.dtype, M=B, N=H)
    launch.run(
        scatter_sum_kernel, (B, launch.cdiv(H, tile["BLOCK_N"])), keys, order, rows, dw, B, V, H, rows.stride(0),
        padding, ACC=launch.acc(dy.dtype), **tile.options,
    )  # fmt: skip
    return dw


def sort(keys: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [B] in [0, limit) in ascending stable order, and their positions (int32)."""
    B = keys.numel()
    keys = keys.contiguous()
    order = None
    blocks = launch.cdiv(B, KEYS)
    count = torch.empty(DIGITS.value * blocks, dtype=torch.int32, device=keys.device)
    for shift in range(0, max(limit - 1, 1).bit_length(), 4):
        launch.run(digit_counts_kernel, (blocks,), keys, count, B, blocks, SHIFT=shift, **SORTING)
        launch.run(digit_places_kernel, (1,), count, DIGITS.value * blocks, **SORTING)
        sorted_, positions = torch.empty_like(keys), torch.empty(B, dtype=torch.int32, device=keys.device)
        launch.run(
            digit_sort_kernel, (blocks,), keys, order, count, sorted_, positions, B, blocks, SHIFT=shift, **SORTING
        )
        keys, order = sorted_, positions
    assert order is not None
    return keys, order
