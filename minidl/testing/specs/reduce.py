"""Specs of reductions.

A sum is off by at most gamma(d) times the sum of the magnitudes, where d is the longest chain of additions of the
kernel (`kernels.reduce.depth`). A norm is accumulated in float64, whose error halves under the root. Maxima and minima
and their positions are exact, and so are the gradients of a sum and of a selection along one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minidl import ops
from minidl.kernels import reduce
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import WANTS_FLOATING, Case, distinct, refuses, spec_factory, tensors
from minidl.testing.specs.elementwise import few_grad_units, no_error, no_grad_error, stored_error, summed, times
from minidl.testing.specs.make import Make

Dim = int | tuple[int, ...] | None


def _reduced(make: Make, smallest: int = 0) -> Case:
    """Return a tensor, the dimensions to reduce, and whether to keep them."""
    shape = make.shape(0, 4, smallest=smallest, largest=17)
    form = make.choice(["all", "one", "several"])
    keepdim = bool(make.integer(0, 1))
    dim: Dim = None
    if shape and form == "one":
        dim = make.integer(-len(shape), len(shape) - 1)
    elif shape and form == "several":
        dim = tuple(i - make.choice([0, len(shape)]) for i in range(len(shape)) if make.integer(0, 1))
    return Case((make.tensor(*shape), dim or (0 if dim == 0 else None), keepdim))


def _not_empty(make: Make) -> Case:
    x, *rest = _reduced(make, smallest=1).args
    return Case((distinct(x), *rest))


def _dims(case: Case) -> tuple[int, ...]:
    """Return the dimensions that are reduced."""
    x, dim, _ = case.arguments(ops.sum)
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.dim() for d in dims) if x.dim() else ()


def _count(case: Case) -> int:
    return math.prod(case.args[0].shape[d] for d in _dims(case))


def _with_ones(case: Case, value: torch.Tensor) -> torch.Tensor:
    """Return a result or its gradient with size 1 for each reduced dimension."""
    return value.reshape(reduce.kept_shape(case.args[0], _dims(case) or None))


def _sum_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return summed(case.args[0].abs(), _with_ones(case, result), _count(case), dtype).reshape(result.shape)


def _mean_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The error of a compiled division is 2 units.
    return _sum_error(case, result, dtype) / max(_count(case), 1) + 4 * bounds.acc_unit(dtype) * result.abs()


def _norm_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count, u = _count(case), bounds.UNIT[torch.float64]
    relative = bounds.gamma(reduce.depth(max(result.numel(), 1), count, dtype) + 4, u)
    # Squares of float64 may underflow or overflow; squares of narrower types fit.
    underflow = math.sqrt(count) * 2.0**-511 if dtype == torch.float64 else 0.0
    error = relative * result.abs() + underflow
    return torch.where(result > 2.0**511, math.inf, error) if dtype == torch.float64 else error


def _norm_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x = case.args[0]
    y = torch.linalg.vector_norm(x, dim=_dims(case) or None, keepdim=True)
    off = stored_error(y, _norm_error(case, y, dtype), dtype)
    # dy x / (y + off): up to twice the relative error of y, if that is below a half.
    relative = torch.where(off * 2 < y, 2 * off / y, math.inf)
    error = times(grads[0], relative.expand(x.shape)) + 4 * bounds.acc_unit(dtype) * grads[0].abs()
    error = error + _with_ones(case, dy).abs() * bounds.TINY[launch.acc_torch(dtype)]
    error = torch.where((y == 0).expand(x.shape), 0.0, error)
    return (bounds.rounded(grads[0], error, dtype),)


_EXAMPLES: dict[str, Callable[[Make], Case]] = {
    "all": tensors((37, 65)),
    "scalar": tensors(()),
    "rows": tensors((37, 65), extra=(1,)),
    "short rows": tensors((70, 5), extra=(-1, True)),
    "long rows": tensors((2, 5003), extra=(1,)),
    "columns": tensors((65, 37), extra=(0,)),
    "few columns": tensors((1030, 3), extra=(0,)),
    "channels": tensors((3, 5, 6, 7), extra=((0, 2, 3), True)),
    "middle": tensors((3, 70, 5), extra=(1,)),
    "copied": tensors((2, 3, 2, 3, 2, 3), extra=((0, 2, 4),)),
    "transposed": lambda make: Case((make.tensor(40, 33).t(), 0)),
    "ties": lambda make: Case((make.tensor(37, 1).expand(37, 65), 1)),
}
_OUTSIDE = refuses(IndexError, "dim 2 is out of range for a tensor of 2 dimensions", (2, 3), extra=(2,))
_TWICE = refuses(ValueError, r"dims \[1, -1\] name a dimension twice", (2, 3), extra=((1, -1),))
_NOTHING = refuses(ValueError, r"no maximum along dims \[0\] of a tensor of shape \[0, 3\]", (0, 3), extra=(0,))


def _reference(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's function with all dimensions for None."""

    def reference(x: torch.Tensor, dim: Dim = None, keepdim: bool = False) -> torch.Tensor:
        return function(x, dim=tuple(range(x.dim())) if dim is None else dim, keepdim=keepdim)

    return reference


def _one_dim(make: Make) -> Case:
    shape = make.shape(0, 4, smallest=1, largest=17)
    dim = make.choice([None, *range(-len(shape), len(shape))])
    return Case((make.tensor(*shape), dim, bool(make.integer(0, 1))))


def _along(make: Make) -> Case:
    """Return a tensor, one of its dimensions or none, and whether to keep it."""
    x, *rest = _one_dim(make).args
    return Case((distinct(x), *rest))


def _chosen(over_all: Any, along: Any) -> Callable[..., Any]:
    """Return torch's maximum or minimum, along one dimension or of all elements, where ties share the gradient."""

    def reference(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return over_all(x, dim=tuple(range(x.dim())), keepdim=keepdim)
        return tuple(along(x, dim, keepdim))

    return reference


def _first_k(make: Make) -> Case:
    x, dim, _ = _along(make).args
    size = x.shape[-1 if dim is None else dim] if x.dim() else 1
    return Case((x, make.integer(0 if x.dim() else 1, size), -1 if dim is None else dim, bool(make.integer(0, 1))))


def _ordered(make: Make) -> Case:
    x, _, dim, descending = _first_k(make).args
    return Case((x, dim, descending))


def _ranked(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True) -> Any:
    """Return the first k of a stable sort."""
    return tuple(t.narrow(dim, 0, k) if x.dim() else t for t in torch.sort(x, dim=dim, descending=largest, stable=True))


def _exactly(case: Case, result: Any, dtype: torch.dtype) -> Any:
    return (
        tuple(no_error(case, r, dtype) for r in result) if isinstance(result, tuple) else no_error(case, result, dtype)
    )


_floating = spec_factory(
    inputs=_reduced,
    differentiable=(0,),
    families=("reduce_columns", "reduce_rows"),
    examples=_EXAMPLES,
    bad=(_OUTSIDE, _TWICE, WANTS_FLOATING),
)
_maximum = partial(
    _floating, reference=_reference(torch.amax), inputs=_not_empty, bound=no_error, grad_bound=few_grad_units(1),
    bad=(_OUTSIDE, _TWICE, _NOTHING), exact=True,
)  # fmt: skip

_ALONG = {name: case for name, case in _EXAMPLES.items() if name not in ("few columns", "channels", "copied")}
_SOME = {name: _ALONG[name] for name in ("long rows", "columns")}
_SEVERAL = refuses(TypeError, r"dim is \(0, 1\), expected one dimension", (2, 3), extra=((0, 1),))

SPECS = [
    _floating(
        "sum",
        reference=_reference(torch.sum),
        bound=lambda case, y, dtype: bounds.rounded(y, _sum_error(case, y, dtype), dtype),
        grad_bound=no_grad_error,
        bad=(_OUTSIDE, _TWICE),
        exact=True,
    ),
    _floating("mean", reference=_reference(torch.mean), bound=bounds.off_by(_mean_error), grad_bound=few_grad_units(2)),
    _floating(
        "norm",
        reference=_reference(torch.linalg.vector_norm),
        bound=bounds.off_by(_norm_error),
        grad_bound=_norm_grad,
        op=lambda x, dim=None, keepdim=False: ops.norm(x, 2, dim, keepdim),
    ),
    _maximum("amax"),
    _maximum("amin", reference=_reference(torch.amin), examples=_SOME, bad=(_OUTSIDE,)),
    _maximum(
        "max",
        reference=_chosen(torch.amax, torch.max),
        inputs=_along,
        bound=_exactly,
        examples=_ALONG,
        bad=(_OUTSIDE, _NOTHING, _SEVERAL),
    ),
    _maximum(
        "min",
        reference=_chosen(torch.amin, torch.min),
        inputs=_along,
        bound=_exactly,
        examples=_SOME,
        bad=(_OUTSIDE, _SEVERAL),
    ),
    _floating(
        "topk",
        reference=_ranked,
        inputs=_first_k,
        bound=_exactly,
        grad_bound=no_grad_error,
        exact=True,
        examples={
            "rows": tensors((37, 65), extra=(5,)),
            "smallest of long rows": tensors((2, 5003), extra=(3, 1, False)),
            "columns": tensors((65, 37), extra=(4, 0)),
            "channels": tensors((3, 5, 6, 7), extra=(2, 1)),
            "nearly all": tensors((70, 5), extra=(4,)),
            "many of long rows": tensors((2, 5003), extra=(20,)),
            "many of columns": tensors((300, 3), extra=(50, 0, False)),
            "half of long rows": tensors((2, 5003), extra=(2100, 1)),
            "ties": lambda make: Case((make.tensor(37, 1).expand(37, 65), 3)),
        },
        bad=(
            refuses(IndexError, "dim 2 is out of range", (2, 3), extra=(1, 2)),
            refuses(ValueError, "k is 4, expected 0 to 3, the size of dim -1", (2, 3), extra=(4,)),
        ),
    ),
    _floating(
        "sort",
        reference=lambda x, dim=-1, descending=False: _ranked(x, x.shape[dim] if x.dim() else 1, dim, descending),
        inputs=_ordered,
        bound=_exactly,
        grad_bound=no_grad_error,
        families=("elementwise",),
        exact=True,
        examples={
            "rows": tensors((37, 65), extra=(1,)),
            "long rows": tensors((2, 1003), extra=(-1, True)),
            "columns": tensors((65, 37), extra=(0,)),
            "middle": tensors((3, 70, 5), extra=(1,)),
            "ties": lambda make: Case((make.tensor(7, 1).expand(7, 165), 1)),
        },
        bad=(refuses(IndexError, "dim 2 is out of range", (2, 3), extra=(2,)),),
    ),
    _maximum(
        "argmax",
        reference=torch.argmax,
        inputs=_one_dim,
        grad_bound=None,
        differentiable=(),
        examples=_ALONG,
        bad=(_OUTSIDE, _NOTHING),
    ),
    _maximum(
        "argmin",
        reference=torch.argmin,
        inputs=_one_dim,
        grad_bound=None,
        differentiable=(),
        examples=_SOME,
        bad=(_OUTSIDE,),
    ),
]
