"""Settings of each thread, which a worker thread can take over."""

from __future__ import annotations

import threading
from collections.abc import Callable

_namespaces: list[threading.local] = []


def settings() -> threading.local:
    """Return a namespace of settings that each thread has for itself."""
    _namespaces.append(threading.local())
    return _namespaces[-1]


def take_over() -> Callable[[], None]:
    """Return a function that gives its caller's thread the present settings of this thread."""
    saved = [(local, dict(vars(local))) for local in _namespaces]

    def take() -> None:
        for local, values in saved:
            vars(local).update(values)

    return take
