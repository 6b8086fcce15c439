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

    What is computed with it is a plain torch tensor. A change in place, which the module would not see, raises
    RuntimeError.
    """

    @classmethod
    def of(cls, data: torch.Tensor) -> torch.Tensor:
        """The data itself where it is contiguous; on the device "meta", where there is none."""
        if data.is_contiguous() or data.device.type == "meta":
            return data
        return data.detach().contiguous().as_subclass(cls)

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
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)
