"""Specs of operations that select elements by index or mask.

The result is exact. A gradient adds up the elements that were selected several times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, bools, outside, refuses, spec_factory
from minidl.testing.specs.elementwise import no_error, no_grad_error
from minidl.testing.specs.make import Make


def sum_of_copies(reference: Callable[..., torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
    """Return the bound of a gradient that adds up, in one order, elements that were selected several times."""

    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        x, *rest = case.args
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            y = reference(x, *rest)
        (total,) = torch.autograd.grad(y, x, dy.abs(), retain_graph=True)
        (times,) = torch.autograd.grad(y, x, torch.ones_like(dy))
        most = int(times.max()) if times.numel() else 0
        error = bounds.gamma(most, bounds.acc_unit(dtype)) * total + most * bounds.TINY[launch.acc_torch(dtype)]
        return (bounds.rounded(grads[0], bounds.or_infinite(error, total, dtype), dtype),)

    return bound


def _selected(make: Make) -> Case:
    shape = make.shape(1, 3, smallest=1)
    dim = make.integer(-len(shape), len(shape) - 1)
    return Case((make.tensor(*shape), dim, make.integers(make.size(0, 9), low=0, high=shape[dim] - 1)))


def _gathered(make: Make) -> Case:
    shape = make.shape(1, 3, smallest=1)
    dim = make.integer(-len(shape), len(shape) - 1)
    at = [make.integer(1, size) for size in shape]
    at[dim] = make.size(0, 9)
    return Case((make.tensor(*shape), dim, make.integers(*at, low=0, high=shape[dim] - 1)))


def _at(x: torch.Tensor, form: str, index: torch.Tensor) -> Any:
    """Return x at an index of one of these forms; index has values from -1 to 1."""
    every = slice(None)
    forms: dict[str, Any] = {
        "first": index, "last": (..., index), "separate": (index, every, index), "adjacent": (every, index, index),
        "one": (0, every, index), "mask": (every, index > 0), "new": (every, None, index), "list": [0, 1, 1, -2],
    }  # fmt: skip
    return x[forms[form]]


def _indexed(make: Make) -> Case:
    form = make.choice(["first", "last", "separate", "adjacent", "one", "new", "list", "mask"])
    x = make.tensor(*(make.size(2, 9) for _ in range(3)))
    index = (
        make.integers(x.shape[1], low=-1, high=1) if form == "mask" else make.integers(make.size(0, 5), low=-2, high=1)
    )
    return Case((x, form, index))


def _masked(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), bools(*shape)(make), make.choice([0.0, 2, -1.5, float("-inf")])))


def _two(make: Make) -> torch.Tensor:
    return make.integers(1, low=2, high=2)


def _causal(make: Make) -> Case:
    x = make.tensor(33, 33)
    return Case((x, torch.ones(33, 33, device=x.device).triu(1).bool(), float("-inf")))


_moved = spec_factory(bound=no_error, differentiable=(0,), families=("elementwise_tile",))
_INDEX_KIND = r"index has dtype torch.float32, expected int64 or int32"

SPECS: list[OpSpec] = [
    _moved(
        "index_select",
        inputs=_selected,
        grad_bound=sum_of_copies(torch.index_select),
        examples={"rows": lambda make: Case((make.tensor(7, 40), 0, make.integers(30, low=0, high=6)))},
        bad=(
            outside("index 2 is out of range", lambda make: Case((make.tensor(2, 3), 0, _two(make)))),
            refuses(TypeError, _INDEX_KIND, (2, 3), extra=(0, torch.ones(2))),
        ),
    ),
    _moved(
        "gather",
        inputs=_gathered,
        grad_bound=sum_of_copies(torch.gather),
        examples={"columns": lambda make: Case((make.tensor(37, 40), 1, make.integers(37, 3, low=0, high=39)))},
        bad=(
            refuses(
                ValueError,
                r"index has shape \[3, 1\], which does not fit \[2, 3\]",
                (2, 3),
                extra=(1, torch.zeros(3, 1).long()),
            ),
            outside(
                "index -1 is negative",
                lambda make: Case((make.tensor(2, 3), 1, make.integers(2, 1, low=-1, high=-1))),
            ),
        ),
    ),
    _moved(
        "getitem at places",
        op=_at,
        reference=_at,
        inputs=_indexed,
        grad_bound=sum_of_copies(_at),
        examples={"separate": lambda make: Case((make.tensor(5, 7, 6), "separate", make.integers(40, low=-2, high=1)))},
        bad=(
            outside(
                "index 2 is out of range for a dimension of size 2",
                lambda make: Case((make.tensor(2, 3), "first", _two(make))),
            ),
        ),
    ),
    _moved(
        "masked_fill",
        inputs=_masked,
        grad_bound=no_grad_error,
        families=("elementwise",),
        examples={"causal": _causal},
        bad=(refuses(TypeError, "condition has dtype torch.float32, expected torch.bool", (3,), (3,), extra=(0.0,)),),
    ),
]
