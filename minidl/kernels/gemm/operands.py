"""The memory of a product's operands: which a tensor descriptor can read, and copies of the others."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.kernels.gemm import choice, launches, parts, rows
from minidl.runtime import launch


def along_k(x: torch.Tensor, nearest: bool) -> torch.Tensor:
    """Return x with a contiguous last axis, copied if necessary; a copied matrix is rounded to tf32 if `nearest`.

    The tf32 matrix instructions read shared memory along K only, and transposing each block in the kernel costs far
    more than copying the operand: at 8192 in tf32 12.6 ms if both need it, 2.7 ms if neither does (H200).
    """
    if x.dim() == 2:
        return parts.along_k(x, nearest)
    return x if x.stride(-1) == 1 else x.contiguous()


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x if a tensor descriptor can read it, else a copy with aligned rows."""
    if has_box(x):
        return x
    stored, transposed = _stored(x)
    assert stored is not None
    return rows.aligned_copy(stored).t() if transposed else rows.aligned_copy(stored)


def can_copy(x: torch.Tensor) -> bool:
    return x.dtype != torch.float64 and _stored(x)[0] is not None


def copies_pay(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether copying operands without a box takes less time than pointers. Not measured for float32."""
    if a.dtype.itemsize != 2 or not (can_copy(a) and can_copy(b)):
        return False
    copied = sum(x.numel() for x in (a, b) if not has_box(x))
    return choice.copies_pay(a.dtype, shape_of(a, b, True), copied, launch.target(), launch.processors())


def shape_of(a: torch.Tensor, b: torch.Tensor, by_pointers: bool) -> choice.Shape:
    """Return the sizes from which `choice` estimates the time."""
    (M, K), N = a.shape[-2:], b.shape[-1]
    units = launches.at_once(M, K, *a.stride()[-2:]), launches.at_once(N, K, *b.stride()[:-3:-1]), launches.unit(N)
    batch = a.shape[0] if a.dim() == 3 else 1
    return choice.Shape(M, N, K, batch, units if by_pointers else (8, 8, units[2]))


def has_box(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read x: one axis is contiguous and rows along it are 16-byte aligned."""
    if x.dtype == torch.float64 or x.data_ptr() % 16:
        return False
    stored = _stored(x)[0]
    return stored is not None and stored.stride(0) * x.element_size() % 16 == 0 and stored.stride(0) >= stored.shape[1]


def _stored(x: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """Return x or x.t(), whichever has contiguous rows (None if neither has), and whether it is transposed."""
    if x.stride(1) == 1 and (x.stride(0) != 1 or x.shape[0] == 1 or x.shape[1] == 1):
        return x, False
    if x.stride(0) == 1:
        return x.t(), True
    return None, False


def descriptors(
    a: torch.Tensor, b: torch.Tensor, tile: launch.Tile
) -> tuple[TensorDescriptor, TensorDescriptor, tuple[bool, bool]]:  # fmt: skip
    """Return the tensor descriptors of both operands, and which of them are transposed."""
    d_a, a_transposed = _box(a, tile["BLOCK_M"], tile["BLOCK_K"])
    d_b, b_transposed = _box(b, tile["BLOCK_K"], tile["BLOCK_N"])
    return d_a, d_b, (a_transposed, b_transposed)


def _box(x: torch.Tensor, block_0: int, block_1: int) -> tuple[TensorDescriptor, bool]:
    stored, transposed = _stored(x)
    assert stored is not None
    block = [block_1, block_0] if transposed else [block_0, block_1]
    return TensorDescriptor(stored, list(stored.shape), list(stored.stride()), block), transposed
