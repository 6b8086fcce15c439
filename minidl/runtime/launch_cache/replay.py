"""Cache calls: replay the launches of an earlier call for tensors with the same layout at other addresses.

Between the call of an operation and its launches, Python checks arguments, looks up a plan, makes descriptors and keys:
60 to 100 us, while the launch itself takes 5. None of it depends on values or addresses. So the second call of a
`replayed` function with the same key (shapes, strides, dtypes, devices and alignment of its tensors, and all other
arguments) is recorded: its allocations, and its launches with the locations of their tensors. Later calls repeat both.

A function may be replayed if it only launches kernels on its inputs and on memory that it allocates: it changes no
counter and makes no choice by values. Copies and fills by torch are recorded as launches. A call is never replayed if
torch computes something else in it, or if a kernel uses another tensor or reads an address from memory. Keys include
the launch settings; `launch.forget` drops all recordings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from minidl.runtime import launch, launch_hooks, precision
from minidl.runtime.launch_cache import fast_launch
from minidl.runtime.launch_cache.recorded_call import RecordedCall
from minidl.runtime.launch_cache.recorder import is_recording, record_call

MAX_KEYS = 4096  # of a function; when it has more, all are dropped
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})  # subclasses of Tensor are never replayed
MISSING = object()
_NOTHING: dict[str, Any] = {}
_RECORD_NEXT, NEVER = "record next", "never"
# In the interpreter kernels take longer than what replaying saves, so it is on only in tests.
settings = {"on": not launch.INTERPRETED, "at_once": False}


class Calls:
    """A function and the recordings of its calls, by key."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.waits = function, False  # waits: results of an operation were deferred
        self.recorded: dict[Any, Any] = {}
        launch.register_cache(self)

    def cache_clear(self) -> None:
        self.recorded.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.replay(args, kwargs)
        return self.call(args, kwargs) if result is MISSING else result

    def replay(self, args: Sequence[Any], kwargs: dict[str, Any] = _NOTHING, never: Any = MISSING) -> Any:
        """Replay the call and return its result, new tensors and no views; return MISSING if `call` is needed, and
        `never` if no call with its key is replayed."""
        if not settings["on"] or (launch_hooks.active and launch.handed_over()) or torch._C._len_torch_dispatch_stack():
            return MISSING
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        try:
            recorded = self.recorded.get(_key(args, kwargs, tensors, addresses))
        except (TypeError, RuntimeError):  # an unhashable argument, a tensor without strides
            return MISSING
        if type(recorded) is RecordedCall and (launch.ON_CPU or fast_launch.usable(recorded.kernels)):
            return recorded.replay(tensors, addresses)
        return never if recorded is NEVER else MISSING

    def call(
        self, args: Sequence[Any], kwargs: dict[str, Any] = _NOTHING, function: Callable[..., Any] | None = None
    ) -> Any:
        """Call the function, record the call if it is the second one with its key, and return its result.

        function: called in place of the function, with the same arguments and result."""
        function = function or self.function
        if not settings["on"] or launch.handed_over() or torch._C._len_torch_dispatch_stack() or is_recording():
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        try:
            key = _key(args, kwargs, tensors, addresses)
            state = self.recorded.get(key, _RECORD_NEXT if settings["at_once"] else None)
        except (TypeError, RuntimeError):
            return function(*args, **kwargs)
        if state is _RECORD_NEXT and not _share_memory(tensors, addresses) and not _has_torch_function_mode():
            result, recorded = record_call(function, args, kwargs, tensors)
            self.recorded[key] = NEVER if recorded is None else recorded
            return result
        if state is None:
            if len(self.recorded) >= MAX_KEYS:
                self.recorded.clear()
            self.recorded[key] = _RECORD_NEXT
        return function(*args, **kwargs)


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that its calls are replayed if possible."""
    calls = Calls(function)

    @functools.wraps(function)  # unlike `calls`, a function binds as a method
    def call(*args: Any, **kwargs: Any) -> Any:
        result = calls.replay(args, kwargs)
        return calls.call(args, kwargs) if result is MISSING else result

    return call


@contextlib.contextmanager
def replaying(enabled: bool, at_once: bool = False) -> Iterator[None]:
    """A context that turns replaying on or off; `at_once`: record the first call with a key, not the second."""
    before = dict(settings)
    settings.update({"on": enabled, "at_once": at_once})
    try:
        yield
    finally:
        settings.update(before)


def _key(args: Sequence[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor], addresses: list[int]) -> Any:
    """Return all that a call depends on except addresses and values. Fills both lists.

    Raises TypeError or RuntimeError for arguments without a key."""
    parts: list[Any] = [precision.state.float32]
    _add((*args, tuple(kwargs), *kwargs.values()) if kwargs else args, parts, tensors, addresses)
    if len(set(addresses)) != len(addresses):
        parts.append(tuple(map(addresses.index, addresses)))
    return tuple(parts)


_SIMPLE = frozenset({int, bool, str, type(None)})
_HASHED = frozenset({int, bool, torch.dtype, torch.device, torch.memory_format})


def _add(values: Iterable[Any], parts: list[Any], tensors: list[torch.Tensor], addresses: list[int]) -> None:
    for value in values:
        kind = type(value)
        if value is None or kind is str:
            parts.append(value)
        elif kind in TENSORS:
            address = value.data_ptr()
            tensors.append(value)
            addresses.append(address)
            parts.append((value.shape, value.stride(), value.dtype, value.device, address & 15))
        elif kind is tuple or kind is list:
            kinds = tuple(map(type, value))
            parts.append(kinds)
            if _SIMPLE.issuperset(kinds):
                parts.append(tuple(value))
            else:
                _add(value, parts, tensors, addresses)
        elif kind is float:
            # 0.0 equals -0.0, and nan does not equal nan
            parts.append(value if value > 0 or value < 0 else value.hex())
        elif kind in _HASHED:
            parts.append((kind, value))  # 1 equals True
        elif kind is tl.constexpr:
            parts.append((kind, value.value))
        elif isinstance(value, tuple):
            parts.append(kind)
            if True in [isinstance(each, torch.Tensor) for each in value]:
                _add(value, parts, tensors, addresses)
            else:
                parts.append(value)
        else:  # a subclass of Tensor, or a container that may have one
            raise TypeError(kind)


def _has_torch_function_mode() -> bool:
    """Return whether a mode other than torch's default device intercepts torch's functions, as guards in tests do."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def _share_memory(tensors: list[torch.Tensor], addresses: list[int]) -> bool:
    """Return whether two tensors at different addresses share a storage, so that locations are ambiguous."""
    distinct = dict(zip(addresses, tensors, strict=True))
    return len({x.untyped_storage().data_ptr() for x in distinct.values()}) != len(distinct)
