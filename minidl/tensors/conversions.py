"""Methods of Tensor that convert it: to Python numbers, NumPy, torch, text, copies and pickles."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch

from minidl.runtime import launch
from minidl.tensors.core import TensorT
from minidl.tensors.gradients import TensorGradients


class TensorConversions(TensorGradients[TensorT]):
    """The part of Tensor that converts it."""

    __slots__ = ()

    def item(self) -> float | int | bool:
        """Return the value of a one-element tensor as a Python number. Raises RuntimeError for any other size."""
        return self.data.item()

    def tolist(self) -> Any:
        """Return the values as nested Python lists."""
        return self.data.tolist()

    def numpy(self) -> Any:
        """Return the values as a NumPy array (shares memory on the CPU). Raises RuntimeError where a gradient is
        recorded."""
        if self.requires_grad:
            raise RuntimeError("this tensor is part of a graph; call .detach().numpy()")
        return self.data.cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the array for NumPy, over the same memory on the CPU. Raises as torch's method."""
        if self.requires_grad:
            raise RuntimeError("can't call numpy() on a Tensor that requires grad; use .detach().numpy()")
        if self.device.type != "cpu":
            raise TypeError(f"can't convert a tensor on {self.device} to numpy; copy it to the host with .cpu() first")
        array = self.data.numpy()
        if dtype is not None and dtype != array.dtype:
            if copy is False:
                raise ValueError(f"an array of {dtype} cannot share the memory of {array.dtype}")
            return array.astype(dtype)
        return array.copy() if copy else array

    def to_torch(self) -> torch.Tensor:
        """Return the torch tensor underneath, sharing memory; torch's autograd does not see it."""
        return self.data

    def __dlpack__(self, **kwargs: Any) -> Any:
        data = self.data
        launch.settle()  # the consumer reads without notice
        return data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe a copy or pickle as torch does: a leaf over the same memory, or with the values; without the
        gradient."""
        return _restored, (type(self), self.data, self._requires_grad, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a leaf with its own memory and gradient. Raises RuntimeError for the result of an operation."""
        if not self.is_leaf:
            raise RuntimeError(
                f"deepcopy: this tensor is the result of an operation, {self._node}, whose graph is not copied; copy "
                "x.detach(), and keep no results as attributes of a module"
            )
        copied = _restored(type(self), copy.deepcopy(self.data, memo), self._requires_grad, self.name)
        copied._grad = copy.deepcopy(self._grad, memo)
        memo[id(self)] = copied
        return copied

    def __len__(self) -> int:
        return len(self.data)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.is_floating_point or self.numel() != 1:
            raise TypeError(f"an index is one integer, got {self.dtype} of shape {list(self.shape)}")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError(f"a tensor of shape {list(self.shape)} is neither true nor false; compare and reduce it")
        return bool(self.item())

    def __repr__(self) -> str:
        text = repr(self.data)
        note = ""
        if self._node is not None:
            note = f", grad_fn=<{self._node.name}>"
        elif self.requires_grad:
            note = ", requires_grad=True"
        return text[:-1] + note + ")"


def _restored(kind: type[Any], data: torch.Tensor, requires_grad: bool, name: str) -> Any:
    """Return a leaf of a class, as it was before it was copied or pickled."""
    tensor = kind(data, requires_grad)
    tensor.name = name
    return tensor
