"""Watches what a call asks torch for and launches: what `again` needs to do the same; `replay` decides when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.runtime import launch
from minidl.runtime.descriptors import of_base
from minidl.runtime.launch_cache import fast_launch
from minidl.runtime.launch_cache.recorded_call import Asked, Place, Replay, Step, each_of, start_of

_aten = torch.ops.aten
_NEW = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_VIEWS = {_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default}
_ALIGNED = 512  # bytes, as torch's allocator has it
_local = threading.local()


def watching() -> bool:
    """Whether a call of this thread is watched."""
    return getattr(_local, "watching", False)


def watched(
    function: Callable[..., Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[Any, Replay | None]:
    """The result of a call with these tensors among its arguments, and how it is made again; None where it cannot."""
    watch, tape = _Watch(), launch.Tape()
    _local.watching = True
    try:
        with watch, tape:
            result = function(*args, **kwargs)
    finally:
        _local.watching = False
    if watch.other or tape.addresses:
        return result, None
    try:
        return result, _seen(result, tape, tensors, watch.made)
    except _UnknownError:
        return result, None


class _Watch(TorchDispatchMode):
    """Notes what torch does for this thread, and keeps the memory that it is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []
        self.other = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _NEW:
            self.made.append(found)
        elif not func.is_view and func not in _VIEWS:
            self.other = True
        return found


class _UnknownError(Exception):
    """A tensor is in memory that was neither given nor made."""


def _seen(result: Any, tape: launch.Tape, given: list[torch.Tensor], made: list[torch.Tensor]) -> Replay:
    tensors = [*given, *made]
    of_storage: dict[int, int] = {}
    for index, each in enumerate(tensors):
        of_storage.setdefault(each.untyped_storage()._cdata, index)  # all that are empty have one address

    def place(x: torch.Tensor) -> Place:
        index = of_storage.get(x.untyped_storage()._cdata)
        if index is None:
            raise _UnknownError
        return Place(index, start_of(x) - start_of(tensors[index]), tuple(x.shape), x.stride(), x.dtype)

    steps = []
    for kernel, grid, args, meta in tape.launches:
        places = tuple((at, place(x)) for at, x in enumerate(args) if isinstance(x, torch.Tensor))
        boxes = tuple((at, place(x.base)) for at, x in enumerate(args) if isinstance(x, TensorDescriptor))
        ready = None if launch.INTERPRETED else fast_launch.found(kernel, args, meta)
        if ready is None and not launch.INTERPRETED:
            raise _UnknownError
        kept = tuple(
            None if isinstance(x, torch.Tensor) else of_base(x, None) if isinstance(x, TensorDescriptor) else x
            for x in args
        )
        opened = None if ready is None else fast_launch.opened(ready, args)
        if opened is not None:
            for at, _ in (*places, *boxes):
                opened.args[opened.at[at]] = None  # the tensors are not kept
        steps.append(Step(kernel, grid, kept, meta, places, boxes, ready, opened))
    lying: dict[int, Any] = {}
    kept_result = _kept(result, place, given, made, lying)
    for each in made:
        lying.setdefault(id(each), (each.shape, each.stride()))
    kernels = {id(step.kernel): (step.kernel, step.ready.forms) for step in steps if step.ready is not None}
    asked, moved = _planned(steps, set(_indices(kept_result)), given, made, lying)
    return Replay(
        asked, tuple(step.moved(moved) for step in steps), tuple(kernels.values()), _moved(kept_result, moved)
    )


def _planned(
    steps: list[Step], kept: set[int], given: list[torch.Tensor], made: list[torch.Tensor], lying: dict[int, Any]
) -> tuple[tuple[Asked, ...], Callable[[Place], Place]]:
    """What is asked for, and where a place lies then: results as they are, all other memory in one tensor, in which
    what no launch needs at the same time has the same bytes."""
    first = len(given)
    results = [index for index in range(first, first + len(made)) if index in kept]
    uses: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for _, place in (*step.places, *step.boxes):
            if place.index >= first and place.index not in kept:
                uses.setdefault(place.index, []).append(number)
    begins, ends = _shared([(numbers[0], numbers[-1], made[i - first]) for i, numbers in uses.items()])
    begin_of = dict(zip(uses, begins, strict=True))
    index_of = {index: first + at for at, index in enumerate(results)}
    asked: list[Asked] = [(*lying[id(made[i - first])], made[i - first].dtype, made[i - first].device) for i in results]
    if uses:
        asked.append(((max(ends),), (1,), torch.uint8, made[next(iter(uses)) - first].device))

    def moved(place: Place) -> Place:
        if place.index in begin_of:
            return place._replace(index=first + len(results), offset=begin_of[place.index] + place.offset)
        return place._replace(index=index_of.get(place.index, place.index))

    return tuple(asked), moved


def _shared(parts: Sequence[tuple[int, int, torch.Tensor]]) -> tuple[list[int], list[int]]:
    """Where each tensor's bytes begin and end, given its first and its last launch: the first gap that is free then."""
    if len({x.device for _, _, x in parts}) > 1:
        raise _UnknownError
    begins: list[int] = []
    ends: list[int] = []
    for start, end, x in parts:
        size, begin = max(1, x.untyped_storage().nbytes()), 0
        at_the_time = [i for i, (a, b, _) in enumerate(parts[: len(begins)]) if a <= end and start <= b]
        for i in sorted(at_the_time, key=begins.__getitem__):
            if begin + size <= begins[i]:
                break
            begin = max(begin, ends[i])
        begins.append(begin)
        ends.append(-(-(begin + size) // _ALIGNED) * _ALIGNED)
    return begins, ends


def _kept(result: Any, place: Callable[[torch.Tensor], Place], given: Any, made: Any, lying: dict[int, Any]) -> Any:
    """A result in places. Memory that is a result as a whole is asked for in the order that the result has."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        for index, each in enumerate(given):
            if each is result:
                return index
        found = place(result)
        index = found.index - len(given)
        if index >= 0 and found.offset == 0 and found.dtype == made[index].dtype and _dense(result, made[index]):
            how = result.shape, result.stride()
            if lying.setdefault(id(made[index]), how) == how:
                return found.index
        return found
    if isinstance(result, tuple | list):
        return each_of(result, lambda part: _kept(part, place, given, made, lying))
    raise _UnknownError


def _dense(result: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether the result has every number of that memory once."""
    sizes = sorted(zip(result.stride(), result.shape, strict=True))
    expected = 1
    for stride, size in sizes:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return result.nbytes == made.untyped_storage().nbytes()


def _indices(kept: Any) -> Iterator[int]:
    """Of which tensors a result is."""
    if isinstance(kept, int):
        yield kept
    elif isinstance(kept, Place):
        yield kept.index
    else:
        for each in kept or ():
            yield from _indices(each)


def _moved(kept: Any, moved: Callable[[Place], Place]) -> Any:
    if kept is None:
        return None
    if isinstance(kept, int):
        return moved(Place(kept, 0, (), (), torch.uint8)).index
    if isinstance(kept, Place):
        return moved(kept)
    return each_of(kept, lambda part: _moved(part, moved))
