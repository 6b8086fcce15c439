"""What the epilogues of convolutions have beyond `kernels.epilogue`: 2x2 pools, and vectors for several pixels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_POOL = tl.constexpr(1)
POOLS = {None: 0, "max": 1, "avg": 2}


def repeated(x: torch.Tensor | None, times: int = 2) -> torch.Tensor | None:
    """Return a vector [M] repeated to [times * M], for adjacent pixels that count as one; None stays None."""
    # For a single value, reshape alone would return a view of stride 0.
    return None if x is None else x.expand(times, -1).reshape(-1).contiguous()


@triton.jit
def pool_last(b_x, POOL: tl.constexpr):
    """Return the maximum (NaN if one is NaN) or the mean of the last two axes, of size 2 each."""
    b_left, b_right = tl.split(b_x)
    b_0, b_2 = tl.split(b_left)
    b_1, b_3 = tl.split(b_right)
    if POOL == MAX_POOL:
        top = tl.maximum(b_0, b_1, propagate_nan=tl.PropagateNan.ALL)
        bottom = tl.maximum(b_2, b_3, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(top, bottom, propagate_nan=tl.PropagateNan.ALL)
    else:
        return 0.25 * ((b_0 + b_1) + (b_2 + b_3))


@triton.jit
def pool_quads(b_x, POOL: tl.constexpr):
    """Pool every four rows of [4 R, N] to one row of [R, N]."""
    b_x = tl.reshape(b_x, (b_x.shape[0] // 4, 2, 2, b_x.shape[1]))
    return pool_last(tl.permute(b_x, (0, 3, 1, 2)), POOL)
