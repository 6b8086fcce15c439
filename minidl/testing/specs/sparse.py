"""The spec of `sparse_linear`.

Row i of x adds its n products, with an error of at most gamma(n + 1) times the sum of their magnitudes in any order.
The gradient of the weight is the same sum over the documents that contain a word. The reference adds the stored
entries only, so an infinite weight only affects documents that contain its word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from minidl import ops
from minidl.kernels.activation import Activation
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.testing.specs import bounds
from minidl.testing.specs.activation import apply
from minidl.testing.specs.base import Case, of, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make
from minidl.testing.specs.products import ACTIVATIONS, gradient_bounds, incoming, output_bound, with_bias


def _matrix(counts: Sequence[int], V: int) -> Callable[[Make], CSR]:
    """Return a CSR whose rows have the given numbers of entries, columns drawn with repetition."""

    def make_matrix(make: Make) -> CSR:
        crow = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)])
        col = make.integers(sum(counts), low=0, high=max(V - 1, 0))
        return CSR.from_torch(crow.to(col.device), col, make.tensor(sum(counts)), (len(counts), V))

    return make_matrix


def _inputs(make: Make) -> Case:
    B, V, H = make.size(0, 33), make.size(1, 40), make.size(1, 40)
    longest = make.choice([1, 3, 70])
    counts = [make.integer(0, longest) if make.integer(0, 1) else min(longest, 2) for _ in range(B)]
    bias = make.tensor(H) if make.integer(0, 1) else None
    return Case((_matrix(counts, V)(make), make.tensor(V, H), bias, make.choice(ACTIVATIONS)))


def _sums(x: CSR, dense: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """Return x or its transpose times a dense matrix, entry by entry."""
    rows = torch.arange(x.shape[0], device=dense.device).repeat_interleave((x.crow[1:] - x.crow[:-1]).long())
    of, at = (x.col.long(), rows) if transposed else (rows, x.col.long())
    zeros = dense.new_zeros(x.shape[transposed], dense.shape[1])
    return zeros.index_add(0, of, x.val[:, None] * dense[at])


def _reference(x: CSR, weight: torch.Tensor, bias: torch.Tensor | None = None, act: Activation = None) -> torch.Tensor:
    return apply(_sums(x, weight) + (0 if bias is None else bias), act)


def _sum_error(total: torch.Tensor, near_zero: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of sums of `terms` products a b in the accumulate type: `total` is sum |a| |b|, `near_zero` sum
    (|a| + 1) (|b| + 1)."""
    most = int(terms.max()) if len(terms) else 0
    error = bounds.gamma(most + 1, bounds.acc_unit(dtype)) * total + near_zero * bounds.TINY[launch.acc_torch(dtype)]
    return bounds.or_infinite(error, total, dtype)


def _totals(x: CSR, dense: torch.Tensor, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of |a| |b| and of (|a| + 1) (|b| + 1) of a product of x, or of x^T."""
    a, b = replace(x, val=x.val.abs()), dense.abs()
    return _sums(a, b, transposed), _sums(replace(x, val=a.val + 1), b + 1, transposed)


def _preactivation(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z = x W + b and its error in the accumulate type."""
    x, weight, bias, _ = case.arguments(ops.sparse_linear)
    z = _sums(x, weight) + (0 if bias is None else bias)
    error = _sum_error(*_totals(x, weight), x.crow[1:] - x.crow[:-1], dtype)
    return z, with_bias(z, error, bias, dtype)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, _, _, act = case.arguments(ops.sparse_linear)
    magnitude, error = incoming(act, dy, *_preactivation(case, dtype), dtype)
    absolute = replace(x, val=x.val.abs())
    counts = torch.zeros(x.shape[1], dtype=torch.int64)
    counts[x.rows.long()] = (x.t_crow[1:] - x.t_crow[:-1]).long()
    dw = _sums(absolute, error, transposed=True) + _sum_error(*_totals(x, magnitude, transposed=True), counts, dtype)
    db = error.sum(0) + _sum_error(magnitude.sum(0), (magnitude + 1).sum(0), torch.tensor([len(dy)]), dtype)
    return gradient_bounds(grads, (dw, db), dtype)


_SMALL = _matrix([1, 2], 4)
SPARSE_LINEAR = spec_factory()(
    "sparse_linear",
    reference=_reference,
    inputs=_inputs,
    bound=output_bound(ops.sparse_linear, _preactivation),
    grad_bound=_grad_bound,
    differentiable=(1, 2),
    families=("sparse",),
    examples={
        "rows of all lengths": tensors(_matrix([90, 3, 0, 1, 70, 1, 2], 50), (50, 19), None, None),
        "a common word": tensors(_matrix([2] * 130, 3), (3, 16), (16,), None),
        "relu": tensors(_matrix([5, 0, 9, 1], 12), (12, 33), (33,), extra=("relu",)),
        "gelu": tensors(_matrix([4, 66, 2], 20), (20, 8), (8,), extra=("gelu",)),
        "several tiles": tensors(_matrix([1] * 40, 60), (60, 130), None, extra=("tanh",)),
        "no entries": tensors(_matrix([0, 0], 4), (4, 3), (3,), extra=("sigmoid",)),
    },
    bad=(
        refuses(ValueError, r"x has shape \[2, 4\], weight \[5, 3\]; expected x \[B, V\]", _SMALL, (5, 3)),
        refuses(ValueError, r"weight \[4\]; expected x \[B, V\], weight \[V, H\]", _SMALL, (4,)),
        refuses(ValueError, r"bias has shape \[4\], expected \[3\]", _SMALL, (4, 3), (4,)),
        refuses(ValueError, "unknown activation 'swish'", _SMALL, (4, 3), (3,), extra=("swish",)),
        refuses(TypeError, "x is a Tensor, expected a CSR", (2, 4), (4, 3)),
        refuses(
            TypeError,
            "val is torch.float32 and dense is torch.float16; convert one of them",
            _SMALL, of(torch.float16, 4, 3),
        ),
    ),
    # With an activation the result is not an integer: tests/kernels/test_sparse.py tests exact sums.
)  # fmt: skip

SPECS = [SPARSE_LINEAR]
