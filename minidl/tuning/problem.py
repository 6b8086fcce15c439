"""One representative problem: its inputs, the call that is timed, and whether a tile gives the right result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidl import no_grad
from minidl.kernels import launch
from minidl.specs import Case, Make, all_specs
from minidl.specs.base import T
from minidl.specs.make import SeededMake
from minidl.testing.compare import as_tuple, unwrap, wrap

Call = Callable[[], Any]
Start = Callable[[Case, Make], Call]
SEED = 1


@dataclass(frozen=True)
class Problem:
    """A shape in a dtype that stands for its class.

    inputs     makes the arguments of a call
    start      from the arguments, the call to time; it returns torch tensors, or a tuple of them
    record     name of the operation's record, whose reference and bound judge the result. Without one, or where whole
               numbers give exact results, the result is that of the present tile on whole numbers, bit for bit
    wrt        positions of the arguments whose gradient the call gives; none for the result itself
    in_place   the call changes its inputs, so that a result is that of the first call only
    off        for a transform, how far the result may be from the present tile's, as a share of its norm
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

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Products of float32 in the problem's precision."""
        before = launch.float32_precision()
        launch.set_float32_precision(self.precision if self.dtype == torch.float32 else before)
        try:
            yield
        finally:
            launch.set_float32_precision(before)

    def call(self, seed: int, device: torch.device | str, kind: str = "normal") -> Call:
        """The call on inputs of its own."""
        make = SeededMake(seed, self.dtype, device, kinds=(kind,))
        with self.set_up():
            return self._under(self.start(self.inputs(make), make))

    def empty(self) -> Call:
        """The call on inputs without values, for recording launches."""
        make = Empty(SEED, self.dtype)
        with self.set_up():
            return self._under(self.start(self.inputs(make), make))

    def _under(self, call: Call) -> Call:
        if self.dtype != torch.float32:
            return call

        def in_precision() -> Any:
            with self.set_up():
                return call()

        return in_precision

    @property
    def exact(self) -> bool:
        """Whether results on whole numbers are compared, bit for bit."""
        return self.record is None or (all_specs()[self.record].exact and not self.off)


class Empty(SeededMake):
    """Tensors of the shapes asked for whose memory is not touched."""

    def tensor(self, *shape: int, low: float | None = None, high: float | None = None) -> torch.Tensor:
        """Whatever was in the memory."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def integers(self, *shape: int, low: int, high: int) -> torch.Tensor:
        """The lowest number only."""
        return torch.full(shape, low, dtype=torch.int64, device=self.device)

    def choice(self, options: Sequence[T]) -> T:
        """The first."""
        return options[0]


def forward(name: str) -> Start:
    """Calls of an operation, by its record's name."""

    def start(case: Case, make: Make) -> Call:
        args = [wrap(arg) for arg in case.args]
        kwargs = {key: wrap(value) for key, value in case.kwargs.items()}
        op = all_specs()[name].op

        def call() -> Any:
            with no_grad():
                return unwrap(op(*args, **kwargs))

        return call

    return start


def backward(name: str, wrt: tuple[int, ...]) -> Start:
    """Gradients of an operation's first result; it itself is computed once, before."""

    def start(case: Case, make: Make) -> Call:
        args = [wrap(arg, position in wrt) for position, arg in enumerate(case.args)]
        out = as_tuple(all_specs()[name].op(*args, **{key: wrap(value) for key, value in case.kwargs.items()}))[0]
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
    """Whether a problem's result is right. Made while the tiles in use are known to be right.

    Raises AssertionError when the present result is not within the bound.
    """

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        self.problem, self.device = problem, device
        self._call: Call | None = None
        if problem.exact or problem.off:
            self._wanted = [t.clone() for t in self._results()]
        else:
            self._spec = all_specs()[problem.record or ""]
            self._reference()
        if not self.right():
            raise AssertionError(f"{problem.name}: the present tile's result is wrong, so there is nothing to compare")

    def right(self) -> bool:
        """Whether the tiles in use give the right result."""
        got = self._results()
        if self.problem.off:
            return all(_near(a, b, self.problem.off) for a, b in zip(got, self._wanted, strict=True))
        if self.problem.exact:
            return all(_same(a, b) for a, b in zip(got, self._wanted, strict=True))
        return all(self._within(*each) for each in zip(got, self._exact, self._bounds(), strict=True))

    def _results(self) -> list[torch.Tensor]:
        if self._call is None or self.problem.in_place:
            self._call = self.problem.call(SEED, self.device, "integers" if self.problem.exact else "normal")
        return list(as_tuple(self._call()))

    def _reference(self) -> None:
        """The exact result in float64, once, from the inputs that `_results` makes again."""
        problem = self.problem
        make = SeededMake(SEED, problem.dtype, self.device, kinds=("normal",))
        self._case = problem.inputs(make).double()
        args = [
            arg.requires_grad_() if position in problem.wrt else arg for position, arg in enumerate(self._case.args)
        ]
        with torch.set_grad_enabled(bool(problem.wrt)):
            outs = as_tuple(self._spec.reference(*args, **self._case.kwargs))
        if problem.wrt:
            self._dy = make.tensor(*outs[0].shape).double()
            asked = [args[position] for position in self._spec.differentiable if position in problem.wrt]
            self._exact = torch.autograd.grad(outs[0], asked, self._dy)
            self._case = self._case.map(lambda t: t.detach())
        else:
            self._exact = outs

    def _bounds(self) -> tuple[torch.Tensor, ...]:
        """They depend on the tile, which decides how a sum is cut."""
        problem, spec = self.problem, self._spec
        with torch.no_grad(), problem.set_up():
            if not problem.wrt:
                outs = self._exact if len(self._exact) > 1 else self._exact[0]
                return as_tuple(spec.bound(self._case, outs, problem.dtype))
            assert spec.grad_bound is not None
            grads = dict(zip([p for p in spec.differentiable if p in problem.wrt], self._exact, strict=True))
            every = tuple(grads.get(p) for p in spec.differentiable)
            bounds = spec.grad_bound(self._case, self._dy, every, problem.dtype)
            return tuple(b for p, b in zip(spec.differentiable, bounds, strict=True) if p in problem.wrt)

    def _within(self, got: torch.Tensor, exact: torch.Tensor, bound: Any) -> bool:
        off = (got.double() - exact).abs()
        return bool((off <= torch.as_tensor(bound, device=off.device) * (2 if got.dtype == torch.float64 else 1)).all())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _near(a: torch.Tensor, b: torch.Tensor, off: float) -> bool:
    return a.shape == b.shape and bool((a.double() - b.double()).norm() <= off * b.double().norm())
