"""Copies where torch returns views: of tensors with channels last in memory, which torch would store in rows.

A change of one would not reach the other, so it is refused as long as both are in memory, and either may be changed
once the other is gone. The memory itself holds the note, so that views of a copy and of what was copied have it, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from minidl.kernels import memory_layout

__all__: list[str] = []  # no public operations

_NOTE, _CHOSEN = "_minidl_copies", "_minidl_chosen"


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Return x, whose order the user chose: torch would copy it, too."""
    if memory_layout.channels_last(x):
        setattr(x.untyped_storage(), _CHOSEN, True)
    return x


def note(copy: torch.Tensor, of: torch.Tensor, always: bool = False) -> torch.Tensor:
    """Return `copy`, with a note in both memories if it is a copy, where torch's tensor would lie in rows or
    `always`."""
    memories = copy.untyped_storage(), of.untyped_storage()
    if memories[0]._cdata == memories[1]._cdata:
        return copy
    if always or (memory_layout.channels_last(of) and not hasattr(memories[1], _CHOSEN)):
        for one, other in (memories, memories[::-1]):
            others = [ref for ref in getattr(one, _NOTE, ()) if not ref.expired()]
            setattr(one, _NOTE, [*others, StorageWeakRef(other)])
    return copy


def refuse_change(name: str, x: torch.Tensor) -> None:
    """Raise RuntimeError where a copy of x, or what x is a copy of, is still in memory."""
    others = getattr(x.untyped_storage(), _NOTE, ())
    if _in_memory(others) and (gc.collect(), _in_memory(others))[1]:  # what Triton's interpreter launched with stays
        raise RuntimeError(
            f"{name}: this tensor of shape {list(x.shape)} and another one are copies, where torch has views of one "
            "memory, as one has its channels last (torch.channels_last), so the other would not see the change: change "
            "x itself, as by x[...] = y, before it is reshaped, or a clone()"
        )


def _in_memory(others: Iterable[StorageWeakRef]) -> bool:
    return any(not ref.expired() for ref in others)
