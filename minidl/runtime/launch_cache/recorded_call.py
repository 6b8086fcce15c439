"""What a call asked for and launched, in places of tensors, and the same again for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from minidl.runtime import launch
from minidl.runtime.descriptors import of_base
from minidl.runtime.launch_cache import fast_launch


def start_of(x: torch.Tensor) -> int:
    """Bytes of its memory before the first number of x: without numbers, x has no address."""
    return x.storage_offset() * x.itemsize


class Place(NamedTuple):
    """A tensor in the memory of another: of which of those given and made, how many bytes after its first number."""

    index: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        base = tensors[self.index]
        start = start_of(base) + self.offset
        made = torch.empty(0, dtype=self.dtype, device=base.device)
        return made.set_(base.untyped_storage(), start // self.dtype.itemsize, self.size, self.stride)


class Step(NamedTuple):
    """A launch: its arguments, and at which of these an address or a descriptor is put, and which one."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]
    places: tuple[tuple[int, Place], ...]
    boxes: tuple[tuple[int, Place], ...]
    ready: fast_launch.Ready | None
    opened: fast_launch.Opened | None

    def moved(self, place_of: Callable[[Place], Place]) -> Step:
        """The same at other places."""
        places, boxes = (tuple((at, place_of(place)) for at, place in each) for each in (self.places, self.boxes))
        return self._replace(places=places, boxes=boxes)


# Of a tensor: size, strides, dtype and device.
Asked = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class Replay(NamedTuple):
    """What a call asked for and launched."""

    made: tuple[Asked, ...]
    steps: tuple[Step, ...]
    kernels: tuple[tuple[Any, Any], ...]  # each once, with its compiled variants
    result: Any  # in places

    def fits(self) -> bool:
        return launch.INTERPRETED or fast_launch.usable(self.kernels)

    def run(self, tensors: list[torch.Tensor], addresses: list[int]) -> Any:
        """Launch with the memory of these tensors; returns the result of the call."""
        for size, stride, dtype, device in self.made:
            fresh = torch.empty_strided(size, stride, dtype=dtype, device=device)
            tensors.append(fresh)
            addresses.append(fresh.data_ptr())
        if self.kernels:
            stream = fast_launch.stream()
            for step in self.steps:
                _launch(step, stream, addresses)
        else:
            for step in self.steps:
                _interpret(step, tensors)
        return _result(self.result, tensors)


def _interpret(step: Step, tensors: list[torch.Tensor]) -> None:
    args = list(step.args)
    for at, place in step.places:
        args[at] = place.of(tensors)
    for at, place in step.boxes:
        args[at] = of_base(step.args[at], place.of(tensors))
    launch.run(step.kernel, step.grid, *args, **step.meta)


def _launch(step: Step, stream: int, addresses: list[int]) -> None:
    opened = step.opened
    if opened is None:
        args = list(step.args)
        for at, place in step.places:
            args[at] = addresses[place.index] + place.offset
        for at, place in step.boxes:
            args[at] = fast_launch.at_address(step.args[at], addresses[place.index] + place.offset)
        assert step.ready is not None
        step.ready.launch(step.grid, stream, args)
        return
    args = opened.args.copy()
    for at, place in step.places:
        args[opened.at[at]] = addresses[place.index] + place.offset
    for at, place in step.boxes:
        args[opened.at[at]] = opened.box(at, step.args[at], addresses[place.index] + place.offset)
    opened.launch(step.grid, stream, args)


def _result(kept: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(kept)
    if kind is int:
        return tensors[kept]
    if kind is Place:
        return kept.of(tensors)
    if kept is None:
        return None
    return each_of(kept, lambda part: _result(part, tensors))


def each_of(parts: Any, change: Callable[[Any], Any]) -> Any:
    """A sequence like another, named or not, of its parts changed."""
    made = map(change, parts)
    return type(parts)(*made) if hasattr(parts, "_fields") else type(parts)(made)
