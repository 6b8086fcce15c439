"""`minidl doctor --compile FILE.py`: what a script launches is recorded as it runs, and then compiled for GPUs.

The script runs in this process, with its kernels interpreted. A launch becomes a job for each architecture, specialised
as Triton itself does it there. The processes that compile are forked from this one, so that they have every kernel,
also those that a function has made.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from minidl.common.architecture import Arch, arch_name
from minidl.compilation import launch_jobs
from minidl.compilation.job import Job
from minidl.data.parsing import counted
from minidl.interpreter import patches
from minidl.testing.sanitizer.autotuned import configured
from minidl.testing.sanitizer.script import play
from minidl.tools.doctor import compile, worker
from minidl.tools.doctor.compile import Verdict
from minidl.tools.first_line import first_line


class _Compiled(JITFunction[Any]):  # type: ignore[misc]
    """A function as Triton would compile it. It has no key here, where what it calls is interpreted."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass
class Launches:
    """What scripts launch: jobs for each architecture by key.

    refused  launches that an architecture has no job for, and why
    failed   scripts that did not end well or launched nothing
    count    how many launches there were; those of minidl's kernels, with tiles for each GPU, are left out
    """

    archs: Sequence[Arch]
    jobs: dict[str, Job] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    count: int = 0
    _names: dict[Any, str] = field(default_factory=dict)
    _compiled: dict[str, _Compiled] = field(default_factory=dict)

    @property
    def kernels(self) -> set[str]:
        """The names of the kernels that were launched."""
        return {job.name for job in self.jobs.values()} | {name.rpartition(" for ")[0] for name in self.refused}

    def add(self, function: InterpretedFunction[Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record a launch."""
        if function.fn.__module__.startswith("minidl."):
            return
        self.count += 1
        name, kernel = self._known(function)
        args = tuple(map(self._argument, args))
        named = {key: self._argument(value) for key, value in named.items()}
        for arch in self.archs:
            try:
                job = launch_jobs.job_of(arch, kernel, (), args, named, name)
            except Exception as error:  # noqa: BLE001 (told in the report; the launch itself may still work)
                self.refused[f"{name.partition(':')[2]} for {arch_name(arch)}"] = first_line(error)
            else:
                self.jobs[job.key] = job

    def _argument(self, value: Any) -> Any:
        return self._known(value)[1] if isinstance(value, InterpretedFunction) else value

    def _known(self, function: InterpretedFunction[Any]) -> tuple[str, _Compiled]:
        """The name of a function in `launch_jobs.registered`, and the function as Triton would compile it."""
        code = function.fn.__code__
        key = code, str([cell.cell_contents for cell in function.fn.__closure__ or ()])
        if key not in self._names:
            name = self._names[key] = self._new_name(code)
            launch_jobs.registered[name] = function
            self._compiled[name] = _Compiled(function.fn, **function.kwargs)
        name = self._names[key]
        return name, self._compiled[name]

    def _new_name(self, code: Any) -> str:
        """As "add.py:add", of a second function of this name "add.py:add 2 (add.py:12)"."""
        file, name = Path(code.co_filename).name, code.co_name
        others = sum(other.co_name == name for other, _ in self._names)
        return f"{file}:{name} {others + 1} ({file}:{code.co_firstlineno})" if others else f"{file}:{name}"


@contextlib.contextmanager
def recording(archs: Sequence[Arch]) -> Iterator[Launches]:
    """A context that records what is launched. Of an autotuned kernel every configuration is, and the first runs."""
    launches, run, tune = Launches(archs), InterpretedFunction.run, Autotuner.run

    def recorded(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        launches.add(function, args, named)
        return run(function, *args, grid=grid, warmup=warmup, **named)

    def untuned(tuner: Any, *args: Any, **named: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for configuration in _left(tuner, named):
            if configuration.pre_hook is not None:
                configuration.pre_hook({**tuner.nargs, **named, **configuration.all_kwargs()})
            tuner.fn.run(*args, **{**named, "warmup": True}, **configuration.all_kwargs())
        with configured(tuner, tuner.configs[0]):
            return tune(tuner, *args, **named)

    InterpretedFunction.run, Autotuner.run = recorded, untuned
    try:
        yield launches
    finally:
        InterpretedFunction.run, Autotuner.run = run, tune


def _left(tuner: Any, named: dict[str, Any]) -> Sequence[Any]:
    """The configurations that a tuner does not rule out; all of them where it asks the GPU for that."""
    try:
        return tuner.prune_configs(named)
    except Exception:  # noqa: BLE001 (a function of the script's)
        return tuner.configs


def record(files: Sequence[str], archs: Sequence[Arch], *, module: bool = False) -> Launches:
    """What scripts launch, or the module `files[0]` with the others as its arguments."""
    folder = Path.cwd()
    with recording(archs) as launches:
        for script, arguments in [(files[0], files[1:])] if module else [(file, ()) for file in files]:
            before = launches.count
            code = play(script, arguments, module=module)
            os.chdir(folder)
            if launches.count == before:
                launches.failed[script] = "launched no Triton kernel of its own"
            if code:
                count = counted(launches.count - before, "launch")
                launches.failed[script] = f"ended with exit code {code}, after {count}"
    return launches


def compile_all(launches: Launches, only: str, progress: Callable[[int, int], None]) -> Verdict:
    """Compile the jobs of kernels with `only` in their name."""
    start = time.perf_counter()
    jobs = [job for job in launches.jobs.values() if only in job.name]
    refused = {name: why for name, why in launches.refused.items() if only in name.rpartition(" for ")[0]}
    with compile.pool(Forked, min(len(jobs), len(os.sched_getaffinity(0)))) as pool:
        figures = compile.compile_jobs(pool, jobs, progress) if jobs else {}
    versions = worker.answer({"versions": True})
    return Verdict(figures, refused, versions, time.perf_counter() - start, launches.failed)


class Forked(compile.Worker):
    """A worker that is forked from this process, and has its kernels compiled."""

    def _begin(self) -> Any:
        return _Process(self._errors.fileno())


class _Process:
    """A forked process, as `subprocess.Popen` has it."""

    def __init__(self, errors: int) -> None:
        own, other = socket.socketpair()
        # Python 3.12 and later warn of other threads: none of them holds what a compiler needs.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.pid = os.fork()
        if self.pid == 0:
            _serve(other.fileno(), other.fileno(), errors)
        self.stdin, self.stdout, self.returncode = own.makefile("w"), own.makefile(), 0
        own.close()
        other.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


def _serve(*files: int) -> NoReturn:
    """Be a worker, with these as standard input, output and error."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 1024)  # those of other workers: they end with the process that asks
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        patches.compile_from_now_on()
        worker.main()
        code = 0
    except BaseException as error:  # noqa: BLE001 (told to the process that asks)
        sys.stderr.write(f"{first_line(error)}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)
