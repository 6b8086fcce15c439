"""Comparison of a result with its float64 reference, within the error bound that follows from the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.tensors import Tensor
from minidl.testing.specs import Case, OpSpec, all_specs, bounds

_MOST_DERIVATIVES = 2**26


def _map_type(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to it, or to the items of a sequence, if they are of type `kind`."""
    if isinstance(value, list | tuple):
        return type(value)(_map_type(item, kind, change) for item in value)
    return change(value) if isinstance(value, kind) else value


def wrap(value: Any, requires_grad: bool = False) -> Any:
    """Replace torch tensors in `value` by Tensors."""
    return _map_type(value, torch.Tensor, lambda t: Tensor(t, requires_grad and t.dtype.is_floating_point))


def unwrap(value: Any) -> Any:
    """Replace Tensors in `value` by torch tensors."""
    return _map_type(value, Tensor, lambda t: t.data)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the outputs of an operation as a tuple, also if there is only one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


class Expected:
    """The expected results of a call on torch tensors, by its spec: exact in float64, with error bounds.

    With `wrt`, the gradients by the arguments at these positions; `dy` makes the first result's gradient for its shape.
    """

    def __init__(
        self, spec: OpSpec, case: Case, dtype: torch.dtype, wrt: Sequence[int] = (), dy: Any = torch.zeros
    ) -> None:
        self.spec, self.dtype, self.wrt = spec, dtype, [p for p in spec.differentiable if p in wrt]
        case = case.double()
        args = [arg.requires_grad_() if position in wrt else arg for position, arg in enumerate(case.args)]
        with torch.set_grad_enabled(bool(wrt)):
            self.exact = as_tuple(spec.reference(*args, **case.kwargs))
        if wrt:
            self.dy = dy(*self.exact[0].shape).double()
            self.exact = torch.autograd.grad(self.exact[0], [args[position] for position in self.wrt], self.dy)
        self.case = case.map(lambda t: t.detach())

    @torch.no_grad()
    def bounds(self) -> tuple[torch.Tensor, ...]:
        """Return the error bound of each element; it depends on the current tiles, which decide how sums are split."""
        if self.wrt and self.spec.grad_bound is not None:
            exact = dict(zip(self.wrt, self.exact, strict=True))
            gradients = tuple(map(exact.get, self.spec.differentiable))
            limits = self.spec.grad_bound(self.case, self.dy, gradients, self.dtype)
            limits = tuple(bound for bound, grad in zip(limits, gradients, strict=True) if grad is not None)
        else:
            limits = as_tuple(
                self.spec.bound(self.case, self.exact if len(self.exact) > 1 else self.exact[0], self.dtype)
            )
        shaped = zip(limits, self.exact, strict=True)
        return tuple(torch.as_tensor(b, dtype=torch.float64, device=e.device).expand(e.shape) for b, e in shaped)

    def holds(self, *results: torch.Tensor) -> bool:
        """Return whether results are within their bounds; within twice the bounds in float64, the reference's dtype."""
        compared = zip(results, self.exact, self.bounds(), strict=True)
        return all(
            bool(((result.double() - exact).abs() <= bound * (1 + (result.dtype == torch.float64))).all())
            for result, exact, bound in compared
        )


def error_bound(
    op: Callable[..., Any] | str, *args: Any, reference: Callable[..., Any] | None = None, depth: int | None = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Return the largest error that each element of `op(*args, **kwargs)` may have, by the operation's spec.

    `op` is a function of `minidl.ops` or the name of its spec; arguments are Tensors, torch tensors and plain values,
    as for the operation. The bound compares the result with the exact value for exactly these inputs.
    Returns a float64 torch tensor of the result's shape, or a tuple of them for several outputs.

    Your own function has no spec: `error_bound(function, inputs, reference=exact, depth=d)` takes its inputs as
    a tuple, a function of torch tensors that computes it in float64, and the length of its longest chain of roundings
    (of minidl's operations; in the last column where a kernel of yours on a GPU has more):

        n products and their sum    n         `tl.dot` 4 n, but not in tf32
        a root, a quotient          1 each    `tl.sqrt` 2, `/` 4
        exp, log                    8 each    `tl.exp` 10
        tanh in float32             16

    Each rounding counts as a relative change of an input or of the result: gamma(depth) (|result| + sum of
    |derivative by an input| |input|). That is too little if intermediate terms cancel, as in (x + 1e4) - 1e4. The
    rounding of the result to the inputs' dtype, to float16 or bfloat16 from float32, is added and is not in depth.
    Intermediate underflow is not covered.

    Raises LookupError for an operation without a spec or a reference, TypeError when no argument is a floating
    tensor, ValueError for a depth below 1 and more than 2^26 derivatives.
    """
    if reference is not None:
        if depth is None:
            raise TypeError("error_bound: a reference needs depth=, the length of the longest chain of roundings")
        inputs = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        return _bound_by_derivatives(reference, unwrap(list(inputs)), {k: unwrap(v) for k, v in kwargs.items()}, depth)
    spec = find_spec(op)
    case = Case(unwrap(args), {name: unwrap(value) for name, value in kwargs.items()})
    dtypes = [t.dtype for t in case.tensors() if t.dtype.is_floating_point]
    if not dtypes:
        raise TypeError(
            f"error_bound: no argument of {spec.name} is a floating tensor, so there is no rounding to bound"
        )
    bounds = Expected(spec, case, dtypes[0]).bounds()
    return bounds if len(bounds) > 1 else bounds[0]


def _bound_by_derivatives(reference: Callable[..., Any], inputs: list[Any], kwargs: Any, depth: int) -> Any:
    """Return the bound of a function with a reference, as `error_bound` describes."""
    if depth < 1:
        raise ValueError(f"error_bound: depth is {depth}, expected at least 1")
    floating = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    if not floating:
        raise TypeError("error_bound: no input is a floating tensor, so there is no rounding to bound")
    dtype = inputs[floating[0]].dtype
    leaves = [inputs[i].detach().double().requires_grad_() for i in floating]
    exact = list(inputs)
    for i, leaf in zip(floating, leaves, strict=True):
        exact[i] = leaf
    gamma = bounds.gamma(depth, bounds.acc_unit(dtype))
    limits = []
    results = as_tuple(reference(*exact, **kwargs))
    for result in results:
        if result.numel() * sum(leaf.numel() for leaf in leaves) > _MOST_DERIVATIVES:
            raise ValueError("error_bound: more than 2^26 derivatives: give smaller inputs")
        sensitivity = torch.zeros(result.numel(), dtype=torch.float64, device=result.device)
        for at, element in enumerate(result.reshape(-1) if result.requires_grad else ()):
            grads = torch.autograd.grad(element, leaves, retain_graph=True, materialize_grads=True)
            sensitivity[at] = sum((grad * leaf).abs().sum().detach() for grad, leaf in zip(grads, leaves, strict=True))
        value = result.detach().double()
        limits.append(bounds.rounded(value, gamma * (value.abs() + sensitivity.reshape(value.shape)), dtype))
    return limits[0] if len(limits) == 1 else tuple(limits)


def find_spec(op: Callable[..., Any] | str) -> OpSpec:
    """Return the spec of an operation, by its function or name. Raises LookupError if there is none."""
    specs = all_specs()
    if isinstance(op, str) and op in specs:
        return specs[op]
    for spec in specs.values():
        if spec.op is op:
            return spec
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    raise LookupError(
        f"{name} has no spec; operations with one: {', '.join(sorted(specs))}. For your own function, pass "
        "reference= and depth= to error_bound"
    )


def assert_within(
    actual: Tensor | torch.Tensor,
    reference: torch.Tensor,
    bound: torch.Tensor | float,
    *,
    what: str = "result",
    repeat: str = "",
) -> float:
    """Raise AssertionError unless every element of `actual` is within `bound` of the float64 `reference`.

    Where the reference is NaN or infinite, `actual` must be the same. Where the reference plus its bound exceeds the
    largest number of the dtype, infinity is accepted. An element whose bound exceeds that number is not compared. A
    float64 result may be off by twice the bound, since the reference is in float64, too. Integers must be equal.
    The message names the result as `what` and `repeat` as the command that repeats the comparison.
    Returns the largest error as a fraction of its bound.
    """
    result = actual.data if isinstance(actual, Tensor) else actual.detach()
    prefix, suffix = f"{what}: " if what else "", f"\n  repeat: {repeat}" if repeat else ""
    if result.shape != reference.shape:
        raise AssertionError(f"{prefix}shape {list(result.shape)}, expected {list(reference.shape)}{suffix}")
    if result.numel() == 0:
        return 0.0
    a, r = result.to("cpu", torch.float64), reference.detach().to("cpu", torch.float64)
    floating = result.dtype.is_floating_point
    b = torch.as_tensor(bound, dtype=torch.float64).detach().cpu().expand(r.shape) if floating else torch.zeros_like(r)
    if result.dtype == torch.float64:
        b = 2 * b
    if (b.isnan() & r.isfinite()).any() or (b < 0).any():
        raise AssertionError(f"{prefix}the bound is NaN or negative where the reference is finite{suffix}")
    error = (a - r).abs()
    largest = torch.finfo(result.dtype).max if floating else math.inf
    unbounded = (b > largest) | (b == math.inf)
    accepted = (a == r) | (a.isnan() & r.isnan()) | unbounded | (error <= b)
    accepted |= (r.abs() + b > largest) & a.isinf() & (a.sign() == r.sign())
    ratio = torch.where((a == r) | unbounded, 0.0, error / b)
    if accepted.all():
        return float(torch.where(ratio.isfinite(), ratio, 0.0).max())
    worst = int(torch.where(accepted, -1.0, ratio.nan_to_num(nan=math.inf, posinf=math.inf)).argmax())
    index = index_at(worst, r.shape)
    x, y, allowed, miss = (float(t.flatten()[worst]) for t in (a, r, b, error))
    raise AssertionError(
        f"{prefix}{int((~accepted).sum())} of {r.numel()} elements of {str(result.dtype).removeprefix('torch.')} "
        f"{list(r.shape)} are outside their bound\n"
        f"  worst at {index}: got {x!r}, expected {y!r}\n"
        f"  error {miss:.4g}, bound {allowed:.4g}, error/bound {miss / allowed if allowed else math.inf:.4g}"
        f"{_ulps(miss, y, result.dtype)}{suffix}"
    )


def index_at(position: int, shape: torch.Size) -> list[int]:
    """Return the index of an element by its position in the flattened tensor."""
    return [int(i) for i in torch.unravel_index(torch.tensor(position), shape)]


def _ulps(error: float, expected: float, dtype: torch.dtype) -> str:
    if not dtype.is_floating_point or not math.isfinite(error):
        return ""
    info = torch.finfo(dtype)
    size = max(abs(expected), info.tiny) if math.isfinite(expected) else info.max
    return f", {error / math.ldexp(info.eps, math.frexp(size)[1] - 1):.4g} ulp"


def assert_not_vacuous(*references: torch.Tensor, what: str = "cases") -> None:
    """Raise AssertionError when every reference result is empty or zero, so that a kernel doing nothing would pass."""
    if not any(bool(r.detach().ne(0).any()) for r in references):
        raise AssertionError(f"{what}: all reference results are zero or empty, so the comparison shows nothing")
