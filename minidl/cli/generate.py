"""`minidl generate`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from minidl.cli.common import (
    Command,
    Device,
    Profile,
    Quiet,
    Trace,
    choose_device,
    errors,
    examples,
    profiled,
    switch,
)
from minidl.generation.config import (
    BUILT_IN,
    USUAL_COUNT,
    USUAL_STEPS,
    Generate,
    parse_grid,
    parse_pair,
    parse_seeds,
)
from minidl.training import files, runs
from minidl.training.config import check_different, check_output
from minidl.training.errors import ConfigError

Samples = Annotated[
    int | None,
    typer.Option("--samples", help="Pictures of a generator that are scored. Default: 10000, on a CPU 1000."),
]
EvaluatorRun = Annotated[
    Path | None,
    typer.Option("--evaluator", help="An image run whose features score a generator. Default: a built-in one."),
]
EXAMPLES = examples(
    "minidl generate --grid 8x8 --out pictures",
    "minidl generate --seeds 0-63,100 --truncation 1.5 --out pictures",
    "minidl generate --interpolate 3 17 --steps 12 --grid 1x12 --out walk",
    "minidl generate --model runs/gan --count 1000 --format npy --out arrays",
    "minidl generate --latents latents.txt --out pictures",
)


def generate(
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures; made if it is missing.")],
    model: Annotated[
        str, typer.Option("--model", help="mnist (built in), a run of `minidl train gan`, or a .safetensors file.")
    ] = "mnist",
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help=f"A picture for each: 0-63,100. Default: the grid's places, or {USUAL_COUNT}."),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", help="So many seeds from 0 on.")] = None,
    grid: Annotated[str | None, typer.Option("--grid", help="Also all in one picture, rows by columns: 8x8.")] = None,
    truncation: Annotated[
        float | None,
        typer.Option("--truncation", help="Keep latents within so many deviations: likelier pictures, less varied."),
    ] = None,
    interpolate: Annotated[
        tuple[str, str] | None,
        typer.Option("--interpolate", metavar="A B", help="A walk from seed A to seed B on the sphere."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help=f"Pictures of the walk, both ends included. Default: {USUAL_STEPS}.")
    ] = None,
    latents: Annotated[
        Path | None,
        typer.Option("--latents", help="A file of latents: .txt (numbers between white space) or .npy."),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="png, bmp, or npy: one float array.")] = "png",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Pictures in flight. Default: what suits the memory.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="float32, tf32 or float16.")] = "float32",
    device: Device = "auto",
    overwrite: Annotated[bool, switch("--overwrite", "Replace the pictures that an earlier command made.")] = False,
    quiet: Quiet = False,
    profile: Profile = False,
    trace: Trace = None,
) -> None:
    """Make pictures with a trained generator.

    A picture depends on its seed alone: the same numbers come out whatever the batch size or the order.

    Each PNG has its seed and the SHA-256 of the model in its text metadata; images.json has it for all of them.
    """
    with errors():
        config = Generate(
            out=out, model=model, seeds=parse_seeds(seeds), count=count, grid=parse_grid(grid), truncation=truncation,
            interpolate=parse_pair(interpolate), steps=steps, latents=latents, format=format_, batch_size=batch_size,
            precision=precision, device=device, overwrite=overwrite, quiet=quiet,
        )  # fmt: skip
        check_different(latents=latents, trace=trace)
        choose_device(device)
        from minidl.generation.generate import generate as work
        from minidl.training import environment

        environment.fix_threads(environment.wanted_threads())
        with profiled(profile, trace, out / "trace.json"):
            work(config)


def evaluate_generator(
    run: Path,
    data: str | None,
    text_column: str | None,
    label_column: str | None,
    json: Path | None,
    samples: int | None,
    evaluator: Path | None,
    device: str,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> bool:
    """`minidl evaluate` of a generator, the work inside `around()`; False, with nothing done, when `run` is none.

    Raises as `Evaluate`.
    """
    if not _is_generator(run):
        for flag, given in (("--samples", samples), ("--evaluator", evaluator)):
            if given is not None:
                raise ConfigError(f"{flag} is for generators: {run} is none")
        return False
    if text_column or label_column:
        raise ConfigError("--text-column and --label-column are for text runs")
    if json is not None:
        check_output("--json", json)
    choose_device(device)
    from minidl.generation import evaluate as work
    from minidl.training import environment

    environment.fix_threads(environment.wanted_threads())
    model = str(run) if _is_built_in(run) else str(run.absolute())
    config = work.EvaluateGan(model=model, data=data, samples=samples, evaluator=evaluator, json=json)
    with around():
        typer.echo(work.as_text(work.evaluate(config)), nl=False)
    return True


def _is_generator(run: Path) -> bool:
    if _is_built_in(run):
        return True
    if files.is_folder(run):
        return runs.finished_run(run).kind == "gan"
    return run.suffix == ".safetensors"


def _is_built_in(run: Path) -> bool:
    """A run of that name is meant itself; a folder of data is none."""
    return str(run) in BUILT_IN and not (run / "config.json").is_file()


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(cls=Command, epilog=EXAMPLES)(generate)
