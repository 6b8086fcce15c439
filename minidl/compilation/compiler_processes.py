"""Processes that compile kernels, and when to start them; without torch and Triton."""

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

Progress = Callable[[int, int], None]  # gets how many are done, and of how many

_START = "{before}from minidl.compilation.server import serve; serve({usual})"
_WITHOUT_TORCH = "from minidl.compilation import fake_torch; fake_torch.install(); "
# Kernels are compiled for a GPU that these processes do not touch, and a process that is forked has no other threads.
_ENVIRONMENT = {
    "TRITON_INTERPRET": "0",
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Compilers:
    """Processes that compile jobs. A context manager: at its end they are ended.

    With the name of a `command`, as "text", the kernels are minidl's own: they are imported without torch, and those
    that the command usually launches are compiled before any job is known.
    """

    def __init__(self, command: str = "") -> None:
        self.command = command
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes; they start again where something is to be compiled."""
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
        """Whether there is a process already."""
        return self._process is not None

    def start(self, jobs: Sequence[Job] = ()) -> None:
        """Start the process that others are forked from, so that it has imported the kernels when it is needed.

        It does without torch for a command, and where all `jobs` are of minidl's own kernels.
        """
        if self._process is None:
            usual = f"{self.command!r}, {os.environ.get('CUDA_VISIBLE_DEVICES')!r}" if self.command else ""
            own = all(job.kernel.startswith("minidl.") for job in jobs) if jobs else bool(self.command)
            before = _WITHOUT_TORCH if own else ""
            self._process = subprocess.Popen(
                import_lock.python(_START.format(before=before, usual=usual)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={**os.environ, **_ENVIRONMENT},
            )  # fmt: skip

    def compile(self, jobs: Sequence[Job], progress: Progress = lambda done, of: None, processes: int = 0) -> None:
        """Compile jobs for Triton's cache.

        `processes` (0: as many as this process has processors) work at a time. Returns as soon as nothing more can be
        done, also when a process was ended.
        """
        self.start(jobs)
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        count = min(processes or len(os.sched_getaffinity(0)), len(jobs))
        progress(0, len(jobs))
        with contextlib.suppress(BrokenPipeError):
            asked = {"jobs": [job.as_json() for job in jobs], "processes": count}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        for done, line in enumerate(self._process.stdout, start=1):
            if line == "end\n":
                break
            progress(done, len(jobs))


_at_hand: list[Compilers] = []


def seem_useful(device: str) -> bool:
    """Whether there seems to be a GPU to compile for, given --device; torch knows, but takes seconds to be asked."""
    return device != "cpu" and "TRITON_INTERPRET" not in os.environ and any(path.exists() for path in _DRIVERS)


@contextlib.contextmanager
def ready(command: str, device: str) -> Iterator[bool]:
    """A block, of a command, that may compile kernels: where it seems to have a GPU, processes begin meanwhile.

    `device` is "auto", "cuda" or "cpu". The value is whether there seems to be a GPU.
    """
    gpu = seem_useful(device)
    with Compilers(command) as own:
        if gpu:
            own.start()
        _at_hand.append(own)
        try:
            yield gpu
        finally:
            _at_hand.remove(own)


def end() -> None:
    """End those of the block under way."""
    for own in _at_hand:
        own.end()


@contextlib.contextmanager
def at_hand() -> Iterator[Compilers]:
    """Those of the block under way, else others."""
    if _at_hand:
        yield _at_hand[-1]
    else:
        with Compilers() as own:
            yield own
