"""Records of reductions.

A sum is off by at most gamma(d) times the sum of the magnitudes, where d is the longest chain of additions of the
kernel (`kernels.reduce.depth`). A norm is accumulated in float64, whose error halves under the root. A maximum and its
position are exact, and so is the gradient of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minidl import ops
from minidl.kernels import launch, reduce
from minidl.specs import bounds
from minidl.specs.base import Bad, Case, Make, OpSpec
from minidl.specs.elementwise import kept, no_error, no_grad_error, summed, times, where_finite

Dim = int | tuple[int, ...] | None


def _reduced(make: Make, smallest: int = 0) -> Case:
    """A tensor, the dimensions to reduce, and whether to keep them."""
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
    if any(stride == 0 < size - 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        # Repeated values would all be ties, where a maximum has no derivative to compare with.
        x = x + torch.arange(x.numel(), device=x.device).view(x.shape)
    return Case((x, *rest))


def _parts(case: Case) -> tuple[torch.Tensor, tuple[int, ...], bool]:
    x, dim, keepdim = (*case.args, None, False)[:3]
    dims = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
    return x, tuple(d % max(x.dim(), 1) for d in dims) if x.dim() else (), keepdim


def _count(case: Case) -> int:
    x, dims, _ = _parts(case)
    return math.prod(x.shape[d] for d in dims)


def _with_ones(case: Case, value: torch.Tensor) -> torch.Tensor:
    """A result or its gradient with size 1 in place of what was reduced."""
    return value.reshape(reduce.kept_shape(case.args[0], _parts(case)[1] or None))


def _sum_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, _, _ = _parts(case)
    flat = _with_ones(case, result)
    return summed(x.abs(), flat, _count(case), dtype).reshape(result.shape)


def _sum_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bounds.rounded(result, _sum_error(case, result, dtype), dtype)


def _mean_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A compiled division is off by 2 units.
    error = _sum_error(case, result, dtype) / max(_count(case), 1) + 4 * bounds.acc_unit(dtype) * result.abs()
    return where_finite(result, bounds.rounded(result, error, dtype))


def _mean_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return (bounds.rounded(grads[0], 2 * bounds.acc_unit(dtype) * grads[0].abs(), dtype),)


def _norm_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count, u = _count(case), bounds.UNIT[torch.float64]
    relative = bounds.gamma(reduce.depth(max(result.numel(), 1), count, dtype) + 4, u)
    # Squares of float64 may vanish or overflow; those of narrower types fit.
    vanished = math.sqrt(count) * 2.0**-511 if dtype == torch.float64 else 0.0
    error = relative * result.abs() + vanished
    return torch.where(result > 2.0**511, math.inf, error) if dtype == torch.float64 else error


def _norm_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return where_finite(result, bounds.rounded(result, _norm_error(case, result, dtype), dtype))


def _norm_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, dims, _ = _parts(case)
    y = torch.linalg.vector_norm(x, dim=dims or None, keepdim=True)
    off = kept(y, _norm_error(case, y, dtype), dtype)
    # dy x / (y + off): up to twice the relative error of y, if that is below a half.
    relative = torch.where(off * 2 < y, 2 * off / y, math.inf)
    error = times(grads[0], relative.expand(x.shape)) + 4 * bounds.acc_unit(dtype) * grads[0].abs()
    error = error + _with_ones(case, dy).abs() * bounds.TINY[launch.acc_torch(dtype)]
    error = torch.where((y == 0).expand(x.shape), 0.0, error)
    return (bounds.rounded(grads[0], error, dtype),)


def _amax_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return (bounds.rounded(grads[0], bounds.acc_unit(dtype) * grads[0].abs(), dtype),)


def _examples(low: float | None = None) -> dict[str, Callable[[Make], Case]]:
    def of(shape: tuple[int, ...], *rest: Any) -> Callable[[Make], Case]:
        return lambda make: Case((make.tensor(*shape, low=low), *rest))

    return {
        "all": of((37, 65)),
        "scalar": of(()),
        "rows": of((37, 65), 1),
        "short rows": of((70, 5), -1, True),
        "long rows": of((2, 5003), 1),
        "columns": of((65, 37), 0),
        "few columns": of((1030, 3), 0),
        "channels": of((3, 5, 6, 7), (0, 2, 3), True),
        "middle": of((3, 70, 5), 1),
        "copied": of((2, 3, 2, 3, 2, 3), (0, 2, 4)),
        "turned": lambda make: Case((make.tensor(40, 33, low=low).t(), 0)),
        "ties": lambda make: Case((make.tensor(37, 1, low=low).expand(37, 65), 1)),
    }


def _bad(*more: Bad) -> tuple[Bad, ...]:
    return (
        Bad(
            lambda make: Case((make.tensor(2, 3), 2)), IndexError, "dim 2 is out of range for a tensor of 2 dimensions"
        ),
        *more,
    )


_TWICE = Bad(lambda make: Case((make.tensor(2, 3), (1, -1))), ValueError, r"dims \[1, -1\] name a dimension twice")
_INTEGERS = Bad(
    lambda make: Case((make.integers(3, low=0, high=5),)),
    TypeError,
    r"x has dtype torch.int64, expected a floating type; convert it with .to\(\)",
)
_NOTHING = Bad(
    lambda make: Case((make.tensor(0, 3), 0)),
    ValueError,
    r"nothing to compare along dims \[0\] of a tensor of shape \[0, 3\]",
)
FAMILIES = ("reduce_columns", "reduce_rows")


def _reference(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's function with all dimensions for None, which some spell otherwise."""

    def reference(x: torch.Tensor, dim: Dim = None, keepdim: bool = False) -> torch.Tensor:
        return function(x, dim=tuple(range(x.dim())) if dim is None else dim, keepdim=keepdim)

    return reference


def _record(name: str, **fields: Any) -> OpSpec:
    fields = {
        "inputs": _reduced,
        "differentiable": (0,),
        "families": FAMILIES,
        "examples": _examples(),
        "bad": _bad(_TWICE),
        **fields,
    }
    return OpSpec(name=name, op=getattr(ops, name), **fields)


def _argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    return torch.argmax(x, dim=dim, keepdim=keepdim)


def _one_dim(make: Make) -> Case:
    shape = make.shape(0, 4, smallest=1, largest=17)
    dim = make.choice([None, *range(-len(shape), len(shape))])
    return Case((make.tensor(*shape), dim, bool(make.integer(0, 1))))


SPECS = [
    _record("sum", reference=_reference(torch.sum), bound=_sum_bound, grad_bound=no_grad_error, exact=True),
    _record(
        "mean",
        reference=_reference(torch.mean),
        bound=_mean_bound,
        grad_bound=_mean_grad,
        bad=_bad(_TWICE, _INTEGERS),
    ),
    _record(
        "norm",
        reference=_reference(torch.linalg.vector_norm),
        bound=_norm_bound,
        grad_bound=_norm_grad,
        bad=_bad(_TWICE, _INTEGERS),
    ),
    _record(
        "amax",
        reference=_reference(torch.amax),
        inputs=_not_empty,
        bound=no_error,
        grad_bound=_amax_grad,
        bad=_bad(_TWICE, _NOTHING),
        exact=True,
    ),
    _record(
        "max",
        reference=_reference(torch.amax),
        inputs=_not_empty,
        bound=no_error,
        grad_bound=_amax_grad,
        examples={"all": _examples()["all"]},
        bad=_bad(_TWICE, _NOTHING),
        exact=True,
    ),
    _record(
        "argmax",
        reference=_argmax,
        inputs=_one_dim,
        bound=no_error,
        differentiable=(),
        examples={
            name: case
            for name, case in _examples().items()
            if name in ("all", "scalar", "rows", "short rows", "long rows", "columns", "middle", "turned", "ties")
        },
        bad=_bad(_NOTHING),
        exact=True,
    ),
]
