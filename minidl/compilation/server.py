"""The process that compiles jobs. It reads requests from standard input, and writes a line for each compiled kernel.

It imports the kernels, uses no GPU, and forks the processes that compile, because importing the kernels takes as long
as compiling about ten of them. It compiles the usual kernels of a command while the command imports and reads its data.
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
_NICENESS = 10  # the command has priority
_FREE = 2  # processors left to the command
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def serve(command: str = "", devices: str | None = None) -> None:
    """Compile the usual kernels of a command, then the jobs of requests; `devices` is the command's
    CUDA_VISIBLE_DEVICES."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _fork(_compile_cuda_utils)
    stop = _started(_usual_jobs(command, devices) if command else [])
    for line in sys.stdin:
        request = json.loads(line)
        # Jobs that are being compiled come last, so that they are in the cache by then.
        begun = stop()
        jobs = sorted(_by_signature(Job(**job) for job in request["jobs"]), key=lambda job: job.key in begun)
        _import(jobs)
        with contextlib.suppress(BrokenPipeError):
            for _ in _forked(jobs, request["processes"]):
                answers.write("done\n")
            answers.write("end\n")


def _compile_cuda_utils() -> None:
    """Compile the C code that Triton 3.6 needs once to launch any kernel."""
    from triton.backends.nvidia import driver

    driver.CudaUtils()


def _usual_jobs(command: str, devices: str | None) -> list[Job]:
    """Return the usual jobs of a command on this machine's first GPU that Triton's cache lacks."""
    with contextlib.suppress(Exception):  # no driver or no such file
        jobs = command_kernels.jobs(command, _architecture(devices))
        _import(jobs)
        return _by_signature(job for job in jobs if not launch_jobs.is_compiled(job))
    return []


def _by_signature(jobs: Iterable[Job]) -> list[Job]:
    """Sort jobs so that one of each signature comes first: Triton 3.6 compiles a C launcher for each signature, and
    processes with the same signature at the same time would all compile it."""
    seen: Counter[str] = Counter()
    ranked = []
    for job in jobs:
        signature = f"{job.kernel} {job.signature}"
        ranked.append((seen[signature], job))
        seen[signature] += 1
    return [job for _, job in sorted(ranked, key=lambda pair: pair[0])]


def _architecture(devices: str | None) -> int:
    """Return the architecture of the first GPU, 90 for sm_90, from the driver, without creating a context. Raises
    OSError without a driver or a GPU."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    cuda = ctypes.CDLL("libcuda.so.1")
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise OSError("no GPU")
    digits = []
    for attribute in _CAPABILITY:
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        digits.append(value.value)
    return 10 * digits[0] + digits[1]


def _started(jobs: list[Job]) -> Callable[[], set[str]]:
    """Compile jobs in background processes. Return a function that skips the jobs not begun yet, and returns the keys
    of the others."""
    queue, put = os.pipe()
    devnull = os.open(os.devnull, os.O_WRONLY)
    work = functools.partial(_work, jobs, queue, devnull, put)
    for _ in range(min(len(jobs), max(1, len(os.sched_getaffinity(0)) - _FREE))):
        _fork(work, _NICENESS)
    _write_numbers(put, len(jobs))
    os.close(put)
    remaining: list[Job | None] = list(jobs)

    def stop() -> set[str]:
        while number := os.read(queue, _NUMBER.size):
            remaining[_NUMBER.unpack(number)[0]] = None  # no process has begun this job
        begun = {job.key for job in remaining if job is not None}
        remaining.clear()
        return begun

    return stop


def _import(jobs: Iterable[Job]) -> None:
    """Import the modules of jobs before forking."""
    for module in {job.kernel.partition(":")[0] for job in jobs}:
        with contextlib.suppress(Exception):  # the launch reports the error
            importlib.import_module(module)


def _forked(jobs: list[Job], processes: int) -> Iterator[int]:
    """Compile jobs in forked processes; yield the number of each job when it is done."""
    queue, put = os.pipe()
    results, done = os.pipe()
    work = functools.partial(_work, jobs, queue, done, put)
    children = [_fork(work) for _ in range(processes)]
    os.close(queue)
    os.close(done)
    try:
        with contextlib.suppress(BrokenPipeError):
            _write_numbers(put, len(jobs))
        os.close(put)
        while True:
            # Standard input is closed when the command ends; nothing else arrives now.
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
    """Write one number at a time, which a pipe keeps together; a full pipe blocks."""
    for number in range(count):
        os.write(pipe, _NUMBER.pack(number))


def _fork(work: Callable[[], Any], niceness: int = 0) -> int:
    """Run `work` in a forked process, and return its process ID."""
    child = os.fork()
    if child == 0:
        _end_after(work, niceness)
    return child


def _end_after(work: Callable[[], Any], niceness: int) -> NoReturn:
    try:
        # The kernel ends this process together with its parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(niceness)
        with contextlib.suppress(Exception):  # the launch reports the error
            work()
    finally:
        os._exit(0)


def _work(jobs: list[Job], queue: int, done: int, put: int) -> None:
    """Compile the jobs whose numbers are read from the queue, until it is empty."""
    os.close(put)
    while number := os.read(queue, _NUMBER.size):
        with contextlib.suppress(Exception):  # the launch reports the error
            _compile_launcher(launch_jobs.compile_job(jobs[_NUMBER.unpack(number)[0]]))
        os.write(done, number)


def _compile_launcher(compiled: Any) -> None:
    """Compile the C launcher that Triton 3.6 needs for each signature."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)
