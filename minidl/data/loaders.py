"""Copy the batches of any loader, such as torch's, to the device."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from minidl.data.ahead import ahead
from minidl.tensors import Tensor, default_device


class _Slot:
    """Marks the position of a tensor in a batch."""


def _take(tensors: list[torch.Tensor], part: torch.Tensor) -> _Slot:
    tensors.append(part)
    return _Slot()


class Loaded:
    """The batches of a loader with Tensors on the device, see `to_device`."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        structures: deque[Any] = deque()

        def parts() -> Iterator[tuple[torch.Tensor, ...]]:
            for batch in self.loader:
                tensors: list[torch.Tensor] = []
                # Only the structure is stored, so that a batch's memory is free after its copy.
                structures.append(_map(batch, torch.Tensor, functools.partial(_take, tensors)))
                yield tuple(tensors)

        for copies in ahead(parts(), self.device):
            yield _map(structures.popleft(), _Slot, functools.partial(self._next, iter(copies)))

    def _next(self, copies: Iterator[torch.Tensor], _: _Slot) -> Tensor:
        return Tensor(next(copies).to(self.device))


def to_device(loader: Iterable[Any], device: torch.device | str | None = None) -> Loaded:
    """Return the batches of a loader, such as `torch.utils.data.DataLoader`, with minidl's Tensors on the device.

    for x, y in data.to_device(loader):
        loss = ops.cross_entropy(model(x), y)

    Torch tensors in tuples, lists and dicts become Tensors; other values stay the same. On a GPU the next two batches
    are copied on a separate stream while one is used. The CPU waits for a copy, but not for kernels, unless the loader
    pins its batches (`pin_memory=True`). On a CPU a Tensor shares memory with the batch. The default `device` is the
    usual one. Raises TypeError for a loader that cannot be iterated over.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"to_device: loader is a {type(loader).__name__}, expected batches to iterate over")
    return Loaded(loader, default_device() if device is None else torch.device(device))


def _map(batch: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return the batch with `function` applied to each value of this kind, in order."""
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(part, kind, function) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(part, kind, function) for part in batch)
    if isinstance(batch, Mapping):
        return {key: _map(part, kind, function) for key, part in batch.items()}
    return batch
