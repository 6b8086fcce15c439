"""Integer division by a divisor that the host knows: a multiplication instead of a slow division."""

from __future__ import annotations

import functools

import triton
import triton.language as tl


@triton.jit
def fast_divide(n, size, by, INDEX: tl.constexpr):
    """Return n // size for 0 <= n < 2^31, by the product with `reciprocal(size)`."""
    if tl.int64 == INDEX:
        return n // size
    else:
        n = n.to(tl.uint32)
        shift = ((by >> 32) - 1).to(tl.uint32)
        return (tl.umulhi(n + n, by.to(tl.uint32)) >> shift).to(tl.int32)


@functools.lru_cache(maxsize=1024)
def reciprocal(size: int) -> int:
    """Return 2^(31 + k) / size rounded up, k the bits of size - 1, with k + 1 in the upper 32 bits: always 64 bits.

    floor(n m / 2^(31 + k)) is then n // size for 0 <= n < 2^31 (Granlund and Montgomery, PLDI 1994).
    """
    k = max(size - 1, 0).bit_length()
    return -(-(1 << 31 + k) // max(size, 1)) | k + 1 << 32


@triton.jit
def as_multiple(o, ALIGN: tl.constexpr):
    """Return o, a multiple of ALIGN, in a form that tells the compiler so: it can then use accesses of ALIGN values."""
    return o // ALIGN * ALIGN
