"""Methods of Tensor about gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic

import torch

from minidl import autograd
from minidl.autograd import Function, Grad
from minidl.autograd.deferred import settle_all
from minidl.sparse.rows import RowGrad
from minidl.tensors.core import TensorCore, TensorT
from minidl.tensors.torch_callers import refuse_callers


class TensorGradients(TensorCore, Generic[TensorT]):
    """The part of Tensor that records, computes and observes gradients."""

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Whether operations on it are recorded."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> TensorT:
        """Set whether operations on this leaf are recorded.

        Raises TypeError for an integer tensor, RuntimeError for the result of an operation.
        """
        if requires_grad and not self.data.is_floating_point():
            raise TypeError(f"only floating tensors can have a gradient, this one is {self.dtype}")
        if not requires_grad and self._edge_node() is not None:
            raise RuntimeError("this tensor is the result of an operation; use .detach() for one without a graph")
        if requires_grad != self._requires_grad:
            settle_all()
        self._requires_grad = requires_grad
        return self  # type: ignore[return-value]

    @property
    def is_leaf(self) -> bool:
        """Whether it is not the result of a recorded operation."""
        return self._edge_node() is None

    @property
    def grad(self) -> TensorT | None:
        """The gradient accumulated by backward(), as a dense tensor; None before."""
        refuse_callers()
        if self._recorded_grad is not None and isinstance(recorded := self._graph_grad(), Function.result_class):
            return recorded  # type: ignore[return-value]
        if isinstance(self._grad, RowGrad):
            return _tensor(self._grad.dense())
        return None if self._grad is None else _tensor(self._grad)

    @grad.setter
    def grad(self, value: TensorT | None) -> None:
        if value is not None and (value.shape != self.shape or value.dtype != self.dtype):
            raise ValueError(
                f"grad has shape {list(value.shape)} and dtype {value.dtype}, "
                f"expected {list(self.shape)} and {self.dtype}"
            )
        if value is not None and value.device != self.device:
            raise ValueError(f"grad is on {value.device}, expected {self.device}; move it with .to()")
        self._grad = None if value is None else value.data
        self._recorded_grad = value if value is not None and value._requires_grad else None

    @property
    def raw_grad(self) -> Grad | None:
        """The gradient as it is stored: a torch tensor, or a RowGrad when it touches few rows."""
        if isinstance(self._grad, RowGrad) and self._grad.changed():
            self._grad = self._grad.dense()
        return self._grad

    def backward(
        self, gradient: TensorT | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Add the gradient of this tensor (times `gradient`) to the `grad` of every leaf it depends on.

        `gradient` has this tensor's shape, and is optional for a tensor of one element.
        With `create_graph` the gradients are recorded, too, and the graph stays valid.
        Raises RuntimeError when nothing was recorded, when a gradient is missing, when the graph was already used, and
        for `create_graph` of an operation without a second derivative.
        """
        if not self.requires_grad:
            raise RuntimeError(
                "backward(): nothing was recorded for this tensor; set requires_grad=True on its inputs, "
                "outside no_grad()"
            )
        if gradient is None:
            if self.numel() != 1:
                raise RuntimeError(
                    f"backward() of a tensor of shape {list(self.shape)} needs `gradient`, a tensor of that shape; "
                    "or reduce it to one value first, for example with .sum()"
                )
            seed = None
        else:
            if gradient.shape != self.shape or gradient.dtype != self.dtype or gradient.device != self.device:
                raise RuntimeError(
                    f"backward(): gradient has shape {list(gradient.shape)}, {gradient.dtype} on {gradient.device}, "
                    f"expected {list(self.shape)}, {self.dtype} on {self.device}"
                )
            seed = gradient.data
        if create_graph:
            autograd.double_backward.backward(self, gradient, retain_graph is not False)
        else:
            with autograd.no_grad():
                autograd.backward_pass.backward(self, seed, bool(retain_graph))

    def register_hook(self, hook: Callable[[TensorT], TensorT | None]) -> autograd.RemovableHandle:
        """Call `hook` with this tensor's gradient during backward; a tensor it returns replaces the gradient.

        Returns a handle whose `remove()` removes the hook. Raises RuntimeError when no gradient is recorded here.
        """
        if not self.requires_grad:
            raise RuntimeError("register_hook(): this tensor has no gradient; set requires_grad=True")
        self._refuse_fused("register_hook")
        node = self._edge_node()
        hooks = self._hooks if node is None else node.hooks.setdefault(self._index, {})

        def on_data(grad: torch.Tensor) -> torch.Tensor | None:
            changed = hook(_tensor(grad))
            return None if changed is None else changed.data

        return autograd.RemovableHandle(hooks, on_data)

    def register_post_accumulate_grad_hook(self, hook: Callable[[TensorT], object]) -> autograd.RemovableHandle:
        """Call `hook` with this leaf during backward, as soon as its `grad` is complete.

        Returns a handle whose `remove()` removes the hook. Raises RuntimeError for the result of an operation, or a
        tensor that requires no gradient.
        """
        if not self.requires_grad or self._edge_node() is not None:
            raise RuntimeError("register_post_accumulate_grad_hook(): expected a leaf with requires_grad=True")
        return autograd.RemovableHandle(self._after, hook)

    def retain_grad(self) -> None:
        """Also fill `grad` of this tensor, the result of an operation, during backward."""
        self._refuse_fused("retain_grad")
        node = self._edge_node()
        if node is not None:
            node.retained[self._index] = weakref.ref(self)

    def _refuse_fused(self, name: str) -> None:
        if self._fused:
            raise RuntimeError(
                f"{name}: this tensor was computed as a part of the operation after it, through which its gradient "
                "does not pass; call it before the tensor is used, or compute under minidl.fusion(False)"
            )


def _tensor(data: torch.Tensor) -> Any:
    return Function.result_class(data)
