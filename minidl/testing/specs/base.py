"""The spec of an operation: its reference, its error bound and the calls that it rejects.

A spec drives the property tests, the gradient check, the every-tile test, the offline compile and tuning.
A `Make` supplies values: Hypothesis draws them in tests, a seed elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from minidl import ops
from minidl.sparse.csr import CSR
from minidl.testing.specs.make import Make

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    """Arguments of one call. torch tensors among them become Tensors for minidl and float64 for the reference."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def map(self, change: Callable[[torch.Tensor], Any]) -> Case:
        """Return the case with `change` applied to every torch tensor in it, also in sequences and CSR matrices."""
        return Case(
            tuple(_map(arg, change) for arg in self.args), {name: _map(v, change) for name, v in self.kwargs.items()}
        )

    def double(self) -> Case:
        """Return the case with its floating values in float64, each tensor a contiguous copy: for the reference."""
        return self.map(lambda t: t.double().contiguous().clone() if t.dtype.is_floating_point else t.clone())

    def arguments(self, op: Callable[..., Any]) -> tuple[Any, ...]:
        """Return the positional arguments of `op` in order, with its defaults for missing arguments.

        Raises TypeError for a keyword-only argument: specs do not cover these.
        """
        bound = inspect.signature(op).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        if uncovered := bound.kwargs.keys() & self.kwargs.keys():
            raise TypeError(f"{op.__name__}: its spec does not cover {', '.join(sorted(uncovered))}")
        return bound.args

    def tensors(self) -> list[torch.Tensor]:
        """Return every torch tensor in the case."""
        tensors: list[torch.Tensor] = []
        self.map(tensors.append)
        return tensors


# An argument: a tensor of this shape, the result of a function, or None.
Argument = tuple[int, ...] | Callable[[Make], Any] | None


def tensors(*arguments: Argument, extra: tuple[Any, ...] = (), **named: Any) -> Callable[[Make], Case]:
    """Return the function that makes cases of these arguments, the values `extra`, and values or functions `named`."""

    def case(make: Make) -> Case:
        options = {name: value(make) if callable(value) else value for name, value in named.items()}
        values = (a(make) if callable(a) else None if a is None else make.tensor(*a) for a in arguments)
        return Case((*values, *extra), options)

    return case


def integers(*shape: int, low: int = 0, high: int = 5) -> Callable[[Make], torch.Tensor]:
    """Return an int64 tensor as an argument."""
    return lambda make: make.integers(*shape, low=low, high=high)


def bools(*shape: int) -> Callable[[Make], torch.Tensor]:
    """Return a bool tensor as an argument."""
    return lambda make: make.integers(*shape, low=0, high=1).bool()


def of(dtype: torch.dtype, *shape: int) -> Callable[[Make], torch.Tensor]:
    """Return a tensor of another dtype as an argument."""
    return lambda make: make.tensor(*shape).to(dtype)


def between(low: float | None, high: float | None, *shape: int) -> Callable[[Make], torch.Tensor]:
    """Return a tensor with values from `low` to `high` as an argument."""
    return lambda make: make.tensor(*shape, low=low, high=high)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, ...] in channels-last memory, of any rank."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def in_either_order(make: Make, x: torch.Tensor) -> torch.Tensor:
    """Return contiguous images or volumes as they are, or in channels-last memory."""
    return channels_last(x) if make.integer(0, 1) else x


def in_both_orders(examples: dict[str, Callable[[Make], Case]]) -> dict[str, Callable[[Make], Case]]:
    """Return examples of contiguous images, and the same in channels-last memory."""

    def moved(make: Make, example: Callable[[Make], Case]) -> Case:
        case = example(make)
        return Case((channels_last(case.args[0]), *case.args[1:]), case.kwargs)

    return examples | {f"{name}, channels last": partial(moved, example=one) for name, one in examples.items()}


def images(N: int, C: int, size: int, width: int | None = None) -> Callable[[Make], torch.Tensor]:
    """Return the function that makes a tensor [N, C, size, width or size] in channels-last memory."""
    return lambda make: make.tensor(N, size, size if width is None else width, C).permute(0, 3, 1, 2)


def matrix(rows: int, columns: int, gap: int = 0, transposed: bool = False) -> Callable[[Make], torch.Tensor]:
    """Return the function that makes a matrix [rows, columns] with `gap` elements between the stored rows.

    `transposed` stores its columns as rows.
    """
    if transposed:
        return lambda make: matrix(columns, rows, gap)(make).t()
    return lambda make: make.tensor(rows, columns + gap)[:, :columns]


def one(low: float | None = None) -> Callable[[Make], Case]:
    """Return the function that makes cases of one tensor of any shape, with values of `low` or more."""
    return lambda make: Case((make.tensor(*make.shape(0, 4), low=low),))


def distinct(x: torch.Tensor) -> torch.Tensor:
    """Return x with distinct values if it repeats memory: equal values have no derivative in maxima and deviations."""
    repeats = any(step == 0 < size - 1 for size, step in zip(x.shape, x.stride(), strict=True))
    return x + torch.arange(x.numel(), device=x.device).view(x.shape) if repeats else x


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, CSR):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{k: change(v) for k, v in parts.items() if isinstance(v, torch.Tensor)})
    if type(value) in (list, tuple):  # a geometry is a named tuple without tensors
        return type(value)(_map(item, change) for item in value)
    return value


@dataclass(frozen=True)
class Bad:
    """A call that must raise: its inputs, the exception, and a pattern of its message.

    An error for `values` is raised on the CPU only: on a GPU, which would have to wait, the result has a NaN.
    """

    inputs: Callable[[Make], Case]
    error: type[Exception]
    message: str
    values: bool = False


@dataclass(frozen=True)
class OpSpec:
    """The specification of one operation.

    op          takes Tensors where the case has floating torch tensors (and where it has integer tensors)
    reference   the same on torch tensors, evaluated in float64; torch's autograd gives the reference gradients
    inputs      a case from a Make
    bound       (case, reference output, dtype) -> largest |error| allowed per element (float64 tensor), for a case in
                float64 with exactly the values of the operation; a tuple for several outputs
    grad_bound  (case, dy, reference gradients, dtype) -> one such tensor for each position in `differentiable`
    differentiable  positions of `args` with a gradient
    families    tile families whose every tile is forced in turn
    examples    named fixed cases, for the every-tile test, the offline compile and guard bands
    bad         calls that must raise
    exact       integer-valued inputs give exactly the reference (tests draw such values; results must fit the type)
    specials    NaN and infinite inputs give NaN and infinity where the reference does
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[Make], Case]
    bound: Callable[[Case, Any, torch.dtype], Any]
    grad_bound: Callable[[Case, Any, tuple[Any, ...], torch.dtype], tuple[Any, ...]] | None = None
    differentiable: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    families: tuple[str, ...] = ()
    examples: Mapping[str, Callable[[Make], Case]] = field(default_factory=dict)
    bad: tuple[Bad, ...] = ()
    exact: bool = False
    specials: bool = True


def spec_factory(**shared: Any) -> Callable[..., OpSpec]:
    """Return a function (name, **fields) -> spec, whose default fields are `shared`.

    The default operation and reference are the functions of `minidl.ops` and torch with the spec's name.
    """

    def make_spec(name: str, **fields: Any) -> OpSpec:
        functions = {"op": getattr(ops, name, None), "reference": getattr(torch, name, None)}
        return OpSpec(name=name, **{**functions, **shared, **fields})

    return make_spec


def refuses(error: type[Exception], message: str, *arguments: Argument, **rest: Any) -> Bad:
    """Return a call with these arguments (see `tensors`) that must raise `error`."""
    return Bad(tensors(*arguments, **rest), error, message)


def outside(message: str, inputs: Callable[[Make], Case]) -> Bad:
    """Return a call with an index or a class out of range."""
    return Bad(inputs, IndexError, message, values=True)


# For operations whose argument x must be floating.
WANTS_FLOATING = refuses(
    TypeError, r"x has dtype torch.int64, expected a floating type; convert it with .to\(\)", integers(1, 2, 4, 4)
)
