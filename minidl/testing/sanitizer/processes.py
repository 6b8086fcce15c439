"""Check every launch of this process from its start, for `startup`."""

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
    """Report each launch and bug from now on; with `stop` the first bug raises SanitizerError.

    Raises RuntimeError if kernels are compiled.
    """
    if not launch.INTERPRETED:
        raise RuntimeError("its kernels are compiled")
    # The lock lasts until this process and its forks have ended: `minidl sanitize` waits for it.
    fcntl.flock(os.open(record, os.O_RDONLY), fcntl.LOCK_SH)
    sanitizer, contexts = Sanitizer(stop, tell), contextlib.ExitStack()
    memory.listeners.append(sanitizer.unwritten.add)
    for context in (sanitizer.unwritten, checking(sanitizer), pretended_gpu()):
        contexts.enter_context(context)
    atexit.register(contexts.close)
    sys.excepthook = _without_findings(sys.excepthook)


def _without_findings(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return an exception hook without tracebacks of findings, which are reported at the end, and of Ctrl-C."""

    def show(kind: type[BaseException], *more: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
        elif not issubclass(kind, SanitizerError):
            hook(kind, *more)

    return show
