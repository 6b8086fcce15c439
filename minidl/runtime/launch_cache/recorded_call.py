"""A recorded call: the memory it allocates and the kernels it launches, to repeat them for other tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from minidl.runtime import launch
from minidl.runtime.descriptors import of_base
from minidl.runtime.launch_cache import fast_launch


def start_of(x: torch.Tensor) -> int:
    """Return the bytes of memory before the first value of x. (An empty tensor has no address.)"""
    return int(x.storage_offset()) * x.itemsize


class Location(NamedTuple):
    """A tensor in the memory of input or buffer number `base` of the call, `offset` bytes after its first value."""

    base: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, tensors: list[torch.Tensor], as_view: bool = False) -> torch.Tensor:
        tensor = tensors[self.base]
        start = start_of(tensor) + self.offset
        if as_view and tensor.dtype == self.dtype:  # in a third of the time
            return tensor.as_strided(self.size, self.stride, start // self.dtype.itemsize)
        x = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return x.set_(tensor.untyped_storage(), start // self.dtype.itemsize, self.size, self.stride)


class RecordedLaunch(NamedTuple):
    """A launch: its arguments, and the positions among these of tensors and of descriptors, with their locations.
    A copy or fill by torch has its method in place of the kernel, and no grid."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]
    tensors: tuple[tuple[int, Location], ...]
    descriptors: tuple[tuple[int, Location], ...]
    compiled: fast_launch.CompiledLaunch | None
    unpacked: fast_launch.UnpackedLaunch | None
    on_cpu: Any = None  # the launch of the kernel compiled for the CPU

    def relocated(self, relocate: Callable[[Location], Location]) -> RecordedLaunch:
        """Return the launch with other locations."""
        tensors, descriptors = (
            tuple((i, relocate(location)) for i, location in each) for each in (self.tensors, self.descriptors)
        )
        return self._replace(tensors=tensors, descriptors=descriptors)


# Size, strides, dtype and device of a tensor.
Allocation = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class RecordedCall(NamedTuple):
    """The allocations and launches of a call; its tensors are its inputs, followed by its buffers."""

    buffers: tuple[Allocation, ...]
    launches: tuple[RecordedLaunch, ...]
    kernels: tuple[tuple[Any, Any], ...]  # each once, with its compiled variants
    result: Any  # indices and locations in place of tensors

    def replay(self, tensors: list[torch.Tensor], addresses: list[int]) -> Any:
        """Launch with these inputs and return the result; buffers are appended to both lists."""
        for size, stride, dtype, device in self.buffers:
            buffer = torch.empty_strided(size, stride, dtype=dtype, device=device)
            tensors.append(buffer)
            addresses.append(buffer.data_ptr())
        stream = fast_launch.stream() if self.kernels else 0
        for recorded in self.launches:
            if recorded.compiled is not None:
                _launch(recorded, stream, addresses)
            elif recorded.on_cpu is not None:
                recorded.on_cpu.run([addresses[at.base] + at.offset for _, at in recorded.tensors])
            else:
                _run(recorded, tensors)
        return tensors[self.result] if type(self.result) is int else _result(self.result, tensors)


def _run(recorded: RecordedLaunch, tensors: list[torch.Tensor]) -> None:
    args = list(recorded.args)
    for i, location in recorded.tensors:
        args[i] = location.of(tensors, as_view=not recorded.grid)
    if not recorded.grid:
        recorded.kernel(*args)
        return
    for i, location in recorded.descriptors:
        args[i] = of_base(recorded.args[i], location.of(tensors))
    launch.run(recorded.kernel, recorded.grid, *args, **recorded.meta)


def _launch(recorded: RecordedLaunch, stream: int, addresses: list[int]) -> None:
    unpacked = recorded.unpacked
    if unpacked is None:
        args = list(recorded.args)
        for i, location in recorded.tensors:
            args[i] = addresses[location.base] + location.offset
        for i, location in recorded.descriptors:
            args[i] = fast_launch.at_address(recorded.args[i], addresses[location.base] + location.offset)
        assert recorded.compiled is not None
        recorded.compiled.launch(recorded.grid, stream, args)
        return
    args = unpacked.args.copy()
    for i, location in recorded.tensors:
        args[unpacked.position[i]] = addresses[location.base] + location.offset
    for i, location in recorded.descriptors:
        args[unpacked.position[i]] = unpacked.descriptor(
            i, recorded.args[i], addresses[location.base] + location.offset
        )
    x, y, z = (*recorded.grid, 1, 1)[:3]
    unpacked.raw(x, y, z, stream, *unpacked.head, *args)


def _result(result: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(result)
    if kind is int:
        return tensors[result]
    if kind is Location:
        return result.of(tensors)
    if result is None:
        return None
    items = [tensors[item] if type(item) is int else item and _result(item, tensors) for item in result]
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def map_items(items: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple, named tuple or list of the same type with `change` applied to each item."""
    changed = map(change, items)
    return type(items)(*changed) if hasattr(items, "_fields") else type(items)(changed)
