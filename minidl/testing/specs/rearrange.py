"""Specs of operations that reverse and repeat elements. Nothing is rounded; the gradient of a repeat is a sum."""

from __future__ import annotations

from minidl.testing.specs.base import Case, OpSpec, refuses, spec_factory
from minidl.testing.specs.elementwise import no_error, no_grad_error
from minidl.testing.specs.indexing import sum_of_copies
from minidl.testing.specs.make import Make


def _flipped(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), tuple(i for i in range(len(shape)) if make.integer(0, 1))))


def _repeated(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), tuple(make.integer(0, 3) for _ in range(len(shape) + make.integer(0, 1)))))


_moved = spec_factory(bound=no_error, differentiable=(0,), families=("elementwise_tile",))

SPECS: list[OpSpec] = [
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
        grad_bound=sum_of_copies(lambda x, counts: x.repeat(counts)),
        examples={"images": lambda make: Case((make.tensor(1, 5, 1), (2, 1, 1, 2)))},  # a view has strides that say it
        bad=(refuses(ValueError, r"got \[2\] for a tensor of 2 dimensions", (2, 3), extra=((2,),)),),
    ),
]
