"""Keys of Triton's cache that do not depend on which kernel is met first.

The key of a kernel holds the global constants that it and the functions that it calls use. Triton 3.6 and 3.7 forget
those of a function that has no key yet: it gets one only then. So the keys of a kernel differ from process to process,
and with them what the cache is found to have. Here functions get their keys before their callers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from minidl.common import locks

_settled: set[int] = set()


def settle(kernel: Any) -> None:
    """Give a JITFunction its key; of anything else nothing is done."""
    if not isinstance(kernel, JITFunction):
        return
    with locks.TRITON:
        if id(kernel) in _settled:
            return
        _settled.add(id(kernel))  # first, as a function may call itself
        for callee in _called(kernel.fn.__globals__, kernel.fn.__code__):
            settle(callee)
        _ = kernel.cache_key


def _called(known: dict[str, Any], code: CodeType) -> Iterator[Any]:
    """What the names in a function stand for, those of attributes of modules included."""
    for name in code.co_names:
        value = known.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (getattr(value, other, None) for other in code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _called(known, constant)
