"""Specs of comparisons, and of operations that choose between operands."""

from __future__ import annotations

from functools import partial

import torch

from minidl.testing.specs.base import Case, bools, integers, of, refuses, spec_factory, tensors
from minidl.testing.specs.elementwise import (
    binary,
    broadcast_grads,
    draw_operands,
    exact_terms,
    narrowed,
    no_error,
    no_grad_error,
)
from minidl.testing.specs.make import Make


def _compared(make: Make) -> Case:
    """Draw operands that are often equal."""
    case = draw_operands(make)
    a = case.args[0]
    return make.choice([case, Case((a, a.clone())), Case((a, 2)), Case((a, -0.5))])


_comparison = partial(
    binary,
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


def _chosen(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((bools(*narrowed(make, shape))(make), make.tensor(*narrowed(make, shape)), make.tensor(*shape)))


def _clamped(make: Make) -> Case:
    low, high = make.choice([(-1.0, 1.0), (None, 0.5), (0, None), (-2, -2), (0.25, 3)])
    return Case((make.tensor(*make.shape(0, 3)), low, high))


_choice = spec_factory(bound=no_error, exact=True)
CHOICES = [
    _choice(
        "where",
        inputs=_chosen,
        grad_bound=broadcast_grads(torch.where, exact_terms, exact_terms),
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

SPECS = [*COMPARISONS, *CHOICES]
