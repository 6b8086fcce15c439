"""Specs of views and copies, which are exact."""

from __future__ import annotations

from typing import Any

import torch

from minidl import ops
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Bad, Case, one, refuses, spec_factory
from minidl.testing.specs.elementwise import no_error, no_grad_error
from minidl.testing.specs.make import Make


def _refuses(error: type[Exception], message: str, *rest: Any) -> Bad:
    """Return a call with a tensor [2, 3, 4] and these arguments that must raise."""
    return refuses(error, message, (2, 3, 4), extra=rest)


_exactly = {"bound": no_error, "grad_bound": no_grad_error, "exact": True}
_view = spec_factory(**_exactly, differentiable=(0,))
_joined = spec_factory(**_exactly, differentiable=(0, 1))
# Operations without other arguments.
_tensor_only = spec_factory(
    **_exactly,
    inputs=one(),
    differentiable=(0,),
    bad=(refuses(TypeError, "positional argument|must be torch.memory_format", (2,), extra=(1,)),),
)


def _reshape_inputs(make: Make) -> Case:
    shape = make.shape(0, 4)
    target = make.choice([(-1,), tuple(reversed(shape)), (1, *shape), (*shape, 1)])
    return Case((make.tensor(*shape), (0,) if target == (-1,) and 0 in shape else target))


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
    sizes = tuple(make.choice([size, -1]) if size == other else size for size, other in zip(shape, narrow, strict=True))
    return Case((make.tensor(*narrow), (*make.shape(0, 1), *sizes)))


def _expand_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bound of a sum over the copies."""
    x = case.args[0].clone().requires_grad_()
    (total,) = torch.autograd.grad(x.expand(case.args[1]), x, dy.abs())
    copies = dy.numel() // max(x.numel(), 1)
    if copies <= 1:
        return no_grad_error(case, dy, grads, dtype)
    error = bounds.or_infinite(bounds.gamma(copies + 1, bounds.acc_unit(dtype)) * total, total, dtype)
    return (bounds.rounded(grads[0], error, dtype),)


def _squeeze_inputs(make: Make) -> Case:
    shape = tuple(make.choice([1, size]) for size in make.shape(0, 4))
    dim = make.choice([None, *range(-len(shape), len(shape))])
    return Case((make.tensor(*shape), dim))


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


def _stack_inputs(make: Make) -> Case:
    shape = make.shape(0, 3)
    return Case((make.tensor(*shape), make.tensor(*shape), make.integer(-len(shape) - 1, len(shape))))


def _cat_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds for a first part that occurs twice, whose gradient is a sum of two."""
    return (bounds.rounded(grads[0], bounds.acc_unit(dtype) * grads[0].abs(), dtype), torch.zeros_like(grads[1]))


_TARGETS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

SPECS = [
    _view(
        "reshape",
        inputs=_reshape_inputs,
        bad=(
            _refuses(ValueError, r"\[2, 3, 4\] has 24 elements, which do not fit \[5, 5\]", (5, 5)),
            _refuses(ValueError, "do not fit", (-1, -1)),
            _refuses(ValueError, "do not fit", (-2, 12)),
            refuses(ValueError, "do not fit", (0, 3), extra=((-1, 0),)),
        ),
    ),
    _view(
        "flatten",
        inputs=_flatten_inputs,
        bad=(
            _refuses(ValueError, "start_dim 2 comes after end_dim 1", 2, 1),
            _refuses(IndexError, "dim 3 is out of range for a tensor of 3 dimensions", 3),
        ),
    ),
    _view(
        "permute",
        inputs=_permute_inputs,
        bad=(
            _refuses(ValueError, r"\[0, 1\] does not name each of 3 dimensions once", (0, 1)),
            _refuses(ValueError, "once", (0, 1, 1)),
            _refuses(IndexError, "dim 3 is out of range", (0, 1, 3)),
        ),
    ),
    _view("transpose", inputs=_transpose_inputs, bad=(_refuses(IndexError, "dim 3 is out of range", 0, 3),)),
    _view(
        "expand",
        reference=lambda x, sizes: x.expand(sizes),
        inputs=_expand_inputs,
        grad_bound=_expand_grad_bound,
        bad=(
            _refuses(ValueError, r"\[2, 3, 4\] does not broadcast to \[2, 3, 5\]", (2, 3, 5)),
            _refuses(ValueError, "does not broadcast", (3, 4)),
        ),
    ),
    _view(
        "squeeze",
        reference=lambda x, dim: x.squeeze() if dim is None else x.squeeze(dim),
        inputs=_squeeze_inputs,
        bad=(_refuses(IndexError, "dim 3 is out of range", 3),),
    ),
    _view(
        "unsqueeze",
        inputs=_unsqueeze_inputs,
        bad=(_refuses(IndexError, "dim 4 is out of range for a tensor of 4 dimensions", 4),),
    ),
    _view(
        "getitem",
        reference=lambda x, index: x[index],
        inputs=_getitem_inputs,
        bad=(
            _refuses(IndexError, "out of bounds|out of range", (2,)),
            _refuses(IndexError, "too many indices", (0, 0, 0, 0)),
            _refuses(TypeError, "indexed by integers, slices, None, ..., masks and tensors, got bool", True),
            _refuses(TypeError, "got torch.float32", [0.5, 1.0]),
            refuses(TypeError, "got torch.float32", (3,), (2,)),
        ),
    ),
    _tensor_only("transposed", reference=lambda x: x.permute(tuple(reversed(range(x.dim()))))),
    _tensor_only("contiguous", reference=torch.Tensor.contiguous),
    _tensor_only("clone"),
    _joined(
        "cat",
        op=lambda a, b, dim: ops.cat([a, b, a], dim),
        reference=lambda a, b, dim: torch.cat([a, b, a], dim),
        inputs=_cat_inputs,
        grad_bound=_cat_grad_bound,
        bad=(
            refuses(ValueError, r"\[2, 4\], which does not fit \[2, 3\] along dim 0", (2, 3), (2, 4), extra=(0,)),
            refuses(ValueError, r"tensors\[1\] has shape \[2\], which does not fit", (2, 3), (2,), extra=(0,)),
            refuses(IndexError, "dim 1 is out of range", (2,), (2,), extra=(1,)),
        ),
    ),
    _joined(
        "stack",
        op=lambda a, b, dim: ops.stack([a, b], dim),
        reference=lambda a, b, dim: torch.stack([a, b], dim),
        inputs=_stack_inputs,
        bad=(refuses(ValueError, "does not fit", (2,), (3,), extra=(0,)),),
    ),
    spec_factory()(
        "to",
        reference=lambda x, dtype: x,
        inputs=lambda make: Case((make.tensor(*make.shape(0, 3)), make.choice(_TARGETS))),
        bound=lambda case, y, dtype: bounds.rounded(y, torch.zeros_like(y), case.args[1]),
        bad=(_refuses(RuntimeError, "nowhere", "nowhere"),),
    ),
]
