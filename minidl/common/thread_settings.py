"""Settings of each thread, which a thread that works for another one takes over."""

from __future__ import annotations

import threading
from collections.abc import Callable

_carried: list[threading.local] = []


def settings() -> threading.local:
    """Return a namespace of settings that each thread has for itself."""
    _carried.append(threading.local())
    return _carried[-1]


def take_over() -> Callable[[], None]:
    """Return a function that gives its caller's thread the present settings of this thread."""
    held = [(local, dict(vars(local))) for local in _carried]

    def take() -> None:
        for local, values in held:
            vars(local).update(values)

    return take
