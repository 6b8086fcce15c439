"""`minidl bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from minidl.cli import drawn, kept_results, networks
from minidl.cli.common import check_plot
from minidl.cli.options import check_alone, command
from minidl.cli.profiling import profiled
from minidl.common.console import echo, rich_console
from minidl.errors import ConfigError
from minidl.training.run_folder.provenance import PLOT, RESULTS, TRACE
from minidl.training.settings.declaration import REPEATED, Positional


class Bench(networks.WholeNetworks):
    """Compare the speed of minidl and PyTorch on this GPU.

    Both sides run alternately as CUDA graphs on fresh inputs outside the L2 cache; the result is the median of five
    rounds. PyTorch is measured in all variants (channels-last or not, eager or compiled), and the fastest counts.
    Results are first checked against float64; wrong ones are not timed. --peers also measures Triton kernels of other
    projects; those that fail or are wrong are named and left out.

    A row meets its goal if its ratio is at least the goal minus 0.01, the noise of one run.

    --drawn N measures N random shapes instead of the rows, in shorter rounds, against PyTorch's eager kernels in both
    memory orders. The summary shows percentiles of the ratios and the worst rows. Shapes that PyTorch cannot run are
    skipped. Rows already in the file of --json are kept, so a run can be split.

    networks [NAME]... measures whole networks in inference and training, each in its own process: images per second,
    memory, seconds to the first step, launches, and the fraction of the hardware limit reached. The same command
    continues with the rows that the file lacks.

    in-torch [MODEL]... measures torchvision and timm models (both must be installed) and a DCGAN. Each runs with
    torch.compile(model, backend="minidl"), eager, and compiled by Inductor; also launched kernel by kernel, and with
    only the layers of minidl.torch.accelerate.

    The exit code is 1 if a row is wrong or cannot be measured.
    """

    examples = (
        "minidl bench",
        'minidl bench softmax "gradient of the weight" --json results.json',
        "minidl bench softmax conv --peers",
        "minidl bench --list",
        "minidl bench --show results.json --plot results.svg",
        "minidl bench --drawn 500 --seed 1 --of conv --json drawn.json --minutes 9",
        "minidl bench networks resnet50 unet --json networks.json --minutes 9",
        "minidl bench in-torch resnet18 dcgan --json in-torch.json --minutes 9",
    )
    names: Annotated[
        tuple[str, ...],
        Positional("NAME"),
        Field(
            description="Measure rows whose name contains one of these words, or networks or in-torch followed by "
            "words. Default: all but networks and in-torch."
        ),
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
    list_: Annotated[
        bool, Field(alias="list", description="Only list the rows and their goals, or the drawn shapes.")
    ] = False
    trace: Annotated[Path | None, TRACE, Field(description="With --profile: trace file. Default: none.")] = None


def _bench(given: dict[str, Any]) -> None:
    config = Bench(**given)
    if networks.wanted(config, config.names, given):
        networks.run(config, given)
        return
    if drawn.wanted(config, given):
        drawn.run(config, given)
        return
    json, plot, show, trace = config.json_file, config.plot, config.show, config.trace
    from minidl.tools.bench.goals import GOALS, chosen

    try:
        wanted = chosen(list(config.names))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.list_:
        check_alone(given, "json", "plot", "show", "peers", "profile", "trace")
        for name in wanted:
            echo(f"{GOALS[name]:>5g}  {name}")
        return
    for name in ("json", "peers", "profile", "trace") if show is not None else ():
        if name in given:
            raise ConfigError(f"--{name} cannot be combined with --show")
    if trace is not None and not config.profile:
        raise ConfigError("--trace requires --profile")
    if config.peers:
        _check_peers()

    from minidl.tools.bench import run, table
    from minidl.training.run_folder import files

    check_plot(plot)
    console = rich_console(width=None if rich_console().is_terminal else 140)
    failures: list[str] = []
    if show is None:
        found = kept_results.earlier(json)
        with profiled(config, None):
            failures = run.run(
                wanted, found, console, lambda: found.save(json) if json is not None else None, config.peers
            )
    else:
        found = kept_results.shown(show, wanted)
        console.print(run.table(found, wanted))
    if plot is not None:
        files.write_bytes(plot, table.picture(found, plot.suffix[1:]))
    echo(run.summary(found))
    for line in failures:
        echo(line, error=True)
    if failures or not found.right:
        raise typer.Exit(1)


def _check_peers() -> None:
    """Show which peers are installed and how to install the others. Raises ConfigError if none is."""
    from minidl.tools.bench import peers

    there, missing = peers.there(), peers.missing()
    if not there:
        raise ConfigError(f"--peers: {'; '.join(missing)}")
    echo(f"with {', '.join(f'{name} {version}' for name, version in there.items())}")
    for line in missing:
        echo(line, error=True)


add_to = command("bench", Bench, _bench)
