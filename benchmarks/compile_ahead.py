"""Compare compilation one by one, in threads and in processes, each into an empty cache. Needs no GPU.

    python -m benchmarks.compile_ahead [--kernels 16] [--processes N] [--arch 90]

It prints seconds for the same kernels of matrix products and softmax, and the stages of compilation one by one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton

from minidl.compilation import launch_jobs
from minidl.compilation.compiler_processes import Compilers
from minidl.compilation.job import Job
from minidl.kernels import gemm, softmax
from minidl.runtime import launch
from minidl.tools.doctor.jobs import target_name

_START = 15.0  # seconds for the start of the processes


def jobs(count: int, arch: int) -> list[Job]:
    """Return `count` different kernels."""
    result: dict[str, Job] = {}

    def keep(*launched: Any) -> None:
        job = launch_jobs.job_of(arch, *launched)
        result.setdefault(job.key, job)

    with launch.record(keep, target_name(arch)):
        for act in (None, "relu", "gelu", "tanh", "sigmoid", "silu"):
            for rows in (64, 512, 4096):
                gemm.gemm(torch.empty(rows, 256), torch.empty(256, 128), act=act)
                softmax.softmax(torch.empty(rows, 3 * rows))
    return list(result.values())[:count]


@contextmanager
def empty() -> Iterator[None]:
    """A context with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        yield


@contextmanager
def timed(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{name:<44}{time.perf_counter() - started:8.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=16)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--arch", type=int, default=90)
    options = parser.parse_args()
    kernels, count = jobs(options.kernels, options.arch), options.processes
    launch_jobs.compile_job(kernels[0])  # modules that are loaded once
    stages: Counter[str] = Counter()

    def count_stages(times: Any, **_: Any) -> None:
        stages.update({"Python": times.ir_initialization, **dict(times.lowering_stages)})

    triton.knobs.compilation.listener = count_stages
    with empty(), timed(f"{len(kernels)} kernels, one after another"):
        for job in kernels:
            launch_jobs.compile_job(job)
    triton.knobs.compilation.listener = None
    total = sum(stages.values())
    print("  of which", ", ".join(f"{name} {duration / total:.0%}" for name, duration in stages.items()))
    with empty(), timed(f"{count} threads"), ThreadPoolExecutor(count) as pool:
        list(pool.map(launch_jobs.compile_job, kernels))
    with empty(), timed(f"{count} processes, start included"), Compilers() as compilers:
        compilers.compile(kernels, processes=count)
    with empty(), Compilers("benchmark") as compilers:
        compilers.start()
        time.sleep(_START)
        with timed(f"{count} processes that have started"):
            compilers.compile(kernels, processes=count)


if __name__ == "__main__":
    main()
