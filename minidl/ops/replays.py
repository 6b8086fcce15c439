"""Replays of operations: a call that records no gradient repeats an earlier one without the operation's own code.

The rules of `runtime.launch_cache.replay` hold for the operation, which must draw no random numbers. A call is never
replayed if it changed an argument, or if its result is deferred or in the memory of an argument, as views are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd.deferred import defers, thread
from minidl.autograd.graph import Variable
from minidl.runtime.launch_cache.replay import MISSING, NEVER, Calls, settings
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations

_DATA = Variable.data


def replayed(function: Callable[..., Any], fuses: bool) -> Callable[..., Any]:
    """Return an operation whose calls are replayed; `fuses`: it may be fused with the one that computes an argument."""
    calls = Calls(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        recorded, inside = torch.is_grad_enabled(), thread.call is not None and defers()
        if not settings["on"] or torch._C._is_any_autocast_enabled() or (inside and calls.waits):
            return function(*args, **options)
        # Fusion and torch's default dtype decide results, too.
        key: list[Any] = [inside, torch.get_default_dtype(), tuple(options)]
        for value in (*args, *options.values()) if options else args:
            if getattr(type(value), "data", None) is _DATA:  # no placeholder
                if (recorded and value._requires_grad) or (fuses and value._deferred is not None):
                    return function(*args, **options)
                value = value._data if value._deferred is None else value.data
            elif isinstance(value, Variable | torch.Tensor):
                return function(*args, **options)
            key.append(value)
        result = calls.replay(key, never=NEVER)
        if result is MISSING:
            return _recorded(calls, args, options, key)
        if result is NEVER:
            return function(*args, **options)
        tensor = Tensor.__new__(Tensor)  # of new memory, which needs no check
        Variable.__init__(tensor, result)
        return tensor

    return call


def _recorded(calls: Calls, args: Any, options: Any, key: list[Any]) -> Any:
    """Call the operation and return its result; the call is recorded if it is the second one with its key."""
    results = []

    def run(*_: Any) -> Any:
        inputs = [x for x in key if isinstance(x, torch.Tensor)]
        versions = [None if x.is_inference() else x._version for x in inputs]
        results.append(y := calls.function(*args, **options))
        calls.waits = calls.waits or (type(y) is Tensor and y._deferred is not None)
        if type(y) is not Tensor or y._deferred is not None:
            return MISSING  # which is no result that can be replayed
        changed = versions != [None if x.is_inference() else x._version for x in inputs]
        shares = y._data.untyped_storage()._cdata in [x.untyped_storage()._cdata for x in inputs]
        return MISSING if changed or shares else y._data

    calls.call(key, function=run)
    return results[0]
