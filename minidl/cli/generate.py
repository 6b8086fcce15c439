"""`minidl generate`."""

from __future__ import annotations

from typing import Any

from minidl import compilers
from minidl.cli.options import command, taken
from minidl.cli.profiling import Profiling, profiled
from minidl.generation.config import Generate
from minidl.training import device, environment
from minidl.training.outputs import check_different


def _generate(given: dict[str, Any]) -> None:
    profiling = taken(given, Profiling)
    config = Generate(**given)
    check_different(latents=config.latents, trace=profiling.trace)
    with compilers.ready("generate", config.device):
        work = device.prepare(config.device, "minidl.generation.generate")
        from minidl.runtime import launch

        if launch.INTERPRETED:
            environment.fix_threads(environment.wanted_threads())
        with profiled(profiling, config.out / "trace.json"):
            work.generate(config)


add_to = command("generate", Generate, _generate, Profiling)
