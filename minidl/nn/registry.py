"""Named parameters, buffers and submodules of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch

from minidl.common import suggestions
from minidl.tensors import Tensor


class Parameter(Tensor):
    """A Tensor that a Module trains: its gradient is recorded, and `parameters()` yields it."""

    __slots__ = ()

    def __init__(self, data: Tensor | torch.Tensor, requires_grad: bool = True) -> None:
        super().__init__(data.data if isinstance(data, Tensor) else data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy without the gradient, as torch does."""
        copied = super().__deepcopy__(memo)
        copied.grad = None
        return copied


def described(value: Any) -> str:
    """Describe a value that is no Module, and what to write instead."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}, expected a Module: write {value.__name__}(...)"
    if isinstance(value, torch.nn.Module):
        return f"torch's {kind}, expected a minidl Module: use minidl.nn.{kind}, and load_state_dict for its weights"
    if isinstance(value, list | tuple):
        return f"a {kind}, expected a Module: pass its modules one by one, as in Sequential(*modules)"
    if callable(value):
        name = getattr(value, "__name__", kind)
        return f"the function {name}, expected a Module: use a layer that calls it, such as nn.Tanh() for ops.tanh"
    return f"of type {kind}, expected a Module"


# Private attributes that functions of torch, such as torch.nn.utils.weight_norm, use to hook into a module.
_TORCH_HOOKS = frozenset(
    {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_load_state_dict_pre_hooks"}
)


class Registry:
    """The names of a Module: a Parameter, Module or registered buffer is named by its attribute."""

    training: bool

    def __init__(self) -> None:
        self.__dict__["_parameters"] = {}
        self.__dict__["_buffers"] = {}
        self.__dict__["_modules"] = {}
        self.__dict__["_not_saved"] = set()  # names of buffers that are not saved
        self.__dict__["training"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: call super().__init__() before setting {name!r}")
        registry = None
        if isinstance(value, Parameter):
            registry = self._parameters
        elif name in self._parameters:
            registry = self._parameters
            if value is not None:
                raise TypeError(f"{type(self).__name__}.{name} is a parameter; assign a Parameter or None")
        elif isinstance(value, Registry):
            registry = self._modules
        elif name in self._modules:
            registry = self._modules
            if value is not None:
                raise TypeError(f"{type(self).__name__}.{name} is a module and the value {described(value)}, or None")
        elif name in self._buffers:
            registry, value = self._buffers, self._as_buffer(name, value)
        elif isinstance(value, torch.nn.Module):
            raise TypeError(f"{type(self).__name__}.{name} is {described(value)}")
        elif isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
            raise TypeError(
                f"{type(self).__name__}.{name} is a torch tensor that torch trains, which parameters() would not "
                "yield; assign minidl.nn.Parameter(t.detach())"
            )
        if registry is None:
            object.__setattr__(self, name, value)
            return
        # As in torch, a module may have the name of something in its class.
        self._check_name(name, registry is self._parameters and hasattr(type(self), name))
        for other in (self._parameters, self._buffers, self._modules, self.__dict__):
            if other is not registry:
                other.pop(name, None)
        if registry is not self._buffers:
            self._not_saved.discard(name)
        registry[name] = value

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__
        if "_modules" in attributes:  # else __init__ was not called
            for registry in (attributes["_parameters"], attributes["_buffers"], attributes["_modules"]):
                if name in registry:
                    return registry[name]
        if name in _TORCH_HOOKS:
            raise AttributeError(
                f"a torch function that hooks into modules got minidl's {type(self).__name__}, unsupported there; "
                "use register_forward_hook or an expression of the parameters in forward()"
            )
        near = None if name.startswith("_") else suggestions.nearest(name, dir(self))
        hint = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def __delattr__(self, name: str) -> None:
        for registry in (self._parameters, self._buffers, self._modules):
            if name in registry:
                del registry[name]
                self._not_saved.discard(name)
                return
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._buffers, *self._modules})

    def _check_name(self, name: Any, exists: bool) -> None:
        """Raise TypeError for a name that is no string, KeyError for one that exists, is empty or has a dot."""
        if not isinstance(name, str):
            raise TypeError(f"{type(self).__name__}: a name is a string, got {type(name).__name__}")
        why = (
            "it is empty" if name == "" else "it has a dot" if "." in name else "it exists already" if exists else None
        )
        if why is not None:
            raise KeyError(f"{type(self).__name__}: nothing can be named {name!r}: {why}")

    def _exists(self, name: str, registry: dict[str, Any]) -> bool:
        """Whether a name belongs to anything but an entry of `registry`."""
        registries = self.__dict__, self._parameters, self._buffers, self._modules
        return name not in registry and (hasattr(type(self), name) or any(name in each for each in registries))

    def register_buffer(self, name: str, tensor: Tensor | torch.Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that is not trained; it is saved with the module if `persistent`.

        A Tensor or None that is later assigned to its name replaces the buffer. A torch tensor is wrapped.
        Raises TypeError for anything else, KeyError for a name that is empty, dotted or in use.
        """
        self._check_name(name, self._exists(name, self._buffers))
        self._buffers[name] = self._as_buffer(name, tensor)
        self._not_saved.discard(name)
        if not persistent:
            self._not_saved.add(name)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Add a parameter or None under a name. Raises TypeError for anything else, KeyError as `register_buffer`."""
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(f"{type(self).__name__}.{name} is of type {type(param).__name__}, expected a Parameter")
        self._check_name(name, self._exists(name, self._parameters))
        self._parameters[name] = param

    def _as_buffer(self, name: str, value: Any) -> Tensor | None:
        if isinstance(value, torch.Tensor):
            return Tensor(value)
        if value is None or isinstance(value, Tensor):
            return value
        raise TypeError(
            f"{type(self).__name__}.{name} is a buffer: got {type(value).__name__}, expected a Tensor or None"
        )

    def add_module(self, name: str, module: Any) -> None:
        """Add a module or None under a name. Raises TypeError for anything else, KeyError as `register_buffer`."""
        if module is not None and not isinstance(module, Registry):
            raise TypeError(f"{type(self).__name__}: {name!r} is {described(module)}")
        self._check_name(name, self._exists(name, self._modules))
        self._modules[name] = module

    register_module = add_module

    def named_modules(
        self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield this module and all submodules with dotted names, each once unless `remove_duplicate` is False."""
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def modules(self) -> Iterator[Any]:
        """Return this module and all its submodules."""
        return (module for _, module in self.named_modules())

    def children(self) -> Iterator[Any]:
        """Return the direct submodules, each once."""
        return (module for _, module in self.named_children())

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """Yield the direct submodules with their names, each once."""
        seen: set[Any] = set()
        for name, module in self._modules.items():
            if module is not None and module not in seen:
                seen.add(module)
                yield name, module

    def get_submodule(self, target: str) -> Any:
        """Return the submodule with a dotted name. Raises AttributeError if there is none."""
        module: Any = self
        for name in target.split(".") if target else ():
            if module._modules.get(name) is None:
                raise AttributeError(f"{type(module).__name__} has no module {name!r}, of {target!r}")
            module = module._modules[name]
        return module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters with dotted names, in order of assignment; without `recurse` only those of this module.

        Each appears once unless `remove_duplicate` is False.
        """
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Return all parameters, each once; without `recurse` only those of this module."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with dotted names, as `named_parameters` does."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return all buffers, each once; without `recurse` only those of this module."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named(self, registry: str, within: str, recurse: bool, once: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        modules = self.named_modules(prefix=within, remove_duplicate=once) if recurse else ((within, self),)
        for prefix, module in modules:
            for name, tensor in module.__dict__[registry].items():
                if tensor is not None and not (once and id(tensor) in seen):
                    seen.add(id(tensor))
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def num_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of this module that are saved, by name, without those of submodules."""
        named = (*self._parameters.items(), *self._buffers.items())
        return {name: tensor for name, tensor in named if tensor is not None and name not in self._not_saved}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all saved parameters and buffers with dotted names; a shared tensor has several names."""
        for prefix, module in self.named_modules(remove_duplicate=False):
            for name, tensor in module.saved_tensors().items():
                yield (f"{prefix}.{name}" if prefix else name), tensor
