"""Records of element-wise arithmetic.

Values are computed in the accumulate type by one correctly rounded operation, or by a function good to a few units,
and rounded once. A gradient is such a function of dy and what was kept; where an operand was broadcast, the rounded
terms are then added up (`folded`). Gradients that need the output use the rounded one: its bound enters to first and
second order. Where a kept value overflows the dtype, there is no bound.
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
from minidl.testing.specs.base import Case, OpSpec, between, bools, integers, of, records, refuses, tensors
from minidl.testing.specs.make import Make


def no_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nothing is rounded."""
    return torch.zeros_like(result, dtype=torch.float64)


def no_grad_error(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Nothing is rounded on the way back."""
    return tuple(torch.zeros_like(g) for g in grads)


def where_finite(result: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """The bound, and 0 where the result is infinite or NaN and must be equal."""
    return torch.where(result.isfinite(), bound, 0.0)


def few_units(units: float) -> Callable[..., torch.Tensor]:
    """A bound of some units of the accumulate type, and one rounding to the dtype."""
    return bounds.off_by(lambda case, result, dtype: units * bounds.acc_unit(dtype) * result.abs())


def few_grad_units(units: float) -> Callable[..., tuple[Any, ...]]:
    """The same for the only gradient."""
    bound = few_units(units)
    return lambda case, dy, grads, dtype: (bound(case, grads[0], dtype),)


def kept(y: torch.Tensor, error: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """The error of an output as it is kept, rounded: infinite where it may overflow."""
    off = bounds.rounded(y, torch.as_tensor(error, dtype=torch.float64), dtype)
    return torch.where(y.abs() + off > torch.finfo(dtype).max, math.inf, off)


def times(factor: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """|factor| times an error; infinite where the error is, also for a factor of 0."""
    return torch.where(error == math.inf, math.inf, factor.abs() * error)


def folded(grad: torch.Tensor, terms: torch.Tensor, errors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bound of a gradient that is the sum of `terms`, of a broadcast shape, over what was repeated.

    Each term is off by `errors`, then rounded to the dtype.
    """
    each = bounds.rounded(terms, errors, dtype)
    if terms.shape == grad.shape:
        return where_finite(grad, each)
    count = terms.numel() // max(grad.numel(), 1)
    return bounds.rounded(grad, summed(terms.abs() + each, grad, count, dtype) + each.sum_to_size(grad.shape), dtype)


def summed(sizes: torch.Tensor, result: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The error of adding numbers of these sizes into `result`; infinite where a term or a partial sum may overflow.

    `count` numbers are added to each element.
    """
    total = sizes.sum_to_size(result.shape)
    chain = reduce.depth(result.numel(), count, dtype)
    lost = (sizes > torch.finfo(dtype).max).double().sum_to_size(result.shape) > 0
    error = torch.where(lost, math.inf, bounds.gamma(chain, bounds.acc_unit(dtype)) * total)
    return bounds.known(error, total, dtype)


# Two operands.


def _narrowed(make: Make, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`."""
    narrow = tuple(make.choice([size, size, 1]) for size in shape)
    return narrow[make.integer(0, len(narrow)) :] if make.integer(0, 2) == 0 else narrow


def _tensors(make: Make) -> Case:
    """Two tensors whose shapes broadcast."""
    shape = make.shape(0, 4)
    return Case((make.tensor(*_narrowed(make, shape)), make.tensor(*_narrowed(make, shape))))


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
        "more than can be walked": pair((2, 2, 2, 2, 2, 2, 2, 3), (2, 1, 2, 1, 2, 1, 2, 1)),
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


# (terms, dy, a, b, dtype) -> the errors of a gradient's terms, before these are summed over what was broadcast.
TermErrors = Callable[..., torch.Tensor]


def _broadcast_grads(function: Callable[..., torch.Tensor], *errors: TermErrors) -> Callable[..., tuple[Any, ...]]:
    """Bounds for torch's function of two operands, from the errors of the terms of each one's gradient."""

    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        *mask, a, b = (arg.expand(dy.shape) for arg in case.args)
        a, b = (operand.clone().requires_grad_() for operand in (a, b))
        with torch.enable_grad():
            every = torch.autograd.grad(function(*mask, a, b), (a, b), dy)
        sides = zip(grads, every, errors, strict=True)
        a, b = a.detach(), b.detach()
        return tuple(folded(grad, terms, error(terms, dy, a, b, dtype), dtype) for grad, terms, error in sides)

    return bound


def _no_errors(terms: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros_like(terms)


def _unit_errors(terms: torch.Tensor, dy: Any, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
    return bounds.acc_unit(dtype) * terms.abs()


def _divisor_errors(terms: torch.Tensor, dy: torch.Tensor, a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
    # a / b and (a / b) / b may vanish before dy lifts them again.
    vanished = dy.abs() * (1 + 1 / b.abs()) * bounds.TINY[launch.acc_torch(dtype)]
    return 4 * bounds.acc_unit(dtype) * terms.abs() + vanished


def _power_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative error of a power in float64: of the logarithm, of b log|a|, and of its exponential."""
    exponent = (b * a.abs().log()).abs().nan_to_num(nan=0.0, posinf=0.0)
    return torch.where(exponent > 700, math.inf, 8 * (1 + exponent) * bounds.UNIT[torch.float64])


def _pow_errors(result: torch.Tensor, roundings: int, dtype: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """For a result that is a^b times something, with as many roundings after the power."""
    return ((_power_error(a, b) + roundings * bounds.acc_unit(dtype)) * result.abs()).nan_to_num(nan=math.inf)


def _divisors(make: Make) -> Case:
    """Tensors with quotients of a few thousand at most."""
    shape = make.shape(0, 4)
    left, right = _narrowed(make, shape), _narrowed(make, shape)
    return Case((make.tensor(*left, low=-100.0, high=100.0), make.tensor(*right, low=0.0625, high=7.0)))


def _quotient_error(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A quotient rounded before its fraction goes may be the next whole number."""
    a, b, mode = (*case.args, "floor")[:3]
    near = ((a / b) - (a / b).round()).abs() <= bounds.acc_unit(dtype) * (a / b).abs()
    step = torch.where(near & (mode == "trunc"), 1.0, 0.0)
    return where_finite(y, bounds.rounded(y, step, dtype))


def _left_error(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exact, and rounded once; there is none where the quotient overflows float64."""
    a, b = case.args[:2]
    error = torch.where((a / b).isinf() & (b != 0) & a.isfinite(), math.inf, 0.0)
    return where_finite(y, bounds.rounded(y, error, dtype))


def _left_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """That of b is dy times a whole quotient, rounded."""
    function = getattr(torch, (*case.args, "remainder")[2])
    both = Case(case.args[:2])

    def errors(terms: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: Any) -> torch.Tensor:
        next_one = torch.where(_quotient_error(Case((a, b, "trunc")), terms, dtype) > 0.5, dy.abs(), 0.0)
        return 2 * bounds.acc_unit(dtype) * terms.abs() + next_one

    return _broadcast_grads(function, _no_errors, errors)(both, dy, grads, dtype)


def _pow_inputs(make: Make) -> Case:
    shape = make.shape(0, 3)
    left, right = _narrowed(make, shape), _narrowed(make, shape)
    return Case((make.tensor(*left, low=0.0625, high=3.0), make.tensor(*right, low=-4.0, high=4.0)))


_binary = records(
    inputs=_tensors, bound=few_units(1), differentiable=(0, 1), families=("elementwise", "elementwise_tile"),
    examples=_binary_examples(), bad=BINARY_BAD,
)  # fmt: skip


def _arithmetic(name: str, *errors: TermErrors, **fields: Any) -> OpSpec:
    return _binary(name, grad_bound=_broadcast_grads(getattr(torch, name), *errors), **fields)


BINARY = [
    _arithmetic("add", _no_errors, _no_errors, exact=True),
    _arithmetic("sub", _no_errors, _no_errors, exact=True),
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
    _binary(
        "floor_divide",
        op=lambda a, b, mode="floor": ops.div(a, b, rounding_mode=mode),
        reference=lambda a, b, mode="floor": torch.div(a, b, rounding_mode=mode),
        inputs=lambda make: Case((*_divisors(make).args, make.choice(["floor", "trunc"]))),
        bound=_quotient_error,
        grad_bound=no_grad_error,
        examples={**_binary_examples(), "trunc": tensors((3, 70), between(0.5, 3, 3, 70), extra=("trunc",))},
        bad=BINARY_BAD[:2],
    ),
    _binary(
        "remainder",
        op=lambda a, b, name="remainder": getattr(ops, name)(a, b),
        reference=lambda a, b, name="remainder": getattr(torch, name)(a, b),
        inputs=lambda make: Case((*_divisors(make).args, make.choice(["remainder", "fmod"]))),
        bound=_left_error,
        grad_bound=_left_grad,
        examples={**_binary_examples(0.5), "fmod": tensors((3, 70), between(0.5, 3, 3, 70), extra=("fmod",))},
        bad=BINARY_BAD[:2],
    ),
    _arithmetic("maximum", _no_errors, _no_errors, bound=no_error, exact=True),
    _arithmetic("minimum", _no_errors, _no_errors, bound=no_error, exact=True),
]


# Comparisons.


def _compared(make: Make) -> Case:
    """Operands that are often equal."""
    case = _tensors(make)
    a = case.args[0]
    return make.choice([case, Case((a, a.clone())), Case((a, 2)), Case((a, -0.5))])


_comparison = partial(
    _binary,
    inputs=_compared,
    bound=no_error,
    differentiable=(),
    examples={
        "one run": tensors((3, 700), (3, 700)),
        "integers": tensors(integers(70, high=3), integers(70, high=3)),
        "column": tensors((37, 65), (37, 1)),
    },
    exact=True,
)
COMPARISONS = [*map(_comparison, ("eq", "ne", "lt", "le", "gt", "ge"))]


# Three operands.


def _chosen(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((bools(*_narrowed(make, shape))(make), make.tensor(*_narrowed(make, shape)), make.tensor(*shape)))


def _clamped(make: Make) -> Case:
    low, high = make.choice([(-1.0, 1.0), (None, 0.5), (0, None), (-2, -2), (0.25, 3)])
    return Case((make.tensor(*make.shape(0, 3)), low, high))


_choice = records(bound=no_error, exact=True)
CHOICES = [
    _choice(
        "where",
        inputs=_chosen,
        grad_bound=_broadcast_grads(torch.where, _no_errors, _no_errors),
        differentiable=(1, 2),
        families=("elementwise", "elementwise_tile"),
        examples={
            "one run": tensors(bools(3, 700), (3, 700), (3, 700)),
            "rows": tensors(bools(37, 1), (37, 40), (40,)),
        },
        bad=(
            refuses(
                TypeError, "the condition has dtype torch.float32, expected torch.bool; compare it", (3,), (3,), (3,)
            ),
            refuses(ValueError, r"shapes \[3\] and \[3\] and \[4\] do not broadcast", bools(3), (3,), (4,)),
            refuses(TypeError, "got operands of torch.float32 and torch.float64", bools(3), (3,), of(torch.float64, 3)),
        ),
    ),
    _choice(
        "clamp",
        inputs=_clamped,
        grad_bound=no_grad_error,
        differentiable=(0,),
        families=("elementwise",),
        examples={
            "both": tensors((3, 700), extra=(-1, 1)),
            "below": tensors((65,), extra=(-0.5,)),
            "above": tensors((65,), extra=(None, 0.5)),
            "crossed": tensors((65,), extra=(0.5, -0.5)),
        },
        bad=(refuses(ValueError, "got neither min nor max, expected at least one", (3,)),),
    ),
]

SPECS = [*BINARY, *COMPARISONS, *CHOICES]
