"""Integer keys with the order of values, for sorting and ranking."""

from typing import Any

import torch
import triton
import triton.language as tl


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
