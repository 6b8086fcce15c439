"""Scripts written for a GPU, on a machine without one: there "cuda" stands for the CPU.

    with pretended_gpu():
        x = torch.rand(1000, device=triton.runtime.driver.active.get_active_torch_device())

Tensors lie in the CPU's memory, and a script is told that they are on cuda:0, save those that it made on the CPU: its
.cuda() and .cpu() copy, as between two memories. torch.cuda and Triton's driver answer for a card of compute capability
9.0 with 4 multiprocessors. torch, Triton and minidl themselves see tensors of the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import triton
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from triton.backends.compiler import GPUTarget

CARD = SimpleNamespace(
    name="none", gcnArchName="", multi_processor_count=4, major=9, minor=0, total_memory=1 << 34, warp_size=32,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
)  # fmt: skip
_HOST = "_minidl_made_on_cpu"
_HONEST = ("minidl.", "torch.", "triton.")
_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)
_PLACES: dict[Any, Callable[[bool, torch.Tensor], Any]] = {
    torch.Tensor.device.__get__: lambda there, at: torch.device("cuda", 0) if there else at.device,
    torch.Tensor.is_cuda.__get__: lambda there, at: there or at.is_cuda,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda there, at: at.is_cpu and not there,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda there, at: 0 if there else at.get_device(),
}


class _Event:
    """An event of a stream, by the clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, *_: Any) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._at - self._at)

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        pass

    wait = synchronize


class _Stream(contextlib.nullcontext[None]):
    """A stream, all of whose work is done."""

    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Device(contextlib.nullcontext[None]):
    idx = prev_idx = 0

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _set_state(state: torch.Tensor, *_: Any) -> None:
    torch.default_generator.set_state(state)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# What torch.cuda answers, by name.
ANSWERS: Mapping[str, Any] = {
    "is_available": _always(True), "device_count": _always(1), "current_device": _always(0), "init": _always(None),
    "set_device": _always(None), "get_device_properties": _always(CARD), "get_device_name": _always(CARD.name),
    "get_device_capability": _always((CARD.major, CARD.minor)), "is_bf16_supported": _always(True),
    "synchronize": _always(None), "ipc_collect": _always(None), "reset_peak_memory_stats": _always(None),
    "mem_get_info": _always((CARD.total_memory, CARD.total_memory)),
    "get_per_process_memory_fraction": _always(1.0), "is_current_stream_capturing": _always(False),
    "manual_seed": _seed, "set_rng_state": _set_state, "get_rng_state": lambda *_: torch.default_generator.get_state(),
    "device": _Device, "device_of": _Device,
    "Event": _Event, "Stream": _Stream, "stream": lambda *_: contextlib.nullcontext(), "set_stream": _always(None),
    "current_stream": lambda *_: _Stream(), "default_stream": lambda *_: _Stream(),
}  # fmt: skip


class _Driver:
    """Triton's, of the card."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": CARD.shared_memory_per_block_optin, "max_num_regs": CARD.regs_per_multiprocessor,
            "multiprocessor_count": CARD.multi_processor_count, "warpSize": CARD.warp_size,
            "sm_clock_rate": 1_980_000, "mem_clock_rate": 2_619_000, "mem_bus_width": 5120,
        }
    )  # fmt: skip
    is_active = staticmethod(_always(True))
    get_current_device = staticmethod(_always(0))
    set_current_device = staticmethod(_always(None))
    get_current_stream = staticmethod(_always(0))
    get_device_capability = staticmethod(_always((CARD.major, CARD.minor)))
    get_current_target = staticmethod(_always(GPUTarget("cuda", 10 * CARD.major + CARD.minor, CARD.warp_size)))
    get_active_torch_device = staticmethod(_always(torch.device("cuda", 0)))
    get_device_interface = staticmethod(_always(torch.cuda))
    get_empty_cache_for_benchmark = staticmethod(lambda: torch.empty(1, dtype=torch.int32))
    clear_cache = staticmethod(lambda cache: cache.zero_())

    @staticmethod
    def get_benchmarker() -> Any:
        import triton.testing

        return triton.testing.do_bench


class _Cuda(TorchFunctionMode):
    """A context in which tensors that are asked for on a GPU are made on the CPU, and say that they are on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = False  # for a GPU, at any time: by scripts that never do, nothing is there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PLACES:
            there = not asked_by(_HONEST) and self._is_there(args[0])
            return _PLACES[func](there, args[0])
        if func is torch.Tensor.pin_memory or func is torch.Tensor.record_stream:
            return args[0] if func is torch.Tensor.pin_memory else None
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            setattr(args[0], _HOST, not self._is_there(args[1]))
        given = list(_tensors((args, kwargs)))
        place, args, kwargs = self._place(func, args, kwargs)
        if place is None:
            place = any(map(self._is_there, given))
        self._asked = self._asked or place
        result = args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
        if func in _MOVES and result is args[0] and place != self._is_there(result):
            result = result.clone()  # from one memory to the other
        if not place:
            before = set(map(id, given))
            for made in _tensors(result):
                if id(made) not in before:
                    setattr(made, _HOST, True)
        return result

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return self._asked and tensor.is_cpu and not getattr(tensor, _HOST, False)

    def _place(self, func: Any, args: Any, kwargs: Any) -> tuple[bool | None, Any, Any]:
        """Whether the GPU is asked for (None: nothing is said), and the arguments with the CPU in its place."""
        if func is torch.Tensor.cuda or func is torch.Tensor.cpu:
            return func is torch.Tensor.cuda, args, kwargs
        first = func is torch.Tensor.to and len(args) > 1
        named = args[1] if first else kwargs.get("device")
        if isinstance(named, torch.Tensor):
            return self._is_there(named), args, kwargs
        if named is None and func in _device._device_constructors() and _cuda_is_default():
            named = "cuda"
        if type(named) not in (torch.device, str, int):  # a dtype, or nothing
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


def asked_by(packages: tuple[str, ...]) -> bool:
    """Whether one of these packages ("torch.") called the function that asks this, or the one that a mode handles."""
    frame: FrameType | None = sys._getframe(1)
    asking = sys._getframe(1).f_globals
    while frame is not None and (frame.f_globals is asking or frame.f_code.co_name == "__torch_function__"):
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(packages)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """A context in which "cuda" stands for the CPU, also in threads that begin in it. With a GPU it does nothing.

    `triton.testing.do_bench` calls its function once: what it takes interpreted says nothing of a GPU.
    """
    if torch.cuda.is_available():
        yield
        return
    import triton.testing

    mode = _Cuda()
    replaced: dict[tuple[Any, str], Any] = {(torch.cuda, name): answer for name, answer in ANSWERS.items()}
    replaced |= {
        (torch, "Generator"): _Generator,
        **{(torch, name): _on_host(getattr(torch, name)) for name in ("from_numpy", "frombuffer", "from_dlpack")},
        (torch.serialization, "default_restore_location"): _restored(torch.serialization.default_restore_location),
        (torch.nn.Parameter, "__new__"): _beside_its_values(torch.nn.Parameter.__new__),
        (torch.accelerator, "current_accelerator"): _accelerator(torch.accelerator.current_accelerator),
        (torch.accelerator, "synchronize"): _always(None),
        (triton.testing, "do_bench"): _once(triton.testing.do_bench),
        (triton.testing, "do_bench_cudagraph"): _once(triton.testing.do_bench_cudagraph),
        (triton.runtime.driver, "_active"): _Driver(),
        # The modes of the caller are off in a backward pass, and unknown to a new thread.
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
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        setattr(tensor, _HOST, True)
        return tensor

    return made


def _beside_its_values(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter = make(cls, data, requires_grad)
        if getattr(data, _HOST, False):
            setattr(parameter, _HOST, True)
        return parameter

    return made


def _restored(restore: Callable[..., Any]) -> Callable[..., Any]:
    """What a file has of a GPU stays in the CPU's memory, and says so."""
    return lambda storage, location: storage if str(location).startswith("cuda") else restore(storage, location)


def _accelerator(own: Callable[..., Any]) -> Callable[..., Any]:
    """torch itself would go on to ask it for streams."""
    return lambda *args, **kwargs: own(*args, **kwargs) if asked_by(("torch.",)) else torch.device("cuda")


def _inside(mode: _Cuda, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return inside


def _once(bench: Callable[..., Any]) -> Callable[..., Any]:
    def once(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(bench).bind(*args, **kwargs)
        given.apply_defaults()
        start = time.perf_counter()
        given.arguments["fn"]()
        took = 1e3 * (time.perf_counter() - start)
        return triton.testing._summarize_statistics(
            [took], given.arguments["quantiles"], given.arguments["return_mode"]
        )

    return once
