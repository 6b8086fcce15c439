"""One problem to tune on: its inputs, the call that is timed, and the check of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minidl.autograd import no_grad
from minidl.runtime import launch
from minidl.testing.compare import Expected, as_tuple, unwrap, wrap
from minidl.testing.specs import Case, Make, all_specs
from minidl.testing.specs.make import SeededMake, T

Call = Callable[[], Any]
Start = Callable[[Case, Make], Call]
SEED = 1


@dataclass(frozen=True)
class Problem:
    """A shape in a dtype that stands for its class.

    inputs     makes the arguments of a call
    start      from the arguments, the call to time; it returns torch tensors, or a tuple of them
    record     name of the operation's record, whose reference and bound judge the result. Without a record, and where
               integers give exact results, a tile must give the present tile's result on integers, bit for bit
    wrt        positions of the arguments whose gradients the call returns; empty: it returns the result
    in_place   the call changes its inputs, so only the result of the first call can be checked
    off        for a transform, the allowed distance from the present tile's result, relative to its norm
    by_values  the call makes tensors whose sizes depend on the values of its inputs
    """

    name: str
    dtype: torch.dtype
    inputs: Callable[[Make], Case]
    start: Start
    precision: str = "ieee"
    record: str | None = None
    wrt: tuple[int, ...] = ()
    in_place: bool = False
    off: float = 0.0
    by_values: bool = False

    def set_up(self) -> AbstractContextManager[None]:
        """A context in which float32 products have the problem's precision."""
        return launch.in_precision(self.precision if self.dtype == torch.float32 else launch.float32_precision())

    def call(self, seed: int, device: torch.device | str, kind: str = "normal") -> Call:
        """The call on new inputs."""
        return self._made(SeededMake(seed, self.dtype, device, kinds=(kind,)))

    def empty(self) -> Call:
        """The call on uninitialised inputs, for recording launches; of a GPU if possible without memory."""
        looked_at = self.by_values or launch.target() == "interpreted"
        return self._made(Empty(SEED, self.dtype, "cpu" if looked_at else "meta"))

    def _made(self, make: Make) -> Call:
        with self.set_up():
            call = self.start(self.inputs(make), make)
        if self.dtype != torch.float32:
            return call

        def in_precision() -> Any:
            with self.set_up():
                return call()

        return in_precision

    @property
    def exact(self) -> bool:
        """Whether results on integers are compared bit for bit."""
        return self.record is None or (all_specs()[self.record].exact and not self.off)


class Empty(SeededMake):
    """A Make of uninitialised tensors."""

    def tensor(self, *shape: int, low: float | None = None, high: float | None = None) -> torch.Tensor:
        """Whatever was in the memory."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def integers(self, *shape: int, low: int, high: int) -> torch.Tensor:
        """The lowest number only."""
        return torch.full(shape, low, dtype=torch.int64, device=self.device)

    def choice(self, options: Sequence[T]) -> T:
        """The first."""
        return options[0]


def operation(name: str, wrt: tuple[int, ...] = ()) -> Start:
    """Calls of an operation, by its record's name; with `wrt`, of the backward pass of its first result alone."""

    def start(case: Case, make: Make) -> Call:
        args = [wrap(arg, position in wrt) for position, arg in enumerate(case.args)]
        run = partial(all_specs()[name].op, *args, **{key: wrap(value) for key, value in case.kwargs.items()})
        if not wrt:
            return lambda: unwrap(no_grad()(run)())
        out = as_tuple(run())[0]
        dy = wrap(make.tensor(*out.shape))

        def call() -> tuple[torch.Tensor, ...]:
            for position in wrt:
                args[position].grad = None
            out.backward(dy, retain_graph=True)
            return tuple(args[position].grad.data for position in wrt)

        return call

    return start


def kernel(launcher: Callable[..., Any]) -> Start:
    """Calls of a launcher on torch tensors."""
    return lambda case, make: lambda: launcher(*case.args, **case.kwargs)


class Judge:
    """Checks a problem's result. Create it while the tiles in use are known to be right.

    Raises AssertionError when the present result is outside its bound.
    """

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        self.problem, self.device = problem, device
        self._call: Call | None = None
        if problem.exact or problem.off:
            self._present = tuple(t.clone() for t in self._results())
        else:
            # The inputs that `_results` makes again.
            make = SeededMake(SEED, problem.dtype, device)
            spec, case = all_specs()[problem.record or ""], problem.inputs(make)
            self._expected = Expected(spec, case, problem.dtype, problem.wrt, make.tensor)
        if not self.right():
            raise AssertionError(
                f"{problem.name}: the present tile's result is wrong, so no tile can be compared with it"
            )

    def right(self) -> bool:
        """Whether the tiles in use give the right result."""
        got, off = self._results(), self.problem.off
        if off:
            return all(_near(*pair, off) for pair in zip(got, self._present, strict=True))
        if self.problem.exact:
            return all(_same(*pair) for pair in zip(got, self._present, strict=True))
        with self.problem.set_up():
            return self._expected.holds(*got)

    def _results(self) -> list[torch.Tensor]:
        if self._call is None or self.problem.in_place:
            self._call = self.problem.call(SEED, self.device, "integers" if self.problem.exact else "normal")
        return list(as_tuple(self._call()))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _near(a: torch.Tensor, b: torch.Tensor, off: float) -> bool:
    return a.shape == b.shape and bool((a.double() - b.double()).norm() <= off * b.double().norm())
