"""`minidl doctor --compile`: every kernel compiled offline by child processes, with a progress bar, and the verdict."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from minidl.doctor import plan as plans
from minidl.doctor.jobs import Figures, Job, problems, target_name
from minidl.doctor.plan import Plan

COMPILE_SECONDS = 300
PLAN_SECONDS = 900


class WorkerError(RuntimeError):
    """A child process died, answered nonsense or did not answer in time."""


# Triton keeps some 2 MB of every kernel it has compiled: a process is replaced after so many.
RENEW = 500


class Worker:
    """A child process of `minidl.doctor.worker`, started when first asked, after it died and after RENEW answers."""

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None
        self._answers = 0

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request. Raises WorkerError."""
        if self._answers >= RENEW:
            self.close()
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
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

    def _start(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [self.python, "-m", "minidl.doctor.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )
        self._answers = 0
        return self._process

    def _stop(self) -> str:
        """End the process and return the last line that it said to standard error."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        process.communicate()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self._errors.close()
        return lines[-1] if lines else f"exit code {process.returncode}"


@dataclass
class Verdict:
    """What became of every job, and what could not even be tried."""

    figures: dict[str, tuple[Job, Figures]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def wrong(self) -> dict[str, list[str]]:
        """Problems by job; a job without any is not in it."""
        found = {str(job): problems(job, figures) for job, figures in self.figures.values()}
        return {name: wrong for name, wrong in found.items() if wrong}

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures and not self.wrong()


def run(
    archs: Sequence[int],
    *,
    only: str = "",
    work: str = "",
    every_tile: bool = True,
    brief: Collection[int] = (),
    workers: int | None = None,
    python: str = sys.executable,
    progress: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> Verdict:
    """Compile the kernels with `only` in their name for each architecture, in child processes of `python`.

    `work` picks the operations that are called, by a part of their name: `minidl.doctor.workloads` lists them. Without
    `every_tile`, only tiles that the shapes of the calls get. For the architectures in `brief` each flag is taken once
    (`plan.shorten`), and without every tile, tiles count for nothing.
    `progress` is told the stage, and how many of its jobs are done. Raises ValueError for an architecture whose limits
    are not known, WorkerError when the launches cannot be recorded.
    """
    for arch in archs:
        target_name(arch)
    start = time.perf_counter()
    verdict = Verdict()
    pool = [Worker(python) for _ in range(workers or len(os.sched_getaffinity(0)))]
    try:
        verdict.versions = pool[0].ask({"versions": True}, PLAN_SECONDS)
        chosen = {"only": only, "work": work, "every_tile": every_tile}
        made = _plan(pool, [{"arch": arch, **chosen} for arch in archs], progress)
        verdict.failures = plans.failures(made)
        jobs = [job for arch, plan in zip(archs, made, strict=True) for job in plans.shorten(plan, arch in brief)]
        verdict.figures = compile_jobs(pool, jobs, partial(progress, "every flag"))
        known = {key: figures for key, (_, figures) in verdict.figures.items()}
        tiled = [plan for arch, plan in zip(archs, made, strict=True) if every_tile or arch not in brief]
        jobs = [job for plan in tiled for job in plans.heaviest(plan, known)]
        verdict.figures |= compile_jobs(pool, jobs, partial(progress, "every tile"))
    finally:
        for worker in pool:
            worker.close()
    verdict.seconds = time.perf_counter() - start
    return verdict


def _plan(
    pool: Sequence[Worker], wanted: Sequence[dict[str, Any]], progress: Callable[[str, int, int], None]
) -> list[Plan]:
    made: dict[int, Plan] = {}

    def one(worker: Worker, arguments: dict[str, Any]) -> None:
        fields = worker.ask({"plan": arguments}, PLAN_SECONDS)
        for name in ("first", "forced"):
            jobs = [Job(**job) for job in fields[name]]
            fields[name] = {job.key: job for job in jobs}
        made[arguments["arch"]] = Plan(**fields)
        progress("recording launches", len(made), len(wanted))

    progress("recording launches", 0, len(wanted))
    _share(pool, wanted, one)
    return [made[arguments["arch"]] for arguments in wanted]


def compile_jobs(
    pool: Sequence[Worker], jobs: Iterable[Job], progress: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, tuple[Job, Figures]]:
    """The jobs with their figures by key, compiled by the workers side by side."""
    jobs = list(jobs)
    done: dict[str, tuple[Job, Figures]] = {}

    def one(worker: Worker, job: Job) -> None:
        try:
            figures = Figures(**worker.ask({"compile": job.as_json()}, COMPILE_SECONDS))
        except WorkerError as error:
            figures = Figures(error=str(error))
        done[job.key] = job, figures
        progress(len(done), len(jobs))

    progress(0, len(jobs))
    _share(pool, jobs, one)
    return done


def _share(pool: Sequence[Worker], items: Iterable[Any], do: Callable[[Worker, Any], None]) -> None:
    """`do` each item with one of the workers, as they become free. Raises the first error that `do` raised."""
    waiting: SimpleQueue[Any] = SimpleQueue()
    for item in items:
        waiting.put(item)
    errors: list[BaseException] = []

    def take(worker: Worker) -> None:
        while not errors:
            try:
                do(worker, waiting.get_nowait())
            except Empty:
                return
            except BaseException as error:  # noqa: BLE001 (raised again below, in the thread that waits)
                errors.append(error)

    threads = [threading.Thread(target=take, args=(worker,), daemon=True) for worker in pool]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
