"""Tensors joined along a dimension; joined again and again along the channels, in one memory.

A dense block joins what it has with the result of each layer, for the next layer's batch norm. Copied each time that is
twice all channels so far for each layer, and all of it is kept for the gradient: in the blocks of DenseNet-121 4 to 15
times what they end with. A batch norm reads rows of channels that lie apart. So from the second join of what was joined
before on, written as `x = cat([x, new], 1)` or as a longer list each time, parts lie in a `Room`, rows that are wider
than what they hold, and only what is new is copied. How wide a room came to be is noted: in the next call of the same
module the first join makes one of that width, which is moved no more. Nothing but a batch norm and the joins after it
sees that memory: for all else the parts are joined as always, and what was joined may be changed without a change of
anything else.

Two tensors that are joined for a convolution are not copied where its kernel reads both (`as_concat_pair`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.autograd import Function, is_grad_enabled
from minidl.autograd.deferred import Deferred, call, may_wait, waiting
from minidl.kernels import check
from minidl.ops.shape import reshape, to, unsqueeze
from minidl.tensors import Tensor

__all__ = ["cat", "hstack", "stack", "vstack"]

_NAME, _WIDTHS = "joins", "widths of joins"
GROWTH = 2  # a room's channels for each that is needed now; what is copied when it is full is less than it holds
WHOLE = 16  # channels of which a room has a multiple, so that rows begin at multiples of 16 bytes


# Of each module's last call: the channels that were joined in the end, for its first joins in their order.
_reached: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


class Cat(Function):
    """Parts [.., C_i, ..] as one tensor [.., sum of C_i, ..] in memory of its own."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return None, *dy.split(ctx.sizes, ctx.dim)


class CatInRoom(Cat):
    """Parts [N, C_i, ...], the first of which lies in a room, or is copied there, and ends where it is filled to."""

    @staticmethod
    def forward(ctx: Any, room: Room, *parts: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.dim, ctx.sizes = 1, [part.shape[1] for part in parts]
        for part in parts[1:]:
            room.add(part)
        return room.held()


class Room:
    """Rows of channels, [N, ..., channels], of which the first `filled` hold a tensor."""

    def __init__(self, first: torch.Tensor, channels: int) -> None:
        self.rows = first.new_empty(first.shape[0], *first.shape[2:], -(-channels // WHOLE) * WHOLE)
        self.filled = 0
        self.add(first)

    def add(self, part: torch.Tensor) -> None:
        """Copy a part [N, C, ...] behind the others. By `data`: to those that hold what is before, nothing changes."""
        start, self.filled = self.filled, self.filled + part.shape[1]
        self.rows.data[..., start : self.filled].copy_(part.movedim(1, -1))

    def held(self) -> torch.Tensor:
        """All parts, [N, filled, ...]."""
        return self.rows.data[..., : self.filled].movedim(-1, 1)


class Seen:
    """A part as it was when it was joined; it does not keep the part."""

    def __init__(self, part: Tensor) -> None:
        self.part, self.data, self.state = weakref.ref(part), weakref.ref(part.data), _state(part)

    def is_of(self, part: Tensor) -> bool:
        return self.part() is part and self.data() is part.data and self.state == _state(part)


def _state(part: Tensor) -> tuple[int, bool]:
    return part.data._version, part.requires_grad


class Widths:
    """Of the call under way: channels that are joined in the end, as they were in the last call and as they are so far,
    for each join of what was not joined before."""

    def __init__(self, owner: Any) -> None:
        self.last: list[int] = _reached.get(owner, [])
        self.now: list[int] = []
        _reached[owner] = self.now

    def begun(self, channels: int) -> int:
        """The number of a first join."""
        self.now.append(channels)
        return len(self.now) - 1

    def known(self, number: int | None, channels: int) -> int:
        """How many there were in the end, of a join that has so many now; 0 where that is not known."""
        if number is None:
            return 0
        self.now[number] = max(self.now[number], channels)
        found = self.last[number] if number < len(self.last) else 0
        return found if found >= channels else 0


def widths() -> Widths | None:
    """The notes of the call under way, None outside of one."""
    under_way = call()
    if under_way is None:
        return None
    if _WIDTHS not in under_way.notes:
        under_way.notes[_WIDTHS] = Widths(under_way.owner)
    found: Widths = under_way.notes[_WIDTHS]
    return found


class DeferredJoin(Deferred):
    """Parts [N, C_i, ...] joined along the channels when it is known what for."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        before, count = _before(parts)
        new = parts[count:]
        self.room: Room | None = None
        self.made: Tensor | None = None
        self.again = before is not None
        self.number: int | None = None if before is None else before.number
        if before is not None and before.made is not None:
            self.room, parts = before.room, [before.made, *new]
        shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), *parts[0].shape[2:])
        wants = any(part.requires_grad for part in parts)
        super().__init__(shape, parts[0].dtype, parts[0].device, wants, *parts)
        self.parts = parts
        self.seen: tuple[Seen, ...] = (*(before.seen if before is not None else ()), *map(Seen, new))

    def compute(self) -> Tensor:
        return Cat.apply(1, *self.parts) if self.room is not None or self.made is None else self.made

    def in_rows(self) -> Tensor:
        made = self.made
        if made is None:
            self.unchanged()
            known = self._known()
            in_room = self.again or known > self.shape[1]
            made = CatInRoom.apply(self._with_room(known), *self.parts) if in_room else Cat.apply(1, *self.parts)
            self.made = made
            if (under_way := call()) is not None:
                under_way.notes[_NAME] = self
        return made

    def as_concat_pair(self, reads: Callable[[Tensor, Tensor], bool]) -> Any:
        parts = self.parts
        return parts if len(parts) == 2 and parts[0].shape == parts[1].shape and reads(*parts) else None

    def holds(self, parts: Sequence[Tensor]) -> bool:
        """Whether it was made of these parts, as they are now."""
        same = len(self.seen) == len(parts) and all(seen.is_of(t) for seen, t in zip(self.seen, parts, strict=True))
        return same and self.made is not None and self._recorded == is_grad_enabled()

    def _known(self) -> int:
        """How many channels the last call joined to these in the end, 0 where that is not known."""
        noted = widths()
        if noted is None:
            return 0
        if not self.again:
            self.number = noted.begun(self.shape[1])
        return noted.known(self.number, self.shape[1])

    def _with_room(self, known: int) -> Room:
        """The room of the first part, or a new one with it: where there was none, where it is full, and where
        something else was joined to the same part."""
        channels = self.shape[1]
        room = self.room
        if room is None or room.filled != self.parts[0].shape[1] or channels > room.rows.shape[-1]:
            room = self.room = Room(self.parts[0].data, known or GROWTH * channels)
        return room


def _before(parts: Sequence[Tensor]) -> tuple[DeferredJoin | None, int]:
    """The join that the first parts are, or have been joined to before, and how many they are; (None, 0) if there is
    none that a batch norm has read."""
    under_way = call()
    first, last = waiting(parts[0]), None if under_way is None else under_way.notes.get(_NAME)
    if isinstance(first, DeferredJoin) and first.made is not None:
        return first, 1
    if isinstance(last, DeferredJoin) and last.holds(parts[: len(last.seen)]):
        return last, len(last.seen)
    return None, 0


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts that fit together joined along a dimension, 0 or more."""
    if dim == 1 and parts[0].ndim > 2 and parts[0].dtype.is_floating_point and all(map(may_wait, parts)):
        return Tensor._of_later(DeferredJoin(tuple(parts)))  # a list may be longer by the time
    return Cat.apply(dim, *parts)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors joined along `dim`, in the dtype that all of them promote to; those of shape [0] are left out, as torch
    does.

    Raises ValueError for sizes that differ elsewhere, and other devices.
    """
    if not tensors:
        raise ValueError("cat: got no tensors, expected at least one")
    if len(kinds := {part.dtype for part in tensors}) > 1:
        kind = functools.reduce(torch.promote_types, kinds)
        tensors = [to(part, kind) for part in tensors]
    tensors = [part for part in tensors if part.shape != (0,)] or tensors
    first = tensors[0]
    at = check.axis("cat", dim, first.ndim)
    check.same("cat", **{f"tensors[{i}]": part for i, part in enumerate(tensors)})
    for i, part in enumerate(tensors):
        if (*part.shape[:at], *part.shape[at + 1 :]) != (*first.shape[:at], *first.shape[at + 1 :]):
            raise ValueError(
                f"cat: tensors[{i}] has shape {list(part.shape)}, which does not fit "
                f"{list(first.shape)} along dim {dim}"
            )
    return joined(tensors, at)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return cat([unsqueeze(part, dim) for part in tensors], dim)


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors joined along their second dimension, vectors along their first."""
    parts = [t if t.ndim else reshape(t, 1) for t in tensors]
    return cat(parts, 0 if parts and parts[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors joined along their first dimension, vectors as rows."""
    return cat([t if t.ndim > 1 else reshape(t, 1, t.numel()) for t in tensors], 0)
