"""Streams of a GPU: work that threads queue on different streams runs concurrently, unless one follows another."""

from __future__ import annotations

from typing import Any

import torch


def current(device: torch.device) -> Any:
    """Return this thread's stream, on which launches on a device are queued; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def follow(stream: Any, before: Any, *tensors: torch.Tensor) -> None:
    """Let future work on `stream` run after the work queued on `before` (None for nothing), and keep the memory of
    `tensors`, allocated on `before`, until it has run."""
    if stream is None or before is None or stream == before:
        return
    if not torch.cuda.is_current_stream_capturing():  # a capture begins when all streams are done
        stream.wait_stream(before)
    for tensor in tensors:
        tensor.record_stream(stream)
