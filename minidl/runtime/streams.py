"""Streams of a GPU: what threads queue on different ones runs side by side, unless one follows another."""

from __future__ import annotations

from typing import Any

import torch


def current(device: torch.device) -> Any:
    """Return this thread's stream, on which launches on a device are queued; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def follow(stream: Any, before: Any, *tensors: torch.Tensor) -> None:
    """Have what is queued on `stream` from now on run after what is queued on `before` (None for nothing), and keep the
    memory of `tensors`, made there, until it has run."""
    if stream is None or before is None or stream == before:
        return
    if not torch.cuda.is_current_stream_capturing():  # a capture begins when all streams are done
        stream.wait_stream(before)
    for tensor in tensors:
        tensor.record_stream(stream)
