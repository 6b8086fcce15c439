"""The files of what commands usually launch, `minidl.compilation.command_kernels`, made anew:

    TRITON_INTERPRET=0 python -m minidl.tools.doctor.usual

A test says when kernels have changed so much that this is due.
"""

from __future__ import annotations

import numpy as np

from minidl.common.console import echo
from minidl.compilation import command_kernels
from minidl.compilation.job import Job
from minidl.compilation.rehearsal import launched
from minidl.tools.doctor import warm
from minidl.tools.doctor.jobs import target_name

ARCHITECTURES = (80, 90)


def found(arch: int, command: str) -> list[Job]:
    """What a command, one of `warm.NAMES`, launches on data at hand with the settings that are its defaults."""
    jobs: dict[str, Job] = {}
    with np.errstate(all="ignore"):  # numbers are what the memory held
        for work in warm.works(command, inputs=()):
            jobs.update({job.key: job for job in launched(work, arch, target_name(arch))})
    return list(jobs.values())


def main() -> None:
    """Write the file of each architecture's target."""
    for arch in ARCHITECTURES:
        by_command = {command: found(arch, command) for command in warm.NAMES}
        command_kernels.write(target_name(arch), by_command)
        counts = ", ".join(f"{command} {len(jobs)}" for command, jobs in by_command.items())
        echo(f"{target_name(arch)}: {counts}")


if __name__ == "__main__":
    main()
