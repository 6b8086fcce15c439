"""Norms under the names of `torch.linalg`; minidl neither solves nor decomposes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from minidl import ops
from minidl.common import suggestions
from minidl.kernels import check
from minidl.tensors import Scalar, Tensor

__all__ = ["norm", "vector_norm"]


def vector_norm(
    x: Tensor, ord: Scalar = 2, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the norm of order `ord` along `dim`, or of all elements, as `ops.norm`; of elements converted to dtype."""
    return ops.norm(x if dtype is None else x.to(dtype), ord, dim, keepdim)


def norm(
    A: Tensor, ord: Scalar | str | None = None, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return `vector_norm` for one dimension, or without ord; for two dimensions the norm of matrices: "fro", or the
    largest (ord 1) or smallest (-1) sum of absolute values of a column, or of a row (inf and -inf).

    Raises ValueError for another ord of matrices, whose singular values are not computed, and for an ord without `dim`
    unless A is a vector or a matrix.
    """
    if ord is None:
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    if dim is None and A.ndim not in (1, 2):
        raise ValueError(f"linalg.norm: A has shape {list(A.shape)}, expected a vector or a matrix, or dim")
    dims = check.axes("linalg.norm", tuple(range(A.ndim)) if dim is None else dim, A.ndim)
    if len(set(dims)) < len(dims):
        raise ValueError(f"linalg.norm: dim is {dim}, which names a dimension twice")
    if len(dims) == 2 and ord == "fro":
        return vector_norm(A, 2, dims, keepdim, dtype=dtype)
    if isinstance(ord, str) or (len(dims) == 2 and ord not in (1, -1, math.inf, -math.inf)):
        expected = "expected 'fro', 1, -1, inf or -inf of two; for singular values see torch.linalg on x.to_torch()"
        raise ValueError(f"linalg.norm: ord is {ord!r} of dimensions {list(dims)}, {expected}")
    if len(dims) != 2:
        return vector_norm(A, ord, dims, keepdim, dtype=dtype)
    added, other = dims if abs(ord) == 1 else dims[::-1]
    norms = (ops.amax if ord > 0 else ops.amin)(vector_norm(A, 1, added, True, dtype=dtype), other, True)
    return norms if keepdim else ops.squeeze(norms, dims)


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.linalg", name, __all__)
