"""Blocks of parameters, and their states."""

import triton
import triton.language as tl


@triton.jit
def block_offsets(width, i_block, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return rows [BLOCK_R, 1] and columns [1, BLOCK_C] of a block, the row width, and the block's column index."""
    width = tl.multiple_of(tl.where(width == 0, BLOCK_C, width), BLOCK_V)
    across = (width + BLOCK_C - 1) // BLOCK_C
    o_r = (i_block // across) * BLOCK_R + tl.arange(0, BLOCK_R)
    i_c = i_block % across
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    return o_r[:, None], o_c[None, :], width, i_c


@triton.jit
def pointer(p_slot, COLUMN: tl.constexpr, like: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the address in a column of the table as a pointer to values of type `like`."""
    BYTES: tl.constexpr = 16 if BLOCK_V > 1 else 1
    return tl.multiple_of(tl.load(p_slot + COLUMN).to(tl.pointer_type(like)), BYTES)


@triton.jit
def load_state(p, m):
    """Load a block of a state. No other launch reads states: they are evicted before the weights."""
    return tl.load(p, mask=m, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_state(p, b, m):
    tl.store(p, b, mask=m, eviction_policy="evict_first")
