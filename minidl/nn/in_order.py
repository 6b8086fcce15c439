"""Weights in the order of memory that files have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ASSIGNMENTS = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


class InOrder(torch.Tensor):
    """A contiguous copy of a weight that has its channels last in memory, for a `state_dict`.

    What is computed with it is a plain torch tensor, of the values that the weight has then, as if it shared its
    memory. A change in place, which the module would not see, raises RuntimeError.
    """

    _weight: torch.Tensor
    _seen: int | None  # the version of the weight that was copied

    @classmethod
    def of(cls, data: torch.Tensor) -> torch.Tensor:
        """The data itself where it is contiguous; on the device "meta", where there is none."""
        if data.is_contiguous() or data.device.type == "meta":
            return data
        made = data.detach().contiguous().as_subclass(cls)
        made._weight, made._seen = data, _version(data)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        changes = name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        if (changes and isinstance(args[0], cls)) or (kwargs and isinstance(kwargs.get("out"), cls)):
            raise RuntimeError(
                f"{name}: this tensor of a state_dict is a copy in contiguous memory of a weight that has its channels "
                "last, so a change of it would not reach the module: change the parameter under no_grad(), or a "
                ".clone() that load_state_dict takes"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for each in _all_of(cls, [args, list((kwargs or {}).values())]):
                if each._seen is None or each._seen != _version(each._weight):
                    each.copy_(each._weight)
                    each._seen = _version(each._weight)
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _all_of(kind: type[InOrder], value: Any) -> list[InOrder]:
    """Those among the arguments of a call."""
    if isinstance(value, list | tuple):
        return [found for part in value for found in _all_of(kind, part)]
    return [value] if isinstance(value, kind) else []


def _version(x: torch.Tensor) -> int | None:
    """How often x was changed; None where torch does not count."""
    return None if x.is_inference() else x._version
