"""Module: named parameters, buffers and sub-modules, as in torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from minidl.autograd import RemovableHandle, no_grad
from minidl.autograd.deferred import deferring, settle_all, thread
from minidl.common import suggestions
from minidl.nn import backward_hooks
from minidl.nn.registry import Parameter as Parameter
from minidl.nn.registry import described as described
from minidl.nn.state import Stateful
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

M = TypeVar("M", bound="Module")
Hook = Callable[..., Any]


class Module(Stateful):
    """Base class of layers and models. The name of a Parameter, Module or registered buffer is its attribute name.

    A subclass defines `forward`; calling the module runs it. As in torch, `train`, `apply`, `state_dict`, loading,
    moving and converting call the same methods of submodules, which these may override.
    """

    _shown: tuple[str, ...] = ()  # attributes that `repr` shows
    _fixed: tuple[str, ...] = ()  # buffers whose dtype `to` keeps

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs and cls.__init__.__module__.startswith("minidl."):
            error = suggestions.argument(cls.__name__, cls.__init__, kwargs)
            if error is not None:
                raise error
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_before"] = {}  # hooks by handle, before and after forward, and of its gradients
        self.__dict__["_after"] = {}
        self.__dict__["_on_gradients"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to its input."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_with_hooks if self._before or self._after or self._on_gradients else self.forward
        try:
            alone = not self._modules and type(self).__module__.startswith("minidl.nn")  # with nothing to fuse
            if alone or thread.call is not None:
                return call(*args, **kwargs)
            with deferring(self):
                return call(*args, **kwargs)
        except (IndexError, TypeError, ValueError) as error:
            self._name_layer(error)
            raise

    def _call_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        for _, hook in sorted(self._before.items()):
            changed = hook(self, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        result = backward_hooks.call(self, args, kwargs) if self._on_gradients else self.forward(*args, **kwargs)
        for _, hook in sorted(self._after.items()):
            changed = hook(self, args, kwargs, result)
            result = result if changed is None else changed
        return result

    def _name_layer(self, error: Exception) -> None:
        """Replace the operation's name in an error by the name of the layer."""
        text = error.args[0] if error.args else None
        is_layer = type(self).__module__.startswith("minidl.nn") and not self._modules
        if is_layer and isinstance(text, str) and (prefix := re.match(r"[a-z_0-9]+: ", text)):
            error.args = (f"{type(self).__name__}: {text[prefix.end() :]}", *error.args[1:])

    def register_forward_pre_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Call hook(module, args) before `forward`, or hook(module, args, kwargs) with with_kwargs; a result other than
        None replaces args, or both. `prepend` puts it before other hooks."""
        return RemovableHandle(self._before, hook if with_kwargs else partial(_positional, hook), prepend)

    def register_forward_hook(self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False) -> RemovableHandle:
        """Call hook(module, args, result) after `forward`, or hook(module, args, kwargs, result) with with_kwargs; a
        result other than None replaces the output. `prepend` as in `register_forward_pre_hook`."""
        return RemovableHandle(self._after, hook if with_kwargs else partial(_positional, hook), prepend)

    def register_full_backward_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        """Call hook(module, grad_input, grad_output) during backward with tuples of the gradients of the positional
        arguments and of the results; Tensors that it returns replace grad_input."""
        return RemovableHandle(self._on_gradients, hook, prepend)

    def train(self: M, mode: bool = True) -> M:
        """Set training mode here and in submodules. Raises ValueError unless `mode` is a bool."""
        if not isinstance(mode, bool):
            raise ValueError(f"{type(self).__name__}.train: mode is {mode!r}, expected True or False")
        self.training = mode
        for module in self.children():
            module.train(mode)
        return self

    def eval(self: M) -> M:
        """Set evaluation mode for this module and its submodules."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Set whether the parameters get gradients."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradient of every parameter to None, or fill it with zeros in place."""
        for parameter in self.parameters():
            grad = parameter.raw_grad
            if set_to_none or grad is None:
                parameter.grad = None
                continue
            parameter._grad = grad.dense() if isinstance(grad, RowGrad) else grad
            parameter._grad.zero_()
            parameter._recorded_grad = None

    def apply(self: M, function: Callable[[Module], None]) -> M:
        """Call `function` on every module, this one last."""
        for module in self.children():
            module.apply(function)
        function(self)
        return self

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Apply `fn` to parameters, their gradients and buffers, which remain the same objects."""
        for module in self.children() if recurse else ():
            module._apply(fn)
        settle_all()
        with no_grad():
            for name, tensor in (*self._parameters.items(), *self._buffers.items()):
                if tensor is None:
                    continue
                grad, changed = tensor.raw_grad, fn(tensor)
                if name in self._fixed and changed.dtype != tensor.dtype:
                    changed = tensor.to(changed.device)
                if changed is not tensor:
                    tensor.data = changed
                if grad is not None:
                    tensor._grad = _convert_gradient(fn, grad)
        return self

    def double(self: M) -> M:
        """Make parameters and buffers float64."""
        return self._apply(_converter(None, torch.float64))

    def float(self: M) -> M:
        """Make parameters and buffers float32."""
        return self._apply(_converter(None, torch.float32))

    def half(self: M) -> M:
        """Make parameters and buffers float16."""
        return self._apply(_converter(None, torch.float16))

    def bfloat16(self: M) -> M:
        """Make parameters and buffers bfloat16."""
        return self._apply(_converter(None, torch.bfloat16))

    def cuda(self: M, device: int | torch.device | str | None = None) -> M:
        """Move parameters and buffers to a GPU. Raises RuntimeError if there is none."""
        return self._apply(_converter(f"cuda:{device}" if isinstance(device, int) else device or "cuda"))

    def cpu(self: M) -> M:
        """Move parameters and buffers to the CPU."""
        return self._apply(_converter("cpu"))

    def to(
        self: M,
        device: Any = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        *,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> M:
        """Move or convert parameters, gradients and buffers in place; dtypes apply to floating tensors only.

        Also to(dtype), or to(tensor) for its device and dtype. `memory_format` applies to tensors of four or five
        dimensions. Raises TypeError for an integer dtype, which would lose the weights.
        """
        if isinstance(device, Tensor | torch.Tensor):
            device, dtype = device.device, device.dtype
        elif isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{type(self).__name__}.to: got {dtype}, expected a floating type: weights would be lost")
        return self._apply(_converter(device, dtype, non_blocking, memory_format))

    def extra_repr(self) -> str:
        """Return the text in `repr` between the brackets, in one or several lines."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)

    def __repr__(self) -> str:
        shown = [line for line in self.extra_repr().split("\n") if line]
        below = [f"({name}): " + repr(module).replace("\n", "\n  ") for name, module in self._modules.items()]
        if len(shown) < 2 and not below:
            return f"{type(self).__name__}({''.join(shown)})"
        return f"{type(self).__name__}(\n  " + "\n  ".join(shown + below) + "\n)"


def _positional(hook: Hook, module: Module, args: Any, kwargs: Any, *result: Any) -> Any:
    """Call a hook without kwargs, before or after forward."""
    changed = hook(module, args, *result)
    return changed if result or changed is None else (changed if isinstance(changed, tuple) else (changed,), kwargs)


def _converter(
    device: torch.device | str | None, dtype: torch.dtype | None = None, non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """Return a function that moves and converts a tensor; the dtype applies to floating tensors only."""

    def convert(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.dtype.is_floating_point else None
        order = memory_format if tensor.ndim in (4, 5) else torch.preserve_format
        return tensor.to(device=device, dtype=kind, non_blocking=non_blocking, memory_format=order)

    return convert


def _convert_gradient(fn: Callable[[Tensor], Tensor], grad: Any) -> Any:
    """Return a stored gradient after `fn`; the same object if `fn` changes nothing."""
    values = Tensor(grad.values if isinstance(grad, RowGrad) else grad)
    changed = fn(values)
    if changed is values:
        return grad
    if isinstance(grad, RowGrad):
        return replace(grad, rows=grad.rows.to(changed.device), values=changed.data, _shown=[])
    return changed.data
