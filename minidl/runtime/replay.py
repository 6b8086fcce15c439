"""Launches again what a function launched before for tensors that lie alike, with other addresses.

Between the call of an operation and its launches, Python checks arguments, looks up a plan, makes descriptors and keys:
60 to 100 us where the launch itself takes 5. None of it depends on values or addresses. So the second call of a
`replayed` function with the same key (shapes, strides, dtypes, devices and alignment of its tensors, everything else as
it is) is watched: which memory it asks for, and what it launches with which parts of that and of its tensors. The calls
after it ask for the same memory and launch the same kernels.

A function may be replayed if all it does is to launch kernels on its tensors and on memory of its own: no change of a
counter, no choice by values. What else torch computes meanwhile, a tensor that is neither given nor made in the call,
and an address that a kernel reads from memory make a call that is never replayed. The keys hold the settings of
launches; `launch.forget` drops all that was watched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.runtime import direct, launch

MOST = 4096  # keys of a function; beyond, all are forgotten
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_WATCHED_NEXT, _NEVER = "watched next", "never"
MISSING = object()
_NOTHING: dict[str, Any] = {}
_aten = torch.ops.aten
_NEW = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_VIEWS = {_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default}
# Interpreted kernels take longer than what this saves: there it is for tests.
_state = {"on": not launch.INTERPRETED, "at once": False}
_local = threading.local()


class Place(NamedTuple):
    """A tensor in the memory of another: of which of those given and made, how many bytes after its first number."""

    index: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        base = tensors[self.index]
        start = base.storage_offset() * base.element_size() + self.offset
        made = torch.empty(0, dtype=self.dtype, device=base.device)
        return made.set_(base.untyped_storage(), start // self.dtype.itemsize, self.size, self.stride)


class Calls:
    """A function, and what was watched of its calls, by their keys."""

    def __init__(self, function: Callable[..., Any], plain: bool = False) -> None:
        """plain: sequences among the arguments hold whole numbers alone."""
        self.function, self.plain = function, plain
        self.known: dict[Any, Any] = {}
        launch.emptied_with_tiles(self)

    def cache_clear(self) -> None:
        self.known.clear()

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any] = _NOTHING) -> Any:
        """The result of a call that is replayed, memory of its own and no view; MISSING where the function is to be
        called."""
        if not _state["on"] or launch.handed_over() or torch._C._len_torch_dispatch_stack():
            return MISSING
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        found = self.known.get(_key(args, kwargs, tensors, addresses, self.plain))
        return found.run(tensors, addresses) if type(found) is Replay and found.fits() else MISSING

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any] = _NOTHING) -> Any:
        """The result of the function, which may be watched."""
        if not _state["on"] or launch.handed_over() or torch._C._len_torch_dispatch_stack() or _watching():
            return self.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        key = _key(args, kwargs, tensors, addresses, self.plain)
        if key is None:
            return self.function(*args, **kwargs)
        found = self.known.get(key, _WATCHED_NEXT if _state["at once"] else None)
        if found is _WATCHED_NEXT and not _share(tensors, addresses) and not _altered():
            result, self.known[key] = _watched(self.function, args, kwargs, tensors)
            return result
        if found is None:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = _WATCHED_NEXT
        return self.function(*args, **kwargs)


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: calls of the function are replayed where they can be."""
    calls = Calls(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = calls.again(args, kwargs)
        return calls.first(args, kwargs) if found is MISSING else found

    return call


@contextlib.contextmanager
def replaying(enabled: bool, at_once: bool = False) -> Iterator[None]:
    """A context in which calls are replayed or not; `at_once`: already the second one with a key, as tests want it."""
    before = dict(_state)
    _state.update({"on": enabled, "at once": at_once})
    try:
        yield
    finally:
        _state.update(before)


def _watching() -> bool:
    return getattr(_local, "watching", False)


def _key(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], addresses: list[int], plain: bool
) -> Any:
    """All that a call may depend on but addresses and values; None where that cannot be told. Fills both lists."""
    parts: list[Any] = [launch.float32_precision()]
    try:
        _add(args, parts, tensors, addresses, plain)
        if kwargs:
            parts.append(tuple(kwargs))
            _add(kwargs.values(), parts, tensors, addresses, plain)
        if len(set(addresses)) != len(addresses):
            parts.append(tuple(map(addresses.index, addresses)))
        key = tuple(parts)
        hash(key)
    except (TypeError, RuntimeError):  # what has no hash, a tensor without strides
        return None
    return key


_SIMPLE = frozenset({int, bool, str, type(None)})
_HASHED = frozenset({int, bool, torch.dtype, torch.device, torch.memory_format})


def _add(
    values: Iterable[Any], parts: list[Any], tensors: list[torch.Tensor], addresses: list[int], plain: bool
) -> None:
    for value in values:
        kind = type(value)
        if value is None or kind is str:
            parts.append(value)
        elif kind in _TENSORS:
            address = value.data_ptr()
            tensors.append(value)
            addresses.append(address)
            parts.append((value.shape, value.stride(), value.dtype, value.device, address & 15))
        elif plain and (kind is tuple or kind is list):
            parts.append(tuple(value))
        elif kind is tuple or kind is list:
            kinds = tuple(map(type, value))
            parts.append(kinds)
            if _SIMPLE.issuperset(kinds):
                parts.append(tuple(value))
            else:
                _add(value, parts, tensors, addresses, plain)
        elif kind is float:
            parts.append(value.hex())  # 0.0 and -0.0 are equal
        elif kind in _HASHED:
            parts.append((kind, value))  # 1 and True are equal
        elif kind is tl.constexpr:
            parts.append((kind, value.value))
        elif isinstance(value, tuple):
            parts.append(kind)
            if any(isinstance(each, torch.Tensor) for each in value):
                _add(value, parts, tensors, addresses, plain)
            else:
                parts.append(value)
        else:  # a tensor of another class, and what may hold one
            raise TypeError(kind)


def _altered() -> bool:
    """Whether something stands between torch's functions and what they do, as the guards of tests."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def _share(tensors: list[torch.Tensor], addresses: list[int]) -> bool:
    """Whether two tensors that begin elsewhere have one memory: what a launch is given may be of either then."""
    begins = dict(zip(addresses, tensors, strict=True))
    return len({each.untyped_storage().data_ptr() for each in begins.values()}) != len(begins)


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


class Replay(NamedTuple):
    """What a call asked for and launched."""

    made: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
    steps: tuple[Step, ...]
    result: Any  # in places

    def fits(self) -> bool:
        return launch.INTERPRETED or all(
            step.ready is not None and step.ready.usable(step.kernel) for step in self.steps
        )

    def run(self, tensors: list[torch.Tensor], addresses: list[int]) -> Any:
        """Launch with the memory of these tensors; returns the result of the call."""
        for size, stride, dtype, device in self.made:
            fresh = torch.empty_strided(size, stride, dtype=dtype, device=device)
            tensors.append(fresh)
            addresses.append(fresh.data_ptr())
        for step in self.steps:
            if step.ready is None:
                args = list(step.args)
                for at, place in step.places:
                    args[at] = place.of(tensors)
                for at, place in step.boxes:
                    args[at] = direct.of_base(step.args[at], place.of(tensors))
                launch.run(step.kernel, step.grid, *args, **step.meta)
                continue
            opened = step.opened
            if opened is None:
                args = list(step.args)
                for at, place in step.places:
                    args[at] = addresses[place.index] + place.offset
                for at, place in step.boxes:
                    args[at] = direct.at_address(step.args[at], addresses[place.index] + place.offset)
                step.ready.launch(step.grid, args)
                continue
            args = opened.args.copy()
            for at, place in step.places:
                args[opened.at[at]] = addresses[place.index] + place.offset
            for at, place in step.boxes:
                address = addresses[place.index] + place.offset
                args[opened.at[at]] = opened.box(at, step.args[at], address)
            opened.launch(step.grid, args)
        return _result(self.result, tensors)


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


def _watched(
    function: Callable[..., Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[Any, Replay | str]:
    """The result of a call, and what was seen of it."""
    watch, tape = _Watch(), launch.Tape()
    _local.watching = True
    try:
        with watch, tape:
            result = function(*args, **kwargs)
    finally:
        _local.watching = False
    if watch.other or tape.addresses:
        return result, _NEVER
    try:
        return result, _seen(result, tape, tensors, watch.made)
    except _UnknownError:
        return result, _NEVER


class _UnknownError(Exception):
    """A tensor is in memory that was neither given nor made."""


def _seen(result: Any, tape: launch.Tape, given: list[torch.Tensor], made: list[torch.Tensor]) -> Replay:
    tensors = [*given, *made]
    of_storage: dict[int, int] = {}
    for index, each in enumerate(tensors):
        of_storage.setdefault(each.untyped_storage().data_ptr(), index)

    def place(x: torch.Tensor) -> Place:
        index = of_storage.get(x.untyped_storage().data_ptr())
        if index is None:
            raise _UnknownError
        return Place(index, x.data_ptr() - tensors[index].data_ptr(), tuple(x.shape), x.stride(), x.dtype)

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
            for at, _ in places:
                opened.args[opened.at[at]] = None  # the tensors are not kept
        steps.append(Step(kernel, grid, kept, meta, places, boxes, ready, opened))
    lying = {id(each): (each.shape, each.stride()) for each in made}
    kept_result = _kept(result, place, given, made, lying)
    asked = tuple((*lying[id(each)], each.dtype, each.device) for each in made)
    return Replay(asked, tuple(steps), kept_result)


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
            known = lying[id(made[index])]
            if known == (made[index].shape, made[index].stride()) or known == (result.shape, result.stride()):
                lying[id(made[index])] = result.shape, result.stride()
                return found.index
        return found
    if isinstance(result, tuple | list):
        parts = [_kept(each, place, given, made, lying) for each in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    raise _UnknownError


def _dense(result: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether both have every number of the same memory once."""
    sizes = sorted(zip(result.stride(), result.shape, strict=True))
    expected = 1
    for stride, size in sizes:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return result.numel() == made.numel() > 0
