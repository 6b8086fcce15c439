"""A problem to tune on: its inputs, the call that is timed, and the check of its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minidl.autograd import no_grad
from minidl.runtime import launch
from minidl.testing.compare import Expected, as_tuple, unwrap, wrap
from minidl.testing.specs import Case, Make, all_specs
from minidl.testing.specs.make import EmptyMake, SeededMake

Call = Callable[[], Any]
Start = Callable[[Case, Make], Call]
SEED = 1


@dataclass(frozen=True)
class Problem:
    """A shape and a dtype that represent their class.

    inputs     makes the arguments of a call
    start      returns the call to time for some arguments; the call returns a torch tensor or a tuple of them
    spec       name of the operation's spec, whose reference and bound judge the result. Without a spec, and if
               integers give exact results, a tile must give the present tile's result on integers, bit for bit
    wrt        positions of the arguments whose gradients the call returns; empty: the call returns the result
    in_place   the call changes its inputs, so only the result of the first call can be checked
    off        for a transform, the allowed distance from the current tile's result, relative to its norm
    by_values  the call makes tensors whose sizes depend on the values of its inputs
    """

    name: str
    dtype: torch.dtype
    inputs: Callable[[Make], Case]
    start: Start
    precision: str = "ieee"
    spec: str | None = None
    wrt: tuple[int, ...] = ()
    in_place: bool = False
    off: float = 0.0
    by_values: bool = False

    def set_up(self) -> AbstractContextManager[None]:
        """Return a context in which float32 products have the problem's precision."""
        return launch.in_precision(self.precision if self.dtype == torch.float32 else launch.float32_precision())

    def call(self, seed: int, device: torch.device | str, kind: str = "normal") -> Call:
        """Return the call on new inputs."""
        return self._call(SeededMake(seed, self.dtype, device, kinds=(kind,)))

    def empty(self) -> Call:
        """Return the call on uninitialised inputs, for recording launches; for a GPU without memory if possible."""
        reads_values = self.by_values or launch.ON_CPU
        return self._call(EmptyMake(SEED, self.dtype, "cpu" if reads_values else "meta"))

    def _call(self, make: Make) -> Call:
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
        """Return whether results on integers are compared bit for bit."""
        return self.spec is None or (all_specs()[self.spec].exact and not self.off)


def operation(name: str, wrt: tuple[int, ...] = ()) -> Start:
    """Return the start of a spec's operation or, with `wrt`, of the backward pass of its first result."""

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
    """Return the start of a launcher on torch tensors."""
    return lambda case, make: lambda: launcher(*case.args, **case.kwargs)


class Judge:
    """Checks a problem's result; create it while the tiles in use are correct.

    Raises AssertionError if the current result is outside its bound.
    """

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        self.problem, self.device = problem, device
        self._call: Call | None = None
        if problem.exact or problem.off:
            self._reference = tuple(t.clone() for t in self._results())
        else:
            # The inputs of `_results`.
            make = SeededMake(SEED, problem.dtype, device)
            spec, case = all_specs()[problem.spec or ""], problem.inputs(make)
            self._expected = Expected(spec, case, problem.dtype, problem.wrt, make.tensor)
        if not self.right():
            raise AssertionError(
                f"{problem.name}: the result of the current tile is wrong, so no tile can be compared with it"
            )

    def right(self) -> bool:
        """Return whether the tiles in use give the right result."""
        results, off = self._results(), self.problem.off
        if off:
            return all(_near(*pair, off) for pair in zip(results, self._reference, strict=True))
        if self.problem.exact:
            return all(_same(*pair) for pair in zip(results, self._reference, strict=True))
        with self.problem.set_up():
            return self._expected.holds(*results)

    def _results(self) -> list[torch.Tensor]:
        if self._call is None or self.problem.in_place:
            self._call = self.problem.call(SEED, self.device, "integers" if self.problem.exact else "normal")
        return list(as_tuple(self._call()))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _near(a: torch.Tensor, b: torch.Tensor, off: float) -> bool:
    return a.shape == b.shape and bool((a.double() - b.double()).norm() <= off * b.double().norm())
