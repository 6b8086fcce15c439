"""`python -m benchmarks.bench networks` and `python -m benchmarks.bench in-torch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from benchmarks.bench import drawn_command
from minidl.cli import kept_results
from minidl.cli.common import check_plot
from minidl.cli.options import check_alone
from minidl.common.console import echo, rich_console
from minidl.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.bench.network_rows import Net
    from minidl.tools.bench.results import Results

WORD, IN_TORCH = "networks", "in-torch"


class NetworkOptions(drawn_command.DrawnOptions):
    """The options of networks."""

    against: Annotated[
        str,
        Field(description="With networks or in-torch: how PyTorch runs them (eager, graph, compile, autotune)."),
    ] = "eager,graph,compile,autotune"


_OTHERS = "drawn", "seed", "of", "dtype", "from_", "regret"
_MEASURING = "against", "part", "minutes"


def is_requested(names: tuple[str, ...], options: Mapping[str, Any]) -> bool:
    """Return whether the first name asks for networks. Raises ConfigError for their options without that name."""
    if names[:1] in ((WORD,), (IN_TORCH,)):
        return True
    if names:
        raise ConfigError(f"NAME is {names[0]}, expected {WORD} or {IN_TORCH} first; `minidl bench` has the fixed rows")
    if "against" in options:
        example = f"python -m benchmarks.bench {WORD} --against {options['against']}"
        raise ConfigError(f"--against requires {WORD}, as in `{example}`")
    return False


def run(config: Any, options: Mapping[str, Any]) -> None:
    """Measure networks, list them, or show the results in a file."""
    from benchmarks.bench import accelerated_rows, network_results, network_rows, network_table

    word = config.names[0]
    for name in _OTHERS:
        if name in options:
            raise ConfigError(f"--{name.rstrip('_')} cannot be combined with {word}")
    if word == IN_TORCH and config.plot is not None:
        raise ConfigError(f"--plot has no picture of {word}; leave it out")
    try:
        nets = (accelerated_rows if word == IN_TORCH else network_rows).chosen(config.names[1:])
        if config.part is not None:
            nets = list(drawn_command.part_of(nets, config.part))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.list_:
        check_alone(options, "json", "plot", "show", "against", "minutes")
        for net in nets:
            echo(f"{net.goal:>5g}  {net.row}")
        return
    show, plot = config.show, config.plot
    for name in ("json", *_MEASURING) if show is not None else ():
        if name in options:
            raise ConfigError(f"--{name} cannot be combined with --show")
    check_plot(plot)

    from minidl.training.run_folder import files

    names = [net.row for net in nets]
    results, failures = (
        (kept_results.shown(show, names, network_results.load), []) if show is not None else _measure(config, nets)
    )
    console = rich_console(width=None if rich_console().is_terminal else 240)
    console.print(network_table.table(results, names))
    if plot is not None:
        files.write_bytes(plot, network_table.picture(results, plot.suffix[1:]))
    echo(accelerated_rows.summary(results.rows) if word == IN_TORCH else network_table.summary(results))
    if failures or not results.right:
        raise typer.Exit(1)


def _measure(config: Any, nets: list[Net]) -> tuple[Results, list[str]]:
    from benchmarks.bench import accelerated_rows, network_clocks, network_results, network_run
    from minidl.tools.bench import machine

    in_torch = config.names[0] == IN_TORCH
    try:
        accelerated_rows.check_installed(nets)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    peers = config.against.split(",")
    unknown = [peer for peer in peers if peer not in network_clocks.PEERS]
    if unknown:
        raise ConfigError(f"--against has {unknown[0]!r}, expected some of {', '.join(network_clocks.PEERS)}")
    path = config.json_file
    kept_results.check_device()
    results = kept_results.earlier(path, network_results.load, network_results.empty(machine.machine()))

    def keep(name: str, row: dict[str, Any]) -> None:
        results.add(name, row)
        if in_torch:
            results.machine["summary"] = accelerated_rows.summary(results.rows)
        if path is not None:
            results.save(path)

    more = {"module": "benchmarks.bench.accelerated_run"} if in_torch else {}
    left, failures = network_run.run(nets, results.rows, peers, keep, echo, config.minutes, **more)
    if left:
        echo(f"{left} of {len(nets)} networks are left: repeat the command", error=True)
    return results, failures
