"""Batches that are on their way to the device while the step before them runs there."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from minidl.csr import CSR

SHARE = 0.25  # of the device's free memory, that a data set may take there
_AHEAD = 2


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether a data set of so many bytes is to lie on the device as a whole."""
    return device.type != "cuda" or nbytes <= SHARE * torch.cuda.mem_get_info(device)[0]


def pinned(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host in memory that a GPU copies from on its own."""
    return part.pin_memory() if device.type == "cuda" else part


def ahead(batches: Iterable[tuple[Any, ...]], device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Batches of tensors and CSR in pinned memory, on the device.

    Two more than were asked for are made, and copied on a stream of their own.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = _copies(device)
    waiting: deque[tuple[tuple[Any, ...], torch.cuda.Event]] = deque()
    for batch in batches:
        with torch.cuda.stream(copies):
            moved = tuple(part.to(device, non_blocking=True) for part in batch)
            waiting.append((moved, copies.record_event()))
        if len(waiting) > _AHEAD:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of all copies: memory that was given out on one stream is not used again on another."""
    return torch.cuda.Stream(device)


def _arrived(batch: tuple[Any, ...], copied: torch.cuda.Event) -> tuple[Any, ...]:
    kernels = torch.cuda.current_stream()
    kernels.wait_event(copied)
    for part in batch:
        for tensor in (part.packed or ()) if isinstance(part, CSR) else (part,):
            # The allocator must not hand the memory to another copy before the kernels have read it.
            tensor.record_stream(kernels)
    return batch
