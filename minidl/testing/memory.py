"""Guard bands around tensors, and a fill pattern that reveals reads of unwritten memory."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from minidl.kernels import memory_layout


class MemoryGuardError(AssertionError):
    """A write outside a tensor or to an input."""


# Elements before and after each guarded tensor: whole pages for every dtype, which keeps alignment.
_BAND = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The lowest NaN of the pattern, and its number of payloads.
_NAN = {
    torch.float16: (0x7E00, 2**9),
    torch.bfloat16: (0x7FC0, 2**6),
    torch.float32: (0x7FC00000, 2**22),
    torch.float64: (0x7FF8 << 48, 2**32),
}
_LARGE = {1: (0x65, 2**4), 2: (2**14, 2**12), 4: (2**30, 2**24), 8: (2**62, 2**32)}


def _pattern(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits of `count` elements: NaN with different payloads, or large numbers for integers."""
    size = dtype.itemsize
    lowest, payloads = _NAN[dtype] if dtype in _NAN else _LARGE[size]
    return (lowest + torch.arange(count, device=device) % payloads).to(_BITS[size])


@dataclass
class _Guard:
    """A buffer around a tensor: the elements of the tensor in it, and the expected content."""

    buffer: torch.Tensor
    tensor: torch.Tensor
    where: str
    inside: torch.Tensor
    first: int
    last: int
    content: torch.Tensor | None = None

    def check(self) -> None:
        expected = self.content
        if expected is None:
            expected = _pattern(len(self.buffer), self.tensor.dtype, self.buffer.device)
        changed = self.buffer != expected
        written = changed & ~self.inside
        if written.any():
            positions = written.nonzero().flatten().tolist()
            first = self._describe(positions[0])
            raise MemoryGuardError(
                f"{len(positions)} elements outside a {self._name()} were written, the first {first}"
            )
        if self.content is not None and changed.any():
            raise MemoryGuardError(f"{int(changed.sum())} elements of the input {self._name()} were changed")

    def _name(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{dtype} tensor of shape {list(self.tensor.shape)} ({self.where})"

    def _describe(self, position: int) -> str:
        if position < self.first:
            return f"{self.first - position} before its start"
        return f"{position - self.last} past its end" if position > self.last else "in a gap between its rows"


class GuardedAllocations(TorchFunctionMode):
    """A context in which torch allocates tensors between bands of NaN that must not change.

    Tensors from torch.empty and similar functions are also filled with NaN (large numbers for integers), so that reads
    of unwritten memory show in the result. Each NaN of a band has another payload; `check()`, which runs when the
    context ends, compares the bits. Copies (contiguous, clone, cat, to) are allocated between bands, too.
    Raises MemoryGuardError when memory outside a tensor was written, or an input given to `guard` was changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: list[_Guard] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_fresh(func, args, kwargs, result):
            return result
        tensor = self._allocate(result, 0)
        if func not in UNWRITTEN:
            return tensor.copy_(result)
        for listener in listeners:
            listener(tensor)
        return tensor

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        if exc[0] is None:
            self.check()

    def guard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of an input, which must not change, with equal strides and alignment and NaN around it."""
        with torch._C.DisableTorchFunction():
            offset = tensor.data_ptr() % 64 // tensor.element_size()
            copy = self._allocate(tensor, offset)
            # The elements of an expanded dimension share memory, which is written once.
            once = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
            copy[once].copy_(tensor[once])
            self._guards[-1].content = self._guards[-1].buffer.clone()
        return copy

    def check(self) -> None:
        """Compare every band and gap. Raises MemoryGuardError."""
        with torch._C.DisableTorchFunction():
            for guard in self._guards:
                guard.check()

    def _allocate(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """Return a tensor of the same shape, strides and dtype in a guarded buffer, `offset` elements past its band."""
        first = _BAND + offset
        last = first + memory_layout.span(like) - 1
        buffer = _pattern(last + 1 + _BAND, like.dtype, like.device)
        inside = torch.zeros(len(buffer), dtype=torch.bool, device=like.device)
        inside.as_strided(without_repeats(like), like.stride(), first).fill_(True)
        tensor = buffer.view(like.dtype).as_strided(like.shape, like.stride(), first)
        self._guards.append(_Guard(buffer, tensor, _caller(), inside, first, last))
        return tensor


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return a copy of `tensor` between bands of NaN, and a function that raises MemoryGuardError if one was written.

    The tensor itself may be written, so use this for outputs of a kernel.
    """
    guards = GuardedAllocations()
    copy = guards.guard(tensor)
    guards._guards[-1].content = None
    return copy, guards.check


class _Poison(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in UNWRITTEN and is_fresh(func, args, kwargs, result):
            bits = result.view(_BITS[result.element_size()])
            bits.copy_(_pattern(result.numel(), result.dtype, result.device).view(result.shape))
        return result


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Return a context in which torch.empty and similar functions return NaN (large numbers for integers)."""
    with _Poison():
        yield


# Functions that are called with each tensor of unwritten memory that GuardedAllocations creates.
listeners: list[Callable[[torch.Tensor], None]] = []
UNWRITTEN = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided,
}  # fmt: skip
_WRITTEN = {
    getattr(owner, name)
    for owner, names in {
        torch: "zeros zeros_like ones ones_like full full_like cat clone",
        torch.Tensor: "new_zeros new_ones new_full clone contiguous to float half double",
    }.items()
    for name in names.split()
}


def is_fresh(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> bool:
    """Return whether `result` is a strided tensor that this call of `func` allocated."""
    if (func not in UNWRITTEN and func not in _WRITTEN) or "out" in (kwargs or {}):
        return False
    if not isinstance(result, torch.Tensor) or result.requires_grad or result.dtype.is_complex:
        return False
    if result.layout != torch.strided or result.device.type == "meta":
        return False
    source = args[0] if args and isinstance(args[0], torch.Tensor) and result.numel() else None
    return source is None or result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def without_repeats(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape with size 1 for expanded dimensions, so that each element of memory occurs once."""
    return tuple(1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _caller() -> str:
    """Return file and line of the nearest frame outside torch and this file."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name:
            return f"{name}:{line}"
    return "unknown place"
