"""Guard bands around tensors, and memory that shows when it is read before it is written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class MemoryGuardError(AssertionError):
    """Memory around a tensor was written, or an input was changed."""


# Elements before and after each guarded tensor: a whole number of pages of every dtype, so alignment stays.
_BAND = 4096
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The lowest of the NaN used, and how many payloads it has.
_NAN = {
    torch.float16: (0x7E00, 2**9),
    torch.bfloat16: (0x7FC0, 2**6),
    torch.float32: (0x7FC00000, 2**22),
    torch.float64: (0x7FF8 << 48, 2**32),
}
_LARGE = {1: (0x65, 2**4), 2: (2**14, 2**12), 4: (2**30, 2**24), 8: (2**62, 2**32)}


def _pattern(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bits of `count` elements: NaN with different payloads for floating types, large numbers for integers."""
    size = dtype.itemsize
    lowest, payloads = _NAN[dtype] if dtype in _NAN else _LARGE[size]
    return (lowest + torch.arange(count, device=device) % payloads).to(_BITS[size])


@dataclass
class _Guard:
    """A buffer with a tensor in it: which elements belong to the tensor, and what the others were."""

    buffer: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    inside: torch.Tensor
    first: int
    last: int
    content: torch.Tensor | None = None

    def check(self) -> None:
        expected = _pattern(len(self.buffer), self.dtype, self.buffer.device) if self.content is None else self.content
        changed = self.buffer != expected
        written = changed & ~self.inside
        if written.any():
            places = written.nonzero().flatten().tolist()
            raise MemoryGuardError(
                f"{len(places)} elements outside a {self._name()} were written, the first {self._place(places[0])}"
            )
        if self.content is not None and changed.any():
            raise MemoryGuardError(f"{int(changed.sum())} elements of the input {self._name()} were changed")

    def _name(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} tensor of shape {list(self.shape)} ({self.where})"

    def _place(self, at: int) -> str:
        if at < self.first:
            return f"{self.first - at} before its start"
        return f"{at - self.last} past its end" if at > self.last else "in a gap between its rows"


class GuardedAllocations(TorchFunctionMode):
    """A context in which what torch allocates lies between bands of NaN that must stay as they are.

    Tensors from torch.empty and its kin are also filled with NaN (large numbers for integers), so that reading memory
    that nothing has written shows in the result. Each NaN of a band carries another payload, and the bits are compared
    by `check()`, which leaving the context calls. Copies (contiguous, clone, cat, to) lie between bands too.
    Raises MemoryGuardError when memory outside a tensor was written, or an input given to `guard` was changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: list[_Guard] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_fresh(func, args, kwargs, result):
            return result
        placed = self._place(tuple(result.shape), result.stride(), result.dtype, result.device, 0)
        if func not in UNWRITTEN:
            return placed.copy_(result)
        for tell in told:
            tell(placed)
        return placed

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        if exc[0] is None:
            self.check()

    def guard(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an input with the same strides and alignment, NaN around it and in its gaps, not to be changed."""
        with torch._C.DisableTorchFunction():
            offset = tensor.data_ptr() % 64 // tensor.element_size()
            placed = self._place(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, offset)
            # Every element of an expanded dimension is the same memory, written once.
            once = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
            placed[once].copy_(tensor[once])
            self._guards[-1].content = self._guards[-1].buffer.clone()
        return placed

    def check(self) -> None:
        """Compare every band and gap. Raises MemoryGuardError."""
        with torch._C.DisableTorchFunction():
            for guard in self._guards:
                guard.check()

    def _place(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int
    ) -> torch.Tensor:
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        first = _BAND + offset
        buffer = _pattern(first + span + _BAND, dtype, device)
        inside = torch.zeros(len(buffer), dtype=torch.bool, device=device)
        inside.as_strided(tuple(1 if s == 0 else n for n, s in zip(shape, stride, strict=True)), stride, first).fill_(
            True
        )
        self._guards.append(_Guard(buffer, shape, dtype, _caller(), inside, first, first + span - 1))
        return buffer.view(dtype).as_strided(shape, stride, first)


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """A copy of `tensor` between bands of NaN, and a function that raises MemoryGuardError if the bands were written.

    Writing to the tensor itself is allowed: for outputs given to a kernel.
    """
    guards = GuardedAllocations()
    placed = guards.guard(tensor)
    guards._guards[-1].content = None
    return placed, guards.check


class _Poison(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in UNWRITTEN and is_fresh(func, args, kwargs, result):
            bits = result.view(_BITS[result.element_size()])
            bits.copy_(_pattern(result.numel(), result.dtype, result.device).view(result.shape))
        return result


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """A context in which torch.empty and its kin give NaN (large numbers for integers), not what was there before."""
    with _Poison():
        yield


# Functions to be told of each tensor that stands for memory which nothing has written.
told: list[Callable[[torch.Tensor], None]] = []
UNWRITTEN = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
_WRITTEN = {
    torch.zeros,
    torch.zeros_like,
    torch.ones,
    torch.ones_like,
    torch.full,
    torch.full_like,
    torch.cat,
    torch.clone,
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_full,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.half,
    torch.Tensor.double,
}


def is_fresh(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> bool:
    """Whether `result` is a strided tensor that this call of `func` allocated."""
    if func not in UNWRITTEN and func not in _WRITTEN:
        return False
    if not isinstance(result, torch.Tensor) or result.requires_grad or "out" in (kwargs or {}):
        return False
    if result.layout != torch.strided or result.device.type == "meta" or result.dtype.is_complex:
        return False
    source = args[0] if args else None
    return not (
        isinstance(source, torch.Tensor)
        and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        and result.numel() > 0
    )


def _caller() -> str:
    """File and line of the nearest frame outside torch and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"
