"""Files with the kernels that commands usually launch, as jobs: written by `minidl.tools.doctor.usual`.

The files affect only time: an unneeded job is compiled in vain, a missing one when it is launched.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from minidl.common.architecture import target_of
from minidl.compilation.job import Job

# Triton has empty attributes for constants (3.6: only for strings), which the files omit.
_OF_ALL_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
FOLDER = Path(__file__).parent / "command_kernels_data"


def file(target: str) -> Path:
    """Return the file of a target, "sm_80" or "sm_90"."""
    return FOLDER / f"{target}.json.gz"


def jobs(command: str, arch: int) -> list[Job]:
    """Return the jobs of a command, such as "text"; none for an architecture below 80."""
    if arch < 80:
        return []
    content = json.loads(gzip.decompress(file(target_of(arch)).read_bytes()))
    return [_job(content["jobs"][number], arch) for number in content["commands"].get(command, [])]


def _job(fields: dict[str, Any], arch: int) -> Job:
    constants = [(path, value) for path, value in fields["constants"] if len(path) == 1]
    paths = (
        [path for path, _ in constants]
        if _OF_ALL_CONSTANTS
        else [inner for path, value in constants for inner in _strings(path, value)]
    )
    return Job(
        **{**fields, "arch": arch, "attributes": sorted([*fields["attributes"], *([path, []] for path in paths)])}
    )


def _strings(path: list[int], value: Any) -> Iterator[list[int]]:
    """Yield the paths of the strings in a constant, also in the fields of a record."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict) and "record" in value:
        for i, field in enumerate(value["fields"].values()):
            yield from _strings([*path, i], field)


def write(target: str, by_command: dict[str, list[Job]]) -> None:
    """Write the file of a target; equal jobs give equal bytes."""
    distinct = {job.key: _fields(job) for jobs_ in by_command.values() for job in jobs_}
    numbers = {key: number for number, key in enumerate(distinct)}
    commands = {command: [numbers[job.key] for job in jobs_] for command, jobs_ in by_command.items()}
    text = json.dumps({"commands": commands, "jobs": list(distinct.values())}, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    file(target).write_bytes(gzip.compress(text.encode(), mtime=0))


def _fields(job: Job) -> dict[str, Any]:
    constants = [path for path, _ in job.constants]
    attributes = [
        [path, properties] for path, properties in job.attributes if path not in constants and path[:1] not in constants
    ]
    return {**job.as_json(), "attributes": attributes}
