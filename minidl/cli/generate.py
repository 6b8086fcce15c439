"""`minidl generate`."""

from __future__ import annotations

import os
from typing import Any

from minidl.cli.options import command, taken
from minidl.cli.profiling import Profiling, profiled
from minidl.common.console import echo
from minidl.compilation import compiler_processes
from minidl.distributed import workers
from minidl.errors import ConfigError, Interrupted
from minidl.generation import folder, sharing
from minidl.generation.config import Generate
from minidl.training.process import device, environment


def _generate(given: dict[str, Any]) -> None:
    profiling = taken(given, Profiling)
    config = Generate(**given)
    place, count = workers.place(), 1
    if place is not None:
        os.environ |= workers.only(place.local)
    else:
        there = device.processes(config.devices, config.device)
        count = there if config.latents is not None else min(there, config.total())
        if count == 1 and config.devices != 1 and not config.quiet:
            reason = "there is only one picture" if there > 1 else "at most one GPU is available"
            echo(f"note: --devices {config.devices}: using one process, because {reason}")
    if (count > 1 or place is not None) and (profiling.profile or profiling.trace):
        raise ConfigError("--profile and --trace work with a single process only; remove --devices")
    if count > 1 and config.devices != "auto":
        _by_processes(config, count)
        return
    with compiler_processes.started("generate", config.device):
        work = device.prepare(config.device, "minidl.generation.generate")
        from minidl.runtime import launch

        if launch.INTERPRETED:
            environment.fix_threads(environment.thread_count())
        with profiled(profiling, config.out / "trace.json"):
            chosen = work.generate(config, count)
    if chosen > 1:
        _by_processes(config, chosen)


def _by_processes(config: Generate, count: int) -> None:
    def left() -> str:
        seeds = config.all_seeds() if config.interpolate is None else ()
        return sharing.left(folder.staged_in(config.out), seeds)

    try:
        workers.run(workers.own_command(), count, restarts=1, first=True, left=left)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {left()}".removesuffix("; ")) from None


add_to = command("generate", Generate, _generate, Profiling)
