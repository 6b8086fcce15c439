"""`minidl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from minidl.cli import sanitize
from minidl.cli.options import command
from minidl.common.architecture import Arch
from minidl.errors import ConfigError
from minidl.training.process import device
from minidl.training.run_folder.provenance import VERDICT
from minidl.training.settings.declaration import REPEATED, Expected, Positional, Settings, flag
from minidl.training.settings.fields import is_number


class Doctor(Settings):
    """Check what this machine can run and what is missing, or compile every kernel.

    --compile prints each kernel's registers, spills, shared memory, matrix instructions, and the share of its loads
    that are 16 bytes wide. The exit code is 1 if a kernel does not compile, spills, exceeds a limit, has serialized
    matrix instructions, or has a float32 constant among float64 values.

    --compile NAME... compiles the Triton kernels of these Python files instead. Each file runs on the CPU with its
    kernels interpreted (without a GPU, the device "cuda" is the CPU), and every kernel it launches is compiled with the
    same specialization; an autotuned kernel is compiled in every configuration. With -m, the names are a module and its
    arguments, like python -m. The exit code is also 1 if a file fails or launches no kernel.

    --warm compiles the kernels of the usual commands into Triton's cache (TRITON_CACHE_DIR), in parallel, for example
    when a container image is built. Names are text, table, images, gan (training with default settings on docstrings,
    diabetes, digits and pictures of 28x28, and prediction), generate, and run folders (predict and evaluate, or
    generate). Without names, everything except run folders is compiled. With other data, some kernels may have other
    tiles or specializations; these are compiled on first use. The exit code is 1 if a kernel does not compile.
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
    compile: Annotated[
        bool, Field(description="Compile every kernel for the GPUs of --arch; none of them has to be present.")
    ] = False
    warm: Annotated[bool, Field(description="Compile the kernels of the usual commands into Triton's cache.")] = False
    names: Annotated[
        tuple[str, ...],
        Field(
            strict=False,
            description="With --compile: Python files. With --warm: text, table, images, gan, generate, or run "
            "folders.",
        ),
        Expected("names"),
        REPEATED,
        Positional("NAME"),
    ] = ()
    arch: Annotated[
        str | None,
        Field(
            description="Compute capabilities, such as 80,90; with --compile also gfx942, gfx950 and gfx1201. --warm "
            "takes only one. Default: with --compile 80,90; with --warm, the capability of this machine's"
            " GPU."
        ),
    ] = None
    module: Annotated[
        bool, Field(alias="m", description="With --compile: run NAME as a module with arguments, like python -m.")
    ] = False
    only: Annotated[str, Field(description="With --compile: compile only kernels whose name contains this text.")] = ""
    brief: Annotated[
        str | None,
        Field(
            description="With --compile: capabilities for which only some flag combinations are compiled, to save time."
        ),
    ] = None
    details: Annotated[bool, Field(description="With --compile: print a row for each tile.")] = False
    json_file: Annotated[
        Path | None, VERDICT, Field(alias="json", description="With --compile: also write the results to this file.")
    ] = None


def _doctor(options: dict[str, Any]) -> None:
    config = Doctor(**options)
    from minidl.tools import doctor as work

    if config.warm:
        raise typer.Exit(_warm(config, options))
    if not config.compile:
        if config.names:
            raise ConfigError("names of commands require --warm, and files require --compile")
        for name in options:
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
            code = work.doctor_compile(archs, brief_archs=brief, **shown)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    raise typer.Exit(code)


def _check_scripts(config: Doctor) -> None:
    """Select the interpreter, and raise ConfigError for missing scripts."""
    if config.brief is not None:
        raise ConfigError("--brief applies to minidl's own kernels: remove it, or remove the files")
    if config.module and not config.names:
        raise ConfigError("-m requires the name of a module, such as pytest")
    device.choose("cpu")
    sanitize.check_scripts(config.names[:1] if config.module else config.names, module=config.module)


def _warm(config: Doctor, options: dict[str, Any]) -> int:
    from minidl.tools import doctor as work

    for name in options:
        if name not in ("warm", "names", "arch"):
            raise ConfigError(f"{flag(name)} cannot be combined with --warm")
    archs: list[Any] = [None] if config.arch is None else _architectures("arch", config.arch)
    if len(archs) > 1 or isinstance(archs[0], str):
        raise ConfigError(f"--arch is {config.arch}, expected one compute capability with --warm")
    try:
        return work.doctor_warm(config.names, archs[0])
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _architectures(name: str, text: str) -> list[Arch]:
    parts = [part.strip().removeprefix("sm_") for part in text.split(",")]
    if not all(is_number(part) or part.startswith("gfx") for part in parts):
        raise ConfigError(f"{flag(name)} is {text}, expected compute capabilities without the point, such as 80,90")
    return [int(part) if is_number(part) else part for part in parts]


add_to = command("doctor", Doctor, _doctor)
