"""The memory of a kernel's arguments, and the programs of a launch that accessed it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

from minidl.kernels.memory_layout import span
from minidl.testing.memory import without_repeats
from minidl.testing.sanitizer.unwritten import Shadow, Unwritten

# Gaps in views are checked if the view spans at most this many elements.
_GAPS_LIMIT = 2**24
# Storages of more elements have narrower stamps, and races of lanes in them are not checked: stamps of 2^32 elements
# need too much memory.
_LARGE = 2**28


class Storage:
    """Memory that several arguments may share, with the stamps of this launch's accesses to each `unit` bytes."""

    def __init__(self, address: int, size: int, unit: int, shadow: Shadow | None) -> None:
        self.address, self.size, self.unit, self.shadow = address, size, unit, shadow
        self._programs: dict[str, np.ndarray] = {}

    def use_unit(self, unit: int) -> None:
        """Record accesses in units of this size or finer."""
        if unit < self.unit:
            finer, self.unit = self.unit // unit, unit
            for kind, programs in self._programs.items():
                self._programs[kind] = np.repeat(programs, finer)[: -(-self.size // unit)]

    @property
    def large(self) -> bool:
        return self.size > _LARGE * self.unit

    def had(self, kind: str) -> bool:
        """Return whether there was an access of the kind."""
        return kind in self._programs

    def last(self, kind: str) -> np.ndarray:
        """Return the stamp of the last "load", "store" or "atomic" of each element."""
        if kind not in self._programs:
            dtype = np.int32 if self.large else np.int64
            self._programs[kind] = np.zeros(-(-self.size // self.unit), dtype)
        return self._programs[kind]


class Region:
    """An argument: the bytes from a tensor's first element to its last."""

    def __init__(self, name: str, tensor: torch.Tensor, storage: Storage) -> None:
        self.name, self.storage = name, storage
        self.address = tensor.data_ptr()
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.item = tensor.element_size()
        self.elements = span(tensor)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self._occupied: np.ndarray | None = None
        if tensor.numel() < self.elements <= _GAPS_LIMIT:
            occupied = torch.zeros(self.elements, dtype=torch.bool)
            occupied.as_strided(without_repeats(tensor), self.strides).fill_(True)
            self._occupied = occupied.numpy()

    def inside(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return which accesses of `size` bytes at byte offsets lie on elements of the tensor."""
        fits = (offsets >= 0) & (offsets + size <= self.elements * self.item)
        if self._occupied is not None and fits.any():
            first, last = offsets[fits], offsets[fits] + (size - 1)
            fits[fits] = self._occupied[first // self.item] & self._occupied[last // self.item]
        return fits

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} tensor of shape {list(self.shape)})"

    def index(self, offset: int) -> tuple[int, ...] | None:
        """Return the index of the element at a byte offset; None outside and in gaps."""
        rest, index = offset // self.item, [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda a: -self.strides[a]):
            if self.strides[axis] > 0 and self.shape[axis] > 1:
                index[axis], rest = divmod(rest, self.strides[axis])
        fits = rest == 0 and all(0 <= i < n for i, n in zip(index, self.shape, strict=True))
        return tuple(index) if fits else None

    def position(self, offset: int) -> str:
        """Describe a byte offset."""
        index = self.index(offset)
        if index is not None:
            return f"element {list(index)} of {self}"
        element, last = offset // self.item, self.elements - 1
        if element < 0:
            return f"{-element} before the start of {self}"
        if element > last:
            return f"{element - last} past the end of {self}"
        return f"an element in a gap between rows of {self}"


class Regions:
    """The arguments of a launch, by the number in their pointers (from 1), and all other live tensors."""

    def __init__(self, unwritten: Unwritten) -> None:
        self._unwritten = unwritten
        self.arguments: list[Region] = []
        self._storages: dict[int, Storage] = {}
        self._others: tuple[np.ndarray, list[Region]] | None = None

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """Add an argument and return its number."""
        with torch._C.DisableTorchFunction():
            self.arguments.append(Region(name, tensor, self._storage(tensor)))
        return len(self.arguments)

    def _storage(self, tensor: torch.Tensor) -> Storage:
        memory = tensor.untyped_storage()
        address, unit = memory.data_ptr(), tensor.element_size()
        storage = self._storages.get(address)
        if storage is None:
            storage = self._storages[address] = Storage(address, memory.nbytes(), unit, self._unwritten.of(memory))
        storage.use_unit(unit)
        return storage

    def around(self, addresses: np.ndarray) -> tuple[np.ndarray, list[Region]]:
        """Return the index of the region of each address without a number (-1 for none), and the regions."""
        starts, regions = self._live()
        if not regions:
            return np.full(addresses.shape, -1), regions
        indices = np.searchsorted(starts, addresses, side="right") - 1
        ends = np.array([region.address + region.elements for region in regions], np.uint64)
        return np.where((indices >= 0) & (addresses < ends[indices]), indices, -1), regions

    def _live(self) -> tuple[np.ndarray, list[Region]]:
        if self._others is None:
            with torch._C.DisableTorchFunction():
                live = {r.address: r for r in map(self._storage_region, filter(_is_plain, gc.get_objects()))}
            regions = [live[address] for address in sorted(live)]
            self._others = np.array([region.address for region in regions], np.uint64), regions
        return self._others

    def _storage_region(self, tensor: torch.Tensor) -> Region:
        """Return the entire storage of a tensor, for an address that a kernel read from memory."""
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return Region("memory that no argument names", memory, self._storage(tensor))


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.untyped_storage().nbytes() > 0
    )
