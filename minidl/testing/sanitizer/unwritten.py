"""Tracking of unwritten elements in newly allocated memory.

Memory from torch.empty and similar functions, and memory that resize_ adds, counts as unwritten until a kernel stores
to it or torch writes to it (copy_, fill_, indexed assignment, `out=`, any function whose name ends in an underscore).
Memory that torch shares with others (NumPy, DLPack, a storage) counts as written, since their writes are invisible; so
does memory whose version shows another writer, such as another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from minidl.kernels.memory_layout import span
from minidl.testing.fake_gpu import called_by
from minidl.testing.memory import UNWRITTEN, is_fresh, without_repeats

_SHARING = {"numpy", "__array__", "__dlpack__"}
# These functions share memory, too, unless the interpreter, torch or minidl calls them.
_STORAGES = {"untyped_storage"}
_TRUSTED = ("triton.", "torch.", "minidl.")
# Functions named like those that write, which change no element.
_NO_WRITE = {
    "requires_grad_", "detach_", "share_memory_", "rename_", "resize_", "set_", "as_strided_", "squeeze_",
    "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_",
}  # fmt: skip
_AUGMENTED = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
# With this many shadows, those of freed memory are dropped.
_MANY = 4096


class Shadow:
    """The unwritten elements of a storage: `unwritten[i]` for the i-th `unit` bytes, as of a tensor's version."""

    def __init__(self, storage: torch.UntypedStorage, unit: int, version: int) -> None:
        self.unit, self.version = unit, version
        self.unwritten = torch.zeros(-(-storage.nbytes() // unit), dtype=torch.bool)
        self._storage = StorageWeakRef(storage)

    @property
    def freed(self) -> bool:
        return bool(self._storage.expired())

    def belongs_to(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this belongs to the storage, not to an earlier one at the same address."""
        return not self.freed and self._storage.cdata == storage._cdata

    def mark(self, tensor: torch.Tensor, unwritten: bool) -> None:
        """Mark the elements of a tensor in this storage as unwritten or written."""
        if tensor.numel() == 0:
            return
        if tensor.element_size() == self.unit:
            elements = self.unwritten.as_strided(without_repeats(tensor), tensor.stride(), tensor.storage_offset())
            elements.fill_(unwritten)
        else:
            first = tensor.storage_offset() * tensor.element_size()
            last = first + span(tensor) * tensor.element_size()
            self.unwritten[first // self.unit : -(-last // self.unit)] = unwritten


class Unwritten(TorchFunctionMode):
    """A context that tracks the memory that torch allocates in it."""

    def __init__(self) -> None:
        super().__init__()
        self._shadows: dict[int, Shadow] = {}

    def of(self, storage: torch.UntypedStorage) -> Shadow | None:
        """Return the shadow of a storage; None if all of it counts as written."""
        address = storage.data_ptr()
        shadow = self._shadows.get(address)
        if shadow is not None and not shadow.belongs_to(storage):
            del self._shadows[address]
            return None
        return shadow

    def _of_tensor(self, tensor: torch.Tensor) -> Shadow | None:
        tracked = self._shadows and tensor.layout == torch.strided and tensor.device.type == "cpu"
        return self.of(tensor.untyped_storage()) if tracked else None

    def add(self, tensor: torch.Tensor) -> None:
        """Count the elements of a tensor as unwritten."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return
        with torch._C.DisableTorchFunction():
            if len(self._shadows) >= _MANY:
                self._shadows = {address: s for address, s in self._shadows.items() if not s.freed}
            storage = tensor.untyped_storage()
            shadow = self._shadows[storage.data_ptr()] = Shadow(storage, tensor.element_size(), _version(tensor))
            shadow.mark(tensor, True)

    def catch_up(self, tensor: torch.Tensor) -> None:
        """Count all of a tensor's memory as written if its version shows an unseen write."""
        with torch._C.DisableTorchFunction():
            shadow = self._of_tensor(tensor)
            if shadow is not None and _version(tensor) > shadow.version:
                shadow.version = _version(tensor)
                shadow.unwritten.fill_(False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = list(_written(func, args, kwargs or {})) if self._shadows and func not in UNWRITTEN else []
        for tensor, _ in written:
            self.catch_up(tensor)
        if getattr(func, "__name__", "") == "resize_" and args[0].device.type == "cpu":
            return self._resize(args[0], lambda: func(*args, **(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        for tensor, entirely in written:
            self._write(tensor, entirely)
        if func in UNWRITTEN:
            with torch._C.DisableTorchFunction():
                fresh = result.detach() if result.requires_grad else result
                if is_fresh(func, args, kwargs, fresh):
                    self.add(fresh)
        return result

    def _resize(self, tensor: torch.Tensor, resize: Callable[[], Any]) -> Any:
        """Return the result of resize_; added memory is unwritten, earlier memory keeps its state."""
        with torch._C.DisableTorchFunction():
            before, shadow = tensor.untyped_storage().nbytes(), self._of_tensor(tensor)
        result = resize()
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if storage.nbytes() > before:
                new = Shadow(storage, shadow.unit if shadow else tensor.element_size(), _version(tensor))
                new.unwritten[-(-before // new.unit) :] = True
                if shadow is not None:
                    new.unwritten[: len(shadow.unwritten)] |= shadow.unwritten
                self._shadows[storage.data_ptr()] = new
        return result

    def _write(self, tensor: torch.Tensor, entirely: bool) -> None:
        with torch._C.DisableTorchFunction():
            shadow = self._of_tensor(tensor)
            if shadow is None:
                return
            shadow.version = max(shadow.version, _version(tensor))
            if entirely:
                shadow.unwritten.fill_(False)
            else:
                shadow.mark(tensor, False)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors that a torch function writes, and whether all of their storage counts as written."""
    name = getattr(func, "__name__", "")
    shares = name in _SHARING or (name in _STORAGES and not called_by(_TRUSTED))
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE
    written: list[Any] = []
    if name == "__setitem__":
        written.append(_assigned(args[0], args[1]))
    elif in_place or shares or name in _AUGMENTED:
        # torch.nn.init names all arguments.
        first = args[0] if args else next(iter(kwargs.values()), None)
        written += first if isinstance(first, (list, tuple)) else [first]
    out = kwargs.get("out")
    written += out if isinstance(out, (list, tuple)) else [out]
    for tensor in written:
        if isinstance(tensor, torch.Tensor):
            yield tensor, shares


def _assigned(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return the part of a tensor that an indexed assignment writes; all of it if the index gives no view."""
    with torch._C.DisableTorchFunction():
        part = tensor[index]
        same = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return part if same else tensor
