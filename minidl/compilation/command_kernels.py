"""What commands usually launch, as jobs: written by `minidl.tools.doctor.usual`, read while a command begins.

Only time depends on these files: a job that a command does not need is compiled in vain, and one that they lack later.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import triton

from minidl.common.architecture import target_of
from minidl.compilation.job import Job

# Triton lists attributes, none, of constants too: 3.6 of those that are texts. The files have none of these.
_OF_ALL_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
FOLDER = Path(__file__).parent / "command_kernels_data"


def file(target: str) -> Path:
    """That of a target, "sm_80" or "sm_90"."""
    return FOLDER / f"{target}.json.gz"


def jobs(command: str, arch: int) -> list[Job]:
    """Those of a command, such as "text", for an architecture; none of one that no kernel is for."""
    if arch < 80:
        return []
    found = json.loads(gzip.decompress(file(target_of(arch)).read_bytes()))
    return [_job(found["jobs"][number], arch) for number in found["commands"].get(command, [])]


def _job(fields: dict[str, Any], arch: int) -> Job:
    constants = [[path, []] for path, value in fields["constants"] if _OF_ALL_CONSTANTS or isinstance(value, str)]
    return Job(**{**fields, "arch": arch, "attributes": sorted([*fields["attributes"], *constants])})


def write(target: str, by_command: dict[str, list[Job]]) -> None:
    """Write the file of a target: the same jobs make the same bytes."""
    distinct = {job.key: _fields(job) for found in by_command.values() for job in found}
    numbers = {key: number for number, key in enumerate(distinct)}
    commands = {command: [numbers[job.key] for job in found] for command, found in by_command.items()}
    text = json.dumps({"commands": commands, "jobs": list(distinct.values())}, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    file(target).write_bytes(gzip.compress(text.encode(), mtime=0))


def _fields(job: Job) -> dict[str, Any]:
    constants = [path for path, _ in job.constants]
    return {**job.as_json(), "attributes": [[path, known] for path, known in job.attributes if path not in constants]}
