"""Messages for libraries that cannot be imported, mostly because of an environment variable that they read."""

from __future__ import annotations

import os
import traceback

from minidl.common.console import cut
from minidl.data.parsing import shorten


def failed_import(error: BaseException) -> str | None:
    """Return a sentence on an error in the import of a library, with variables that it may have read; else None."""
    names = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    library = next((name for name in names if name not in ("minidl", "__main__", "")), None)
    if library is None:
        return None
    message = " ".join(str(error).split())
    variables = sorted(
        f"{name} ({shorten(value)})"
        for name, value in os.environ.items()
        if library.upper() in name or (len(name) > 2 and name in message) or (value and repr(value) in message)
    )
    advice = f"unset {', '.join(variables)}, then repeat the command" if variables else f"reinstall {library}"
    return f"{library} cannot be imported: {type(error).__name__}: {cut(message, 200)}; {advice}"
