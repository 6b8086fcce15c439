"""`minidl generate`."""

from __future__ import annotations

import os
from typing import Any

from minidl.cli.options import command, extract
from minidl.cli.profiling import Profiling, profiled
from minidl.common.console import echo
from minidl.compilation import compiler_processes
from minidl.distributed import workers
from minidl.errors import ConfigError, Interrupted
from minidl.generation import folder, sharing
from minidl.generation.config import Generate
from minidl.training.process import device, environment


def _generate(options: dict[str, Any]) -> None:
    profiling = extract(options, Profiling)
    config = Generate(**options)
    ranks, count = workers.ranks(), 1
    if ranks is not None:
        os.environ |= workers.only(ranks.local)
    else:
        available = device.processes(config.devices, config.device)
        count = available if config.latents is not None else min(available, config.total())
        if count == 1 and config.devices != 1 and not config.quiet:
            reason = "only one picture was requested" if available > 1 else "at most one GPU is available"
            echo(f"note: --devices {config.devices}: using one process, because {reason}")
    if (count > 1 or ranks is not None) and (profiling.profile or profiling.trace):
        raise ConfigError("--profile and --trace work with a single process only; remove --devices")
    if count > 1 and config.devices != "auto":
        _run_processes(config, count)
        return
    with compiler_processes.started("generate", config.device):
        work = device.prepare(config.device, "minidl.generation.generate")
        from minidl.runtime import launch

        if launch.ON_CPU:
            environment.fix_threads(environment.thread_count())
        with profiled(profiling, config.out / "trace.json"):
            chosen = work.generate(config, count)
    if chosen > 1:
        _run_processes(config, chosen)


def _run_processes(config: Generate, count: int) -> None:
    def left() -> str:
        seeds = config.all_seeds() if config.interpolate is None else ()
        return sharing.left(folder.staged_in(config.out), seeds)

    try:
        workers.run(workers.own_command(), count, restarts=1, first=True, left=left)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {left()}".removesuffix("; ")) from None


add_to = command("generate", Generate, _generate, Profiling)
