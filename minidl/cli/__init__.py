"""The commands. Flags become one frozen dataclass of settings per command; the work is done below this layer.

Neither torch nor Triton nor numpy is imported before a command needs it, so help answers at once.
Exit codes: 0 done, 1 a failure, 2 bad usage or input, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from minidl import __version__
from minidl.cli.bench import add_to as add_bench
from minidl.cli.common import (
    Command,
    Device,
    Group,
    LabelColumn,
    Profile,
    RunFolder,
    TextColumn,
    TraceOfRun,
    check_file,
    choose_device,
    errors,
    examples,
    profiled,
    switch,
    terminated,
)
from minidl.cli.generate import EvaluatorRun, Samples, evaluate_generator
from minidl.cli.generate import add_to as add_generate
from minidl.cli.sanitize import add_to as add_sanitize
from minidl.cli.train import train_app
from minidl.cli.tune import add_to as add_tune
from minidl.training import runs
from minidl.training.config import Evaluate, Predict, check_different, is_number
from minidl.training.errors import ConfigError

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train and use small neural networks whose every floating-point operation is a Triton kernel: compiled on an "
    "NVIDIA GPU, interpreted on a CPU.",
    epilog=examples(
        "minidl train text --data docstrings --out runs/first", 'minidl predict runs/first "Open a socket"'
    ),
)
app.add_typer(train_app, name="train")


def main() -> None:
    """Entry point of the command `minidl`."""
    try:
        with terminated():
            app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        # Typer has no word for what comes while it reads the command line.
        if isinstance(end.__context__, typer.Exit) and isinstance(end.__context__.__cause__, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        raise
    finally:
        # What was to be said is said: one more Ctrl-C must not print a trace while Python closes.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, metavar="", help="Show it.")
    ] = False,
) -> None:
    pass


@app.command(
    cls=Command,
    epilog=examples(
        "minidl evaluate runs/first",
        "minidl evaluate runs/mails --data new.csv",
        "minidl evaluate runs/photos --data later_photos",
        "minidl evaluate mnist",
    ),
)
def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None,
        typer.Option("--data", help="A data set, or a file or folder with labels; else the run's own test split."),
    ] = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the scores to this file.")] = None,
    samples: Samples = None,
    evaluator: EvaluatorRun = None,
    device: Device = "auto",
    profile: Profile = False,
    trace: TraceOfRun = None,
) -> None:
    """Score a finished run on its test split or on other data; a generator (a GAN run, or mnist) by its pictures."""
    with errors():
        check_different(data=data, json=json, trace=trace)
        if json is not None:
            runs.check_not_own("--json", json)
        usual = run / "trace-evaluate.json" if (run / "config.json").is_file() else None
        around = functools.partial(profiled, profile, trace, usual)
        if evaluate_generator(run, data, text_column, label_column, json, samples, evaluator, device, around):
            return
        config = Evaluate(
            run=run, data=data, text_column=text_column, label_column=label_column, json=json, device=device
        )
        runs.finished_run(run)
        choose_device(device)
        from minidl.training import predict as work
        from minidl.training import reports

        with around():
            typer.echo(reports.as_text(work.evaluate(config)), nl=False)


@app.command(
    cls=Command,
    epilog=examples(
        'minidl predict runs/first "Open a socket" "Compute a logarithm"',
        "minidl predict runs/mails --file new.csv",
        "minidl predict runs/photos a.png b.jpg",
        "cat lines.txt | minidl predict runs/first",
        """minidl predict runs/houses '{"area": 100, "rooms": 3, "city": "Bern"}'""",
        "cat houses.csv | minidl predict runs/houses",
    ),
)
def predict(
    run: RunFolder,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts; JSON objects for a table run; picture files, or folders of them, for an image run; standard "
            "input when there is none.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Inputs from a .csv, .tsv or .jsonl file, or lines of a text file.")
    ] = None,
    text_column: TextColumn = None,
    top: Annotated[int, typer.Option("--top", help="Number of labels listed per answer.")] = 3,
    device: Device = "auto",
    profile: Profile = False,
    trace: TraceOfRun = None,
) -> None:
    """Answer each input with one JSON line: label, probability and the best labels, or the predicted number.

    Standard input is answered as it comes, line by line.

    A table run takes JSON objects, or CSV with a header line: the columns it was trained on, in any order.
    An image run takes paths of picture files.
    """
    with errors():
        check_different(file=file, trace=trace)
        config = Predict(run=run, inputs=tuple(text or ()), file=file, text_column=text_column, top=top, device=device)
        runs.finished_run(run)
        choose_device(device)
        from minidl.training import predict as work

        with profiled(profile, trace, run / "trace-predict.json"):
            work.predict(config, sys.stdout)


@app.command(
    cls=Command,
    epilog=examples(
        "minidl doctor", "minidl doctor --compile --arch 80,90", "minidl doctor --compile --only gemm --details"
    ),
)
def doctor(
    compile_: Annotated[bool, switch("--compile", "Compile every kernel for GPUs, which need not be there.")] = False,
    arch: Annotated[
        str | None, typer.Option("--arch", help="With --compile: compute capabilities. Default: 80,90.")
    ] = None,
    only: Annotated[str, typer.Option("--only", help="With --compile: kernels with this in their name.")] = "",
    brief: Annotated[
        str | None,
        typer.Option("--brief", help="With --compile: those of --arch for which each flag of a kernel counts once."),
    ] = None,
    details: Annotated[bool, switch("--details", "With --compile: a row for each tile.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="With --compile: also write the figures here.")] = None,
) -> None:
    """Say what this machine can run and what is missing; with --compile, check every kernel for each GPU.

    The compile prints each kernel's registers, spills, shared memory and matrix instructions.

    It fails where a kernel spills, exceeds a limit or has its matrix instructions serialised.
    """
    with errors():
        from minidl import doctor as work

        if not compile_:
            given = {"--arch": arch, "--only": only, "--brief": brief, "--details": details, "--json": json}
            for name, value in given.items():
                if value:
                    raise ConfigError(f"{name} goes with --compile")
            raise typer.Exit(work.doctor())
        if json is not None:
            check_file("--json", json)
        archs = list(work.ARCHITECTURES) if arch is None else _architectures("--arch", arch)
        short = [] if brief is None else _architectures("--brief", brief)
        if not set(short) <= set(archs):
            raise ConfigError(f"--brief is {brief}, expected some of --arch: {', '.join(map(str, archs))}")
        try:
            code = work.doctor_compile(archs, json=json, only=only, brief=short, details=details)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        raise typer.Exit(code)


def _architectures(flag: str, given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",")]
    if not all(map(is_number, parts)):
        raise ConfigError(f"{flag} is {given}, expected compute capabilities without the point, such as 80,90")
    return [int(part) for part in parts]


add_generate(app)
add_bench(app)
add_tune(app)
add_sanitize(app)
