"""Imports in threads that must not run beside each other, and in the processes that this one starts."""

from __future__ import annotations

import sys
import threading

# Held while torch or scikit-learn is imported. scikit-learn's import asks torch for its types where `sys.modules` has
# it, and fails on a torch that another thread has only begun to import.
apart = threading.RLock()


def python(statements: str, *arguments: str) -> list[str]:
    """The command line of a Python process that runs statements with these arguments.

    It imports from where this process does. Python itself would search the folder it stands in first, whose files are
    the user's.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {statements}", *arguments]
