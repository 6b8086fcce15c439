"""The commands. Flags become one frozen dataclass of settings per command; the work is done below this layer.

Neither torch nor Triton nor numpy is imported before a command needs it, so help answers at once.
Exit codes: 0 done, 1 a failure, 2 bad usage or input, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from minidl import __version__
from minidl.data.files import LABEL_NAMES, TEXT_NAMES
from minidl.training import runs
from minidl.training.config import (
    Evaluate,
    Predict,
    TrainImages,
    TrainTable,
    TrainText,
    check_output,
    is_number,
    parse_size,
    parse_sizes,
)
from minidl.training.errors import ConfigError, DamagedError, Interrupted, RunError


def _examples(*commands: str) -> str:
    """The end of a command's help: a line for each example, as it is typed."""
    return "\n\n".join(["Examples:", *(f"[bold]{command}[/bold]" for command in commands)])


def _without_type(option: Any) -> Any:
    """--help shows no type, as the other flags."""
    if option is not None:
        option.metavar = ""
    return option


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))


class _Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train and use small neural networks whose every floating-point operation is a Triton kernel: compiled on an "
    "NVIDIA GPU, interpreted on a CPU.",
    epilog=_examples(
        "minidl train text --data docstrings --out runs/first", 'minidl predict runs/first "Open a socket"'
    ),
)
train_app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    help="Train a model and report how good it is.",
    epilog=_examples(
        "minidl train text --data docstrings --out runs/first",
        "minidl train table --data houses.csv --target price --out runs/houses",
    ),
)
app.add_typer(train_app, name="train")


def main() -> None:
    """Entry point of the command `minidl`."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # What was to be said is said: one more Ctrl-C must not print a trace while Python closes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


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


HELP = {
    "epochs": "Passes over the training split.",
    "batch_size": "Examples per step.",
    "lr": "Learning rate.",
    "hidden": "Sizes of the hidden layers: 128 or 256,128.",
    "dropout": "Share of hidden values dropped in training.",
    "optimizer": "adamw, adam, rmsprop, adagrad or sgd.",
    "weight_decay": "Pull of the weights towards zero.",
    "label_smoothing": "Share of a label spread over all classes.",
    "balance": "Extra weight of rare classes, from 0 (none) to 1 (all classes alike).",
    "schedule": "Course of the learning rate: constant, cosine or linear.",
    "warmup": "Epochs in which the learning rate rises to --lr.",
    "patience": "Stop after so many epochs more than one standard error from the best validation score; 0: never. "
    "The last epoch that is closer is kept.",
    "seed": "Decides first weights, order of examples and dropout.",
    "precision": "Matrix products on a GPU: float32 or tf32.",
    "ngrams": "Longest run of words that is a feature.",
    "min_df": "Texts that a feature must occur in.",
    "max_features": "Most frequent features kept.",
    "missing": "Missing values: error or fill.",
    "model": "small (3x3 convolutions with batch norm) or ece408 (two 5x5 convolutions, for 28x28).",
}
IMAGE_HELP = {
    "dropout": "Share of the values before the last layer dropped in training.",
    "seed": "Decides first weights, order and shifts of examples, and dropout.",
    "precision": "float32, tf32, bfloat16 or float16: of weights and activations; half precision has float32 masters.",
}


def _flag(settings: type[TrainText | TrainTable | TrainImages], name: str) -> Any:
    """A setting's option. It is None when it is not given, so that --resume can tell; its help names the default."""
    default = getattr(settings, name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    text = IMAGE_HELP.get(name, HELP[name]) if settings is TrainImages else HELP[name]
    return typer.Option("--" + name.replace("_", "-"), help=f"{text} Default: {shown}.", show_default=False)


def _switch(name: str, text: str) -> Any:
    """A flag without a value."""
    return typer.Option(name, help=text, metavar="")


def _column(name: str, usual: tuple[str, ...]) -> Any:
    """The column of a file for `name`, which is guessed where it is not given."""
    guess = f"{', '.join(usual[:-1])} or {usual[-1]}"
    text = f"Column of your file with the {name}. Default: a guess, the one named {guess}, or the other one of two."
    return typer.Option(f"--{name}-column", help=text)


Out = Annotated[Path, typer.Option("--out", help="Folder of the run; made if it is missing.")]
ValSplit = Annotated[float | None, typer.Option("--val-split", help="Share of your file for validation. Default: 0.1.")]
TestSplit = Annotated[float | None, typer.Option("--test-split", help="Share of your file for the test. Default: 0.2.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu (Triton's interpreter).")]
Resume = Annotated[bool, _switch("--resume", "Continue the run in --out with its settings.")]
Overwrite = Annotated[bool, _switch("--overwrite", "Replace the run in --out when this one is done.")]
Quiet = Annotated[bool, _switch("--quiet", "Show errors only.")]
NoPlots = Annotated[bool, _switch("--no-plots", "Make no pictures.")]
TextColumn = Annotated[str | None, _column("text", TEXT_NAMES)]
LabelColumn = Annotated[str | None, _column("label", LABEL_NAMES)]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)]


@train_app.command(
    "text",
    cls=_Command,
    epilog=_examples(
        "minidl train text --data docstrings --out runs/first",
        "minidl train text --data mails.csv --label-column folder --out runs/mails",
        "minidl train text --out runs/mails --resume",
    ),
)
def train_text(
    out: Out,
    data: Annotated[
        str | None, typer.Option("--data", help="docstrings, reuters-r8, reuters-r52, or a .csv, .tsv or .jsonl file.")
    ] = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    hidden: Annotated[list[str] | None, _flag(TrainText, "hidden")] = None,
    epochs: Annotated[int | None, _flag(TrainText, "epochs")] = None,
    batch_size: Annotated[int | None, _flag(TrainText, "batch_size")] = None,
    lr: Annotated[float | None, _flag(TrainText, "lr")] = None,
    dropout: Annotated[float | None, _flag(TrainText, "dropout")] = None,
    optimizer: Annotated[str | None, _flag(TrainText, "optimizer")] = None,
    lazy: Annotated[bool, _switch("--lazy", "Update only the rows of the first layer that a batch touches.")] = False,
    weight_decay: Annotated[float | None, _flag(TrainText, "weight_decay")] = None,
    label_smoothing: Annotated[float | None, _flag(TrainText, "label_smoothing")] = None,
    balance: Annotated[float | None, _flag(TrainText, "balance")] = None,
    schedule: Annotated[str | None, _flag(TrainText, "schedule")] = None,
    warmup: Annotated[float | None, _flag(TrainText, "warmup")] = None,
    patience: Annotated[int | None, _flag(TrainText, "patience")] = None,
    val_split: ValSplit = None,
    test_split: TestSplit = None,
    ngrams: Annotated[int | None, _flag(TrainText, "ngrams")] = None,
    min_df: Annotated[int | None, _flag(TrainText, "min_df")] = None,
    max_features: Annotated[int | None, _flag(TrainText, "max_features")] = None,
    seed: Annotated[int | None, _flag(TrainText, "seed")] = None,
    precision: Annotated[str | None, _flag(TrainText, "precision")] = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    no_plots: NoPlots = False,
) -> None:
    """Train a text classifier: TF-IDF features and a multilayer perceptron with a sparse first layer.

    The test split is read once, at the end. The majority class and a linear machine stand beside the result.

    Ctrl-C saves and names the command that continues.
    """
    flags = {name: value for name, value in locals().items() if name != "no_plots"}
    _train("text", flags, no_plots)


@train_app.command(
    "table",
    cls=_Command,
    epilog=_examples(
        "minidl train table --data diabetes --out runs/diabetes",
        "minidl train table --data houses.csv --target price --out runs/houses",
        "minidl train table --data cars.csv --target kind --task classification --out c",
        "minidl train table --data h.csv --target y --ignore id --missing fill --out h",
    ),
)
def train_table(
    out: Out,
    data: Annotated[str | None, typer.Option("--data", help="diabetes, or a .csv, .tsv or .jsonl file.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Column to predict. Default: a guess, the one named target.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="regression or classification. Default: a guess, classification where the target is text or has at "
            "most 20 different whole numbers.",
        ),
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="Column to leave out; may be repeated.")] = None,
    missing: Annotated[str | None, _flag(TrainTable, "missing")] = None,
    hidden: Annotated[list[str] | None, _flag(TrainTable, "hidden")] = None,
    epochs: Annotated[int | None, _flag(TrainTable, "epochs")] = None,
    batch_size: Annotated[int | None, _flag(TrainTable, "batch_size")] = None,
    lr: Annotated[float | None, _flag(TrainTable, "lr")] = None,
    dropout: Annotated[float | None, _flag(TrainTable, "dropout")] = None,
    optimizer: Annotated[str | None, _flag(TrainTable, "optimizer")] = None,
    weight_decay: Annotated[float | None, _flag(TrainTable, "weight_decay")] = None,
    label_smoothing: Annotated[float | None, _flag(TrainTable, "label_smoothing")] = None,
    balance: Annotated[float | None, _flag(TrainTable, "balance")] = None,
    schedule: Annotated[str | None, _flag(TrainTable, "schedule")] = None,
    warmup: Annotated[float | None, _flag(TrainTable, "warmup")] = None,
    patience: Annotated[int | None, _flag(TrainTable, "patience")] = None,
    val_split: ValSplit = None,
    test_split: TestSplit = None,
    seed: Annotated[int | None, _flag(TrainTable, "seed")] = None,
    precision: Annotated[str | None, _flag(TrainTable, "precision")] = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    no_plots: NoPlots = False,
) -> None:
    """Train on a table: regression or classification by a multilayer perceptron on standardised columns."""
    flags = {name: value for name, value in locals().items() if name != "no_plots"}
    flags["ignore"] = tuple(ignore) if ignore else None
    _train("table", flags, no_plots)


@train_app.command(
    "images",
    cls=_Command,
    epilog=_examples(
        "minidl train images --data digits --out runs/digits",
        "minidl train images --data mnist --precision bfloat16 --out runs/mnist",
        "minidl train images --data photos --size 64 --flip --out runs/photos",
    ),
)
def train_images(
    out: Out,
    data: Annotated[
        str | None, typer.Option("--data", help="digits, mnist, fashion-mnist, or a folder with a folder per class.")
    ] = None,
    model: Annotated[str | None, _flag(TrainImages, "model")] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="Pixels of your pictures: 32 or 32x48, height first. Default: the most common size."
        ),
    ] = None,
    shift: Annotated[
        int | None,
        typer.Option("--shift", help="Move training pictures by up to so many pixels. Default: what suits the data."),
    ] = None,
    flip: Annotated[
        bool | None,
        typer.Option("--flip/--no-flip", metavar="", help="Mirror half of the pictures. Default: fashion-mnist only."),
    ] = None,
    epochs: Annotated[int | None, _flag(TrainImages, "epochs")] = None,
    batch_size: Annotated[int | None, _flag(TrainImages, "batch_size")] = None,
    lr: Annotated[float | None, _flag(TrainImages, "lr")] = None,
    dropout: Annotated[float | None, _flag(TrainImages, "dropout")] = None,
    optimizer: Annotated[str | None, _flag(TrainImages, "optimizer")] = None,
    weight_decay: Annotated[float | None, _flag(TrainImages, "weight_decay")] = None,
    label_smoothing: Annotated[float | None, _flag(TrainImages, "label_smoothing")] = None,
    balance: Annotated[float | None, _flag(TrainImages, "balance")] = None,
    schedule: Annotated[str | None, _flag(TrainImages, "schedule")] = None,
    warmup: Annotated[float | None, _flag(TrainImages, "warmup")] = None,
    patience: Annotated[int | None, _flag(TrainImages, "patience")] = None,
    val_split: Annotated[
        float | None, typer.Option("--val-split", help="Share of your folder for validation. Default: 0.1.")
    ] = None,
    test_split: Annotated[
        float | None, typer.Option("--test-split", help="Share of your folder for the test. Default: 0.2.")
    ] = None,
    seed: Annotated[int | None, _flag(TrainImages, "seed")] = None,
    precision: Annotated[str | None, _flag(TrainImages, "precision")] = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    no_plots: NoPlots = False,
) -> None:
    """Train an image classifier: a convolutional network on pictures of one size.

    A folder holds one folder of pictures (PNG, JPEG, BMP, GIF, TIFF, WebP, PPM) per class. The test split is read once,
    at the end; the report has the majority class and a linear machine on the pixels beside the result.
    """
    flags = {name: value for name, value in locals().items() if name != "no_plots"}
    _train("images", flags, no_plots)


@app.command(
    cls=_Command,
    epilog=_examples(
        "minidl evaluate runs/first",
        "minidl evaluate runs/mails --data new.csv",
        "minidl evaluate runs/photos --data later_photos",
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
    device: Device = "auto",
) -> None:
    """Score a finished run on its test split or on other data."""
    with _errors():
        config = Evaluate(**locals())
        runs.finished_run(run)
        _choose_device(device)
        from minidl.training import predict as work
        from minidl.training import reports

        typer.echo(reports.as_text(work.evaluate(config)), nl=False)


@app.command(
    cls=_Command,
    epilog=_examples(
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
) -> None:
    """Answer each input with one JSON line: label, probability and the best labels, or the predicted number.

    Standard input is answered as it comes, line by line.

    A table run takes JSON objects, or CSV with a header line: the columns it was trained on, in any order.
    An image run takes paths of picture files.
    """
    with _errors():
        config = Predict(run=run, inputs=tuple(text or ()), file=file, text_column=text_column, top=top, device=device)
        runs.finished_run(run)
        _choose_device(device)
        from minidl.training import predict as work

        work.predict(config, sys.stdout)


@app.command(
    cls=_Command,
    epilog=_examples(
        "minidl doctor", "minidl doctor --compile --arch 80,90", "minidl doctor --compile --only gemm --details"
    ),
)
def doctor(
    compile_: Annotated[bool, _switch("--compile", "Compile every kernel for GPUs, which need not be there.")] = False,
    arch: Annotated[
        str | None, typer.Option("--arch", help="With --compile: compute capabilities. Default: 80,90.")
    ] = None,
    only: Annotated[str, typer.Option("--only", help="With --compile: kernels with this in their name.")] = "",
    details: Annotated[bool, _switch("--details", "With --compile: a row for each tile.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="With --compile: also write the figures here.")] = None,
) -> None:
    """Say what this machine can run and what is missing; with --compile, check every kernel for each GPU.

    The compile prints each kernel's registers, spills, shared memory and matrix instructions.

    It fails where a kernel spills, exceeds a limit or has its matrix instructions serialised.
    """
    with _errors():
        from minidl import doctor as work

        if not compile_:
            for name, given in (("--arch", arch), ("--only", only), ("--details", details), ("--json", json)):
                if given:
                    raise ConfigError(f"{name} goes with --compile")
            raise typer.Exit(work.doctor())
        if json is not None:
            check_output("--json", json)
        parts = [str(known) for known in work.ARCHITECTURES] if arch is None else [p.strip() for p in arch.split(",")]
        if not all(map(is_number, parts)):
            raise ConfigError(f"--arch is {arch}, expected compute capabilities without the point, such as 80,90")
        try:
            code = work.doctor_compile([int(part) for part in parts], json=json, only=only, details=details)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        raise typer.Exit(code)


def _train(kind: str, flags: dict[str, Any], no_plots: bool) -> None:
    with _errors():
        from minidl.training import sources

        if "hidden" in flags:
            flags["hidden"] = parse_sizes(flags["hidden"])
        if "size" in flags:
            flags["size"] = parse_size(flags["size"])
        given = {name: value for name, value in flags.items() if value is not None}
        if not flags.get("lazy", True):
            del given["lazy"]
        config: TrainText | TrainTable | TrainImages = runs.settings(kind, {**given, "plots": not no_plots})
        done = runs.finished_report(config)
        if done is not None:
            if not config.quiet:
                typer.echo(done, nl=False)
            return
        dataset = sources.load(config)
        checksum = sources.fingerprint(dataset)
        runs.check_data(config, checksum)
        _choose_device(config.device)
        from minidl.training.train import train

        train(kind, config, dataset, checksum)


def _choose_device(device: str) -> None:
    from minidl.training.device import choose

    choose(device)


@contextmanager
def _errors() -> Iterator[None]:
    """Turns what can go wrong into one sentence on standard error and an exit code."""
    from minidl.data.records import DataError

    try:
        yield
    except Interrupted as stop:
        _fail(str(stop), 130)
    except (ConfigError, DataError, DamagedError) as error:
        _fail(f"error: {error}", 2)
    except RunError as error:
        _fail(f"error: {error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read the answers has gone; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"error: {where}{error.strerror or error}", 1)


def _fail(message: str, code: int) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(code) from None
