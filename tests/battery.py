"""What is asked of every operation, as functions of its record and a drawn case; `repeat` runs one again by hand."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from minidl.autograd import no_grad
from minidl.runtime import launch
from minidl.runtime.launch_cache import replay
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations, assert_within, check_grads
from minidl.testing.compare import as_tuple, wrap
from minidl.testing.specs import Case, Make, OpSpec, all_specs
from minidl.testing.specs.make import KINDS, LAYOUTS, SPECIAL, SeededMake
from tests.strategies import EXTENTS, Replay

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}


@dataclass(frozen=True)
class Problem:
    """A case with its reference: outputs in float64, and a gradient for each floating output, in the case's dtype."""

    spec: OpSpec
    dtype: torch.dtype
    case: Case
    exact: Case
    reference: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    check: str
    decisions: list[int]

    def __repr__(self) -> str:
        call = f"repeat({self.spec.name!r}, {self.check!r}, {NAMES[self.dtype]!r}, {self.decisions})"
        return f'python -c "from tests.battery import repeat; {call}"'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis shows of a failing problem: the command that repeats it."""
        printer.text(repr(self))

    def describe(self, what: str) -> str:
        """`what` with the operation and the arguments, for messages."""
        shown = [
            f"{list(a.shape)} strides {list(a.stride())}" if isinstance(a, torch.Tensor) else repr(a)
            for a in (*self.case.args, *self.case.kwargs.items())
        ]
        return f"{what} of {self.spec.name}({', '.join(shown)})"


def pose(spec: OpSpec, make: Make, check: str, inputs: Any = None) -> Problem:
    """A problem drawn from a Make: a case of the operation (from `inputs`, if given) and gradients of its outputs."""
    case = (inputs or spec.inputs)(make)
    exact = case.double().map(lambda t: t.cpu())
    with torch.no_grad():
        reference = as_tuple(spec.reference(*exact.args, **exact.kwargs))
    floating = [r for r in reference if r.dtype.is_floating_point] if spec.differentiable else []
    cotangents = tuple(make.tensor(*r.shape) for r in floating)
    return Problem(spec, make.dtype, case, exact, reference, cotangents, check, make.decisions)


@contextlib.contextmanager
def isolated(case: Case) -> Iterator[tuple[Case, GuardedAllocations]]:
    """The case with its inputs in guarded memory, inside a guard of everything that is allocated."""
    guards = GuardedAllocations()
    placed = case.map(guards.guard)
    with guards:
        yield placed, guards


def call(spec: OpSpec, case: Case, differentiate: bool = False) -> tuple[list[Any], tuple[Any, ...]]:
    """The arguments as Tensors and the outputs, recorded for the positions with a gradient when asked."""
    args = [wrap(a, differentiate and i in spec.differentiable) for i, a in enumerate(case.args)]
    return args, as_tuple(spec.op(*args, **{name: wrap(value) for name, value in case.kwargs.items()}))


def check_forward(problem: Problem) -> None:
    """Outputs within the bound of the reference, written wholly and nowhere else; inputs as they were."""
    spec, exact = problem.spec, problem.exact
    with isolated(problem.case) as (placed, _):
        _, outputs = call(spec, placed)
    assert len(outputs) == len(problem.reference), f"{len(outputs)} outputs, expected {len(problem.reference)}"
    bounds = as_tuple(spec.bound(exact, problem.reference if len(outputs) > 1 else problem.reference[0], problem.dtype))
    converts = any(isinstance(a, torch.dtype) for a in problem.case.args)
    for k, (out, reference, bound) in enumerate(zip(outputs, problem.reference, bounds, strict=True)):
        dtype = problem.dtype if reference.dtype.is_floating_point else reference.dtype
        assert out.dtype == dtype or converts, problem.describe(f"dtype {out.dtype}, expected {dtype}: output {k}")
        assert_within(out, reference, bound, what=problem.describe(f"output {k}"), repeat=repr(problem))


def check_aliases(problem: Problem) -> None:
    """No output shares memory with an input or another output."""
    _, outputs = call(problem.spec, problem.case)
    taken = {t.untyped_storage().data_ptr() for t in problem.case.tensors() if t.numel()}
    for k, out in enumerate(outputs):
        if out.numel():
            assert out.data.untyped_storage().data_ptr() not in taken, problem.describe(f"output {k} shares memory:")
            taken.add(out.data.untyped_storage().data_ptr())


def check_repeats(problem: Problem) -> None:
    """Two runs give the same bits, forward and backward; the second replays launches of the first in other memory."""
    other = replace(problem, case=problem.case.map(_moved), cotangents=tuple(map(_moved, problem.cotangents)))
    with replay.replaying(True, at_once=True):
        for first, second in zip(*map(outputs_and_gradients, (problem, other)), strict=True):
            assert same_bits(first, second), problem.describe("two runs differ: result")
        with no_grad():  # the operation itself is replayed
            runs = [call(each.spec, each.case, differentiate=False)[1] for each in (problem, other)]
        for first, second in zip(*runs, strict=True):
            assert same_bits(first.data, second.data), problem.describe("two runs without a gradient differ: result")


def _moved(x: torch.Tensor) -> torch.Tensor:
    """x in other memory, which lies as that of x."""
    return torch.empty_like(x).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def outputs_and_gradients(problem: Problem) -> list[torch.Tensor]:
    """Outputs, then the gradient of each differentiable position that has one."""
    args, outputs = call(problem.spec, problem.case, differentiate=True)
    go_back(outputs, problem.cotangents)
    grads = [args[i].grad for i in problem.spec.differentiable if hasattr(args[i], "grad")]
    return [t.data for t in (*outputs, *grads) if t is not None]


def _bytes(x):
    # Into fresh memory: one element of a strided view counts as contiguous and keeps its stride.
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def go_back(outputs: tuple[Any, ...], cotangents: tuple[torch.Tensor, ...]) -> None:
    """Backward from every floating output."""
    floating = [out for out in outputs if out.dtype.is_floating_point]
    pairs = [(o, c) for o, c in zip(floating, cotangents, strict=bool(cotangents)) if o.requires_grad]
    for k, (out, cotangent) in enumerate(pairs):
        out.backward(wrap(cotangent), retain_graph=k + 1 < len(pairs))


def check_gradients(problem: Problem) -> None:
    """Gradients within their bounds of those that torch's autograd finds in float64."""
    spec, exact = problem.spec, problem.exact
    assert spec.grad_bound is not None, f"{spec.name} has gradients and no grad_bound"
    if not all(isinstance(exact.args[i], torch.Tensor) for i in spec.differentiable):
        missing = [i for i in spec.differentiable if not isinstance(exact.args[i], torch.Tensor)]
        assert all(exact.args[i] is None for i in missing), f"{spec.name}: arguments {missing} are not tensors"
    there = [i for i in spec.differentiable if exact.args[i] is not None]
    expected = reference_gradients(problem, there)
    doubled = tuple(c.double().cpu() for c in problem.cotangents)
    with isolated(problem.case) as (placed, guards):
        args, outputs = call(spec, placed, differentiate=True)
        go_back(outputs, tuple(guards.guard(c) for c in problem.cotangents))
        grads = {i: args[i].grad for i in there}
    every = tuple(expected.get(i) for i in spec.differentiable)
    bounds = spec.grad_bound(exact, doubled[0] if len(doubled) == 1 else doubled, every, problem.dtype)
    assert len(bounds) == len(spec.differentiable), f"{spec.name}: {len(bounds)} gradient bounds"
    for i, bound in zip(spec.differentiable, bounds, strict=True):
        if i in there:
            got = grads[i] if grads[i] is not None else torch.zeros_like(problem.case.args[i])
            assert_within(
                got, expected[i], bound, what=problem.describe(f"gradient of argument {i}"), repeat=repr(problem)
            )


def reference_gradients(problem: Problem, positions: list[int]) -> dict[int, torch.Tensor]:
    """float64 gradients by torch's autograd, zeros where there are none."""
    leaves = {i: problem.exact.args[i].clone().requires_grad_() for i in positions}
    args = [leaves.get(i, a) for i, a in enumerate(problem.exact.args)]
    outputs = [o for o in as_tuple(problem.spec.reference(*args, **problem.exact.kwargs)) if o.dtype.is_floating_point]
    pairs = [(o, c.double().cpu()) for o, c in zip(outputs, problem.cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return {i: torch.zeros_like(leaf) for i, leaf in leaves.items()}
    found = torch.autograd.grad([o for o, _ in pairs], list(leaves.values()), [c for _, c in pairs], allow_unused=True)
    return {i: torch.zeros_like(leaf) if g is None else g for (i, leaf), g in zip(leaves.items(), found, strict=True)}


def check_exact(problem: Problem) -> None:
    """For integer-valued inputs, exactly the reference (rounded once to the dtype)."""
    _, outputs = call(problem.spec, problem.case)
    for k, (out, reference) in enumerate(zip(outputs, problem.reference, strict=True)):
        assert_within(
            out, reference.to(out.dtype).double(), 0.0, what=problem.describe(f"output {k}"), repeat=repr(problem)
        )


def check_specials(problem: Problem) -> None:
    """NaN and infinities just where the reference has them, everything else within the bound where there is one."""
    spec, exact = problem.spec, problem.exact
    _, outputs = call(spec, problem.case)
    bounds = as_tuple(spec.bound(exact, problem.reference if len(outputs) > 1 else problem.reference[0], problem.dtype))
    for k, (out, reference, bound) in enumerate(zip(outputs, problem.reference, bounds, strict=True)):
        if not reference.dtype.is_floating_point:
            assert_within(out, reference, 0.0, what=problem.describe(f"output {k}"), repeat=repr(problem))
            continue
        # A bound is only a theorem for finite inputs: infinite or NaN, it says nothing about a finite element.
        finite = torch.as_tensor(bound, dtype=torch.float64).expand(reference.shape)
        finite = torch.where(reference.isfinite(), finite.nan_to_num(nan=torch.inf), 0.0)
        assert_within(out, reference, finite, what=problem.describe(f"output {k}"), repeat=repr(problem))
        wrong = out.data.cpu().isnan() != reference.isnan()
        assert not wrong.any(), (
            f"{problem.describe(f'output {k}')}: {int(wrong.sum())} NaN too many or too few\n{problem!r}"
        )


def check_real_gradients(problem: Problem) -> None:
    """Gradients of the kernels themselves against central differences."""
    args, _ = call(problem.spec, problem.case, differentiate=True)
    check_grads(lambda *given: problem.spec.op(*given, **problem.case.kwargs), *args)


@dataclass(frozen=True)
class Check:
    """A check and what it is drawn from."""

    run: Any
    kinds: tuple[str, ...] = KINDS
    layouts: tuple[str, ...] = LAYOUTS


CHECKS = {
    "forward": Check(check_forward),
    "gradients": Check(check_gradients),
    "exact": Check(check_exact, kinds=("integers",)),
    "specials": Check(check_specials, kinds=(SPECIAL, "normal")),
    "real gradients": Check(check_real_gradients, kinds=("normal", "positive")),
}


def examples(spec: OpSpec, dtype: torch.dtype) -> dict[str, Problem]:
    """The record's fixed cases with seeded values, or some drawn from its inputs where it has none."""
    named = spec.examples or {f"seed {seed}": spec.inputs for seed in range(4)}
    return {
        name: pose(spec, SeededMake(seed, dtype, default_device(), sizes=EXTENTS), name, inputs)
        for seed, (name, inputs) in enumerate(named.items())
    }


def dtypes(spec: OpSpec) -> list[torch.dtype]:
    """The dtypes of an operation that can run here: no bfloat16 in the interpreter."""
    return [d for d in spec.dtypes if not (launch.INTERPRETED and d == torch.bfloat16)]


def repeat(name: str, check: str, dtype: str, decisions: list[int]) -> None:
    """Run one check again, on the case that a list of decisions makes."""
    chosen = CHECKS[check]
    make = Replay(
        decisions,
        getattr(torch, dtype),
        device=default_device(),
        kinds=chosen.kinds,
        layouts=chosen.layouts,
        sizes=EXTENTS,
    )
    problem = pose(all_specs()[name], make, check)
    print(problem.describe("inputs"))
    for tensor in problem.case.tensors():
        print(tensor)
    chosen.run(problem)
    print("passes")
