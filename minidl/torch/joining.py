"""Tensors of torch joined again and again along the channels, for batch norms, in one memory: see `minidl.ops.join`.

A traced forward calls `cat` in place of `torch.cat` where blocks that begin with a batch norm are all that reads the
result: they read rows of channels that lie apart, and change nothing in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minidl import later
from minidl.ops.join import GROWTH, Room, widths
from minidl.torch.layers import ready
from minidl.torch.registry import straight

_NAME = "joins of torch tensors"


class _Joined(NamedTuple):
    """What was joined last in the call under way; it does not keep the parts."""

    parts: list[weakref.ref[torch.Tensor]]
    states: list[tuple[int, bool]]
    made: torch.Tensor
    room: Room | None
    number: int  # of the first of these joins, see `Widths`
    recorded: bool

    def begins(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether it is the first of these parts, as they are now."""
        return (
            len(self.parts) <= len(parts) and self.recorded == torch.is_grad_enabled()
            and all(
                seen() is part and state == _state(part)
                for seen, state, part in zip(self.parts, self.states, parts, strict=False)
            )
        )  # fmt: skip


def _state(part: torch.Tensor) -> tuple[int, bool]:
    return part._version, part.requires_grad


class _InRoom(torch.autograd.Function):
    """Parts [N, C_i, ...], the first of which ends where the room is filled to."""

    @staticmethod
    def forward(ctx: Any, room: Room, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [part.shape[1] for part in parts]
        return _filled(room, parts)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return None, *dy.split(ctx.sizes, 1)


def _filled(room: Room, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    for part in parts[1:]:
        room.add(part.detach())
    return room.held()


def cat(tensors: Any, dim: int = 0) -> torch.Tensor:
    """torch.cat. The result lies in rows that are wider than what they hold, and is read only."""
    under_way = None if torch.compiler.is_compiling() else later.call()
    if under_way is None or not _fits(tensors, dim):
        return torch.cat(tensors, dim)
    parts: list[torch.Tensor] = list(tensors)
    channels = sum(part.shape[1] for part in parts)
    before: _Joined | None = under_way.notes.get(_NAME)
    if before is not None and not before.begins(parts):
        before = None
    lengths = widths()
    assert lengths is not None
    number = lengths.begun(channels) if before is None else before.number
    known = lengths.known(number, channels)
    room = None
    if before is not None or known > channels:
        joined = parts if before is None else [before.made, *parts[len(before.parts) :]]
        room = None if before is None else before.room
        if room is None or room.filled != joined[0].shape[1] or channels > room.rows.shape[-1]:
            room = Room(joined[0].detach(), known or GROWTH * channels)
        recorded = torch.is_grad_enabled() and any(part.requires_grad for part in joined)
        made = _InRoom.apply(room, *joined) if recorded else _filled(room, joined)  # type: ignore[no-untyped-call]
    else:
        made = torch.cat(parts, dim)
    seen = [weakref.ref(part) for part in parts], [_state(part) for part in parts]
    under_way.notes[_NAME] = _Joined(*seen, made, room, number, torch.is_grad_enabled())
    return made


def _fits(tensors: Any, dim: Any) -> bool:
    """Whether all are tensors of plain rows of channels, whose changes in place torch counts."""
    if not isinstance(tensors, list | tuple) or dim != 1 or not tensors or not straight(tensors):
        return False
    first = tensors[0]
    return ready(first) and first.dim() > 2 and all(
        type(part) is torch.Tensor and not part.is_inference() and part.dim() == first.dim()
        and part.stride(1) == 1 and part.dtype == first.dtype and part.device == first.device
        and part.shape[0] == first.shape[0] and part.shape[2:] == first.shape[2:]
        for part in tensors
    )  # fmt: skip
