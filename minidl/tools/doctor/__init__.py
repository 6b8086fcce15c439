"""`minidl doctor`: check this machine, and compile kernels offline, also for other GPUs.

Read `machine` first (the checks), then `workloads` and `plan` (the kernels to compile), `jobs`, `offline`, `compile`,
`report`, `scripts` (kernels of a user's script) and `warm`. The commands import torch and rich when they run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.common.console import rich_console

if TYPE_CHECKING:
    from minidl.common.architecture import Arch
    from minidl.tools.doctor.compile import Verdict

ARCHITECTURES = (80, 90)


def doctor() -> int:
    """Print what this machine can run and what is missing. Returns 1 if something needed is missing, else 0."""
    from rich.markup import escape

    from minidl.tools.doctor import machine
    from minidl.version import __version__

    colours = {machine.GOOD: "green", machine.NOTE: "yellow", machine.BAD: "red"}
    console, checks = rich_console(), []
    with console.status("looking") as status:
        for check in machine.checks():
            checks.append(check)
            status.update(f"looking: {check.name}")
    console.print(f"minidl {__version__} on this machine\n", highlight=False)
    width = max(len(check.name) for check in checks)
    # Lines instead of a table, so that long paths are not wrapped.
    for check in checks:
        colour = colours[check.status]
        line = f"{escape(check.name.ljust(width))}  [{colour}]{check.status}[/]  {escape(check.text)}"
        console.print(line, soft_wrap=True, highlight=False)
        if check.advice:
            console.print(f"{'':{width + 8}}[{colour}]{escape(check.advice)}[/]", soft_wrap=True, highlight=False)
    console.print()
    failed = [check.name for check in checks if check.status == machine.BAD]
    if failed:
        console.print(f"[red]Needs attention:[/] {escape(', '.join(failed))}")
        return 1
    console.print("[green]All requirements are met.[/]")
    return 0


def doctor_compile(
    arch: Sequence[Arch] = ARCHITECTURES,
    *,
    only: str = "",
    workload: str = "",
    json: Path | None = None,
    details: bool = False,
    **options: Any,
) -> int:
    """Compile every kernel offline for these architectures and print a table. Returns 1 if something is wrong, else 0.

    only      compile kernels with this text in their name
    workload  call operations with this text in their name
    json      file for the figures
    details   a row per tile in the table; the JSON always has them
    options   arguments of `compile.run`, which chooses tiles, flags and the Python interpreter

    Raises ValueError for an unknown architecture and if no kernel has `only` in its name, OSError if the JSON file
    cannot be written.
    """
    from rich.markup import escape

    from minidl.tools.doctor import compile, jobs, report

    kernels = sorted({name.split(":")[1] for name in jobs.kernels()})
    if not any(only in name for name in kernels):
        names = ", ".join(name.removesuffix("_kernel") for name in kernels)
        raise ValueError(f"no kernel has {only!r} in its name; the kernels are: {names}")
    console = report.console()
    try:
        with report.Stages(console) as stages:
            verdict = compile.run(arch, only=only, workload=workload, progress=stages.tell, **options)
    except compile.WorkerError as error:
        console.print(f"[red]failed[/] {escape(str(error))}", highlight=False)
        return 1
    if not verdict.figures and not verdict.failures:
        console.print(
            f"no operation with {workload!r} in its name launches such a kernel", markup=False, highlight=False
        )
        return 1
    return _report(verdict, console, json, details)


def doctor_files(
    files: Sequence[str],
    arch: Sequence[Arch] = ARCHITECTURES,
    *,
    module: bool = False,
    only: str = "",
    json: Path | None = None,
    details: bool = False,
) -> int:
    """Run scripts and compile what they launch for the given architectures. Returns 1 if something is wrong, else 0.

    With `module`, the first of `files` is a module, as in `python -m`, and the others are its arguments. `only`, `json`
    and `details` are as in `doctor_compile`. Kernels must be interpreted in this process. Raises ValueError for an
    unknown architecture and if no launched kernel has `only` in its name, OSError as `doctor_compile`.
    """
    from minidl.tools.doctor import jobs, report, scripts

    for each in arch:
        jobs.target_name(each)
    if json is not None:
        json = json.absolute()  # a script may change the working directory
    console, launches = report.console(), scripts.record(files, arch, module=module)
    if not launches.kernels:
        reasons = [f"{file} {why}" for file, why in launches.failed.items()]
        tests = [] if module else [file for file in files if Path(file).name.startswith("test_")]
        reasons += [f"tests run by: minidl doctor --compile -m pytest {file}" for file in tests]
        console.print(f"nothing was compiled: {'; '.join(reasons)}", markup=False, soft_wrap=True)
        return 1
    if not any(only in name for name in launches.kernels):
        raise ValueError(f"no kernel has {only!r} in its name; launched were: {', '.join(sorted(launches.kernels))}")
    with report.Stages(console) as stages:
        verdict = scripts.compile_all(launches, only, partial(stages.tell, "every launch"))
    return _report(verdict, console, json, details)


def _report(verdict: Verdict, console: Any, json: Path | None, details: bool) -> int:
    """Show a verdict, write it to a file, and return the exit code."""
    from minidl.tools.doctor import report

    report.show(verdict, console, details)
    if json is not None:
        from minidl.training.run_folder.files import write_json
        from minidl.training.run_folder.outputs import check_output
        from minidl.training.run_folder.provenance import VERDICT

        check_output("--json", json, VERDICT)  # a second time: a script may have created the file
        write_json(json, report.as_json(verdict))
    return 0 if verdict.fine else 1


def doctor_warm(names: Sequence[str], arch: int | None) -> int:
    """Compile the kernels of the usual commands, or of `names` (see `warm.jobs`), into Triton's cache.

    `arch` None means this machine's GPU. Returns 1 if a kernel could not be compiled, else 0. Raises ConfigError for
    an unknown name, without `arch` on a machine without a GPU, and in a process that interprets kernels; ValueError for
    an unknown architecture; DataError and DamagedError for a run that cannot be read.
    """
    os.environ["TRITON_INTERPRET"] = "0"  # nothing is launched here
    import torch
    from triton import knobs

    from minidl.compilation import launch_jobs
    from minidl.compilation.compiler_processes import Compilers
    from minidl.compilation.job import Job
    from minidl.errors import ConfigError
    from minidl.runtime import launch
    from minidl.tools.doctor import report, warm

    if launch.INTERPRETED:
        raise ConfigError("kernels are interpreted in this process: run `minidl doctor --warm` in a separate process")
    if arch is None and not torch.cuda.is_available():
        raise ConfigError("--warm: this machine has no GPU; give an architecture, such as --arch 90 for an H100")
    names, console, started = names or warm.NAMES, rich_console(soft_wrap=True), time.perf_counter()
    every_job: dict[str, Job] = {}
    with report.Stages(console) as stages, Compilers("doctor") as compilers:
        compilers.start()  # starts its processes during the recording
        stages.tell("recording launches", 0, len(names))
        for done, jobs in enumerate(warm.jobs(names, arch), start=1):
            every_job.update({job.key: job for job in jobs})
            stages.tell("recording launches", done, len(names))
        missing = [job for job in every_job.values() if not launch_jobs.is_compiled(job)]
        if missing:
            compilers.compile(missing, lambda done, of: stages.tell("compiling kernels", done, of))
    failed = [job for job in missing if not launch_jobs.is_compiled(job)]
    for job in failed:
        console.print(f"not compiled: {job}", markup=False, highlight=False)
    compiled, cached, seconds = len(missing) - len(failed), len(every_job) - len(missing), time.perf_counter() - started
    summary = f"{compiled} kernels compiled, {cached} were cached; cache: {knobs.cache.dir}; {seconds:.0f} s"
    console.print(summary, markup=False, highlight=False)
    return 1 if failed else 0
