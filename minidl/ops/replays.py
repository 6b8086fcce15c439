"""Replays of operations: a call that records no gradient repeats an earlier one without the operation's own code.

An operation checks its arguments, chooses a form, and wraps each of its steps, also where kernels are replayed. None of
it depends on values, so the second call with a key is recorded by the rules of `runtime.launch_cache.replay`. It is
never replayed if it changed an argument, or if its result waits or shares an argument's memory, as views do. Operations
that draw random numbers must not be replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd.deferred import defers, thread
from minidl.autograd.graph import PLAIN, Variable
from minidl.runtime.launch_cache.recorded_call import map_items
from minidl.runtime.launch_cache.replay import MISSING, NEVER, Calls, settings
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


def replayed(function: Callable[..., Any], fuses: bool) -> Callable[..., Any]:
    """Return an operation whose calls are replayed. fuses: it may be fused with the operation that computes an
    argument, and its result may wait for the next one."""
    calls = Calls(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        recorded, inside = torch.is_grad_enabled(), thread.call is not None and defers()
        if not settings["on"] or torch._C._is_any_autocast_enabled() or (inside and calls.waits):
            return function(*args, **options)
        raw: list[Any] = []
        for value in (*args, *options.values()) if options else args:
            if type(value) in PLAIN:
                if (recorded and value._requires_grad) or (fuses and value._deferred is not None):
                    return function(*args, **options)
                value = value._data if value._deferred is None else value.data
            elif isinstance(value, Variable | torch.Tensor):
                return function(*args, **options)
            raw.append(value)
        named = dict(zip(options, raw[len(args) :], strict=True)) if options else {}
        key = *raw[: len(args)], inside, torch.get_default_dtype()
        result = calls.replay(key, named, NEVER)
        if result is NEVER:
            return function(*args, **options)
        if result is MISSING:
            return _recorded(calls, args, options, key, named)
        if type(result) is not torch.Tensor:
            return map_items(result, Tensor)
        tensor = Tensor.__new__(Tensor)  # of new memory, which needs no check
        Variable.__init__(tensor, result)
        return tensor

    return call


def _recorded(calls: Calls, args: Any, options: Any, key: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call the operation and return its result; the call is recorded if it is the second one with its key."""
    results = []

    def run(*_: Any, **__: Any) -> Any:
        inputs = [x for x in (*key, *named.values()) if isinstance(x, torch.Tensor)]
        before = [None if x.is_inference() else x._version for x in inputs]
        results.append(calls.function(*args, **options))
        parts = results[0] if isinstance(results[0], tuple) else (results[0],)
        if any(type(y) is not Tensor for y in parts):
            return MISSING
        if any(y._deferred is not None for y in parts):
            calls.waits = True
            return MISSING
        memories = {x.untyped_storage()._cdata for x in inputs}
        changed = before != [None if x.is_inference() else x._version for x in inputs]
        if changed or any(y._data.untyped_storage()._cdata in memories for y in parts):
            return MISSING
        return map_items(parts, lambda y: y._data) if isinstance(results[0], tuple) else parts[0]._data

    calls.call(key, named, run)
    return results[0]
