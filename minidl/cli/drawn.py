"""`minidl bench --drawn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from minidl.cli.options import check_alone
from minidl.cli.profiling import Profiling
from minidl.common.console import echo, rich_console
from minidl.errors import ConfigError
from minidl.training.settings.declaration import flag

if TYPE_CHECKING:
    from pathlib import Path

    from minidl.tools.bench.drawn_results import Drawn


class DrawnShapes(Profiling):
    """The options of --drawn."""

    drawn: Annotated[
        int | None, Field(ge=1, le=1_000_000, description="Measure this many random shapes instead of the rows.")
    ] = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="With --drawn: seed of the shapes.")] = 0
    of: Annotated[
        Literal["conv", "conv_transpose", "conv1d", "conv3d", "gemm", "softmax", "norm", "pool", "reduce", "all"],
        Field(description="With --drawn: operation to measure:"),
    ] = "conv"
    dtype: Annotated[Literal["float16", "bfloat16", "float32"], Field(description="With --drawn: data type:")] = (
        "float16"
    )
    from_: Annotated[int, Field(ge=0, le=999_999, description="With --drawn: index of the first shape to measure.")] = 0
    minutes: Annotated[
        float | None,
        Field(gt=0, le=1440, description="Start no further row after this many minutes."),
    ] = None
    part: Annotated[
        str | None,
        Field(description="Measure only one of several parts: every second row for 1/2 or 2/2. Default: all."),
    ] = None
    regret: Annotated[
        bool,
        Field(
            description="With --drawn: time convolutions in every form and compare the chosen form with the fastest."
        ),
    ] = False


_OWN = "seed", "of", "dtype", "from_", "minutes", "part", "regret"
_OTHERS = "plot", "show", "peers", "profile", "trace"


def wanted(config: DrawnShapes, given: Mapping[str, Any]) -> bool:
    """Whether drawn shapes are measured, listed or shown. Raises ConfigError for their settings without --drawn."""
    if config.drawn is None:
        for name in _OWN:
            if name in given:
                raise ConfigError(f"{flag(name)} requires --drawn")
    if config.drawn is not None or "show" not in given or "list" in given:
        return config.drawn is not None
    from minidl.tools.bench import drawn_results

    return drawn_results.is_drawn(given["show"])


def run(config: DrawnShapes, given: Mapping[str, Any]) -> None:
    """Measure drawn shapes, list them, or show those in a file."""
    from minidl.tools.bench import drawn_results

    if config.drawn is None:
        for name in ("names", "json", "plot", "peers", "profile", "trace"):
            if name in given:
                raise ConfigError(f"{_named(name)} cannot be combined with --show of drawn shapes")
        _tell(drawn_results.load(given["show"]))
        return
    for name in ("names", *_OTHERS):
        if name in given:
            raise ConfigError(f"{_named(name)} cannot be combined with --drawn")
    if config.from_ >= config.drawn:
        raise ConfigError(f"--from {config.from_} leaves none of the {config.drawn} shapes of --drawn, numbered from 0")
    if config.regret and not config.of.startswith(("conv", "all")):
        raise ConfigError(f"--regret requires convolutions; --of is {config.of}")
    from minidl.tools.bench import machine

    indices: Sequence[int] = range(config.from_, config.drawn)
    try:
        indices = indices if config.part is None else machine.part_of(indices, config.part)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if "list" in given:
        check_alone(given, "json", "minutes", "regret")
        _list(config, indices)
        return
    path = given.get("json")
    check_device()
    _measure(config, path, indices)


def check_device() -> None:
    """Raises ConfigError where there is no GPU to measure on."""
    import torch

    from minidl.runtime import launch

    if launch.INTERPRETED or not torch.cuda.is_available():
        raise ConfigError("bench requires a CUDA device with compiled kernels; --list and --show FILE work without one")


def _list(config: DrawnShapes, indices: Sequence[int]) -> None:
    from minidl.tools.bench.drawn import KINDS, draw

    itemsize = 4 if config.dtype == "float32" else 2
    for of in KINDS if config.of == "all" else (config.of,):
        for index in indices:
            said = f"{of}: " if config.of == "all" else ""
            echo(f"{index:>5}  {said}{draw(of, config.seed, index, itemsize)}")


def _measure(config: DrawnShapes, path: Path | None, indices: Sequence[int]) -> None:
    from minidl.tools.bench import drawn_results, drawn_run, machine

    here = machine.machine()
    about = {"of": config.of, "seed": config.seed, "dtype": config.dtype}
    if path is not None and path.exists():
        found = drawn_results.continued(path, about, here)
    else:
        found = drawn_results.Drawn(about, here)
    rows = drawn_run.wanted(found, indices, "cuda", config.regret)
    lost = ""
    try:
        left = drawn_run.run(
            found, rows, rich_console(), lambda: found.save(path) if path is not None else None, config.minutes,
            config.regret, parts=1 if config.part is None else int(config.part.partition("/")[2]),
        )  # fmt: skip
    except drawn_run.LostError as error:
        left, lost = 0, str(error)
    if left:
        echo(f"{left} of {len(rows)} rows are left: run the same command again", error=True)
    if lost:
        echo(lost, error=True)
    _tell(found)
    if lost:
        raise typer.Exit(1)


def _tell(found: Drawn) -> None:
    """Print the summary. The exit code is 1 if a row is wrong or failed."""
    from minidl.tools.bench import drawn_results

    for line in drawn_results.summary(found):
        echo(line)
    if found.failed:
        raise typer.Exit(1)


def _named(name: str) -> str:
    return "NAME" if name == "names" else flag(name)
