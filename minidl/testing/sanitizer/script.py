"""Run a Python script or module in this process, like `python script.py`."""

from __future__ import annotations

import runpy
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minidl.testing.fake_gpu import pretended_gpu


def play(script: str, arguments: Sequence[str], *, module: bool) -> int:
    """Run a script or module in this process as Python does, wait for its threads, and return its exit code.

    Without a GPU, the device "cuda" maps to the CPU.
    """
    before = set(threading.enumerate())
    with _as_main(script, arguments, module), pretended_gpu():
        code = _execute(script, module)
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()
    return code


def _execute(script: str, module: bool) -> int:
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            # An absolute path, as in Python, still exists after the script changes folder.
            runpy.run_path(str(Path(script).absolute()), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BaseException as error:  # noqa: BLE001 (the script's error, printed as Python does)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        return 1
    return 0


@contextmanager
def _as_main(script: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    """Return a context with the sys.argv and sys.path that the script expects."""
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path.cwd() if module else Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
