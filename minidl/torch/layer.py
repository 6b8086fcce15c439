"""The base class of accelerated layers, which chooses between an operator and torch's forward.

torch's forward handles inputs that the operator does not support, such as a tensor on a device without kernels, and all
calls of a layer whose forward, or a function or method that torch's forward calls, was patched.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import has_torch_function
from torch.utils._device import DeviceContext

from minidl.kernels import check
from minidl.runtime import launch

FEW = 32  # rows
_TORCH = str(Path(torch.__file__).parent)


def ready(x: Any) -> bool:
    """Return whether kernels support a tensor on its device: the interpreter has no bfloat16."""
    if not isinstance(x, torch.Tensor) or x.dtype not in check.FLOATING:
        return False
    if not launch.ON_CPU:
        return launch.is_gpu(x.device)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        return False
    return x.dtype != torch.bfloat16 and x.device.type in ("cpu", "cuda")


def few_rows(x: torch.Tensor, inputs: int, outputs: int) -> bool:
    """Return whether a product has so few rows that torch is faster (0.91 of the time, mean of 10; H100, float16)."""
    return bool(inputs >= 256 and outputs >= 256 and x.numel() < FEW * inputs)


def wide_volume(weight: torch.Tensor, groups: int) -> bool:
    """Return whether a convolution has volumes of many channels, for which torch is faster: 8 of 10 were, on average
    0.73 forward and 0.74 with backward; 34 others 2.0 and 2.3 (H100, float16)."""
    wide = groups == 1 and weight.dim() == 5 and weight.shape[1] >= 64 and weight.shape[0] >= 32
    return wide and weight.shape[2:].numel() >= 4


class Accelerated(nn.Module):
    """The base of all classes that `accelerate` assigns; `_minidl_torch_class` is the module's original class.

    Copies are also accelerated; pickling stores a module of torch's class.
    """

    _minidl_torch_class: ClassVar[type[nn.Module]]

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if hasattr(clone, "flatten_parameters"):  # cuDNN, for calls that the operator does not take, warns otherwise
            clone.flatten_parameters()
        return clone

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError("torch.jit.script takes no modules of minidl; call minidl.torch.restore(model) first")

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        arguments = self._minidl_torch_class, object, None
        return copyreg._reconstructor, arguments, self.__getstate__()  # type: ignore[attr-defined]


class Layer(Accelerated):
    """The base class of layers: `_minidl_forward` computes with operators, unless overridden `_minidl_function` of the
    input and the attributes `_minidl_settings`."""

    _minidl_function: ClassVar[Any]
    _minidl_settings: ClassVar[list[str]]

    # Methods, and the function of torch.nn.functional, that torch's forward calls: if one was patched, it runs.
    _minidl_watched_methods: ClassVar[tuple[str, ...]] = ()
    _minidl_op: ClassVar[str] = ""
    _minidl_originals: ClassVar[tuple[tuple[Any, str, Any], ...]] = ()
    _minidl_original_methods: ClassVar[tuple[tuple[str, Any], ...]] = ()

    def __init_subclass__(cls) -> None:
        torch_class: Any = cls.__bases__[-1]
        if issubclass(torch_class, Accelerated):  # a base of layers, or a subclass that torch created
            return
        cls._minidl_torch_class = torch_class
        names = [(torch_class, "forward"), *([(F, cls._minidl_op)] if cls._minidl_op else [])]
        cls._minidl_originals = tuple((owner, name, _original(owner, name)) for owner, name in names)
        methods = cls._minidl_watched_methods
        cls._minidl_original_methods = tuple((name, _original(torch_class, name)) for name in methods)
        original = torch_class.forward
        parameters = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name in parameters[len(args) :] if kwargs else ():
                if name not in kwargs:
                    break
                args = *args, kwargs.pop(name)
            if kwargs or not self._minidl_takes(*args):
                return torch_class.forward(self, *args, **kwargs)
            return self._minidl_forward(*args)

        cls.forward = forward

    @classmethod
    def _minidl_refusal(cls, module: Any) -> str:
        """Return why a module of torch's class is not switched, "" if it is."""
        settings = vars(module)
        unsupported = [name for name in ("return_indices", "proj_size") if settings.get(name)]
        return unsupported[0] if unsupported else "dim is None" if settings.get("dim", 0) is None else ""

    def _minidl_forward(self, *inputs: Any, **_: Any) -> Any:
        return self._minidl_function(*inputs, *[getattr(self, name) for name in self._minidl_settings])

    @classmethod
    def _minidl_slow_reason(cls, module: Any) -> str:
        """Return why it is not switched without timing, "" if it is; from benchmarks of random shapes
        (`benchmarks/notes.md`)."""
        return ""

    def _minidl_takes(self: Any, input: Any, *more: Any) -> bool:
        """Return whether the operator computes the result of torch's forward."""
        for owner, name, original in self._minidl_originals:
            if getattr(owner, name) is not original:
                return False
        for name, original in self._minidl_original_methods:
            if getattr(getattr(self, name), "__func__", None) is not original:
                return False
        if more or self._minidl_refusal(self):
            return False
        return ready(input) and not _intercepted(self, input) and not torch.onnx.is_in_onnx_export()


def _original(owner: Any, name: str) -> Any:
    """Return a function of torch, None if it was replaced before."""
    function = getattr(owner, name)
    code = getattr(function, "__code__", None)
    return function if code is None or code.co_filename.startswith(_TORCH) else None


def _intercepted(module: nn.Module, input: torch.Tensor) -> bool:
    """Return whether a tensor subclass or a mode intercepts torch's functions."""
    if torch.compiler.is_compiling() or not has_torch_function((input, *module._parameters.values())):
        return False
    plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    tensors = (each for each in (input, *module._parameters.values()) if each is not None)
    depth = torch._C._len_torch_function_stack()
    modes = (torch._C._get_function_stack_at(i) for i in range(depth))
    return any(type(t).__torch_function__ not in plain for t in tensors) or not all(
        isinstance(mode, DeviceContext) for mode in modes
    )
