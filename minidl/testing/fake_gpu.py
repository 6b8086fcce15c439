"""A fake GPU for scripts on a machine without one: "cuda" maps to the CPU.

    with pretended_gpu():
        x = torch.rand(1000, device=triton.runtime.driver.active.get_active_torch_device())

Tensors are in the CPU's memory. To a script, they are on cuda:0 unless it created them on the CPU, and .cuda() and
.cpu() copy them. torch, Triton and minidl see tensors on the CPU. `fake_card` has torch.cuda's and Triton's answers.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import triton
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from minidl.testing import fake_card

_HOST = "_minidl_made_on_cpu"
_LIBRARIES = ("minidl.", "torch.", "triton.")
_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)
_DEVICES: dict[Any, Callable[[bool, torch.Tensor], Any]] = {
    torch.Tensor.device.__get__: lambda on_gpu, t: torch.device("cuda", 0) if on_gpu else t.device,
    torch.Tensor.is_cuda.__get__: lambda on_gpu, t: on_gpu or t.is_cuda,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda on_gpu, t: t.is_cpu and not on_gpu,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda on_gpu, t: 0 if on_gpu else t.get_device(),
}


class _Cuda(TorchFunctionMode):
    """A context in which tensors for a GPU are created on the CPU and report that they are on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._used = False  # whether the script ever used a GPU; otherwise no tensor is on it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DEVICES:
            on_gpu = not called_by(_LIBRARIES) and self._on_gpu(args[0])
            return _DEVICES[func](on_gpu, args[0])
        if func is torch.Tensor.pin_memory or func is torch.Tensor.record_stream:
            return args[0] if func is torch.Tensor.pin_memory else None
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            setattr(args[0], _HOST, not self._on_gpu(args[1]))
        inputs = list(_tensors((args, kwargs)))
        to_gpu, args, kwargs = self._on_cpu(func, args, kwargs)
        if to_gpu is None:
            to_gpu = any(map(self._on_gpu, inputs))
        self._used = self._used or to_gpu
        result = args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
        if func in _MOVES and result is args[0] and to_gpu != self._on_gpu(result):
            result = result.clone()  # a copy between the two memories
        if not to_gpu:
            before = set(map(id, inputs))
            for tensor in _tensors(result):
                if id(tensor) not in before:
                    setattr(tensor, _HOST, True)
        return result

    def _on_gpu(self, tensor: torch.Tensor) -> bool:
        return self._used and tensor.is_cpu and not getattr(tensor, _HOST, False)

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> tuple[bool | None, Any, Any]:
        """Return whether the call names the GPU (None: no device), and the arguments with the CPU instead."""
        if func is torch.Tensor.cuda or func is torch.Tensor.cpu:
            return func is torch.Tensor.cuda, args, kwargs
        first = func is torch.Tensor.to and len(args) > 1
        named = args[1] if first else kwargs.get("device")
        if isinstance(named, torch.Tensor):
            return self._on_gpu(named), args, kwargs
        if named is None and func in _device._device_constructors() and _cuda_is_default():
            named = "cuda"
        if type(named) not in (torch.device, str, int):  # a dtype or None
            return None, args, kwargs
        kind = torch.device(named).type if type(named) is not int else "cuda"
        if kind != "cuda":
            return (False if kind == "cpu" else None), args, kwargs
        if first:
            return True, (args[0], "cpu", *args[2:]), kwargs
        return True, args, {**kwargs, "device": "cpu"}


def _cuda_is_default() -> bool:
    return _device.CURRENT_DEVICE is not None and _device.CURRENT_DEVICE.type == "cuda"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def called_by(packages: tuple[str, ...]) -> bool:
    """Return whether one of these packages ("torch.") called the caller, or the function that a mode handles."""
    frame: FrameType | None = sys._getframe(1)
    caller = sys._getframe(1).f_globals
    while frame is not None and (frame.f_globals is caller or frame.f_code.co_name == "__torch_function__"):
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(packages)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Return a context in which "cuda" maps to the CPU, also in threads started in it; with a GPU it does nothing.

    `triton.testing.do_bench` calls its function once: interpreted times say nothing about a GPU.
    """
    if torch.cuda.is_available():
        yield
        return
    import triton.testing

    mode = _Cuda()
    replaced: dict[tuple[Any, str], Any] = {(torch.cuda, name): answer for name, answer in fake_card.ANSWERS.items()}
    replaced |= {
        (torch, "Generator"): fake_card.Generator,
        **{(torch, name): _on_host(getattr(torch, name)) for name in ("from_numpy", "frombuffer", "from_dlpack")},
        (torch.serialization, "default_restore_location"): _restored(torch.serialization.default_restore_location),
        (torch.nn.Parameter, "__new__"): _on_device_of_data(torch.nn.Parameter.__new__),
        (torch.accelerator, "current_accelerator"): _accelerator(torch.accelerator.current_accelerator),
        (torch.accelerator, "synchronize"): fake_card.always(None),
        (triton.testing, "do_bench"): _once(triton.testing.do_bench),
        (triton.testing, "do_bench_cudagraph"): _once(triton.testing.do_bench_cudagraph),
        (triton.runtime.driver, "_active"): fake_card.Driver(),
        # A backward pass and a new thread do not have the modes of the caller.
        (BackwardCFunction, "apply"): _inside(mode, BackwardCFunction.apply),
        (threading.Thread, "_bootstrap_inner"): _inside(mode, threading.Thread._bootstrap_inner),  # type: ignore[attr-defined]
    }
    before = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        with mode:
            yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
        if _cuda_is_default():
            torch.set_default_device(None)


def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        setattr(tensor, _HOST, True)
        return tensor

    return call


def _on_device_of_data(make: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter = make(cls, data, requires_grad)
        if getattr(data, _HOST, False):
            setattr(parameter, _HOST, True)
        return parameter

    return new


def _restored(restore: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function, which leaves tensors of a GPU in a file in the CPU's memory."""
    return lambda storage, location: storage if str(location).startswith("cuda") else restore(storage, location)


def _accelerator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the GPU, except to torch, which would use its streams."""
    return lambda *args, **kwargs: original(*args, **kwargs) if called_by(("torch.",)) else torch.device("cuda")


def _inside(mode: _Cuda, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def _once(bench: Callable[..., Any]) -> Callable[..., Any]:
    def once(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(bench).bind(*args, **kwargs)
        bound.apply_defaults()
        start = time.perf_counter()
        bound.arguments["fn"]()
        milliseconds = 1e3 * (time.perf_counter() - start)
        return triton.testing._summarize_statistics(
            [milliseconds], bound.arguments["quantiles"], bound.arguments["return_mode"]
        )

    return once
