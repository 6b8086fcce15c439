"""Concatenation: `cat`, `stack` and their relatives; repeated concatenation along the channels shares one buffer.

A dense block concatenates its input with each layer's result, for the next layer's batch norm. Copying every time
would read and write all channels so far for each layer, and save all copies for the gradient: in the blocks of
DenseNet-121 4 to 15 times their final size. A batch norm reads rows of channels with gaps. So from the second
concatenation on, written as `x = cat([x, new], 1)` or as a longer list each time, parts are stored in a `Room`, rows
that are wider than their contents, and only new parts are copied. The final width is recorded: in the next call of the
same module the first concatenation allocates that width. Only batch norms and later concatenations read this buffer:
every other operation gets an ordinary copy, and may change it.

Two tensors that are concatenated for a convolution are not copied if its kernel reads both (`as_concat_pair`).
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
GROWTH = 2  # allocated channels per channel in use; a copy of a full room moves less than it holds
ROUNDED_TO = 16  # a room has a multiple of as many channels, so that rows begin at multiples of 16 bytes


# Of each module's last call: the channels that were joined in the end, for its first joins in their order.
_reached: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


class Cat(Function):
    """Parts [.., C_i, ..] as one tensor [.., sum of C_i, ..] in new memory."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return None, *dy.split(ctx.sizes, ctx.dim)

    recorded_backward = backward


class CatInRoom(Cat):
    """Parts [N, C_i, ...]; the first is the contents of a room."""

    @staticmethod
    def forward(ctx: Any, room: Room, *parts: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.dim, ctx.sizes = 1, [part.shape[1] for part in parts]
        for part in parts[1:]:
            room.add(part)
        return room.contents()


class Room:
    """Rows of channels, [N, ..., channels], of which the first `filled` hold a tensor."""

    def __init__(self, first: torch.Tensor, channels: int) -> None:
        self.rows = first.new_empty(first.shape[0], *first.shape[2:], -(-channels // ROUNDED_TO) * ROUNDED_TO)
        self.filled = 0
        self.add(first)

    def add(self, part: torch.Tensor) -> None:
        """Append a part [N, C, ...]. By `data`: tensors over earlier parts keep their version."""
        start, self.filled = self.filled, self.filled + part.shape[1]
        self.rows.data[..., start : self.filled].copy_(part.movedim(1, -1))

    def contents(self) -> torch.Tensor:
        """Return all parts, [N, filled, ...]."""
        return self.rows.data[..., : self.filled].movedim(-1, 1)


class Seen:
    """The state of a part when it was joined, with weak references."""

    def __init__(self, part: Tensor) -> None:
        self.part, self.data, self.state = weakref.ref(part), weakref.ref(part.data), _state(part)

    def is_of(self, part: Tensor) -> bool:
        return self.part() is part and self.data() is part.data and self.state == _state(part)


def _state(part: Tensor) -> tuple[int, bool]:
    return part.data._version, part.requires_grad


class Widths:
    """The final numbers of channels of each first join: of the last call, and so far of this one."""

    def __init__(self, owner: Any) -> None:
        self.last: list[int] = _reached.get(owner, [])
        self.now: list[int] = []
        _reached[owner] = self.now

    def register(self, channels: int) -> int:
        """Return the number of a first join."""
        self.now.append(channels)
        return len(self.now) - 1

    def final(self, number: int | None, channels: int) -> int:
        """Return the final number of channels of a join that has `channels` now; 0 if unknown."""
        if number is None:
            return 0
        self.now[number] = max(self.now[number], channels)
        width = self.last[number] if number < len(self.last) else 0
        return width if width >= channels else 0


def widths() -> Widths | None:
    """Return the widths of the current call, or None outside of one."""
    current = call()
    if current is None:
        return None
    if _WIDTHS not in current.notes:
        current.notes[_WIDTHS] = Widths(current.owner)
    noted: Widths = current.notes[_WIDTHS]
    return noted


class DeferredJoin(Deferred):
    """Parts [N, C_i, ...], joined along the channels once the next operation reads them."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        before, count = _earlier_join(parts)
        new = parts[count:]
        self.room: Room | None = None
        self.joined: Tensor | None = None
        self.extends = before is not None
        self.number: int | None = None if before is None else before.number
        if before is not None and before.joined is not None:
            self.room, parts = before.room, [before.joined, *new]
        shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), *parts[0].shape[2:])
        wants = any(part.requires_grad for part in parts)
        super().__init__(shape, parts[0].dtype, parts[0].device, wants, *parts)
        self.parts = parts
        self.seen: tuple[Seen, ...] = (*(before.seen if before is not None else ()), *map(Seen, new))

    def compute(self) -> Tensor:
        return Cat.apply(1, *self.parts) if self.room is not None or self.joined is None else self.joined

    def in_rows(self) -> Tensor:
        output = self.joined
        if output is None:
            self.unchanged()
            final = self._final_channels()
            in_room = self.extends or final > self.shape[1]
            output = CatInRoom.apply(self._with_room(final), *self.parts) if in_room else Cat.apply(1, *self.parts)
            self.joined = output
            if (current := call()) is not None:
                current.notes[_NAME] = self
        return output

    def as_concat_pair(self, reads: Callable[[Tensor, Tensor], bool]) -> Any:
        parts = self.parts
        return parts if len(parts) == 2 and parts[0].shape == parts[1].shape and reads(*parts) else None

    def holds(self, parts: Sequence[Tensor]) -> bool:
        """Return whether it joined these parts in their present state."""
        same = len(self.seen) == len(parts) and all(seen.is_of(t) for seen, t in zip(self.seen, parts, strict=True))
        return same and self.joined is not None and self._recorded == is_grad_enabled()

    def _final_channels(self) -> int:
        """Return the number of channels that the last call joined to these in the end; 0 if unknown."""
        noted_widths = widths()
        if noted_widths is None:
            return 0
        if not self.extends:
            self.number = noted_widths.register(self.shape[1])
        return noted_widths.final(self.number, self.shape[1])

    def _with_room(self, final: int) -> Room:
        """Return the room of the first part, or a new one if there is none, it is full, or another tensor was joined to
        the same part."""
        channels = self.shape[1]
        room = self.room
        if room is None or room.filled != self.parts[0].shape[1] or channels > room.rows.shape[-1]:
            room = self.room = Room(self.parts[0].data, final or GROWTH * channels)
        return room


def _earlier_join(parts: Sequence[Tensor]) -> tuple[DeferredJoin | None, int]:
    """Return the earlier join that the first parts are or belong to, and their number; (None, 0) if no batch norm has
    read one."""
    current = call()
    first, last = waiting(parts[0]), None if current is None else current.notes.get(_NAME)
    if isinstance(first, DeferredJoin) and first.joined is not None:
        return first, 1
    if isinstance(last, DeferredJoin) and last.holds(parts[: len(last.seen)]):
        return last, len(last.seen)
    return None, 0


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return parts that fit together joined along a dimension, 0 or more."""
    if dim == 1 and parts[0].ndim > 2 and parts[0].dtype.is_floating_point and all(map(may_wait, parts)):
        return Tensor._of_deferred(DeferredJoin(tuple(parts)))  # the caller may extend its list
    return Cat.apply(dim, *parts)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors joined along `dim`, in the dtype that all of them promote to; those of shape [0] are left out, as
    torch does.

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
    """Return tensors of one shape joined along a new dimension."""
    return cat([unsqueeze(part, dim) for part in tensors], dim)


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their second dimension, vectors along their first."""
    parts = [t if t.ndim else reshape(t, 1) for t in tensors]
    return cat(parts, 0 if parts and parts[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their first dimension, vectors as rows."""
    return cat([t if t.ndim > 1 else reshape(t, 1, t.numel()) for t in tensors], 0)
