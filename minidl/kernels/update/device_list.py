"""Lists of int64 numbers that the host writes and kernels read."""

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
    """A device copy of int64 numbers from the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int64, device=device)
        self._captured: list[torch.Tensor] = []

    def hold(self, values: array[int]) -> torch.Tensor:
        """Return the numbers on the device; valid until the next call."""
        host = torch.frombuffer(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return host
        count = len(values)
        if self._buffer.numel() < count:
            self._buffer = torch.empty(triton.next_power_of_2(count), dtype=torch.int64, device=self._device)
        # Pageable memory is staged before the call returns, so `values` need not stay alive.
        self._buffer[:count].copy_(host, non_blocking=True)
        return self._buffer

    def captured(self, values: array[int]) -> torch.Tensor:
        """Return the numbers for a CUDA graph under capture: copied at once, and kept alive by this object.

        The copy is not part of the graph, where each replay would repeat it.
        """
        with outside_capture(self._device) as stream:
            copy = torch.empty(len(values), dtype=torch.int64, device=self._device)
            _copy(copy, values, stream)
        self._captured.append(copy)
        return copy


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of the device is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def outside_capture(device: torch.device) -> Iterator[int]:
    """Run work outside a CUDA graph that is being captured; the work is complete when the context ends.

    Memory allocated in the context does not belong to the graph, whose own memory may be overwritten before a replay.
    The work runs on the default stream, for which no stream of torch waits; the context yields its handle. (A capture
    on a blocking stream that torch did not create would be lost.)
    """
    stream = torch.cuda.default_stream(device)
    # Capture in torch's default mode forbids its thread to allocate memory and to wait, on other streams too.
    with _relaxed(), torch.cuda.stream(stream):
        yield stream.cuda_stream
        _call("cuStreamSynchronize", ctypes.c_void_p(stream.cuda_stream))


def _copy(target: torch.Tensor, values: array[int], stream: int) -> None:
    """Start a copy of values on a stream. (A copy by torch would be captured.)"""
    address, count = values.buffer_info()
    size, to = ctypes.c_size_t(count * values.itemsize), ctypes.c_uint64(target.data_ptr())
    _call("cuMemcpyHtoDAsync_v2", to, ctypes.c_void_p(address), size, ctypes.c_void_p(stream))


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
