"""A lock for imports that must not run in parallel, and the command line of Python child processes."""

from __future__ import annotations

import sys
import threading

# Held while torch or scikit-learn is imported: scikit-learn's import uses torch if `sys.modules` has it, and fails if
# another thread has not finished importing it.
LOCK = threading.RLock()


def python(statements: str, *arguments: str) -> list[str]:
    """Return the command line of a Python process that runs statements with these arguments.

    It has the import path of this process. By default Python would search the working directory first, which has the
    user's files.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {statements}", *arguments]
