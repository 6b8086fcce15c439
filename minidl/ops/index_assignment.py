"""`x[index] = value`, with gradients of both.

If a gradient is recorded, x becomes the result in the graph as in `inplace`, but in its memory, which no other
tensor uses.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function, is_grad_enabled
from minidl.autograd.deferred import settle_all
from minidl.autograd.function import recordable
from minidl.kernels import reduce
from minidl.ops import copies, indexing
from minidl.ops.change import Operand, refuse_recorded, replace_by_result, without_overlap
from minidl.ops.promotion import python_number
from minidl.ops.shape import sum_to, to
from minidl.tensors import Tensor

__all__: list[str] = []  # attached to Tensor, no operation

# A basic index, and one of tensors and slices in the view that it makes.
Index = tuple[Any, Any]


class Assign(Function):
    """x with value, a tensor of its dtype or a number, at an index; in place if no other tensor uses x's memory."""

    sum_to = staticmethod(reduce.sum_to)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: Any, index: Index, alone: bool) -> torch.Tensor:
        ctx.index, ctx.shape = index, getattr(value, "shape", ())
        y = x if alone else x.clone()
        y[index[0]][index[1]] = value
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        basic, parts = ctx.index
        dv = None
        if ctx.needs[1]:
            dv = dy[basic] if parts is ... else dy[basic][parts]
            sizes = ctx.shape[max(len(ctx.shape) - dv.dim(), 0) :]  # torch accepts a value with more leading sizes of 1
            dv = cls.sum_to(dv, sizes).reshape(ctx.shape)
        return cls.clear(dy, ctx.index) if ctx.needs[0] else None, dv, None, None

    @staticmethod
    def clear(dy: Any, index: Index) -> Any:
        dx = dy.clone()
        dx[index[0]][index[1]] = 0
        return dx


recordable(sum_to=sum_to, clear=lambda dy, index: Assign.apply(dy, 0, index, False))(Assign)


def set_item(x: Tensor, index: Any, value: Operand) -> None:
    """Assign x[index] = value, broadcast to the selection and cast to x's dtype; of equal positions one value stays.

    Gradients go to both; each value of an equal position gets the position's gradient. Raises RuntimeError for a value
    that does not fit, a leaf that requires grad, and a recorded gradient while a view of x shares its memory; TypeError
    for a tensor of another dtype at an index of tensors; else as `getitem`.
    """
    settle_all()
    value = Tensor(value) if isinstance(value, torch.Tensor) else python_number(value)
    recorded = is_grad_enabled() and (x.requires_grad or (isinstance(value, Tensor) and value.requires_grad))
    if recorded and x.requires_grad and x.is_leaf:
        refuse_recorded("x[...] = y", x)
    copies.refuse_change("x[...] = y", x.data)
    at = _parsed(x, index)
    by_tensors = at[1] is not ... and not all(isinstance(part, slice) for part in at[1])
    if by_tensors and isinstance(value, Tensor) and value.dtype != x.dtype and not _is_fill(index, value):
        raise TypeError(
            f"x[...] = y: y is {value.dtype}, expected {x.dtype} at an index of tensors; convert it with .to()"
        )
    if not recorded:
        raw = value.data.to(x.device, x.dtype) if isinstance(value, Tensor) else value
        x.data[at[0]][at[1]] = without_overlap(raw, x.data)
        return
    if isinstance(value, Tensor):
        value = to(value, x.device, x.dtype)
    saved = x._node is not None and x._node.context is not None and any(t is not None for t in x._node.context._saved)
    replace_by_result("x[...] = y", x, lambda before, new: Assign.apply(before, new, at, not saved), value)


def _is_fill(index: Any, value: Tensor) -> bool:
    """Return whether one value, of any dtype, goes to all positions of one mask."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [part.data if isinstance(part, Tensor) else part for part in parts if not indexing.is_basic(part)]
    return value.numel() == 1 and len(tensors) == 1 and torch.as_tensor(tensors[0]).dtype == torch.bool


def _parsed(x: Tensor, index: Any) -> Index:
    parts = index if isinstance(index, tuple) else (index,)
    if all(map(indexing.is_basic, parts)):
        return parts, ...
    basic, dims, tensors = indexing.parse(x.shape, parts, x.device)
    sizes = x.data[basic].shape
    if dims:
        indexing.flat_index(tensors, [sizes[dim] for dim in dims])
    return basic, tuple(tensors.pop(0) if dim in dims else slice(None) for dim in range(len(sizes)))
