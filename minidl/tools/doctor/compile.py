"""`minidl doctor --compile`: compile every kernel offline, without the GPU it is for, in child processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from minidl.common.architecture import Arch
from minidl.compilation.job import Job
from minidl.tools.doctor import plan as plans
from minidl.tools.doctor.jobs import Figures, problems, target_name
from minidl.tools.doctor.plan import CompilePlan

T = TypeVar("T")
R = TypeVar("R")
COMPILE_SECONDS = 300
PLAN_SECONDS = 900
# Triton keeps about 2 MB for each compiled kernel, so a process is replaced after this many answers.
RENEW = 500


class WorkerError(RuntimeError):
    """A child process died or did not answer in time."""


class Worker:
    """A child process that runs `doctor.worker`. It starts when needed, and again after RENEW answers."""

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python
        self._process: Any = None
        self._errors: Any = None
        self._answers = 0

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request, see `worker`: "versions", "plan" or "compile". Raises WorkerError."""
        if self._answers >= RENEW:
            self.close()
        process = self._process or self._restart()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            raise WorkerError(f"the compiling process ended: {self._stop()}") from None
        if not select.select([process.stdout], [], [], seconds)[0]:
            self._stop()
            raise WorkerError(f"no answer within {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            raise WorkerError(f"the compiling process ended: {self._stop()}")
        self._answers += 1
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._stop()

    def _restart(self) -> Any:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process, self._answers = self._start_process(), 0
        return self._process

    def _start_process(self) -> Any:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return subprocess.Popen(
            [self.python, "-P", "-m", "minidl.tools.doctor.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )

    def _stop(self) -> str:
        """End the process and return the reason: an error of LLVM, or the last line of its standard error."""
        process, self._process = self._process, None
        process.kill()
        process.communicate()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self._errors.close()
        errors = [line for line in lines if line.startswith("LLVM ERROR") or " Assertion `" in line]
        return next(iter(errors + lines[-1:]), f"exit code {process.returncode}")


@dataclass
class Verdict:
    """The results of an offline compile.

    figures   each compiled job with its figures, by the job's key
    failures  calls that raised, and kernels that no call launches, with the reason
    versions  of Python, torch and Triton
    scripts   scripts of `minidl doctor --compile FILE.py` that failed or launched nothing, with the reason
    """

    figures: dict[str, tuple[Job, Figures]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    scripts: dict[str, str] = field(default_factory=dict)

    def wrong(self) -> dict[str, list[str]]:
        """Return the problems by job, for jobs that have any."""
        messages: dict[str, list[str]] = {}
        for job, figures in self.figures.values():
            # Jobs that differ only in a flag, a constant that no tile table sets, print as the same text.
            if wrong := problems(job, figures):
                messages.setdefault(str(job), []).extend(wrong)
        return messages

    @property
    def fine(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.failures and not self.scripts and not self.wrong()


def run(
    archs: Sequence[Arch],
    *,
    only: str = "",
    workload: str = "",
    every_tile: bool = True,
    brief_archs: Collection[Arch] = (),
    workers: int | None = None,
    python: str = sys.executable,
    progress: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> Verdict:
    """Compile the kernels with `only` in their name for each architecture, in child processes of `python`.

    The first stage compiles jobs that cover every dtype and each pair of flag values of a kernel, with the tiles of the
    calls' shapes. The second compiles the jobs of each tile that are expected to be the largest, by the figures of the
    first.

    workload     a part of the names of the operations to call (`doctor.workloads` lists them)
    every_tile   whether the second stage covers every tile of the tables, or only those of the calls' shapes
    brief_archs  architectures for which the first stage compiles each value of a flag, instead of each pair of values
                 (`plan.shorten`); without `every_tile` they have no second stage
    progress     gets the stage, the number of its finished jobs and their total

    Raises ValueError for an architecture whose limits are not known, WorkerError when a process does not answer.
    """
    for arch in archs:
        target_name(arch)  # raises for an unknown one
    start = time.perf_counter()
    verdict = Verdict()
    with worker_pool(partial(Worker, python), workers) as pool:
        verdict.versions = pool[0].ask({"versions": True}, PLAN_SECONDS)
        selection = {"only": only, "workload": workload, "every_tile": every_tile}
        arch_plans = _plan(pool, [{"arch": arch, **selection} for arch in archs], progress)
        verdict.failures = plans.failures(arch_plans)
        by_arch = dict(zip(archs, arch_plans, strict=True))
        jobs = [job for arch, plan in by_arch.items() for job in plans.shorten(plan, arch in brief_archs)]
        verdict.figures = compile_jobs(pool, jobs, partial(progress, "every flag"))
        first_figures = {key: figures for key, (_, figures) in verdict.figures.items()}
        second_stage = [plan for arch, plan in by_arch.items() if every_tile or arch not in brief_archs]
        jobs = [job for plan in second_stage for job in plans.heaviest(plan, first_figures)]
        verdict.figures |= compile_jobs(pool, jobs, partial(progress, "heaviest per tile"))
    verdict.seconds = time.perf_counter() - start
    return verdict


@contextlib.contextmanager
def worker_pool(make: Callable[[], Worker], count: int | None = None) -> Iterator[list[Worker]]:
    """Open `count` workers, by default one for each processor, and close them at the end."""
    workers = [make() for _ in range(len(os.sched_getaffinity(0)) if count is None else count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _plan(
    pool: Sequence[Worker], requests: Sequence[dict[str, Any]], progress: Callable[[str, int, int], None]
) -> list[CompilePlan]:
    def one(worker: Worker, arguments: dict[str, Any]) -> CompilePlan:
        fields = worker.ask({"plan": arguments}, PLAN_SECONDS)
        # Jobs with the tiles of their shapes, and jobs with each tile forced.
        jobs = {name: {key: Job(**job) for key, job in fields[name].items()} for name in ("first", "forced")}
        return CompilePlan(**{**fields, **jobs})

    return _share(pool, requests, one, partial(progress, "recording launches"))


def compile_jobs(
    pool: Sequence[Worker], jobs: Iterable[Job], progress: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, tuple[Job, Figures]]:
    """Compile the jobs in parallel, and return them with their figures, by key."""

    def one(worker: Worker, job: Job) -> tuple[Job, Figures]:
        try:
            return job, Figures(**worker.ask({"compile": job.as_json()}, COMPILE_SECONDS))
        except WorkerError as error:
            return job, Figures(error=str(error))

    return {job.key: (job, figures) for job, figures in _share(pool, list(jobs), one, progress)}


def _share(
    pool: Sequence[Worker], items: Sequence[T], do: Callable[[Worker, T], R], progress: Callable[[int, int], None]
) -> list[R]:
    """Call `do` on each item with the next free worker, and return the results. Raises the first error of `do`."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in pool:
        free.put(worker)

    def one(item: T) -> R:
        worker = free.get()
        try:
            return do(worker, item)
        finally:
            free.put(worker)

    progress(0, len(items))
    threads = ThreadPoolExecutor(len(pool))
    try:
        futures = [threads.submit(one, item) for item in items]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            progress(done, len(items))
        return [future.result() for future in futures]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
