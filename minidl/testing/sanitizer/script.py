"""Run a Python script or module under the sanitizer, as `python script.py` would run it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl.testing.sanitizer import Sanitizer, SanitizerError, sanitize


@dataclass(frozen=True)
class Outcome:
    """How a script ended: its exit code, and what the sanitizer saw."""

    code: int
    sanitizer: Sanitizer


def run(script: str, arguments: Sequence[str], *, module: bool, stop: bool) -> Outcome:
    """Run a script's file, or a module by name, as `__main__` with its arguments.

    An exception of the script is printed as Python prints it, and the code is then 1.
    """
    code = 0
    sanitizer: Sanitizer | None = None
    try:
        with sanitize(stop=stop) as sanitizer, _as_main(script, arguments, module):
            code = _execute(script, module)
    except SanitizerError:
        pass
    assert sanitizer is not None
    return Outcome(code, sanitizer)


def _execute(script: str, module: bool) -> int:
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SanitizerError:
        raise
    except SystemExit as end:
        return _exit_code(end.code)
    except Exception as error:  # noqa: BLE001 (the script's own, told as Python does)
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            own = own.tb_next
        traceback.print_exception(error.with_traceback(own))
        return 1
    return 0


def _exit_code(code: Any) -> int:
    """What `sys.exit(code)` gives a process; a text is printed."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


@contextmanager
def _as_main(script: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    """sys.argv and the first entry of sys.path as the script expects them."""
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path.cwd() if module else Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
