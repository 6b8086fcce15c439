"""`python -m benchmarks.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from benchmarks.bench import drawn_command, network_command
from minidl import cli
from minidl.cli.options import command
from minidl.errors import ConfigError
from minidl.training.run_folder.provenance import PLOT, RESULTS
from minidl.training.settings.declaration import REPEATED, Positional


class Bench(network_command.NetworkOptions):
    """Measure minidl and torch side by side on shapes drawn from a seed, or on networks.

    --drawn N measures N shapes drawn from --seed, in short rounds and against torch's eager kernels in both memory
    orders. The summary has the percentiles of the ratios and the worst rows. Shapes that torch cannot run are skipped.
    Rows already in the file of --json are kept, so a run can be done in parts.

    networks [NAME]... measures networks, in inference and training, each in a separate process: images per
    second, memory, seconds to the first step, launches, and the share of the floor. A row has every measured way
    of running torch; repeat the command to measure the rows that the file lacks.

    in-torch [MODEL]... measures models of torchvision and timm, which must be installed, and a DCGAN: as
    torch.compile(model, backend="minidl") runs them, against the same models eager and compiled by Inductor; also
    launched kernel by kernel, and with only the layers of minidl.torch.accelerate.

    Results are first compared with float64, and wrong ones are not timed. The exit code is 1 if a row is wrong or
    cannot be measured.
    """

    examples = (
        "python -m benchmarks.bench --drawn 500 --seed 1 --of conv --json drawn.json --minutes 9",
        "python -m benchmarks.bench --show drawn.json",
        "python -m benchmarks.bench networks resnet50 unet --json networks.json --minutes 9",
        "python -m benchmarks.bench in-torch resnet18 dcgan --json in-torch.json --minutes 9",
    )
    names: Annotated[
        tuple[str, ...],
        Positional("NAME"),
        Field(description="networks or in-torch, then words that the names of rows contain. Default: all rows."),
        REPEATED,
    ] = ()
    json_file: Annotated[
        Path | None,
        RESULTS,
        Field(alias="json", description="Also write the results to this file, which keeps its other rows."),
    ] = None
    plot: Annotated[
        Path | None, PLOT, Field(description="With networks: also draw the results here, as .svg or .png.")
    ] = None
    show: Annotated[Path | None, Field(description="Show the results in this file, without measuring.")] = None
    list_: Annotated[
        bool, Field(alias="list", description="Only list the rows with their goals, or the drawn shapes.")
    ] = False


def _bench(options: dict[str, Any]) -> None:
    config = Bench(**options)
    if network_command.is_requested(config.names, options):
        network_command.run(config, options)
    elif drawn_command.is_requested(config, options):
        drawn_command.run(config, options)
    else:
        raise ConfigError(
            f"expected --drawn N, {network_command.WORD} or {network_command.IN_TORCH}; "
            "`minidl bench` measures the fixed rows"
        )


app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)
command("bench", Bench, _bench)(app)

if __name__ == "__main__":
    cli.main(app)
