"""`minidl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from minidl.cli.common import check_files
from minidl.cli.options import command
from minidl.training.errors import ConfigError
from minidl.training.fields import is_number
from minidl.training.settings import Settings, flag


class Doctor(Settings):
    """Show what this machine can run and what is missing; with --compile, check every kernel for each GPU.

    The compile prints each kernel's registers, spills, shared memory and matrix instructions.

    The exit code is 1 if a kernel spills, exceeds a limit or has serialised matrix instructions.
    """

    examples = (
        "minidl doctor",
        "minidl doctor --compile --arch 80,90",
        "minidl doctor --compile --only gemm --details",
    )
    compile: Annotated[bool, Field(description="Compile every kernel for GPUs, which need not be present.")] = False
    arch: Annotated[str | None, Field(description="With --compile: compute capabilities. Default: 80,90.")] = None
    only: Annotated[str, Field(description="With --compile: only kernels whose name contains this.")] = ""
    brief: Annotated[
        str | None,
        Field(
            description="With --compile: capabilities for which only some combinations of flags are compiled, to save "
            "time."
        ),
    ] = None
    details: Annotated[bool, Field(description="With --compile: show a row for each tile.")] = False
    json_file: Annotated[
        Path | None, Field(alias="json", description="With --compile: also write the figures here.")
    ] = None


def _doctor(given: dict[str, Any]) -> None:
    config = Doctor(**given)
    from minidl.workbench import doctor as work

    if not config.compile:
        for name in given:
            raise ConfigError(f"{flag(name)} requires --compile")
        raise typer.Exit(work.doctor())
    json = config.json_file
    check_files(json=json)
    archs = list(work.ARCHITECTURES) if config.arch is None else _architectures("arch", config.arch)
    brief = [] if config.brief is None else _architectures("brief", config.brief)
    if not set(brief) <= set(archs):
        raise ConfigError(f"--brief is {config.brief}, expected some of --arch: {', '.join(map(str, archs))}")
    try:
        code = work.doctor_compile(archs, json=json, only=config.only, brief=brief, details=config.details)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    raise typer.Exit(code)


def _architectures(name: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(map(is_number, parts)):
        raise ConfigError(f"{flag(name)} is {given}, expected compute capabilities without the point, such as 80,90")
    return [int(part) for part in parts]


add_to = command("doctor", Doctor, _doctor)
