"""Locks for what the threads of a process share."""

from __future__ import annotations

import os
import threading
from typing import Any


def lock() -> Any:
    """Return a re-entrant lock that is free in a forked process, in which the holding thread does not exist."""
    rlock: Any = threading.RLock()
    os.register_at_fork(after_in_child=rlock._at_fork_reinit)
    return rlock


# Held while Triton launches: while it interprets a kernel, or compiles and loads one at its first launch.
TRITON = lock()
