"""Comparison of a result with its float64 reference, within the error bound that follows from the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minidl.tensors import Tensor
from minidl.testing.specs import Case, OpSpec, all_specs


def wrap(value: Any, requires_grad: bool = False) -> Any:
    """Tensors in place of the torch tensors in `value` (a tensor, a sequence of them, or anything else)."""
    if isinstance(value, torch.Tensor):
        return Tensor(value, requires_grad and value.dtype.is_floating_point)
    if isinstance(value, list | tuple):
        return type(value)(wrap(item, requires_grad) for item in value)
    return value


def unwrap(value: Any) -> Any:
    """torch tensors in place of the Tensors in `value`."""
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, list | tuple):
        return type(value)(unwrap(item) for item in value)
    return value


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The outputs of an operation as a tuple, whether it has one or several."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def error_bound(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
    """The largest error that each element of `op(*args, **kwargs)` may have, from the operation's record.

    `op` is a function of `minidl.ops` or the name of its record; arguments are Tensors, torch tensors and plain values,
    as the operation takes them. The bound compares the result with the exact value for exactly these inputs.
    Returns a float64 torch tensor of the result's shape, or a tuple of them for several outputs.
    Raises LookupError for an operation without a record, TypeError when no argument is a floating tensor.
    """
    spec = find_spec(op)
    case = Case(unwrap(args), {name: unwrap(value) for name, value in kwargs.items()})
    dtypes = [t.dtype for t in case.tensors() if t.dtype.is_floating_point]
    if not dtypes:
        raise TypeError(
            f"error_bound: no argument of {spec.name} is a floating tensor, so there is no rounding to bound"
        )
    exact = case.double()
    with torch.no_grad():
        result = spec.reference(*exact.args, **exact.kwargs)
        bound = spec.bound(exact, result, dtypes[0])
    shaped = tuple(
        torch.as_tensor(b, dtype=torch.float64, device=r.device).expand(r.shape)
        for b, r in zip(as_tuple(bound), as_tuple(result), strict=True)
    )
    return shaped if isinstance(result, list | tuple) else shaped[0]


def find_spec(op: Callable[..., Any] | str) -> OpSpec:
    """The record of an operation, by its function or name. Raises LookupError."""
    specs = all_specs()
    if isinstance(op, str) and op in specs:
        return specs[op]
    for spec in specs.values():
        if spec.op is op:
            return spec
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    raise LookupError(f"{name} has no record; operations with one: {', '.join(sorted(specs))}")


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
    got = actual.data if isinstance(actual, Tensor) else actual.detach()
    where = f"{what}: " if what else ""
    if got.shape != reference.shape:
        raise AssertionError(f"{where}shape {list(got.shape)}, expected {list(reference.shape)}{_repeat(repeat)}")
    if got.numel() == 0:
        return 0.0
    a, r = got.to("cpu", torch.float64), reference.detach().to("cpu", torch.float64)
    floating = got.dtype.is_floating_point
    b = torch.as_tensor(bound, dtype=torch.float64).cpu().expand(r.shape) if floating else torch.zeros_like(r)
    if got.dtype == torch.float64:
        b = 2 * b
    if (b.isnan() & r.isfinite()).any() or (b < 0).any():
        raise AssertionError(f"{where}the bound is NaN or negative where the reference is finite{_repeat(repeat)}")
    error = (a - r).abs()
    largest = torch.finfo(got.dtype).max if floating else math.inf
    unknown = (b > largest) | (b == math.inf)
    accepted = (a == r) | (a.isnan() & r.isnan()) | unknown | (error <= b)
    accepted |= (r.abs() + b > largest) & a.isinf() & (a.sign() == r.sign())
    ratio = torch.where((a == r) | unknown, 0.0, error / b)
    if accepted.all():
        return float(torch.where(ratio.isfinite(), ratio, 0.0).max())
    worst = int(torch.where(accepted, -1.0, ratio.nan_to_num(nan=math.inf, posinf=math.inf)).argmax())
    index = index_at(worst, r.shape)
    x, y, allowed, off = (float(t.flatten()[worst]) for t in (a, r, b, error))
    raise AssertionError(
        f"{where}{int((~accepted).sum())} of {r.numel()} elements of {str(got.dtype).removeprefix('torch.')} "
        f"{list(r.shape)} are outside their bound\n"
        f"  worst at {index}: got {x!r}, expected {y!r}\n"
        f"  error {off:.4g}, bound {allowed:.4g}, error/bound {off / allowed if allowed else math.inf:.4g}"
        f"{_ulps(off, y, got.dtype)}{_repeat(repeat)}"
    )


def index_at(position: int, shape: torch.Size) -> list[int]:
    """The index of an element by its position in a flattened tensor of this shape."""
    return [int(i) for i in torch.unravel_index(torch.tensor(position), shape)]


def _repeat(command: str) -> str:
    return f"\n  repeat: {command}" if command else ""


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
