"""The answers of torch.cuda and Triton's driver for the fake GPU: compute capability 9.0 and 4 multiprocessors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

CARD = SimpleNamespace(
    name="none", gcnArchName="", multi_processor_count=4, major=9, minor=0, total_memory=1 << 34, warp_size=32,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
)  # fmt: skip


class _Event:
    """An event of a stream that records the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._time - self._time)

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        pass

    wait = synchronize


class _Stream(contextlib.nullcontext[None]):
    """A stream without pending work."""

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


class Generator(torch.Generator):
    """A generator on the CPU."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Device(contextlib.nullcontext[None]):
    idx = prev_idx = 0

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _set_state(state: torch.Tensor, *_: Any) -> None:
    torch.default_generator.set_state(state)


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns a value."""
    return lambda *_, **__: value


# The functions and classes of torch.cuda.
ANSWERS: Mapping[str, Any] = {
    "is_available": always(True), "device_count": always(1), "current_device": always(0), "init": always(None),
    "set_device": always(None), "get_device_properties": always(CARD), "get_device_name": always(CARD.name),
    "get_device_capability": always((CARD.major, CARD.minor)), "is_bf16_supported": always(True),
    "synchronize": always(None), "ipc_collect": always(None), "reset_peak_memory_stats": always(None),
    "mem_get_info": always((CARD.total_memory, CARD.total_memory)),
    "get_per_process_memory_fraction": always(1.0), "is_current_stream_capturing": always(False),
    "manual_seed": _seed, "set_rng_state": _set_state, "get_rng_state": lambda *_: torch.default_generator.get_state(),
    "device": _Device, "device_of": _Device,
    "Event": _Event, "Stream": _Stream, "stream": lambda *_: contextlib.nullcontext(), "set_stream": always(None),
    "current_stream": lambda *_: _Stream(), "default_stream": lambda *_: _Stream(),
}  # fmt: skip


class Driver:
    """The driver of Triton for the fake GPU."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": CARD.shared_memory_per_block_optin, "max_num_regs": CARD.regs_per_multiprocessor,
            "multiprocessor_count": CARD.multi_processor_count, "warpSize": CARD.warp_size,
            "sm_clock_rate": 1_980_000, "mem_clock_rate": 2_619_000, "mem_bus_width": 5120,
        }
    )  # fmt: skip
    is_active = staticmethod(always(True))
    get_current_device = staticmethod(always(0))
    set_current_device = staticmethod(always(None))
    get_current_stream = staticmethod(always(0))
    get_device_capability = staticmethod(always((CARD.major, CARD.minor)))
    get_current_target = staticmethod(always(GPUTarget("cuda", 10 * CARD.major + CARD.minor, CARD.warp_size)))
    get_active_torch_device = staticmethod(always(torch.device("cuda", 0)))
    get_device_interface = staticmethod(always(torch.cuda))
    get_empty_cache_for_benchmark = staticmethod(lambda: torch.empty(1, dtype=torch.int32))
    clear_cache = staticmethod(lambda cache: cache.zero_())

    @staticmethod
    def get_benchmarker() -> Any:
        import triton.testing

        return triton.testing.do_bench
