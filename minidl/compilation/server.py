"""The process that compiles jobs: requests on standard input until it ends, a line for each kernel.

It has imported the kernels and touches no GPU, and processes forked from it compile: importing the kernels takes a
process as long as compiling some ten. What a command usually launches is compiled from the beginning on, while the
command imports and reads its data.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import select
import signal
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from minidl.compilation import command_kernels, launch_jobs
from minidl.compilation.job import Job

_NUMBER = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_LESS_URGENT = 10  # of niceness: the command itself comes first
_FREE = 2  # processors that are left to it
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def serve(command: str = "", devices: str | None = None) -> None:
    """Compile what the command of this name usually launches, and then what is asked for; `devices` are what
    CUDA_VISIBLE_DEVICES is for the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the command

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _fork(_launching)
    early = _begun(_of_command(command, devices) if command else [])
    for line in sys.stdin:
        asked = json.loads(line)
        # What is being compiled already comes last, and is then found.
        taken = early()
        jobs = sorted(_spread(Job(**job) for job in asked["jobs"]), key=lambda job: job.key in taken)
        _import(jobs)
        with contextlib.suppress(BrokenPipeError):
            for _ in _forked(jobs, asked["processes"]):
                answers.write("done\n")
            answers.write("end\n")


def _launching() -> None:
    """What Triton 3.6 compiles in C once, to launch anything."""
    from triton.backends.nvidia import driver

    driver.CudaUtils()


def _of_command(command: str, devices: str | None) -> list[Job]:
    """What a command usually launches, on the first GPU of this machine, and Triton's cache lacks."""
    with contextlib.suppress(Exception):  # there is no driver, or no such file
        jobs = command_kernels.jobs(command, _architecture(devices))
        _import(jobs)
        return _spread(job for job in jobs if not launch_jobs.is_compiled(job))
    return []


def _spread(jobs: Iterable[Job]) -> list[Job]:
    """Those first that have a signature of their own: Triton 3.6 compiles a launcher for each signature in C, and
    processes that do so at the same time all do it."""
    seen: Counter[str] = Counter()
    found = []
    for job in jobs:
        signature = f"{job.kernel} {job.signature}"
        found.append((seen[signature], job))
        seen[signature] += 1
    return [job for _, job in sorted(found, key=lambda pair: pair[0])]


def _architecture(devices: str | None) -> int:
    """Of the first GPU, as 90 for sm_90: asked of the driver, which makes no context for it. Raises OSError without a
    driver or a GPU."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    cuda = ctypes.CDLL("libcuda.so.1")
    device, found = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise OSError("no GPU")
    digits = []
    for attribute in _CAPABILITY:
        cuda.cuDeviceGetAttribute(ctypes.byref(found), attribute, device)
        digits.append(found.value)
    return 10 * digits[0] + digits[1]


def _begun(jobs: list[Job]) -> Callable[[], set[str]]:
    """Compile jobs in processes of their own; a function that stops that, but for the jobs under way, and returns the
    keys of those and of what is done."""
    waiting, put = os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    work = functools.partial(_work, jobs, waiting, nowhere, put)
    for _ in range(min(len(jobs), max(1, len(os.sched_getaffinity(0)) - _FREE))):
        _fork(work, _LESS_URGENT)
    _write_numbers(put, len(jobs))
    os.close(put)
    remaining: list[Job | None] = list(jobs)

    def stop() -> set[str]:
        while number := os.read(waiting, _NUMBER.size):
            remaining[_NUMBER.unpack(number)[0]] = None  # no process has begun this job
        taken = {job.key for job in remaining if job is not None}
        remaining.clear()
        return taken

    return stop


def _import(jobs: Iterable[Job]) -> None:
    """Forked processes need not import them again."""
    for module in {job.kernel.partition(":")[0] for job in jobs}:
        with contextlib.suppress(Exception):  # the launch will tell
            importlib.import_module(module)


def _forked(jobs: list[Job], processes: int) -> Iterator[int]:
    """The number of each job as a forked process has done with it; ends when all of them have ended."""
    waiting, put = os.pipe()
    results, done = os.pipe()
    work = functools.partial(_work, jobs, waiting, done, put)
    children = [_fork(work) for _ in range(processes)]
    os.close(waiting)
    os.close(done)
    try:
        with contextlib.suppress(BrokenPipeError):
            _write_numbers(put, len(jobs))
        os.close(put)
        while True:
            # The command's end closes standard input; nothing else arrives there now.
            ready, _, _ = select.select([results, 0], [], [])
            if 0 in ready:
                return
            number = os.read(results, _NUMBER.size)
            if not number:
                return
            yield _NUMBER.unpack(number)[0]
    finally:
        os.close(results)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _write_numbers(pipe: int, count: int) -> None:
    """A pipe hands out what fits into PIPE_BUF as a whole, and takes no more than it has room for at a time."""
    for number in range(count):
        os.write(pipe, _NUMBER.pack(number))


def _fork(work: Callable[[], Any], niceness: int = 0) -> int:
    """A process that does this work: its number."""
    child = os.fork()
    if child == 0:
        _end_after(work, niceness)
    return child


def _end_after(work: Callable[[], Any], niceness: int) -> NoReturn:
    try:
        # Ended with the process that forked it, however that ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(niceness)
        with contextlib.suppress(Exception):  # the launch will tell
            work()
    finally:
        os._exit(0)


def _work(jobs: list[Job], waiting: int, done: int, put: int) -> None:
    """Compile the jobs whose numbers are read, until there are no more."""
    os.close(put)
    while number := os.read(waiting, _NUMBER.size):
        with contextlib.suppress(Exception):  # the launch will tell
            _launcher(launch_jobs.compile_job(jobs[_NUMBER.unpack(number)[0]]))
        os.write(done, number)


def _launcher(compiled: Any) -> None:
    """What Triton 3.6 compiles in C to launch a kernel, for each signature."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)
