"""Keys of Triton's cache that do not depend on the order in which kernels are launched.

A kernel's key includes the global constants used by the kernel and the functions it calls. Triton 3.6 and 3.7 omit the
constants of a called function that has no key yet, so keys, and cache hits, differ between processes. `compute_key`
computes the keys of functions before those of their callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from minidl.common import locks

_keyed: set[int] = set()


def compute_key(kernel: Any) -> None:
    """Compute the key of a JITFunction; ignore any other object."""
    if not isinstance(kernel, JITFunction):
        return
    with locks.TRITON:
        if id(kernel) in _keyed:
            return
        _keyed.add(id(kernel))  # first, because a function may call itself
        for callee in _called(kernel.fn.__globals__, kernel.fn.__code__):
            compute_key(callee)
        _ = kernel.cache_key


def _called(namespace: dict[str, Any], code: CodeType) -> Iterator[Any]:
    """Yield the objects that the names in a function refer to, attributes of modules included."""
    for name in code.co_names:
        value = namespace.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (getattr(value, other, None) for other in code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _called(namespace, constant)
