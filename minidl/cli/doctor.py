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
from minidl.training.settings import REPEATED, Expected, Positional, Settings, flag


class Doctor(Settings):
    """Show what this machine can run and what is missing; with --compile, check every kernel for each GPU.

    The compile prints each kernel's registers, spills, shared memory and matrix instructions. Its exit code is 1 if a
    kernel spills, exceeds a limit, has serialised matrix instructions, or a float32 constant among float64 values.

    With --warm, compile into Triton's cache (TRITON_CACHE_DIR) what the usual commands launch, in all processes: for an
    image of a container, or before the first command. NAMES are text, table, images, gan (to train with default
    settings on docstrings, diabetes, digits and pictures of 28x28, and to predict), generate, and folders of finished
    runs (to predict and evaluate, or to generate). Without names, it is all but runs. Other data finds its kernels
    there as far as its sizes choose the same tiles and are multiples of 16, or 1, in the same places; the others are
    compiled when they are met. The exit code is 1 if a kernel does not compile.
    """

    examples = (
        "minidl doctor",
        "minidl doctor --compile --arch 80,90",
        "minidl doctor --compile --only gemm --details",
        "minidl doctor --warm",
        "minidl doctor --warm text runs/mails --arch 90",
    )
    compile: Annotated[bool, Field(description="Compile every kernel for GPUs, which need not be present.")] = False
    warm: Annotated[bool, Field(description="Fill Triton's cache with the kernels of the usual commands.")] = False
    names: Annotated[
        tuple[str, ...],
        Field(strict=False, description="With --warm: text, table, images, gan, generate, or folders of runs."),
        Expected("names"),
        REPEATED,
        Positional("[NAMES]..."),
    ] = ()
    arch: Annotated[
        str | None,
        Field(
            description="Compute capabilities. Default: with --compile 80,90; with --warm, which takes one, that of "
            "this machine's GPU."
        ),
    ] = None
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

    if config.warm:
        raise typer.Exit(_warm(config, given))
    if config.names:
        raise ConfigError("names of commands require --warm")
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


def _warm(config: Doctor, given: dict[str, Any]) -> int:
    from minidl.workbench import doctor as work

    for name in given:
        if name not in ("warm", "names", "arch"):
            raise ConfigError(f"--warm takes no {flag(name)}")
    archs: list[Any] = [None] if config.arch is None else _architectures("arch", config.arch)
    if len(archs) > 1:
        raise ConfigError(f"--arch is {config.arch}, expected one compute capability with --warm")
    try:
        return work.doctor_warm(config.names, archs[0])
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _architectures(name: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(map(is_number, parts)):
        raise ConfigError(f"{flag(name)} is {given}, expected compute capabilities without the point, such as 80,90")
    return [int(part) for part in parts]


add_to = command("doctor", Doctor, _doctor)
