"""Specs of element-wise arithmetic.

Values are computed in the accumulate type by one correctly rounded operation, or by a function accurate to a few units,
and rounded once. A gradient is such a function of dy and stored values; for a broadcast operand, the rounded terms are
then added (`folded`). Gradients that need the output use the rounded output: its bound enters to first and second
order. If a stored value overflows the dtype, there is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minidl import ops
from minidl.kernels import reduce
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, between, of, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def no_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound 0 of an exact result."""
    return torch.zeros_like(result, dtype=torch.float64)


def no_grad_error(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds 0 of exact gradients."""
    return tuple(torch.zeros_like(g) for g in grads)


def where_finite(result: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return the bound, and 0 where the result is infinite or NaN and must be equal."""
    return torch.where(result.isfinite(), bound, 0.0)


def few_units(units: float) -> Callable[..., torch.Tensor]:
    """Return a bound of some units of the accumulate type, and one rounding to the dtype."""
    return bounds.off_by(lambda case, result, dtype: units * bounds.acc_unit(dtype) * result.abs())


def few_grad_units(units: float) -> Callable[..., tuple[Any, ...]]:
    """Return the bound of `few_units` for the only gradient."""
    bound = few_units(units)
    return lambda case, dy, grads, dtype: (bound(case, grads[0], dtype),)


def stored_error(y: torch.Tensor, error: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of a stored, rounded output; infinite if it may overflow."""
    off = bounds.rounded(y, torch.as_tensor(error, dtype=torch.float64), dtype)
    return torch.where(y.abs() + off > torch.finfo(dtype).max, math.inf, off)


def times(factor: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return |factor| times an error; infinite if the error is infinite, also for a factor of 0."""
    return torch.where(error == math.inf, math.inf, factor.abs() * error)


def folded(grad: torch.Tensor, terms: torch.Tensor, errors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound of a gradient that is the sum of `terms`, of a broadcast shape, over repeated elements.

    Each term has an error of `errors` and is then rounded to the dtype.
    """
    term_errors = bounds.rounded(terms, errors, dtype)
    if terms.shape == grad.shape:
        return where_finite(grad, term_errors)
    count = terms.numel() // max(grad.numel(), 1)
    return bounds.rounded(
        grad, summed(terms.abs() + term_errors, grad, count, dtype) + term_errors.sum_to_size(grad.shape), dtype
    )


def summed(sizes: torch.Tensor, result: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of adding numbers of these sizes into `result`; infinite if a term or a sum may overflow.

    `count` numbers are added to each element.
    """
    total = sizes.sum_to_size(result.shape)
    chain = reduce.depth(result.numel(), count, dtype)
    overflows = (sizes > torch.finfo(dtype).max).double().sum_to_size(result.shape) > 0
    error = torch.where(overflows, math.inf, bounds.gamma(chain, bounds.acc_unit(dtype)) * total)
    return bounds.or_infinite(error, total, dtype)


def narrowed(make: Make, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to `shape`."""
    narrow = tuple(make.choice([size, size, 1]) for size in shape)
    return narrow[make.integer(0, len(narrow)) :] if make.integer(0, 2) == 0 else narrow


def draw_operands(make: Make) -> Case:
    """Draw two tensors whose shapes broadcast."""
    shape = make.shape(0, 4)
    return Case((make.tensor(*narrowed(make, shape)), make.tensor(*narrowed(make, shape))))


def _binary_examples(low: float | None = None) -> dict[str, Callable[[Make], Case]]:
    def pair(left: tuple[int, ...], right: tuple[int, ...]) -> Callable[[Make], Case]:
        return tensors(between(low, None, *left), between(low, None, *right))

    return {
        "one run": pair((3, 700), (3, 700)),
        "value": pair((3, 700), (1,)),
        "row": pair((37, 64), (64,)),
        "column": pair((37, 65), (37, 1)),
        "channels": pair((3, 5, 4, 7), (5, 1, 1)),
        "transposed": lambda make: Case((make.tensor(33, 40, low=low), make.tensor(40, 33, low=low).t())),
        "two outer dimensions": pair((2, 3, 2, 5, 2), (2, 1, 2, 1, 2)),
        "too many dimensions": pair((2, 2, 2, 2, 2, 2, 2, 3), (2, 1, 2, 1, 2, 1, 2, 1)),
        "wide": pair((2, 1, 1025), (2, 3, 1025)),
    }


BINARY_BAD = (
    refuses(ValueError, r"\[2, 3\] and \[2, 4\] do not broadcast: sizes must be equal or 1", (2, 3), (2, 4)),
    refuses(
        TypeError,
        r"got operands of torch.float32 and torch.float64; convert one of them with .to\(\)",
        (3,),
        of(torch.float64, 3),
    ),
    refuses(TypeError, "got str, expected a tensor or a number", (3,), extra=("2",)),
    refuses(TypeError, "got only Python numbers, expected at least one tensor", extra=(1, 2.0)),
)


# (terms, dy, a, b, dtype) -> the errors of a gradient's terms, before the sum over broadcast elements.
TermErrors = Callable[..., torch.Tensor]


def broadcast_grads(function: Callable[..., torch.Tensor], *errors: TermErrors) -> Callable[..., tuple[Any, ...]]:
    """Return the bounds for torch's function of two operands, from the errors of the terms of each gradient."""

    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        *mask, a, b = (arg.expand(dy.shape) for arg in case.args)
        a, b = (operand.clone().requires_grad_() for operand in (a, b))
        with torch.enable_grad():
            gradients = torch.autograd.grad(function(*mask, a, b), (a, b), dy)
        sides = zip(grads, gradients, errors, strict=True)
        a, b = a.detach(), b.detach()
        return tuple(folded(grad, terms, error(terms, dy, a, b, dtype), dtype) for grad, terms, error in sides)

    return bound


def exact_terms(terms: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros_like(terms)


def _unit_errors(terms: torch.Tensor, dy: Any, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
    return bounds.acc_unit(dtype) * terms.abs()


def _divisor_errors(terms: torch.Tensor, dy: torch.Tensor, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
    # a / b and (a / b) / b may underflow before the product with dy.
    underflow = dy.abs() * (1 + 1 / b.abs()) * bounds.TINY[launch.acc_torch(dtype)]
    return 4 * bounds.acc_unit(dtype) * terms.abs() + underflow


def _power_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the relative error of a power in float64: of the logarithm, of b log|a|, and of its exponential."""
    exponent = (b * a.abs().log()).abs().nan_to_num(nan=0.0, posinf=0.0)
    return torch.where(exponent > 700, math.inf, 8 * (1 + exponent) * bounds.UNIT[torch.float64])


def _pow_errors(result: torch.Tensor, roundings: int, dtype: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the error of a product with a^b, with this many roundings after the power."""
    return ((_power_error(a, b) + roundings * bounds.acc_unit(dtype)) * result.abs()).nan_to_num(nan=math.inf)


def _divisors(make: Make) -> Case:
    """Draw tensors with quotients of a few thousand at most."""
    shape = make.shape(0, 4)
    left, right = narrowed(make, shape), narrowed(make, shape)
    return Case((make.tensor(*left, low=-100.0, high=100.0), make.tensor(*right, low=0.0625, high=7.0)))


def _quotient_error(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound of a rounded quotient without its fraction, which may be the next integer."""
    a, b, mode = (*case.args, "floor")[:3]
    near = ((a / b) - (a / b).round()).abs() <= bounds.acc_unit(dtype) * (a / b).abs()
    step = torch.where(near & (mode == "trunc"), 1.0, 0.0)
    return where_finite(y, bounds.rounded(y, step, dtype))


def _left_error(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound of an exact result that is rounded once; infinite if the quotient overflows float64."""
    a, b = case.args[:2]
    error = torch.where((a / b).isinf() & (b != 0) & a.isfinite(), math.inf, 0.0)
    return where_finite(y, bounds.rounded(y, error, dtype))


def _left_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds of the gradients: the gradient of b is dy times an integer quotient, rounded."""
    function = getattr(torch, (*case.args, "remainder")[2])
    both = Case(case.args[:2])

    def errors(terms: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: Any) -> torch.Tensor:
        next_one = torch.where(_quotient_error(Case((a, b, "trunc")), terms, dtype) > 0.5, dy.abs(), 0.0)
        return 2 * bounds.acc_unit(dtype) * terms.abs() + next_one

    return broadcast_grads(function, exact_terms, errors)(both, dy, grads, dtype)


def _pow_inputs(make: Make) -> Case:
    shape = make.shape(0, 3)
    left, right = narrowed(make, shape), narrowed(make, shape)
    return Case((make.tensor(*left, low=0.0625, high=3.0), make.tensor(*right, low=-4.0, high=4.0)))


binary = spec_factory(
    inputs=draw_operands, bound=few_units(1), differentiable=(0, 1), families=("elementwise", "elementwise_tile"),
    examples=_binary_examples(), bad=BINARY_BAD,
)  # fmt: skip


def _arithmetic(name: str, *errors: TermErrors, **fields: Any) -> OpSpec:
    return binary(name, grad_bound=broadcast_grads(getattr(torch, name), *errors), **fields)


SPECS = [
    _arithmetic("add", exact_terms, exact_terms, exact=True),
    _arithmetic("sub", exact_terms, exact_terms, exact=True),
    _arithmetic("mul", _unit_errors, _unit_errors, exact=True),
    _arithmetic("div", _unit_errors, _divisor_errors),
    _arithmetic(
        "pow",
        lambda terms, dy, a, b, dtype: _pow_errors(terms, 2, dtype, a, b - 1),
        lambda terms, dy, a, b, dtype: _pow_errors(terms, 2, dtype, a, b),
        inputs=_pow_inputs,
        bound=bounds.off_by(lambda case, y, dtype: _pow_errors(y, 1, dtype, *case.args)),
        examples=_binary_examples(low=0.0625),
    ),
    binary(
        "floor_divide",
        op=lambda a, b, mode="floor": ops.div(a, b, rounding_mode=mode),
        reference=lambda a, b, mode="floor": torch.div(a, b, rounding_mode=mode),
        inputs=lambda make: Case((*_divisors(make).args, make.choice(["floor", "trunc"]))),
        bound=_quotient_error,
        grad_bound=no_grad_error,
        examples={**_binary_examples(), "trunc": tensors((3, 70), between(0.5, 3, 3, 70), extra=("trunc",))},
        bad=BINARY_BAD[:2],
    ),
    binary(
        "remainder",
        op=lambda a, b, name="remainder": getattr(ops, name)(a, b),
        reference=lambda a, b, name="remainder": getattr(torch, name)(a, b),
        inputs=lambda make: Case((*_divisors(make).args, make.choice(["remainder", "fmod"]))),
        bound=_left_error,
        grad_bound=_left_grad,
        examples={**_binary_examples(0.5), "fmod": tensors((3, 70), between(0.5, 3, 3, 70), extra=("fmod",))},
        bad=BINARY_BAD[:2],
    ),
    _arithmetic("maximum", exact_terms, exact_terms, bound=no_error, exact=True),
    _arithmetic("minimum", exact_terms, exact_terms, bound=no_error, exact=True),
]
