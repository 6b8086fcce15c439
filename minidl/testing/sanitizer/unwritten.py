"""Which elements of fresh memory nothing has written yet.

Memory of torch.empty and its kin counts as unwritten until a kernel stores to it or torch writes to it (copy_, fill_,
indexed assignment, `out=`, any function whose name ends in an underscore). Where torch hands the memory to others
(NumPy, DLPack), nobody sees what they write, and it counts as written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from minidl.testing.memory import UNWRITTEN, is_fresh

_HANDED_OUT = {"numpy", "__array__", "__dlpack__"}
# Named like functions that write, but they change no element.
_NO_WRITE = {
    "requires_grad_", "detach_", "share_memory_", "rename_", "resize_", "set_", "as_strided_", "squeeze_",
    "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_",
}  # fmt: skip
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
# How many records there may be before those of freed memory are dropped.
_MANY = 4096


class Shadow:
    """The unwritten elements of one storage: `unwritten[i]` for the i-th `unit` bytes."""

    def __init__(self, storage: torch.UntypedStorage, unit: int) -> None:
        self.unit = unit
        self.unwritten = torch.zeros(-(-storage.nbytes() // unit), dtype=torch.bool)
        self._storage = StorageWeakRef(storage)

    @property
    def freed(self) -> bool:
        return bool(self._storage.expired())

    def mark(self, tensor: torch.Tensor, unwritten: bool) -> None:
        """Say of the elements of a tensor in this storage that they are written, or not."""
        if tensor.numel() == 0:
            return
        if tensor.element_size() == self.unit:
            once = tuple(1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            self.unwritten.as_strided(once, tensor.stride(), tensor.storage_offset()).fill_(unwritten)
        else:
            first = tensor.storage_offset() * tensor.element_size()
            last = first + span(tensor) * tensor.element_size()
            self.unwritten[first // self.unit : -(-last // self.unit)] = unwritten


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor, gaps counted."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


class Unwritten(TorchFunctionMode):
    """A context that keeps the shadows of what torch allocates in it."""

    def __init__(self) -> None:
        super().__init__()
        self._shadows: dict[int, Shadow] = {}

    def of(self, storage: torch.UntypedStorage) -> Shadow | None:
        """The shadow of a storage, None where all of it counts as written."""
        address = storage.data_ptr()
        shadow = self._shadows.get(address)
        if shadow is not None and shadow.freed:
            del self._shadows[address]
            return None
        return shadow

    def add(self, tensor: torch.Tensor) -> None:
        """Count the elements of a tensor as unwritten."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return
        with torch._C.DisableTorchFunction():
            if len(self._shadows) >= _MANY:
                self._shadows = {address: s for address, s in self._shadows.items() if not s.freed}
            storage = tensor.untyped_storage()
            shadow = self._shadows[storage.data_ptr()] = Shadow(storage, tensor.element_size())
            shadow.mark(tensor, True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in UNWRITTEN:
            if is_fresh(func, args, kwargs, result):
                self.add(result)
        elif self._shadows:
            for tensor, whole in _written(func, args, kwargs or {}):
                self._write(tensor, whole)
        return result

    def _write(self, tensor: torch.Tensor, whole: bool) -> None:
        with torch._C.DisableTorchFunction():
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                return
            shadow = self.of(tensor.untyped_storage())
            if shadow is not None and whole:
                shadow.unwritten.fill_(False)
            elif shadow is not None:
                shadow.mark(tensor, False)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that a function of torch wrote, and whether all of their storage is to count as written."""
    name = getattr(func, "__name__", "")
    handed_out = name in _HANDED_OUT
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE
    written = []
    if name == "__setitem__":
        written.append(_assigned(args[0], args[1]))
    elif args and (in_place or handed_out or name in _AUGMENTED):
        written += args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    out = kwargs.get("out")
    written += out if isinstance(out, (list, tuple)) else [out]
    for tensor in written:
        if isinstance(tensor, torch.Tensor):
            yield tensor, handed_out


def _assigned(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """The part of a tensor that an indexed assignment writes; all of it where the index gives no view."""
    with torch._C.DisableTorchFunction():
        part = tensor[index]
        same = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return part if same else tensor
