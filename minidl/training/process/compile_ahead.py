"""Kernels compiled before they are launched, see `rehearsal`, with a bar that says so."""

from __future__ import annotations

import time
from collections.abc import Callable

from minidl.common import timing
from minidl.compilation import compiler_processes, rehearsal
from minidl.runtime import launch
from minidl.training.process.display import Display

_FEW = 4  # are compiled as they are launched before a process has started


def compile_ahead(work: Callable[[], object], display: Display) -> None:
    """Compile the kernels that `work` would launch; without a GPU, nothing. What `work` makes is useless."""
    if launch.INTERPRETED:
        return
    started = time.monotonic()
    with timing.timed("compile"):
        try:
            wanted = rehearsal.missing(work)
        except Exception as error:  # noqa: BLE001 (the work itself will raise it, where it is one of the work)
            display.note(f"note: kernels are compiled on first use ({type(error).__name__}: {error})")
            return
        with compiler_processes.current() as processes:
            if wanted and (processes.started or len(wanted) >= _FEW):
                with display.counted("compiling kernels") as progress:
                    processes.compile(wanted, progress)
                display.note(f"{len(wanted)} kernels compiled in {time.monotonic() - started:.1f} s")
            processes.end()  # their memory is the work's
