"""Start processes that compile kernels. Imports neither torch nor Triton."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from minidl.common import import_lock
from minidl.compilation.job import Job

Progress = Callable[[int, int], None]  # called with the number of compiled jobs and of all jobs

_START = "{imports}from minidl.compilation.server import serve; serve({command})"
_WITHOUT_TORCH = "from minidl.compilation import fake_torch; fake_torch.install(); "
# The processes do not use the GPU that they compile for, and must not have threads when they fork.
_ENVIRONMENT = {
    "TRITON_INTERPRET": "0",
    "MINIDL_CPU": "interpreted",
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Compilers:
    """Processes that compile jobs; as a context manager, it ends them on exit.

    With a `command`, such as "text", they import minidl's kernels without torch, and compile the kernels that the
    command usually launches before they get any job.
    """

    def __init__(self, command: str = "") -> None:
        self.command = command
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes; `compile` starts them again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._process = None

    @property
    def started(self) -> bool:
        """Whether a process is running."""
        return self._process is not None

    def start(self, jobs: Sequence[Job] = ()) -> None:
        """Start the process that the compiling ones are forked from, so that it has imported the kernels in time.

        It does not import torch for a command, or if all `jobs` are minidl's kernels.
        """
        if self._process is None:
            command = f"{self.command!r}, {os.environ.get('CUDA_VISIBLE_DEVICES')!r}" if self.command else ""
            without_torch = all(job.kernel.startswith("minidl.") for job in jobs) if jobs else bool(self.command)
            imports = _WITHOUT_TORCH if without_torch else ""
            self._process = subprocess.Popen(
                import_lock.python(_START.format(imports=imports, command=command)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={**os.environ, **_ENVIRONMENT},
            )  # fmt: skip

    def compile(self, jobs: Sequence[Job], progress: Progress = lambda done, of: None, processes: int = 0) -> None:
        """Compile jobs for Triton's cache.

        `processes` (0: the number of available processors) work in parallel. Also returns if a process was ended.
        """
        self.start(jobs)
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        count = min(processes or len(os.sched_getaffinity(0)), len(jobs))
        progress(0, len(jobs))
        with contextlib.suppress(BrokenPipeError):
            request = {"jobs": [job.as_json() for job in jobs], "processes": count}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        for done, line in enumerate(self._process.stdout, start=1):
            if line == "end\n":
                break
            progress(done, len(jobs))


_active: list[Compilers] = []


def has_gpu(device: str) -> bool:
    """Return whether a GPU driver is installed that option --device allows; torch would take seconds to check."""
    return device != "cpu" and "TRITON_INTERPRET" not in os.environ and any(path.exists() for path in _DRIVERS)


@contextlib.contextmanager
def started(command: str, device: str) -> Iterator[bool]:
    """A context for a command that may compile kernels; if there is a GPU, processes start in the background.

    `device` is "auto", "cuda" or "cpu". Yields whether there is a GPU (`has_gpu`).
    """
    gpu = has_gpu(device)
    with Compilers(command) as compilers:
        if gpu:
            compilers.start()
        _active.append(compilers)
        try:
            yield gpu
        finally:
            _active.remove(compilers)


def end() -> None:
    """End the processes of the current `started` context."""
    for compilers in _active:
        compilers.end()


@contextlib.contextmanager
def current() -> Iterator[Compilers]:
    """A context with the compilers of the current `started` context, or new ones."""
    if _active:
        yield _active[-1]
    else:
        with Compilers() as compilers:
            yield compilers
