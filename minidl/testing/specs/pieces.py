"""Records of what puts parts of tensors elsewhere, and of running sums.

Nothing is rounded on the way there, but for running sums: an element is off by at most gamma(d) times the sum of the
magnitudes up to it, d the longest chain of additions (`kernels.scan.depth`). A gradient adds up what was chosen several
times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.kernels import scan
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, bools, outside, records, refuses, tensors
from minidl.testing.specs.elementwise import no_error, no_grad_error
from minidl.testing.specs.make import Make


def _running(x: torch.Tensor, dim: int, dtype: torch.dtype, result: torch.Tensor) -> torch.Tensor:
    total = x.abs().cumsum(dim)
    length = x.shape[dim] if x.dim() else 1
    depth = scan.depth(x.numel() // length, length, dtype) if x.numel() else 0
    error = bounds.gamma(depth, bounds.acc_unit(dtype)) * total
    return torch.where(result.isfinite(), bounds.rounded(result, bounds.known(error, total, dtype), dtype), 0.0)


def _cumsum_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, dim = case.args
    if not x.dim():
        return (torch.zeros_like(dy),)
    return (_running(dy.flip(dim), dim, dtype, grads[0].flip(dim)).flip(dim),)


def _cumsum_inputs(make: Make) -> Case:
    shape = make.shape(1, 3)
    return Case((make.tensor(*shape), make.integer(-len(shape), len(shape) - 1)))


def _added(reference: Callable[..., torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
    """The bound of a gradient that adds up what was chosen several times, in one order."""

    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        x, *rest = case.args
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            y = reference(x, *rest)
        (total,) = torch.autograd.grad(y, x, dy.abs(), retain_graph=True)
        (times,) = torch.autograd.grad(y, x, torch.ones_like(dy))
        most = int(times.max()) if times.numel() else 0
        error = bounds.gamma(most, bounds.acc_unit(dtype)) * total + most * bounds.TINY[launch.acc_torch(dtype)]
        return (bounds.rounded(grads[0], bounds.known(error, total, dtype), dtype),)

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
    """x at an index of one of these forms; index has values from -1 to 1."""
    whole = slice(None)
    forms: dict[str, Any] = {
        "first": index, "last": (..., index), "apart": (index, whole, index), "beside": (whole, index, index),
        "one": (0, whole, index), "mask": (whole, index > 0), "new": (whole, None, index), "list": [0, 1, 1, -2],
    }  # fmt: skip
    return x[forms[form]]


def _placed(make: Make) -> Case:
    form = make.choice(["first", "last", "apart", "beside", "one", "new", "list", "mask"])
    x = make.tensor(*(make.size(2, 9) for _ in range(3)))
    index = (
        make.integers(x.shape[1], low=-1, high=1) if form == "mask" else make.integers(make.size(0, 5), low=-2, high=1)
    )
    return Case((x, form, index))


def _filled(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), bools(*shape)(make), make.choice([0.0, 2, -1.5, float("-inf")])))


def _two(make: Make) -> torch.Tensor:
    return make.integers(1, low=2, high=2)


def _causal(make: Make) -> Case:
    x = make.tensor(33, 33)
    return Case((x, torch.ones(33, 33, device=x.device).triu(1).bool(), float("-inf")))


def _flipped(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), tuple(i for i in range(len(shape)) if make.integer(0, 1))))


def _repeated(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), tuple(make.integer(0, 3) for _ in range(len(shape) + make.integer(0, 1)))))


_moved = records(bound=no_error, differentiable=(0,), families=("elementwise_tile",))
_INDEX_KIND = r"index has dtype torch.float32, expected int64 or int32"

SPECS: list[OpSpec] = [
    _moved(
        "cumsum",
        inputs=_cumsum_inputs,
        bound=lambda case, y, dtype: _running(case.args[0], case.args[1], dtype, y),
        grad_bound=_cumsum_grad,
        examples={
            "rows": tensors((37, 65), extra=(1,)),
            "columns": tensors((65, 37), extra=(0,)),
            "middle": tensors((3, 70, 5), extra=(1,)),
            "long": tensors((2, 9001), extra=(-1,)),
            "long columns": tensors((9001, 2), extra=(0,)),
        },
        bad=(refuses(IndexError, "dim 2 is out of range for a tensor of 2", (2, 3), extra=(2,)),),
    ),
    _moved(
        "index_select",
        inputs=_selected,
        grad_bound=_added(torch.index_select),
        examples={"rows": lambda make: Case((make.tensor(7, 40), 0, make.integers(30, low=0, high=6)))},
        bad=(
            outside("index 2 is out of range", lambda make: Case((make.tensor(2, 3), 0, _two(make)))),
            refuses(TypeError, _INDEX_KIND, (2, 3), extra=(0, torch.ones(2))),
        ),
    ),
    _moved(
        "gather",
        inputs=_gathered,
        grad_bound=_added(torch.gather),
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
        inputs=_placed,
        grad_bound=_added(_at),
        examples={"apart": lambda make: Case((make.tensor(5, 7, 6), "apart", make.integers(40, low=-2, high=1)))},
        bad=(
            outside(
                "index 2 is out of range for a dimension of size 2",
                lambda make: Case((make.tensor(2, 3), "first", _two(make))),
            ),
        ),
    ),
    _moved(
        "masked_fill",
        inputs=_filled,
        grad_bound=no_grad_error,
        families=("elementwise",),
        examples={"causal": _causal},
        bad=(refuses(TypeError, "condition has dtype torch.float32, expected torch.bool", (3,), (3,), extra=(0.0,)),),
    ),
    _moved(
        "flip",
        inputs=_flipped,
        grad_bound=no_grad_error,
        bad=(refuses(ValueError, "name a dimension twice", (2, 3), extra=((0, 0),)),),
    ),
    _moved(
        "repeat",
        reference=lambda x, counts: x.repeat(counts),
        inputs=_repeated,
        grad_bound=_added(lambda x, counts: x.repeat(counts)),
        examples={"images": lambda make: Case((make.tensor(1, 5, 1), (2, 1, 1, 2)))},  # a view has strides that say it
        bad=(refuses(ValueError, r"got \[2\] for a tensor of 2 dimensions", (2, 3), extra=((2,),)),),
    ),
]
