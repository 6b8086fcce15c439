"""`minidl doctor --compile FILE.py`: record the launches of a script, and compile them for GPUs.

The script runs in this process, with its kernels interpreted. A launch becomes a job for each architecture, specialised
as Triton does. The compiling processes are forked from this one, so that they have every kernel, also kernels that a
function created.
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
    """A function as Triton would compile it, without Triton's hash, because the functions it calls are interpreted."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass
class Launches:
    """The launches of scripts: jobs for each architecture by key.

    refused  launches for which an architecture has no job, and why
    failed   scripts that failed or launched nothing
    count    the number of launches, without those of minidl's kernels
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
        """Return the names of the launched kernels."""
        return {job.name for job in self.jobs.values()} | {name.rpartition(" for ")[0] for name in self.refused}

    def add(self, function: InterpretedFunction[Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record a launch."""
        if function.fn.__module__.startswith("minidl."):
            return
        self.count += 1
        name, kernel = self._registered(function)
        args = tuple(map(self._argument, args))
        named = {key: self._argument(value) for key, value in named.items()}
        for arch in self.archs:
            try:
                job = launch_jobs.job_of(arch, kernel, (), args, named, name)
            except Exception as error:  # noqa: BLE001 (the report names it; the launch itself may still work)
                self.refused[f"{name.partition(':')[2]} for {arch_name(arch)}"] = first_line(error)
            else:
                self.jobs[job.key] = job

    def _argument(self, value: Any) -> Any:
        return self._registered(value)[1] if isinstance(value, InterpretedFunction) else value

    def _registered(self, function: InterpretedFunction[Any]) -> tuple[str, _Compiled]:
        """Return the name of a function in `launch_jobs.registered`, and the function as Triton would compile it."""
        code = function.fn.__code__
        key = code, str([cell.cell_contents for cell in function.fn.__closure__ or ()])
        if key not in self._names:
            name = self._names[key] = self._new_name(code)
            launch_jobs.registered[name] = function
            self._compiled[name] = _Compiled(function.fn, **function.kwargs)
        name = self._names[key]
        return name, self._compiled[name]

    def _new_name(self, code: Any) -> str:
        """Return a name such as "add.py:add", or "add.py:add 2 (add.py:12)" for a second function of this name."""
        file, name = Path(code.co_filename).name, code.co_name
        others = sum(other.co_name == name for other, _ in self._names)
        return f"{file}:{name} {others + 1} ({file}:{code.co_firstlineno})" if others else f"{file}:{name}"


@contextlib.contextmanager
def recording(archs: Sequence[Arch]) -> Iterator[Launches]:
    """A context that records launches: of an autotuned kernel those of every configuration, of which the first runs."""
    launches, run, tune = Launches(archs), InterpretedFunction.run, Autotuner.run

    def recorded(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        launches.add(function, args, named)
        return run(function, *args, grid=grid, warmup=warmup, **named)

    def untuned(tuner: Any, *args: Any, **named: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for configuration in _configurations(tuner, named):
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


def _configurations(tuner: Any, named: dict[str, Any]) -> Sequence[Any]:
    """Return the configurations that a tuner does not prune; all of them if pruning needs the GPU."""
    try:
        return tuner.prune_configs(named)
    except Exception:  # noqa: BLE001 (a function of the script)
        return tuner.configs


def record(files: Sequence[str], archs: Sequence[Arch], *, module: bool = False) -> Launches:
    """Run scripts, or the module `files[0]` with the others as arguments, and return their launches."""
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
    with compile.worker_pool(Forked, min(len(jobs), len(os.sched_getaffinity(0)))) as pool:
        figures = compile.compile_jobs(pool, jobs, progress) if jobs else {}
    versions = worker.answer({"versions": True})
    return Verdict(figures, refused, versions, time.perf_counter() - start, launches.failed)


class Forked(compile.Worker):
    """A worker that is forked from this process and compiles its kernels."""

    def _start_process(self) -> Any:
        return _Process(self._errors.fileno())


class _Process:
    """A forked process with the interface of `subprocess.Popen`."""

    def __init__(self, errors: int) -> None:
        near, far = socket.socketpair()
        # Python 3.12 and later warn of other threads: none of them holds a lock that a compiler needs.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.pid = os.fork()
        if self.pid == 0:
            _serve(far.fileno(), far.fileno(), errors)
        self.stdin, self.stdout, self.returncode = near.makefile("w"), near.makefile(), 0
        near.close()
        far.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


def _serve(*files: int) -> NoReturn:
    """Run a worker with these files as standard input, output and error."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 1024)  # other workers' files: these workers end with the parent process
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        patches.compile_from_now_on()
        worker.main()
        code = 0
    except BaseException as error:  # noqa: BLE001 (reported to the parent process)
        sys.stderr.write(f"{first_line(error)}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)
