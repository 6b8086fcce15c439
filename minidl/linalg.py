"""Norms under the names of `torch.linalg`; minidl neither solves nor decomposes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from minidl import ops
from minidl.common import suggestions
from minidl.kernels import check
from minidl.tensors import Scalar, Tensor

__all__ = ["matrix_norm", "norm", "vector_norm"]


def vector_norm(
    x: Tensor, ord: Scalar = 2, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the norm of order `ord` along `dim`, or of all elements, as `ops.norm`; of elements converted to dtype."""
    return ops.norm(x if dtype is None else x.to(dtype), ord, dim, keepdim)


def matrix_norm(
    A: Tensor, ord: Scalar | str = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the norm of the matrices in two dimensions: "fro", or the largest (ord 1) or smallest (-1) sum of absolute
    values of a column, or of a row (inf and -inf).

    Raises ValueError for another ord, as singular values are not computed, or unless `dim` is two dimensions.
    """
    if len(dim) != 2:
        raise ValueError(f"linalg.matrix_norm: dim is {dim!r}, expected two dimensions")
    if A.ndim < 2:
        raise ValueError(f"linalg.matrix_norm: A has shape {list(A.shape)}, expected two dimensions or more")
    rows, columns = check.axes("linalg.matrix_norm", dim, A.ndim)
    A = A if dtype is None else A.to(dtype)
    if ord == "fro":
        return ops.norm(A, 2, (rows, columns), keepdim)
    if isinstance(ord, str) or ord not in (1, -1, math.inf, -math.inf):
        expected = "expected 'fro', 1, -1, inf or -inf; for singular values see torch.linalg on x.to_torch()"
        raise ValueError(f"linalg.matrix_norm: ord is {ord!r}, {expected}")
    added, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = ops.norm(A, 1, added, True)
    norms = (ops.amax if ord > 0 else ops.amin)(sums, other, True)
    return norms if keepdim else ops.squeeze(norms, (rows, columns))


def norm(
    A: Tensor, ord: Scalar | str | None = None, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return `matrix_norm` for two dimensions and an ord, else `vector_norm`; the 2-norm of all without ord and dim.

    Raises ValueError as these, and for an ord without `dim` unless A is a vector or a matrix.
    """
    if ord is None:
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    if dim is None and A.ndim not in (1, 2):
        raise ValueError(f"linalg.norm: A has shape {list(A.shape)}, expected a vector or a matrix, or dim")
    dims = (dim,) if isinstance(dim, int) else tuple(range(A.ndim) if dim is None else dim)
    if len(dims) == 2:
        return matrix_norm(A, ord, dims, keepdim, dtype=dtype)
    if isinstance(ord, str):
        raise ValueError(f"linalg.norm: ord is {ord!r} of {list(A.shape)} along {list(dims)}, expected two dimensions")
    return vector_norm(A, ord, dims, keepdim, dtype=dtype)


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.linalg", name, __all__)
