"""`python -m benchmarks.bench --drawn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from pydantic import Field

from minidl.cli.kept_results import check_device
from minidl.cli.options import check_alone
from minidl.common.console import echo, rich_console
from minidl.errors import ConfigError
from minidl.training.settings.declaration import Settings, flag

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench.drawn_results import Drawn

T = TypeVar("T")


class DrawnOptions(Settings):
    """The options of --drawn."""

    drawn: Annotated[int | None, Field(ge=1, le=1_000_000, description="Measure this many random shapes.")] = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="With --drawn: seed of the shapes.")] = 0
    of: Annotated[
        Literal["conv", "conv_transpose", "conv1d", "conv3d", "gemm", "softmax", "norm", "pool", "reduce", "all"],
        Field(description="With --drawn: operation to measure:"),
    ] = "conv"
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32", "tf32"],
        Field(description="With --drawn: data type; tf32 is float32 with TF32 products on both sides."),
    ] = "float16"
    from_: Annotated[int, Field(ge=0, le=999_999, description="With --drawn: index of the first shape to measure.")] = 0
    minutes: Annotated[
        float | None,
        Field(
            gt=0,
            le=1440,
            description="With --drawn, networks or in-torch: start no further row after this many minutes.",
        ),
    ] = None
    part: Annotated[
        str | None,
        Field(description="With --drawn, networks or in-torch: every second row for 1/2 or 2/2. Default: all."),
    ] = None
    regret: Annotated[bool, Field(description="With --drawn: also time every form of a convolution.")] = False


_OPTIONS = "seed", "of", "dtype", "from_", "minutes", "part", "regret"
_OTHERS = "plot", "show"


def is_requested(config: DrawnOptions, options: Mapping[str, Any]) -> bool:
    """Return whether to measure, list or show drawn shapes. Raises ConfigError for their options without --drawn."""
    if config.drawn is None:
        for name in _OPTIONS:
            if name in options:
                raise ConfigError(f"{flag(name)} requires --drawn")
    if config.drawn is not None or "show" not in options or "list" in options:
        return config.drawn is not None
    from benchmarks.bench import drawn_results

    return drawn_results.is_drawn(options["show"])


def run(config: DrawnOptions, options: Mapping[str, Any]) -> None:
    """Measure drawn shapes, list them, or show the results in a file."""
    from benchmarks.bench import drawn_results

    if config.drawn is None:
        for name in ("names", "json", "plot"):
            if name in options:
                raise ConfigError(f"{_named(name)} cannot be combined with --show of drawn shapes")
        _show(drawn_results.load(options["show"]))
        return
    for name in ("names", *_OTHERS):
        if name in options:
            raise ConfigError(f"{_named(name)} cannot be combined with --drawn")
    if config.from_ >= config.drawn:
        raise ConfigError(f"--from {config.from_} leaves none of the {config.drawn} shapes of --drawn, numbered from 0")
    if config.regret and not config.of.startswith(("conv", "all")):
        raise ConfigError(f"--regret requires convolutions; --of is {config.of}")
    indices: Sequence[int] = range(config.from_, config.drawn)
    try:
        indices = indices if config.part is None else part_of(indices, config.part)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if "list" in options:
        check_alone(options, "json", "minutes", "regret")
        _list(config, indices)
        return
    check_device()
    _measure(config, options.get("json"), indices)


def part_of(items: Sequence[T], part: str) -> Sequence[T]:
    """Return the items of a part such as 1/2 (every second one). Raises ValueError for another text."""
    number, slash, of = part.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ValueError(f"expected a part as 1/2, got {part!r}")
    return items[int(number) - 1 :: int(of)]


def _list(config: DrawnOptions, indices: Sequence[int]) -> None:
    from benchmarks.bench.drawn_peers import dtype_of
    from minidl.tools.tuning.drawn import KINDS, draw

    itemsize = dtype_of(config.dtype).itemsize
    for of in KINDS if config.of == "all" else (config.of,):
        for index in indices:
            prefix = f"{of}: " if config.of == "all" else ""
            echo(f"{index:>5}  {prefix}{draw(of, config.seed, index, itemsize)}")


def _measure(config: DrawnOptions, path: Path | None, indices: Sequence[int]) -> None:
    from benchmarks.bench import drawn_results, drawn_run
    from minidl.tools.bench import machine

    here = machine.machine()
    about = {"of": config.of, "seed": config.seed, "dtype": config.dtype}
    if path is not None and path.exists():
        results = drawn_results.continued(path, about, here)
    else:
        results = drawn_results.Drawn(about, here)
    rows = drawn_run.remaining(results, indices, "cuda", config.regret)
    lost_device = ""
    try:
        left = drawn_run.run(
            results, rows, rich_console(), lambda: results.save(path) if path is not None else None, config.minutes,
            config.regret, parts=1 if config.part is None else int(config.part.partition("/")[2]),
        )  # fmt: skip
    except drawn_run.LostError as error:
        left, lost_device = 0, str(error)
    if left:
        echo(f"{left} of {len(rows)} rows are left: repeat the command", error=True)
    if lost_device:
        echo(lost_device, error=True)
    _show(results)
    if lost_device:
        raise typer.Exit(1)


def _show(results: Drawn) -> None:
    """Print the summary. The exit code is 1 if a row is wrong or failed."""
    from benchmarks.bench import drawn_results

    for line in drawn_results.summary(results):
        echo(line)
    if results.failed:
        raise typer.Exit(1)


def _named(name: str) -> str:
    return "NAME" if name == "names" else flag(name)
