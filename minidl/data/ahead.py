"""Copy batches to the device while the previous step runs on it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from minidl.sparse.csr import CSR

SHARE = 0.25  # of the device's free memory that a data set may take
_AHEAD = 2


def fits(nbytes: int, device: torch.device) -> bool:
    """Return whether a data set of this size should stay on the device."""
    return device.type != "cuda" or nbytes <= SHARE * torch.cuda.mem_get_info(device)[0]


def pinned(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host tensor in pinned memory, from which a GPU copies without the CPU."""
    return part.pin_memory() if device.type == "cuda" else part


def ahead(batches: Iterable[tuple[Any, ...]], device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Return the batches (of tensors and CSR in pinned memory) on the device.

    Up to two batches are prepared ahead of their use and copied on a separate stream.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = _copies(device)
    waiting: deque[tuple[tuple[Any, ...], torch.cuda.Event]] = deque()
    for batch in batches:
        with torch.cuda.stream(copies):
            copy = tuple(part.to(device, non_blocking=True) for part in batch)
            waiting.append((copy, copies.record_event()))
        if len(waiting) > _AHEAD:
            yield _wait_for(*waiting.popleft())
    while waiting:
        yield _wait_for(*waiting.popleft())


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies: the allocator does not reuse memory of one stream on another."""
    return torch.cuda.Stream(device)


def _wait_for(batch: tuple[Any, ...], copied: torch.cuda.Event) -> tuple[Any, ...]:
    kernels = torch.cuda.current_stream()
    kernels.wait_event(copied)
    for part in batch:
        for tensor in (part.packed or ()) if isinstance(part, CSR) else (part,):
            # The allocator must not reuse the memory for another copy before the kernels have read it.
            tensor.record_stream(kernels)
    return batch
