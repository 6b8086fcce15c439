"""Locks for what the threads of a process share."""

from __future__ import annotations

import os
import threading
from typing import Any


def lock() -> Any:
    """Return a re-entrant lock, which is free in a forked process: the thread that holds it may not be there."""
    made: Any = threading.RLock()
    os.register_at_fork(after_in_child=made._at_fork_reinit)
    return made


# Held while Triton itself launches: it interprets a kernel, or compiles and loads one that is launched the first time.
TRITON = lock()
