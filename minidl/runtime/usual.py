"""What commands usually launch, as jobs: written by `minidl.workbench.doctor.usual`, read while a command begins.

Only time depends on these files: a job that a command does not need is compiled in vain, and one that they lack later.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from minidl.jobs import Job

FOLDER = Path(__file__).parent / "usual_kernels"


def file(target: str) -> Path:
    """That of a target, "sm_80" or "sm_90"."""
    return FOLDER / f"{target}.json.gz"


def jobs(command: str, arch: int) -> list[Job]:
    """Those of a command, such as "text", for an architecture; none of one that no kernel is for."""
    if arch < 80:
        return []
    found = json.loads(gzip.decompress(file("sm_90" if arch // 10 == 9 else "sm_80").read_bytes()))
    return [Job(**{**found["jobs"][number], "arch": arch}) for number in found["commands"].get(command, [])]


def write(target: str, by_command: dict[str, list[Job]]) -> None:
    """Write the file of a target: the same jobs make the same bytes."""
    distinct = list({job.key: job.as_json() for found in by_command.values() for job in found}.values())
    numbers = {Job(**job).key: number for number, job in enumerate(distinct)}
    commands = {command: [numbers[job.key] for job in found] for command, found in by_command.items()}
    text = json.dumps({"commands": commands, "jobs": distinct}, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    file(target).write_bytes(gzip.compress(text.encode(), mtime=0))
