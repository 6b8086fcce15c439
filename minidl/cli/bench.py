"""`minidl bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minidl.cli.common import Command, Profile, TraceFile, check_alone, check_file, errors, examples, profiled, switch
from minidl.training.config import check_different
from minidl.training.errors import ConfigError

if TYPE_CHECKING:
    from minidl.bench.results import Results

EXAMPLES = examples(
    "minidl bench",
    'minidl bench softmax "gradient of the weight" --json results.json',
    "minidl bench softmax conv --peers",
    "minidl bench --list",
    "minidl bench --show results.json --plot results.svg",
)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Words: rows whose name has one of them. Default: all.", metavar="[NAME]..."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here; other rows in the file stay.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the results here, as SVG.")] = None,
    show: Annotated[Path | None, typer.Option("--show", help="Measure nothing; show the results in this file.")] = None,
    peers: Annotated[
        bool, switch("--peers", "Also measure attorch, FlagGems and Liger, where they are installed.")
    ] = False,
    list_: Annotated[bool, switch("--list", "Only name the rows, with their goals.")] = False,
    profile: Profile = False,
    trace: TraceFile = None,
) -> None:
    """Measure minidl and torch side by side on this GPU.

    Both sides run as CUDA graphs, in turn, on fresh inputs beyond the L2 cache; the median of five rounds counts. torch
    is measured in every way it has (channels-last and not, eager and compiled), and its best counts. A result is
    compared with float64 first, and a wrong one is not timed. With --peers other projects' Triton kernels are measured
    and compared, too; one that is wrong or fails is named and left out.

    A row is at its goal from 0.01 below it, the noise of a run.

    It fails where a row is wrong or cannot be measured.
    """
    with errors():
        from minidl.bench.goals import GOALS, chosen

        try:
            wanted = chosen(names or [])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        check_alone("--list", list_, json=json, plot=plot, show=show, peers=peers, profile=profile, trace=trace)
        if list_:
            for name in wanted:
                typer.echo(f"{GOALS[name]:>5g}  {name}")
            return
        for flag, path in (("--json", json), ("--plot", plot)):
            if path is not None:
                check_file(flag, path)
        measuring = (("--json", json), ("--peers", peers), ("--profile", profile), ("--trace", trace))
        for flag, given in measuring if show is not None else ():
            if given:
                raise ConfigError(f"{flag} goes with measuring, not with --show")
        check_different(show=show, json=json, plot=plot, trace=trace)
        if trace is not None and not profile:
            raise ConfigError("--trace goes with --profile")
        if peers:
            _check_peers()

        from rich.console import Console

        from minidl.bench import run, table
        from minidl.training import files, plots

        if plot is not None and not plots.available():
            raise ConfigError(plots.MISSING)
        console = Console(width=None if Console().is_terminal else 140)
        failures: list[str] = []
        if show is None:
            found = _results(json)
            with profiled(profile, trace, None):
                failures = run.run(
                    wanted, found, console, lambda: found.save(json) if json is not None else None, peers
                )
        else:
            found = _shown(show, wanted)
            console.print(run.table(found, wanted))
        if plot is not None:
            files.write_bytes(plot, table.picture(found))
        typer.echo(run.summary(found))
        for line in failures:
            typer.echo(line, err=True)
        if failures or not found.right:
            raise typer.Exit(1)


def _check_peers() -> None:
    """Say which peers there are and how to install those that are not. Raises ConfigError when there is none."""
    from minidl.bench import peers

    there, missing = peers.there(), peers.missing()
    if not there:
        raise ConfigError(f"--peers: {'; '.join(missing)}")
    typer.echo(f"with {', '.join(f'{name} {version}' for name, version in there.items())}")
    for line in missing:
        typer.echo(line, err=True)


def _shown(path: Path, wanted: list[str]) -> Results:
    """The rows that are wanted of those in the file. Raises ConfigError when it has none of them."""
    from minidl.bench import results

    found = results.load(path)
    rows = {name: row for name, row in found.rows.items() if name in wanted}
    if not rows:
        has = ", ".join(found.rows) or "none"
        raise ConfigError(f"--show {path} has none of the rows asked for; the rows in it: {has}")
    return results.Results(found.machine, rows)


def _results(json: Path | None) -> Results:
    """Results of this machine: those in the file, until they are measured again. Raises ConfigError."""
    import torch

    from minidl.bench import machine, results
    from minidl.kernels import launch

    if launch.INTERPRETED or not torch.cuda.is_available():
        raise ConfigError(
            "bench measures on a CUDA device with compiled kernels, and there is none here; "
            "--list names the rows and --show FILE shows results"
        )
    here = machine.machine()
    if json is None or not json.exists():
        return results.Results(here)
    before = results.load(json)
    if before.machine["device"] != here["device"]:
        raise ConfigError(
            f"--json {json} has results of a {before.machine['device']}; this is a {here['device']}; give another"
        )
    return results.Results(here, before.rows)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=Command, epilog=EXAMPLES)(bench)
