"""int64 numbers that the host makes and kernels read."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from array import array
from collections.abc import Iterator
from typing import Any

import torch
import triton

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DeviceList:
    """int64 numbers made by the host, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = torch.empty(0, dtype=torch.int64, device=device)
        self._captured: list[torch.Tensor] = []

    def hold(self, values: array[int]) -> torch.Tensor:
        """The numbers; valid until the next call."""
        host = torch.frombuffer(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return host
        count = len(values)
        if self._held.numel() < count:
            self._held = torch.empty(triton.next_power_of_2(count), dtype=torch.int64, device=self._device)
        # Pageable memory is staged before the call returns, so `values` may go.
        self._held[:count].copy_(host, non_blocking=True)
        return self._held

    def captured(self, values: array[int]) -> torch.Tensor:
        """The numbers for a CUDA graph that is being captured: copied at once, and kept as long as this object.

        The copy is not part of the graph, where it would take 11.6 us of each replay on an H200.
        """
        with outside_capture(self._device) as stream:
            held = torch.empty(len(values), dtype=torch.int64, device=self._device)
            _copy(held, values, stream)
        self._captured.append(held)
        return held


def capturing(device: torch.device) -> bool:
    """Whether the current stream of the device is captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def outside_capture(device: torch.device) -> Iterator[int]:
    """A context for work outside a CUDA graph that is being captured; the work is complete when the context ends.

    Memory allocated in it does not belong to the graph, whose own memory may be overwritten before a replay. The work
    runs on the default stream, whose handle this yields, since no stream of torch waits for it. (The capture of a
    blocking stream, made elsewhere, would be lost.)
    """
    stream = torch.cuda.default_stream(device)
    # Capture in torch's default mode forbids its thread to allocate memory and to wait, on other streams too.
    with _relaxed(), torch.cuda.stream(stream):
        yield stream.cuda_stream
        _call("cuStreamSynchronize", ctypes.c_void_p(stream.cuda_stream))


def _copy(to: torch.Tensor, values: array[int], stream: int) -> None:
    """Start a copy of values on a stream. (A copy by torch would be captured.)"""
    address, count = values.buffer_info()
    size = ctypes.c_size_t(count * values.itemsize)
    _call(
        "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(to.data_ptr()), ctypes.c_void_p(address), size, ctypes.c_void_p(stream)
    )


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Allow calls in this thread that capture forbids because they might wait for the captured stream."""
    mode = ctypes.c_int(RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    status = getattr(_driver(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA error {status}")
