"""One record per operation: what it computes, how far it may be off, what it refuses.

A record drives the property tests, the gradient check, the every-tile test, the offline compile and the benchmark.
It names no test library: a `Make` supplies values, drawn by Hypothesis in tests and from a seed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import torch

from minidl.csr import CSR

T = TypeVar("T")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Make(Protocol):
    """Where the inputs of a case come from."""

    dtype: torch.dtype
    device: torch.device

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        ...

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        ...

    def size(self, low: int = 0, high: int = 40) -> int:
        """An extent: small, prime, one off a power of two, 1, and 0 where low allows."""
        ...

    def shape(self, low: int = 0, high: int = 4, smallest: int = 0, largest: int = 12) -> tuple[int, ...]:
        """A shape of `low` to `high` dimensions with extents from `smallest` to `largest`."""
        ...

    def tensor(self, *shape: int, low: float | None = None, high: float | None = None) -> torch.Tensor:
        """Values in `dtype`, in a drawn layout (contiguous, transposed, strided, offset, expanded).

        Values are normal, positive, cancelling, of mixed or huge size, or small integers, as the run asks; with `low`
        or `high` they lie between these.
        """
        ...

    def integers(self, *shape: int, low: int, high: int) -> torch.Tensor:
        """An int64 tensor with values in [low, high]: labels and indices."""
        ...


@dataclass(frozen=True)
class Case:
    """Arguments of one call. torch tensors among them become Tensors for minidl and float64 for the reference."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def map(self, change: Callable[[torch.Tensor], Any]) -> Case:
        """The case with `change` applied to every torch tensor in it, also in sequences and CSR matrices."""
        return Case(
            tuple(_map(arg, change) for arg in self.args), {name: _map(v, change) for name, v in self.kwargs.items()}
        )

    def double(self) -> Case:
        """The case with its floating values in float64, each tensor a contiguous copy: for the reference."""
        return self.map(lambda t: t.double().contiguous().clone() if t.dtype.is_floating_point else t.clone())

    def tensors(self) -> list[torch.Tensor]:
        """Every torch tensor in the case."""
        found: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.map(keep)
        return found


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, CSR):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{k: change(v) for k, v in parts.items() if isinstance(v, torch.Tensor)})
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return value


@dataclass(frozen=True)
class Bad:
    """A call that must be refused: its inputs, the exception, and a pattern that its message matches."""

    inputs: Callable[[Make], Case]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class OpSpec:
    """What holds for one operation.

    op          takes Tensors where the case has floating torch tensors (and where it has integer tensors)
    reference   the same on torch tensors, evaluated in float64; torch's autograd gives the reference gradients
    inputs      a case from a Make
    bound       (case, reference output, dtype) -> largest |error| allowed per element (float64 tensor), for a case in
                float64 holding exactly the values that the operation got; a tuple for several outputs
    grad_bound  (case, dy, reference gradients, dtype) -> one such tensor for each position in `differentiable`
    differentiable  positions of `args` with a gradient
    families    tile families whose every tile is forced in turn
    examples    named fixed cases: for every tile, the offline compile and guard bands
    bad         calls that are refused
    exact       integer-valued inputs give exactly the reference (tests draw such values; results must fit the type)
    specials    NaN and infinite inputs give NaN and infinity where the reference does
    bench       shapes to measure, by row name of the results file
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
    bench: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
