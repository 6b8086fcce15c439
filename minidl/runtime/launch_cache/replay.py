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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton.language as tl
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from minidl.runtime import launch
from minidl.runtime.launch_cache.recorded_call import Replay
from minidl.runtime.launch_cache.recorder import watched, watching

MOST = 4096  # keys of a function; beyond, all are forgotten
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # not of a class of its own
_WATCHED_NEXT, _NEVER = "watched next", "never"
MISSING = object()
_NOTHING: dict[str, Any] = {}
# Interpreted kernels take longer than what this saves: there it is for tests.
_state = {"on": not launch.INTERPRETED, "at once": False}


class Calls:
    """A function, and what was watched of its calls, by their keys."""

    def __init__(self, function: Callable[..., Any], plain: bool = False) -> None:
        """plain: sequences among the arguments hold whole numbers alone."""
        self.function, self.plain = function, plain
        self.known: dict[Any, Any] = {}
        launch.emptied_with_tiles(self)

    def cache_clear(self) -> None:
        self.known.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.again(args, kwargs)
        return self.first(args, kwargs) if found is MISSING else found

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
        if not _state["on"] or launch.handed_over() or torch._C._len_torch_dispatch_stack() or watching():
            return self.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        key = _key(args, kwargs, tensors, addresses, self.plain)
        if key is None:
            return self.function(*args, **kwargs)
        found = self.known.get(key, _WATCHED_NEXT if _state["at once"] else None)
        if found is _WATCHED_NEXT and not _share(tensors, addresses) and not _altered():
            result, self.known[key] = _watch(self.function, args, kwargs, tensors)
            return result
        if found is None:
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = _WATCHED_NEXT
        return self.function(*args, **kwargs)


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: calls of the function are replayed where they can be."""
    calls = Calls(function)

    @functools.wraps(function)  # a function is bound to the class that has it, an object is not
    def call(*args: Any, **kwargs: Any) -> Any:
        return calls(*args, **kwargs)

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


def _watch(function: Callable[..., Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    result, found = watched(function, args, kwargs, tensors)
    return result, _NEVER if found is None else found


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
        elif kind in TENSORS:
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
            # 0.0 and -0.0 are equal, no nan is equal to another
            parts.append(value if value > 0 or value < 0 else value.hex())
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
