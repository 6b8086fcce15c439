"""Module: named parameters, buffers and sub-modules, as in torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from minidl import missing
from minidl.autograd import RemovableHandle
from minidl.later import deferring, settle_all
from minidl.nn.in_order import InOrder
from minidl.tensors import Tensor, device_of

M = TypeVar("M", bound="Module")


class Parameter(Tensor):
    """A Tensor that a Module trains: its gradient is recorded, and `parameters()` yields it."""

    __slots__ = ()

    def __init__(self, data: Tensor | torch.Tensor, requires_grad: bool = True) -> None:
        super().__init__(data.data if isinstance(data, Tensor) else data, requires_grad)


def described(value: Any) -> str:
    """What stands in the place of a Module, and what to write instead."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}, expected a Module: write {value.__name__}(...)"
    if isinstance(value, torch.nn.Module):
        return f"torch's {kind}, expected a minidl Module: use minidl.nn.{kind}, and load_state_dict for its weights"
    if isinstance(value, list | tuple):
        return f"a {kind}, expected a Module: pass its modules one by one, as in Sequential(*modules)"
    if callable(value):
        called = getattr(value, "__name__", kind)
        return f"the function {called}, expected a Module: use a layer that calls it, such as nn.Tanh() for ops.tanh"
    return f"of type {kind}, expected a Module"


class Loaded(NamedTuple):
    """Which names did not fit when a state was loaded, as torch answers."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __repr__(self) -> str:
        fits = not self.missing_keys and not self.unexpected_keys
        names = f"missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys}"
        return "<All keys matched successfully>" if fits else f"Loaded({names})"


class Module:
    """Base of layers and models. A Parameter, Module or registered buffer has the name of its attribute.

    A subclass defines `forward`; calling the module runs it.
    """

    training: bool
    _shown: tuple[str, ...] = ()  # attributes that `repr` shows
    _fixed: tuple[str, ...] = ()  # buffers whose dtype `to` leaves as it is
    _may_lack: tuple[str, ...] = ()  # buffers that older states do not have

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs and cls.__init__.__module__.startswith("minidl."):
            error = missing.argument(cls.__name__, cls.__init__, kwargs)
            if error is not None:
                raise error
        return super().__new__(cls)

    def __init__(self) -> None:
        self.__dict__["_parameters"] = {}
        self.__dict__["_buffers"] = {}
        self.__dict__["_modules"] = {}
        self.__dict__["_passing"] = set()  # names of buffers that are not saved
        self.__dict__["_before"] = {}  # hooks by handle, before and after forward
        self.__dict__["_after"] = {}
        self.__dict__["training"] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with deferring(self):
            try:
                if not (self._before or self._after):
                    return self.forward(*args, **kwargs)
                return self._hooked(args, kwargs)
            except (IndexError, TypeError, ValueError) as error:
                self._own(error)
                raise

    def _hooked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for before in tuple(self._before.values()):
            changed = before(self, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        result = self.forward(*args, **kwargs)
        for after in tuple(self._after.values()):
            changed = after(self, args, result)
            result = result if changed is None else changed
        return result

    def _own(self, error: Exception) -> None:
        """Let the error of an operation name the layer that the user wrote."""
        text = error.args[0] if error.args else None
        own = type(self).__module__.startswith("minidl.nn") and not self._modules
        if own and isinstance(text, str) and (found := re.match(r"[a-z_0-9]+: ", text)):
            error.args = (f"{type(self).__name__}: {text[found.end() :]}", *error.args[1:])

    def register_forward_pre_hook(self, hook: Callable[[Module, Any], Any]) -> RemovableHandle:
        """Call hook(module, args) before `forward`; what it returns, unless None, takes the place of args."""
        return RemovableHandle(self._before, hook)

    def register_forward_hook(self, hook: Callable[[Module, Any, Any], Any]) -> RemovableHandle:
        """Call hook(module, args, result) after `forward`; what it returns, unless None, takes the result's place."""
        return RemovableHandle(self._after, hook)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: call super().__init__() before setting {name!r}")
        registry = None
        if isinstance(value, Parameter):
            registry = self._parameters
        elif isinstance(value, Module):
            registry = self._modules
        elif name in self._buffers:
            registry, value = self._buffers, self._as_buffer(name, value)
        elif isinstance(value, torch.nn.Module):
            raise TypeError(f"{type(self).__name__}.{name} is {described(value)}")
        elif isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
            raise TypeError(
                f"{type(self).__name__}.{name} is a torch tensor that torch trains, which parameters() would not "
                "yield; assign minidl.nn.Parameter(t.detach())"
            )
        elif name in self._parameters and value is not None:
            raise TypeError(f"{type(self).__name__}.{name} is a parameter; assign a Parameter or None")
        for other in (self._parameters, self._buffers, self._modules, self.__dict__):
            if other is not registry:
                other.pop(name, None)
        if registry is None:
            self.__dict__[name] = value
        else:
            registry[name] = value

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_modules" in own:  # else __init__ was not called
            for registry in (own["_parameters"], own["_buffers"], own["_modules"]):
                if name in registry:
                    return registry[name]
        near = None if name.startswith("_") else missing.nearest(name, dir(self))
        end = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{end}")

    def __delattr__(self, name: str) -> None:
        for registry in (self._parameters, self._buffers, self._modules):
            if name in registry:
                del registry[name]
                return
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._buffers, *self._modules})

    def register_buffer(self, name: str, tensor: Tensor | torch.Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that is not trained: saved with the module unless it is not `persistent`.

        What is assigned to its name from then on, a Tensor or None, is the buffer. A torch tensor is wrapped.
        Raises TypeError for anything else.
        """
        tensor = self._as_buffer(name, tensor)
        for other in (self._parameters, self._modules, self.__dict__):
            other.pop(name, None)
        self._buffers[name] = tensor
        self._passing.discard(name)
        if not persistent:
            self._passing.add(name)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Add a parameter under a name, as an assignment does. Raises TypeError for anything else than it or None."""
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(f"{type(self).__name__}.{name} is of type {type(param).__name__}, expected a Parameter")
        setattr(self, name, param)

    def _as_buffer(self, name: str, value: Any) -> Tensor | None:
        if isinstance(value, torch.Tensor):
            return Tensor(value)
        if value is None or isinstance(value, Tensor):
            return value
        raise TypeError(
            f"{type(self).__name__}.{name} is a buffer: got {type(value).__name__}, expected a Tensor or None"
        )

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a module under a name. Raises TypeError for what is none, KeyError for a name that cannot be one."""
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__}: {name!r} is {described(module)}")
        if not isinstance(name, str):
            raise TypeError(f"{type(self).__name__}: a module's name is a string, got {type(name).__name__}")
        if name == "" or "." in name or (name not in self._modules and hasattr(self, name)):
            raise KeyError(f"{type(self).__name__}: no module can be named {name!r}: empty, dotted or taken")
        self._modules[name] = module

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, each once, with dotted names."""
        seen: set[int] = set()
        stack: list[tuple[str, Module]] = [(prefix, self)]
        while stack:
            name, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            stack.extend(
                (f"{name}.{child}" if name else child, sub) for child, sub in reversed(module._modules.items())
            )

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        return (module for _, module in self.named_modules())

    def children(self) -> Iterator[Module]:
        """The modules directly below this one."""
        return iter(self._modules.values())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules directly below this one, with their names."""
        return iter(self._modules.items())

    def get_submodule(self, target: str) -> Module:
        """The module with a dotted name. Raises AttributeError where there is none."""
        module = self
        for name in target.split(".") if target else ():
            if name not in module._modules:
                raise AttributeError(f"{type(module).__name__} has no module {name!r}, of {target!r}")
            module = module._modules[name]
        return module

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, with its dotted name, in order of assignment; without `recurse` this module's own."""
        return self._named("_parameters", prefix, recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Every parameter once; without `recurse` this module's own."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, with its dotted name."""
        return self._named("_buffers")

    def buffers(self) -> Iterator[Tensor]:
        """Every buffer once."""
        return (buffer for _, buffer in self.named_buffers())

    def _named(self, registry: str, within: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for prefix, module in self.named_modules(within) if recurse else ((within, self),):
            for name, tensor in module.__dict__[registry].items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())

    def train(self: M, mode: bool = True) -> M:
        """Set training mode here and below (dropout acts only in it)."""
        for module in self.modules():
            module.__dict__["training"] = mode
        return self

    def eval(self: M) -> M:
        """Set evaluation mode here and below."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Set whether the gradients of the parameters are recorded."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradient of every parameter, or fill it with zeros."""
        for parameter in self.parameters():
            grad = parameter.raw_grad
            if set_to_none or grad is None:
                parameter.grad = None
            else:
                parameter.grad = Tensor(torch.zeros_like(parameter.data))

    def apply(self: M, function: Callable[[Module], None]) -> M:
        """Call `function` on every module, this one last."""
        for module in self.children():
            module.apply(function)
        function(self)
        return self

    def double(self: M) -> M:
        """Make parameters and buffers float64."""
        return self.to(dtype=torch.float64)

    def float(self: M) -> M:
        """Make parameters and buffers float32."""
        return self.to(dtype=torch.float32)

    def half(self: M) -> M:
        """Make parameters and buffers float16."""
        return self.to(dtype=torch.float16)

    def bfloat16(self: M) -> M:
        """Make parameters and buffers bfloat16."""
        return self.to(dtype=torch.bfloat16)

    def cuda(self: M, device: int | torch.device | str | None = None) -> M:
        """Move parameters and buffers to a GPU. Raises RuntimeError where there is none."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def cpu(self: M) -> M:
        """Move parameters and buffers to the CPU."""
        return self.to("cpu")

    def to(self: M, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> M:
        """Move parameters and buffers in place to a device, a dtype (if floating) or both. Gradients are dropped.

        Raises TypeError for an integer dtype, which would leave nothing of the weights.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        device = None if device is None else device_of(device)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{type(self).__name__}.to: got {dtype}, expected a floating type: weights would be lost")
        settle_all()
        fixed = {id(module._buffers.get(name)) for module in self.modules() for name in module._fixed}
        for tensor in (*self.parameters(), *self.buffers()):
            changes = dtype is not None and tensor.dtype.is_floating_point and id(tensor) not in fixed
            to_dtype = dtype if changes else tensor.dtype
            tensor.data = tensor.data.to(device or tensor.device, to_dtype)
            tensor.grad = None
        return self

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The torch tensors of all parameters and buffers by name, sharing memory. A shared one has several names.

        Weights of convolutions that have their channels last in memory are contiguous copies, as files want them; a
        change of a copy in place raises RuntimeError.
        """
        return {name: InOrder.of(tensor.data) for name, tensor in self.named_tensors()}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer with its dotted name; a shared one has several."""
        stack: list[tuple[str, Module]] = [("", self)]
        while stack:
            prefix, module = stack.pop()
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and name not in module._passing:
                    yield prefix + name, tensor
            stack.extend((f"{prefix}{child}.", sub) for child, sub in reversed(module._modules.items()))

    def load_state_dict(self, state: Mapping[str, torch.Tensor | Tensor], strict: bool = True) -> Loaded:
        """Copy values into parameters and buffers by name, converting dtype and device.

        Returns the names that were missing in `state` and those that were not known. Nothing changes unless everything
        fits. As in torch, num_batches_tracked of a batch norm may be missing, and stays as it is. Raises KeyError for
        missing names, and for unknown ones when `strict`; ValueError for a different shape.
        """
        places = dict(self.named_tensors())
        later = {id(module._buffers.get(name)) for module in self.modules() for name in module._may_lack}
        missing = [name for name, tensor in places.items() if name not in state and id(tensor) not in later]
        unknown = [name for name in state if name not in places]
        if strict and (missing or unknown):
            raise KeyError(
                f"state_dict does not fit {type(self).__name__}: missing {missing or 'nothing'}, "
                f"unknown {unknown or 'nothing'}; pass strict=False to load what fits"
            )
        wrong = [
            f"{name} is {list(state[name].shape)}, expected {list(tensor.shape)}"
            for name, tensor in places.items()
            if name in state and state[name].shape != tensor.shape
        ]
        if wrong:
            raise ValueError(f"state_dict does not fit {type(self).__name__}: {'; '.join(wrong)}")
        settle_all()
        for name, tensor in places.items():
            if name in state:
                source = state[name]
                tensor.data.copy_(source.data if isinstance(source, Tensor) else source)
        return Loaded(missing, unknown)

    def extra_repr(self) -> str:
        """What `repr` shows between the parentheses of a module without sub-modules."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)

    def __repr__(self) -> str:
        lines = [f"({name}): " + repr(module).replace("\n", "\n  ") for name, module in self._modules.items()]
        if not lines:
            return f"{type(self).__name__}({self.extra_repr()})"
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"
