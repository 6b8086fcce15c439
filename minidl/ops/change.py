"""Change a tensor in place, in its memory or in the graph (see `inplace`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import UnknownTensor, is_grad_enabled
from minidl.autograd.deferred import settle_all
from minidl.kernels import activation
from minidl.ops import copies
from minidl.ops.promotion import python_number
from minidl.ops.shape import to
from minidl.tensors import Scalar, Tensor

__all__: list[str] = []  # no public operations

Operand = Tensor | torch.Tensor | Scalar


def check_fits(name: str, result: Any, x: Any) -> None:
    """Raise ValueError if the result's shape is not x's, TypeError if its dtype cannot be cast to x's."""
    if result.shape != x.shape:
        raise ValueError(
            f"{name}: the result has shape {list(result.shape)}, which does not fit in place of {list(x.shape)}"
        )
    if not torch.can_cast(result.dtype, x.dtype):
        raise TypeError(
            f"{name}: the result is {result.dtype}, which does not fit in place of {x.dtype}; convert it with .to()"
        )


def refuse_recorded(name: str, x: Tensor) -> None:
    """Raise RuntimeError for a tensor of the graph."""
    settle_all()
    copies.refuse_change(name, x.data)
    if x.requires_grad and is_grad_enabled():
        raise RuntimeError(
            f"{name}: a tensor whose gradient is recorded cannot be changed in place; "
            "do it under minidl.no_grad(), or on .detach()"
        )


def change(
    name: str,
    x: Tensor,
    recorded: Callable[..., Tensor],
    kernel: Callable[..., torch.Tensor],
    *others: Operand,
) -> Tensor:
    """Return x, changed by `kernel` of the raw operands, or by `recorded` of Tensors if a gradient is recorded."""
    try:
        return _change_now(name, x, recorded, kernel, *others)
    except UnknownTensor as unknown:
        return unknown.answer((x, others))


def _change_now(
    name: str,
    x: Tensor,
    recorded: Callable[..., Tensor],
    kernel: Callable[..., torch.Tensor],
    *others: Operand,
) -> Tensor:
    if x._deferred is None:
        copies.refuse_change(name, x.data)
    others = tuple([_cast_operand(x, other) for other in others])
    needs = is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (x, *others))
    if needs or x._deferred is not None:
        if x._deferred is None and x.requires_grad and x.is_leaf:
            refuse_recorded(name, x)
        return replace_by_result(name, x, recorded, *others)
    settle_all()
    data = x.data
    if any(step == 0 < size - 1 for size, step in zip(data.shape, data.stride(), strict=True)):
        raise RuntimeError(f"{name}: several elements of the tensor share one memory address; clone() it first")
    raw = [without_overlap(other.data if isinstance(other, Tensor) else other, data) for other in others]
    kernel(data, *raw, out=data)
    if name != "copy_" and not data.is_inference():
        torch.autograd.graph.increment_version(data)
    return x


def _cast_operand(x: Tensor, other: Operand) -> Operand:
    """Return an operand, cast to a floating x's dtype if it does not decide the result's: integers, and one number."""
    if isinstance(other, Tensor | torch.Tensor) and x.dtype.is_floating_point:
        passes = not other.dtype.is_floating_point or len(other.shape) == 0 < x.ndim
        return other.to(x.dtype) if passes and other.dtype != x.dtype else other
    return python_number(other)


def without_overlap(operand: Any, data: torch.Tensor) -> Any:
    """Return an operand that does not change while `data` does: a clone if they overlap."""
    if not isinstance(operand, torch.Tensor):
        return operand
    if operand.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
        return operand.detach()
    same = (operand.data_ptr(), operand.shape, operand.stride()) == (data.data_ptr(), data.shape, data.stride())
    return operand if same else operand.clone()


def replace_by_result(name: str, x: Tensor, recorded: Callable[..., Tensor], *others: Operand) -> Tensor:
    """Return x after it became the result in the graph. Raises RuntimeError if another tensor shares its memory."""
    node = x._node
    shared = x._deferred is None and not _is_unshared(x)
    before = x._twin()
    if x._deferred is None:
        before._data = x.data.data  # its own version counter: backward refuses saves of the old value
    result = recorded(before, *(before if other is x else other for other in others))
    if shared:
        raise RuntimeError(
            f"{name}: this tensor shares memory with a view of it, or with a value saved for backward(), which could "
            "not follow; write x = x + y in place of x += y, or change a clone()"
        )
    check_fits(name, result, x)
    result = to(result, x.dtype)
    retained = None if node is None else node.retained.get(x._index)
    if x._deferred is None and not x.data.is_inference():
        torch.autograd.graph.increment_version(x.data)
        context = None if node is None else node.context
        if context is not None and activation.parse(getattr(context, "act", None))[0] in activation.FROM_INPUT_IN_TORCH:
            context.keep(x.data)
    x._take_place(result)
    if retained is not None and retained() is x and node is not None:
        del node.retained[before._index]
        x.retain_grad()
    return x


def _is_unshared(x: Tensor) -> bool:
    """Return whether only x and the values saved by its operation use its memory."""
    memory = x.data.untyped_storage()
    context = None if x._node is None else x._node.context
    saved = {id(t): t for t in (() if context is None else context._saved) if t is not None}
    operation_uses = sum(t.untyped_storage().data_ptr() == memory.data_ptr() for t in saved.values())
    return _uses(memory) - operation_uses <= _USES_OF_ONE_TENSOR


def _uses(memory: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(memory._cdata)


_ONE = torch.empty(1)
_USES_OF_ONE_TENSOR = _uses(_ONE.untyped_storage())
