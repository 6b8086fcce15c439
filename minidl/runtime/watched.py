"""What a call asked torch for and launched, and the same again for other tensors: `replay` decides when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.runtime import direct, launch

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


def _start(x: torch.Tensor) -> int:
    """Bytes of its memory before the first number of x: without numbers, x has no address."""
    return x.storage_offset() * x.itemsize


class Place(NamedTuple):
    """A tensor in the memory of another: of which of those given and made, how many bytes after its first number."""

    index: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        base = tensors[self.index]
        start = _start(base) + self.offset
        made = torch.empty(0, dtype=self.dtype, device=base.device)
        return made.set_(base.untyped_storage(), start // self.dtype.itemsize, self.size, self.stride)


class Step(NamedTuple):
    """A launch: its arguments, and at which of these an address or a descriptor is put, and which one."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]
    places: tuple[tuple[int, Place], ...]
    boxes: tuple[tuple[int, Place], ...]
    ready: direct.Ready | None
    opened: direct.Opened | None

    def moved(self, place_of: Callable[[Place], Place]) -> Step:
        """The same at other places."""
        places, boxes = (tuple((at, place_of(place)) for at, place in each) for each in (self.places, self.boxes))
        return self._replace(places=places, boxes=boxes)


# Of a tensor: size, strides, dtype and device.
Asked = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class Replay(NamedTuple):
    """What a call asked for and launched."""

    made: tuple[Asked, ...]
    steps: tuple[Step, ...]
    kernels: tuple[tuple[Any, Any], ...]  # each once, with its compiled variants
    result: Any  # in places

    def fits(self) -> bool:
        return launch.INTERPRETED or direct.usable(self.kernels)

    def run(self, tensors: list[torch.Tensor], addresses: list[int]) -> Any:
        """Launch with the memory of these tensors; returns the result of the call."""
        for size, stride, dtype, device in self.made:
            fresh = torch.empty_strided(size, stride, dtype=dtype, device=device)
            tensors.append(fresh)
            addresses.append(fresh.data_ptr())
        if self.kernels:
            stream = direct.stream()
            for step in self.steps:
                _launch(step, stream, addresses)
        else:
            for step in self.steps:
                _interpret(step, tensors)
        return _result(self.result, tensors)


def _interpret(step: Step, tensors: list[torch.Tensor]) -> None:
    args = list(step.args)
    for at, place in step.places:
        args[at] = place.of(tensors)
    for at, place in step.boxes:
        args[at] = direct.of_base(step.args[at], place.of(tensors))
    launch.run(step.kernel, step.grid, *args, **step.meta)


def _launch(step: Step, stream: int, addresses: list[int]) -> None:
    opened = step.opened
    if opened is None:
        args = list(step.args)
        for at, place in step.places:
            args[at] = addresses[place.index] + place.offset
        for at, place in step.boxes:
            args[at] = direct.at_address(step.args[at], addresses[place.index] + place.offset)
        assert step.ready is not None
        step.ready.launch(step.grid, stream, args)
        return
    args = opened.args.copy()
    for at, place in step.places:
        args[opened.at[at]] = addresses[place.index] + place.offset
    for at, place in step.boxes:
        args[opened.at[at]] = opened.box(at, step.args[at], addresses[place.index] + place.offset)
    opened.launch(step.grid, stream, args)


def _result(kept: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(kept)
    if kind is int:
        return tensors[kept]
    if kind is Place:
        return kept.of(tensors)
    if kept is None:
        return None
    made = [_result(each, tensors) for each in kept]
    return kind(*made) if hasattr(kept, "_fields") else kind(made)


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
        return Place(index, _start(x) - _start(tensors[index]), tuple(x.shape), x.stride(), x.dtype)

    steps = []
    for kernel, grid, args, meta in tape.launches:
        places = tuple((at, place(x)) for at, x in enumerate(args) if isinstance(x, torch.Tensor))
        boxes = tuple((at, place(x.base)) for at, x in enumerate(args) if isinstance(x, TensorDescriptor))
        ready = None if launch.INTERPRETED else direct.found(kernel, args, meta)
        if ready is None and not launch.INTERPRETED:
            raise _UnknownError
        kept = tuple(
            None if isinstance(x, torch.Tensor) else direct.of_base(x, None) if isinstance(x, TensorDescriptor) else x
            for x in args
        )
        opened = None if ready is None else direct.opened(ready, args)
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
    """What is asked for, and where a place lies then: results as they are, all other memory in one tensor, in which$
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
        parts = [_kept(each, place, given, made, lying) for each in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
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
    parts = [_moved(each, moved) for each in kept]
    return type(kept)(*parts) if hasattr(kept, "_fields") else type(kept)(parts)
