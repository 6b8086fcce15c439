"""`minidl bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from minidl.cli import kept_results
from minidl.cli.common import check_plot
from minidl.cli.options import check_alone, command
from minidl.cli.profiling import Profiling, profiled
from minidl.common.console import echo, rich_console
from minidl.errors import ConfigError
from minidl.training.run_folder.provenance import PLOT, RESULTS, TRACE
from minidl.training.settings.declaration import REPEATED, Positional


class Bench(Profiling):
    """Compare the speed of minidl and PyTorch on this GPU.

    Both sides run alternately as CUDA graphs on fresh inputs outside the L2 cache; the result is the median of five
    rounds. PyTorch is measured in all variants (channels-last or not, eager or compiled), and the fastest counts.
    Results are first checked against float64; wrong ones are not timed. --peers also measures Triton kernels of other
    projects; those that fail or are wrong are named and left out.

    A row meets its goal if its ratio is at least the goal minus 0.01, the noise of one run.

    The exit code is 1 if a row is wrong or cannot be measured.
    """

    examples = (
        "minidl bench",
        'minidl bench softmax "gradient of the weight" --json results.json',
        "minidl bench softmax conv --peers",
        "minidl bench --list",
        "minidl bench --show results.json --plot results.svg",
    )
    names: Annotated[
        tuple[str, ...],
        Positional("NAME"),
        Field(description="Measure rows whose name contains one of these words. Default: all."),
        REPEATED,
    ] = ()
    json_file: Annotated[
        Path | None,
        RESULTS,
        Field(alias="json", description="Also write the results to this file; its other rows are kept."),
    ] = None
    plot: Annotated[Path | None, PLOT, Field(description="Also draw the results to this .svg or .png file.")] = None
    show: Annotated[Path | None, Field(description="Show the results in this file without measuring.")] = None
    peers: Annotated[bool, Field(description="Also measure attorch, FlagGems and Liger, if installed.")] = False
    list_: Annotated[bool, Field(alias="list", description="Only list the rows and their goals.")] = False
    trace: Annotated[Path | None, TRACE, Field(description="With --profile: trace file. Default: none.")] = None


def _bench(options: dict[str, Any]) -> None:
    config = Bench(**options)
    json, plot, show, trace = config.json_file, config.plot, config.show, config.trace
    from minidl.tools.bench.goals import GOALS, chosen

    try:
        names = chosen(list(config.names))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.list_:
        check_alone(options, "json", "plot", "show", "peers", "profile", "trace")
        for name in names:
            echo(f"{GOALS[name]:>5g}  {name}")
        return
    for option in ("json", "peers", "profile", "trace") if show is not None else ():
        if option in options:
            raise ConfigError(f"--{option} cannot be combined with --show")
    if trace is not None and not config.profile:
        raise ConfigError("--trace requires --profile")
    if config.peers:
        _check_peers()

    from minidl.tools.bench import chart, machine, results, run
    from minidl.training.run_folder import files

    check_plot(plot)
    console = rich_console(width=None if rich_console().is_terminal else 140)
    failures: list[str] = []
    if show is None:
        kept_results.check_device()
        measured = kept_results.earlier(json, results.load, results.Results(machine.machine()))
        with profiled(config, None):
            failures = run.run(
                names, measured, console, lambda: measured.save(json) if json is not None else None, config.peers
            )
    else:
        measured = kept_results.shown(show, names, results.load)
        console.print(run.table(measured, names))
    if plot is not None:
        files.write_bytes(plot, chart.picture(measured, plot.suffix[1:]))
    echo(run.summary(measured))
    for line in failures:
        echo(line, error=True)
    if failures or not measured.right:
        raise typer.Exit(1)


def _check_peers() -> None:
    """Show which peers are installed and how to install the others. Raises ConfigError if none is."""
    from minidl.tools.bench import peers

    installed, missing = peers.installed(), peers.missing()
    if not installed:
        raise ConfigError(f"--peers: {'; '.join(missing)}")
    echo(f"with {', '.join(f'{name} {version}' for name, version in installed.items())}")
    for line in missing:
        echo(line, error=True)


add_to = command("bench", Bench, _bench)
