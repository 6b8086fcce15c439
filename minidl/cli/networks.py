"""`minidl bench networks` and `minidl bench in-torch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from minidl.cli import drawn, kept_results
from minidl.cli.common import check_plot
from minidl.cli.options import check_alone
from minidl.common.console import echo, rich_console
from minidl.errors import ConfigError

if TYPE_CHECKING:
    from minidl.tools.bench.network_rows import Net
    from minidl.tools.bench.results import Results

WORD, IN_TORCH = "networks", "in-torch"


class WholeNetworks(drawn.DrawnShapes):
    """The options of whole networks."""

    against: Annotated[
        str,
        Field(description="With networks or in-torch: how PyTorch runs them (eager, graph, compile, autotune)."),
    ] = "eager,graph,compile,autotune"


_OTHERS = "peers", "profile", "trace", "drawn", "seed", "of", "dtype", "from_", "regret"
_MEASURING = "against", "part", "minutes"


def wanted(config: WholeNetworks, names: tuple[str, ...], given: Mapping[str, Any]) -> bool:
    """Whether the first name asks for networks. Raises ConfigError for their settings without them."""
    if names[:1] in ((WORD,), (IN_TORCH,)):
        return True
    if "against" in given:
        raise ConfigError(f"--against requires {WORD}, as in `minidl bench {WORD} --against {given['against']}`")
    return False


def run(config: Any, given: Mapping[str, Any]) -> None:
    """Measure networks, list them, or show those in a file."""
    from minidl.tools.bench import accelerated_rows, machine, network_rows, network_table

    word = config.names[0]
    for name in _OTHERS:
        if name in given:
            raise ConfigError(f"--{name.rstrip('_')} cannot be combined with {word}")
    if word == IN_TORCH and config.plot is not None:
        raise ConfigError(f"--plot has no picture of {word}; leave it out")
    try:
        nets = (accelerated_rows if word == IN_TORCH else network_rows).chosen(config.names[1:])
        if config.part is not None:
            nets = list(machine.part_of(nets, config.part))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.list_:
        check_alone(given, "json", "plot", "show", "against", "minutes")
        for net in nets:
            echo(f"{net.goal:>5g}  {net.row}")
        return
    show, plot = config.show, config.plot
    for name in ("json", *_MEASURING) if show is not None else ():
        if name in given:
            raise ConfigError(f"--{name} cannot be combined with --show")
    check_plot(plot)

    from minidl.training.run_folder import files

    names = [net.row for net in nets]
    found, failures = (kept_results.shown(show, names), []) if show is not None else _measured(config, nets)
    console = rich_console(width=None if rich_console().is_terminal else 240)
    console.print(network_table.table(found, names))
    if plot is not None:
        files.write_bytes(plot, network_table.picture(found, plot.suffix[1:]))
    echo(accelerated_rows.summary(found.rows) if word == IN_TORCH else network_table.summary(found))
    if failures or not found.right:
        raise typer.Exit(1)


def _measured(config: Any, nets: list[Net]) -> tuple[Results, list[str]]:
    from minidl.tools.bench import accelerated_rows, network_clocks, network_run

    in_torch = config.names[0] == IN_TORCH
    try:
        accelerated_rows.check_installed(nets)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    peers = config.against.split(",")
    unknown = [peer for peer in peers if peer not in network_clocks.PEERS]
    if unknown:
        raise ConfigError(f"--against has {unknown[0]!r}, expected some of {', '.join(network_clocks.PEERS)}")
    found, path = kept_results.earlier(config.json_file), config.json_file

    def keep(name: str, row: dict[str, Any]) -> None:
        found.add(name, row)
        if in_torch:
            found.machine["summary"] = accelerated_rows.summary(found.rows)
        if path is not None:
            found.save(path)

    more = {"module": "minidl.tools.bench.accelerated_run"} if in_torch else {}
    left, failures = network_run.run(nets, found.rows, peers, keep, echo, config.minutes, **more)
    if left:
        echo(f"{left} of {len(nets)} networks are left: run the same command again", error=True)
    return found, failures
