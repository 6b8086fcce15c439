"""The batches of any loader, such as torch's, on the device."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from minidl.data.ahead import ahead
from minidl.tensors import Tensor, default_device


class _Place:
    """Where a tensor was in a batch."""


def _taken(found: list[torch.Tensor], part: torch.Tensor) -> _Place:
    found.append(part)
    return _Place()


class Loaded:
    """The batches of a loader with Tensors on the device, see `to_device`."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises what it raises

    def __iter__(self) -> Iterator[Any]:
        forms: deque[Any] = deque()

        def parts() -> Iterator[tuple[torch.Tensor, ...]]:
            for batch in self.loader:
                found: list[torch.Tensor] = []
                # The form alone waits: a batch's memory is free as soon as it is copied.
                forms.append(_mapped(batch, torch.Tensor, functools.partial(_taken, found)))
                yield tuple(found)

        for moved in ahead(parts(), self.device):
            yield _mapped(forms.popleft(), _Place, functools.partial(self._next, iter(moved)))

    def _next(self, arrived: Iterator[torch.Tensor], _: _Place) -> Tensor:
        return Tensor(next(arrived).to(self.device))


def to_device(loader: Iterable[Any], device: torch.device | str | None = None) -> Loaded:
    """The batches of a loader, such as `torch.utils.data.DataLoader`, with minidl's Tensors on the device.

    for x, y in data.to_device(loader):
        loss = ops.cross_entropy(model(x), y)

    Torch tensors in tuples, lists and dicts become Tensors; anything else in a batch is passed on. On a GPU the next
    two batches are copied while one is used, on a stream of their own. The CPU waits for a copy, though not for
    kernels, unless the loader pins its batches (`pin_memory=True`). On a CPU a Tensor shares memory with the batch.
    `device` is the usual one if it is not given. Raises TypeError for what cannot be iterated over.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"to_device: loader is a {type(loader).__name__}, expected batches to iterate over")
    return Loaded(loader, default_device() if device is None else torch.device(device))


def _mapped(batch: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The batch with `function` applied to everything of this kind in it, in order."""
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(part, kind, function) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(part, kind, function) for part in batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(part, kind, function) for key, part in batch.items()}
    return batch
