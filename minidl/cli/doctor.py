"""`minidl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from minidl.cli import sanitize
from minidl.cli.options import command
from minidl.jobs import Arch
from minidl.training import device
from minidl.training.errors import ConfigError
from minidl.training.fields import is_number
from minidl.training.provenance import VERDICT
from minidl.training.settings import REPEATED, Expected, Positional, Settings, flag


class Doctor(Settings):
    """Show what this machine can run and what is missing; with --compile, check every kernel for each GPU.

    The compile prints each kernel's registers, spills, shared memory, matrix instructions, and the share of its loads
    that take 16 bytes at once. Its exit code is 1 if a kernel does not compile, spills, exceeds a limit, has serialised
    matrix instructions, or a float32 constant among float64 values.

    NAMES with --compile are Python files, whose own Triton kernels are compiled in place of minidl's: each file runs
    with its kernels interpreted, on the CPU ("cuda" stands for it where there is no GPU), and what it launches is
    compiled as it is specialised there, an autotuned kernel in every configuration. With -m, NAMES are a module and its
    arguments, as in python -m. The exit code is also 1 if a file fails or launches nothing.

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
        "minidl doctor --compile my_kernel.py --arch 86,90,gfx942",
        "minidl doctor --compile -m pytest tests/test_kernels.py",
        "minidl doctor --warm",
        "minidl doctor --warm text runs/mails --arch 90",
    )
    compile: Annotated[bool, Field(description="Compile every kernel for GPUs, which need not be present.")] = False
    warm: Annotated[bool, Field(description="Fill Triton's cache with the kernels of the usual commands.")] = False
    names: Annotated[
        tuple[str, ...],
        Field(
            strict=False,
            description="With --compile: Python files. With --warm: text, table, images, gan, generate, or folders of "
            "runs.",
        ),
        Expected("names"),
        REPEATED,
        Positional("NAME"),
    ] = ()
    arch: Annotated[
        str | None,
        Field(
            description="Compute capabilities, and with --compile also gfx942, gfx950, gfx1201. Default: with "
            "--compile 80,90; with --warm, which takes one, that of this machine's GPU."
        ),
    ] = None
    module: Annotated[
        bool, Field(alias="m", description="With --compile: NAMES are a module and its arguments, as in python -m.")
    ] = False
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
        Path | None, VERDICT, Field(alias="json", description="With --compile: also write the figures here.")
    ] = None


def _doctor(given: dict[str, Any]) -> None:
    config = Doctor(**given)
    from minidl.workbench import doctor as work

    if config.warm:
        raise typer.Exit(_warm(config, given))
    if not config.compile:
        if config.names:
            raise ConfigError("names of commands require --warm, files --compile")
        for name in given:
            raise ConfigError(f"{flag(name)} requires --compile")
        raise typer.Exit(work.doctor())
    json = config.json_file
    archs = list(work.ARCHITECTURES) if config.arch is None else _architectures("arch", config.arch)
    brief = [] if config.brief is None else _architectures("brief", config.brief)
    if not set(brief) <= set(archs):
        raise ConfigError(f"--brief is {config.brief}, expected some of --arch: {', '.join(map(str, archs))}")
    shown: dict[str, Any] = {"json": json, "only": config.only, "details": config.details}
    try:
        if config.names or config.module:
            _check_scripts(config)
            code = work.doctor_files(config.names, archs, module=config.module, **shown)
        else:
            code = work.doctor_compile(archs, brief=brief, **shown)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    raise typer.Exit(code)


def _check_scripts(config: Doctor) -> None:
    """Have kernels interpreted, and raise ConfigError for scripts that are not there."""
    if config.brief is not None:
        raise ConfigError("--brief is for minidl's own kernels: leave it out with files")
    if config.module and not config.names:
        raise ConfigError("-m takes the name of a module, such as pytest")
    device.choose("cpu")
    sanitize.check_scripts(config.names[:1] if config.module else config.names, module=config.module)


def _warm(config: Doctor, given: dict[str, Any]) -> int:
    from minidl.workbench import doctor as work

    for name in given:
        if name not in ("warm", "names", "arch"):
            raise ConfigError(f"--warm takes no {flag(name)}")
    archs: list[Any] = [None] if config.arch is None else _architectures("arch", config.arch)
    if len(archs) > 1 or isinstance(archs[0], str):
        raise ConfigError(f"--arch is {config.arch}, expected one compute capability with --warm")
    try:
        return work.doctor_warm(config.names, archs[0])
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _architectures(name: str, given: str) -> list[Arch]:
    parts = [part.strip().removeprefix("sm_") for part in given.split(",")]
    if not all(is_number(part) or part.startswith("gfx") for part in parts):
        raise ConfigError(f"{flag(name)} is {given}, expected compute capabilities without the point, such as 80,90")
    return [int(part) if is_number(part) else part for part in parts]


add_to = command("doctor", Doctor, _doctor)
