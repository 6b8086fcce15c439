"""Specs of functions of one tensor, element by element, with the bounds of `elementwise`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from minidl import ops
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, between, bools, integers, one, refuses, spec_factory, tensors
from minidl.testing.specs.elementwise import (
    few_grad_units,
    few_units,
    no_error,
    no_grad_error,
    stored_error,
    times,
    where_finite,
)
from minidl.testing.specs.make import Make

# Units in the last place of exp and log.
FUNCTION_UNITS = 8


def _unary_examples(low: float | None = None) -> dict[str, Callable[[Make], Case]]:
    return {
        "one run": tensors(between(low, None, 3, 700)),
        "scalar": tensors(between(low, None)),
        "every second": lambda make: Case((make.tensor(37, 66, low=low)[:, ::2],)),
    }


_INTEGERS = refuses(TypeError, r"got dtype torch.int64, expected a floating type; convert it with .to\(\)", integers(3))
_NO_BOOL = refuses(TypeError, "got dtype torch.bool, expected a floating type", bools(3))
_BOOL = refuses(TypeError, "got dtype torch.bool, expected a floating or", bools(3))

_unary = spec_factory(
    inputs=one(), differentiable=(0,), families=("elementwise",), examples=_unary_examples(), bad=(_INTEGERS,)
)
_exact = partial(_unary, bound=no_error, grad_bound=no_grad_error, bad=(_BOOL,), exact=True)
# For values above 0.
_positive = partial(_unary, inputs=one(low=0.0), examples=_unary_examples(low=0.0625))


def _exp_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    y = case.args[0].exp()
    error = times(dy, stored_error(y, FUNCTION_UNITS * bounds.acc_unit(dtype) * y, dtype))
    return (bounds.rounded(grads[0], error + bounds.acc_unit(dtype) * grads[0].abs(), dtype),)


def _sqrt_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    # The root of the smallest number is far from underflow, so the stored value has the error of two roundings.
    relative = 2 * (bounds.UNIT[dtype] + bounds.acc_unit(dtype)) + 2 * bounds.acc_unit(dtype)
    return (where_finite(grads[0], bounds.rounded(grads[0], relative * grads[0].abs(), dtype)),)


def _reciprocal_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    y = case.args[0].reciprocal().abs()
    off = stored_error(y, bounds.acc_unit(dtype) * y, dtype)
    error = times(dy, 2 * y * off + off * off) + 4 * bounds.acc_unit(dtype) * grads[0].abs()
    # dy y may underflow before the second product with y.
    error = error + y * bounds.TINY[launch.acc_torch(dtype)]
    return (where_finite(grads[0], bounds.rounded(grads[0], error, dtype)),)


def _any_of(functions: Mapping[str, tuple[float | None, float]], **fields: Any) -> OpSpec:
    """Return one spec, named after the first function, of several functions by name, with the least x and units."""
    first = next(iter(functions))

    def reference(x: torch.Tensor, name: str = first) -> torch.Tensor:
        return getattr(torch, name)(x)

    def inputs(make: Make) -> Case:
        name = make.choice([*functions])
        return Case((make.tensor(*make.shape(0, 4), low=functions[name][0]), name))

    return _unary(
        first,
        op=lambda x, name=first: getattr(ops, name)(x),
        reference=reference,
        inputs=inputs,
        bound=bounds.off_by(lambda case, y, dtype: functions[_name(case, first)][1] * bounds.acc_unit(dtype) * y.abs()),
        examples={name: tensors(between(low, None, 3, 70), extra=(name,)) for name, (low, _) in functions.items()},
        **fields,
    )


def _name(case: Case, first: str) -> str:
    return case.args[1] if len(case.args) > 1 else first


def _curve_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bound of dy f'(x): a large dy scales the underflow of f', and torch's expm1 cancels in dy (y + 1)."""
    x, name, u = case.args[0], _name(case, "sin"), bounds.acc_unit(dtype)
    units = FUNCTION_UNITS + 4 + (2 * (x * x).clamp(max=800) if name == "erf" else 0)
    lost = bounds.TINY[launch.acc_torch(dtype)] + (bounds.UNIT[torch.float64] if name == "expm1" else 0)
    error = units * u * grads[0].abs() + 2 * dy.abs() * lost
    return (where_finite(grads[0], bounds.rounded(grads[0], error, dtype)),)


_CURVES = {
    "sin": (None, 4), "cos": (None, 4), "log1p": (-0.75, 12), "expm1": (None, 16), "erf": (None, 4), "log2": (0.0, 8),
    "rsqrt": (0.0, 2),
}  # fmt: skip
_STEPS = ("floor", "ceil", "trunc", "round")

SPECS = [
    _any_of(dict.fromkeys(_STEPS, (None, 0)), grad_bound=no_grad_error, exact=True, bad=(_NO_BOOL,)),
    _any_of(_CURVES, grad_bound=_curve_grad),
    *map(_exact, ("neg", "abs", "sign")),
    _exact("square", bound=few_units(1), grad_bound=few_grad_units(2)),
    _unary("exp", bound=few_units(FUNCTION_UNITS), grad_bound=_exp_grad),
    _positive("log", bound=few_units(FUNCTION_UNITS), grad_bound=few_grad_units(1)),
    _positive("sqrt", bound=few_units(1), grad_bound=_sqrt_grad),
    _unary("reciprocal", bound=few_units(1), grad_bound=_reciprocal_grad),
]
