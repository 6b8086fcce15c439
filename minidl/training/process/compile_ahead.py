"""Compile kernels before they are launched, see `rehearsal`, and show a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from minidl.common import timing
from minidl.compilation import compiler_processes, rehearsal
from minidl.runtime import cache_keys, launch
from minidl.training.process.display import Display

_FEW = 4  # compiling fewer kernels at their launch takes less time than starting a process


def compile_ahead(work: Callable[[], object], display: Display) -> None:
    """Compile the kernels that `work` launches, unless they are interpreted. The results of `work` are undefined."""
    if launch.INTERPRETED:
        return
    started = time.monotonic()
    if launch.COMPILED_CPU:
        with timing.timed("compile"):
            _for_cpu(work, display)
        return
    with timing.timed("compile"):
        try:
            jobs = rehearsal.missing(work)
        except Exception as error:  # noqa: BLE001 (an error of the work is raised again when it runs)
            display.note(f"note: kernels are compiled on first use ({type(error).__name__}: {error})")
            return
        with compiler_processes.current() as processes:
            if jobs and (processes.started or len(jobs) >= _FEW):
                with display.counted("compiling kernels") as progress:
                    processes.compile(jobs, progress)
                display.note(f"{len(jobs)} kernels compiled in {time.monotonic() - started:.1f} s")
            processes.end()  # frees their memory for the work


def _for_cpu(work: Callable[[], object], display: Display) -> None:
    from minidl.cpu import run as cpu

    launches: list[tuple[Any, ...]] = []
    try:
        with rehearsal.rehearsal(lambda *launched: launches.append(launched)):
            work()
        for kernel in {launched[0] for launched in launches}:
            cache_keys.compute_key(kernel)
        with display.counted("compiling kernels") as progress:
            cpu.compile_ahead(launches, progress)
    except Exception as error:  # noqa: BLE001 (an error of the work is raised again when it runs)
        display.note(f"note: kernels are compiled on first use ({type(error).__name__}: {error})")
