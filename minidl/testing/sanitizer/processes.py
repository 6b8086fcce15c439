"""Check every launch of this process from its beginning on, as `startup` asks for."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import sys
from collections.abc import Callable
from typing import Any

from minidl.runtime import launch
from minidl.testing import memory
from minidl.testing.fake_gpu import pretended_gpu
from minidl.testing.sanitizer.checks import Sanitizer
from minidl.testing.sanitizer.findings import SanitizerError
from minidl.testing.sanitizer.patches import checking


def begin(tell: Callable[..., None], record: str, stop: bool) -> None:
    """Tell of each launch and bug from now on; with `stop` the first bug raises SanitizerError.

    Raises RuntimeError where kernels are compiled.
    """
    if not launch.INTERPRETED:
        raise RuntimeError("its kernels are compiled")
    # Locked until this process and those that it forks have ended: what runs the script waits for them.
    fcntl.flock(os.open(record, os.O_RDONLY), fcntl.LOCK_SH)
    sanitizer, lasting = Sanitizer(stop, tell), contextlib.ExitStack()
    memory.told.append(sanitizer.unwritten.add)
    for context in (sanitizer.unwritten, checking(sanitizer), pretended_gpu()):
        lasting.enter_context(context)
    atexit.register(lasting.close)
    sys.excepthook = _without_ours(sys.excepthook)


def _without_ours(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for exceptions that shows no traceback of a first bug, which is told at the end, nor of Ctrl-C."""

    def shown(kind: type[BaseException], *more: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
        elif not issubclass(kind, SanitizerError):
            hook(kind, *more)

    return shown
