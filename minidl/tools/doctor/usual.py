"""Write the files of the kernels that commands usually launch (`minidl.compilation.command_kernels`):

    TRITON_INTERPRET=0 python -m minidl.tools.doctor.usual

A test fails when kernels have changed so much that new files are needed.
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


def jobs_of(arch: int, command: str) -> list[Job]:
    """Return the launches of a command, one of `warm.NAMES`, on built-in data with its default settings."""
    jobs: dict[str, Job] = {}
    with np.errstate(all="ignore"):  # memory is uninitialised
        for work in warm.works(command, inputs=()):
            jobs.update({job.key: job for job in launched(work, arch, target_name(arch))})
    return list(jobs.values())


def main() -> None:
    """Write the file of each architecture's target."""
    for arch in ARCHITECTURES:
        by_command = {command: jobs_of(arch, command) for command in warm.NAMES}
        command_kernels.write(target_name(arch), by_command)
        counts = ", ".join(f"{command} {len(jobs)}" for command, jobs in by_command.items())
        echo(f"{target_name(arch)}: {counts}")


if __name__ == "__main__":
    main()
