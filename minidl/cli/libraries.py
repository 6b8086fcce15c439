"""What is said when a library cannot be imported: mostly for a variable of the environment that it reads."""

from __future__ import annotations

import os
import traceback

from minidl.common.console import cut
from minidl.data.parsing import shorten


def failed_import(error: BaseException) -> str | None:
    """A sentence on an error of a library while it was imported, with variables that it may have read; else None."""
    names = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    library = next((name for name in names if name not in ("minidl", "__main__", "")), None)
    if library is None:
        return None
    said = " ".join(str(error).split())
    read = sorted(
        f"{name} ({shorten(value)})"
        for name, value in os.environ.items()
        if library.upper() in name or (len(name) > 2 and name in said) or (value and repr(value) in said)
    )
    advice = f"unset {', '.join(read)}, then try again" if read else f"reinstall {library}"
    return f"{library} cannot be imported: {type(error).__name__}: {cut(said, 200)}; {advice}"
