"""Records of views and copies: the same values in another place, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl import ops
from minidl.kernels import launch
from minidl.specs import bounds
from minidl.specs.base import Bad, Case, Make, OpSpec
from minidl.tensor import Tensor


def _no_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(result)


def _no_grad_error(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(torch.zeros_like(g) for g in grads)


def _tensor_and(*rest: Any, shape: tuple[int, ...] = (2, 3, 4)) -> Callable[[Make], Case]:
    return lambda make: Case((make.tensor(*shape), *rest))


def _record(name: str, reference: Callable[..., Any], inputs: Callable[[Make], Case], **fields: Any) -> OpSpec:
    fields = {"op": getattr(ops, name), "grad_bound": _no_grad_error, "differentiable": (0,), "exact": True, **fields}
    return OpSpec(name=name, reference=reference, inputs=inputs, bound=_no_error, **fields)


def _reshape_inputs(make: Make) -> Case:
    shape = make.shape(0, 4)
    target = make.choice([(-1,), tuple(reversed(shape)), (1, *shape), (*shape, 1)])
    size = 1
    for extent in shape:
        size *= extent
    return Case((make.tensor(*shape), (size,) if target == (-1,) and size == 0 else target))


def _flatten_inputs(make: Make) -> Case:
    shape = make.shape(1, 4)
    start = make.integer(0, len(shape) - 1)
    return Case((make.tensor(*shape), start, make.integer(start, len(shape) - 1)))


def _permute_inputs(make: Make) -> Case:
    shape = make.shape(0, 4)
    left, order = list(range(len(shape))), []
    while left:
        order.append(left.pop(make.integer(0, len(left) - 1)))
    return Case((make.tensor(*shape), tuple(d - make.choice([0, len(shape)]) for d in order)))


def _transpose_inputs(make: Make) -> Case:
    shape = make.shape(1, 4)
    last = len(shape) - 1
    return Case((make.tensor(*shape), make.integer(-last - 1, last), make.integer(-last - 1, last)))


def _expand_inputs(make: Make) -> Case:
    shape = make.shape(0, 3, smallest=1)
    narrow = tuple(make.choice([size, 1]) for size in shape)
    kept = tuple(make.choice([size, -1]) if size == other else size for size, other in zip(shape, narrow, strict=True))
    return Case((make.tensor(*narrow), (*make.shape(0, 1), *kept)))


def _expand_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """A sum over the copies."""
    x = case.args[0].clone().requires_grad_()
    (total,) = torch.autograd.grad(x.expand(case.args[1]), x, dy.abs())
    copies = dy.numel() // max(x.numel(), 1)
    if copies <= 1:
        return _no_grad_error(case, dy, grads, dtype)
    error = bounds.gamma(copies + 1, bounds.acc_unit(dtype)) * total
    error = torch.where(total > torch.finfo(launch.acc_torch(dtype)).max / 2, torch.inf, error)
    return (bounds.rounded(grads[0], error, dtype),)


def _squeeze_inputs(make: Make) -> Case:
    shape = tuple(make.choice([1, size]) for size in make.shape(0, 4))
    dim = make.choice([None, *range(-len(shape), len(shape))])
    return Case((make.tensor(*shape), dim))


def _squeeze(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    return x.squeeze() if dim is None else x.squeeze(dim)


def _unsqueeze_inputs(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), make.integer(-len(shape) - 1, len(shape))))


def _getitem_inputs(make: Make) -> Case:
    shape = make.shape(1, 4, smallest=1)
    index: list[Any] = []
    for size in shape[: make.integer(0, len(shape))]:
        start = make.integer(-size, size)
        stop, step = make.choice([None, make.integer(-size, size)]), make.choice([None, 1, 2, 3])
        index.append(make.choice([slice(start, stop, step), make.integer(-size, size - 1)]))
        if make.integer(0, 3) == 0:
            index.append(None)
    if make.integer(0, 1):
        index.append(...)
    return Case((make.tensor(*shape), tuple(index)))


def _cat_inputs(make: Make) -> Case:
    shape = make.shape(1, 3)
    dim = make.integer(0, len(shape) - 1)
    sizes = [make.size(0, 8) for _ in range(2)]
    parts = (make.tensor(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes)
    return Case((*parts, make.choice([dim, dim - len(shape)])))


def _cat(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return ops.cat([a, b, a], dim)


def _stack_inputs(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), make.tensor(*shape), make.integer(-len(shape) - 1, len(shape))))


def _stack(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return ops.stack([a, b], dim)


def _cat_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The first part is there twice, so its gradient is a sum of two."""
    return (bounds.rounded(grads[0], bounds.acc_unit(dtype) * grads[0].abs(), dtype), torch.zeros_like(grads[1]))


_TARGETS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _to_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bounds.rounded(result, torch.zeros_like(result), case.args[1])


SPECS = [
    _record(
        "reshape",
        torch.reshape,
        _reshape_inputs,
        bad=(
            Bad(_tensor_and((5, 5)), ValueError, r"\[2, 3, 4\] has 24 elements, which do not fit \[5, 5\]"),
            Bad(_tensor_and((-1, -1)), ValueError, "do not fit"),
            Bad(_tensor_and((-2, 12)), ValueError, "do not fit"),
            Bad(_tensor_and((-1, 0), shape=(0, 3)), ValueError, "do not fit"),
        ),
    ),
    _record(
        "flatten",
        torch.flatten,
        _flatten_inputs,
        bad=(
            Bad(_tensor_and(2, 1), ValueError, "start_dim 2 comes after end_dim 1"),
            Bad(_tensor_and(3), IndexError, "dim 3 is out of range for a tensor of 3 dimensions"),
        ),
    ),
    _record(
        "permute",
        torch.permute,
        _permute_inputs,
        bad=(
            Bad(_tensor_and((0, 1)), ValueError, r"\[0, 1\] does not name each of 3 dimensions once"),
            Bad(_tensor_and((0, 1, 1)), ValueError, "once"),
            Bad(_tensor_and((0, 1, 3)), IndexError, "dim 3 is out of range"),
        ),
    ),
    _record(
        "transpose",
        torch.transpose,
        _transpose_inputs,
        bad=(Bad(_tensor_and(0, 3), IndexError, "dim 3 is out of range"),),
    ),
    _record(
        "transposed",
        lambda x: x.permute(tuple(reversed(range(x.dim())))),
        lambda make: Case((make.tensor(*make.shape(0, 4)),)),
        bad=(Bad(lambda make: Case((make.tensor(2), 1)), TypeError, "positional argument"),),
    ),
    _record(
        "expand",
        lambda x, sizes: x.expand(sizes),
        _expand_inputs,
        grad_bound=_expand_grad_bound,
        bad=(
            Bad(_tensor_and((2, 3, 5)), ValueError, r"\[2, 3, 4\] does not broadcast to \[2, 3, 5\]"),
            Bad(_tensor_and((3, 4)), ValueError, "does not broadcast"),
        ),
    ),
    _record(
        "squeeze",
        _squeeze,
        _squeeze_inputs,
        bad=(Bad(_tensor_and(3), IndexError, "dim 3 is out of range"),),
    ),
    _record(
        "unsqueeze",
        torch.unsqueeze,
        _unsqueeze_inputs,
        bad=(Bad(_tensor_and(4), IndexError, "dim 4 is out of range for a tensor of 4 dimensions"),),
    ),
    _record(
        "getitem",
        lambda x, index: x[index],
        _getitem_inputs,
        bad=(
            Bad(_tensor_and((2,)), IndexError, "out of bounds|out of range"),
            Bad(_tensor_and((0, 0, 0, 0)), IndexError, "too many indices"),
            Bad(_tensor_and(True), TypeError, "indexed by integers, slices, None and ..., got bool"),
            Bad(_tensor_and([0, 1]), TypeError, "got list"),
            Bad(lambda make: Case((make.tensor(3), make.integers(2, low=0, high=2))), TypeError, "got Tensor"),
        ),
    ),
    _record(
        "cat",
        lambda a, b, dim: torch.cat([a, b, a], dim),
        _cat_inputs,
        op=_cat,
        grad_bound=_cat_grad_bound,
        differentiable=(0, 1),
        bad=(
            Bad(
                lambda make: Case((make.tensor(2, 3), make.tensor(2, 4), 0)),
                ValueError,
                r"parts\[1\] has shape \[2, 4\], which does not fit \[2, 3\] along dim 0",
            ),
            Bad(lambda make: Case((make.tensor(2, 3), make.tensor(2), 0)), ValueError, "does not fit"),
            Bad(
                lambda make: Case((make.tensor(2), make.tensor(2).double(), 0)),
                TypeError,
                r"parts\[1\] is torch.float64",
            ),
            Bad(lambda make: Case((make.tensor(2), make.tensor(2), 1)), IndexError, "dim 1 is out of range"),
        ),
    ),
    _record(
        "stack",
        lambda a, b, dim: torch.stack([a, b], dim),
        _stack_inputs,
        op=_stack,
        differentiable=(0, 1),
        bad=(Bad(lambda make: Case((make.tensor(2), make.tensor(3), 0)), ValueError, "does not fit"),),
    ),
    _record(
        "contiguous",
        torch.Tensor.contiguous,
        lambda make: Case((make.tensor(*make.shape(0, 4)),)),
        bad=(Bad(lambda make: Case((make.tensor(2), 1)), TypeError, "positional argument"),),
    ),
    _record(
        "clone",
        torch.clone,
        lambda make: Case((make.tensor(*make.shape(0, 4)),)),
        bad=(Bad(lambda make: Case((make.tensor(2), 1)), TypeError, "positional argument"),),
    ),
    OpSpec(
        name="to",
        op=ops.to,
        reference=lambda x, dtype: x,
        inputs=lambda make: Case((make.tensor(*make.shape(0, 3)), make.choice(_TARGETS))),
        bound=_to_bound,
        bad=(Bad(_tensor_and("nowhere"), RuntimeError, "nowhere"),),
    ),
]
