"""`minidl train ...`: flags become one frozen dataclass of settings, and training begins."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from minidl.cli.common import (
    Command,
    Device,
    Group,
    LabelColumn,
    NoPlots,
    Out,
    Overwrite,
    Profile,
    Quiet,
    Resume,
    TestSplit,
    TextColumn,
    Trace,
    ValSplit,
    choose_device,
    errors,
    examples,
    profiled,
    switch,
)
from minidl.training import runs
from minidl.training.config import (
    GAN_DEFAULTS,
    TrainGan,
    TrainImages,
    TrainTable,
    TrainText,
    check_different,
    parse_size,
    parse_sizes,
)

train_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Train a model and report how good it is.",
    epilog=examples(
        "minidl train text --data docstrings --out runs/first",
        "minidl train table --data houses.csv --target price --out runs/houses",
    ),
)

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


GAN_HELP = {
    "epochs": ("Passes over the pictures.", "{1} for digits, else {0}"),
    "batch_size": ("Pictures per step.", "{1} for digits, else {0}"),
    "latent": ("Numbers that a picture is made from.", "{1} for digits, else {0}"),
    "width": ("Channels next to the picture; deeper layers have 2, 4 or 8 times as many.", "{1} for digits, else {0}"),
    "lr": ("Learning rate of both networks.", "{1} for digits, else {0}"),
    "seed": ("Decides first weights, order of pictures and noise.", None),
    "precision": (HELP["precision"], None),
}


def _flag(settings: type[TrainText | TrainTable | TrainImages | TrainGan], name: str) -> Any:
    """A setting's option. It is None when it is not given, so that --resume can tell; its help names the default."""
    default = getattr(settings, name)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    if settings is TrainGan:
        text, suited = GAN_HELP[name]
        shown = shown if suited is None else suited.format(*GAN_DEFAULTS[name])
    else:
        text = IMAGE_HELP.get(name, HELP[name]) if settings is TrainImages else HELP[name]
    return typer.Option("--" + name.replace("_", "-"), help=f"{text} Default: {shown}.", show_default=False)


NoCapture = Annotated[
    bool,
    switch("--no-capture", "Launch every step from Python on a GPU, not as one CUDA graph: slower, the same result."),
]


@train_app.command(
    "text",
    cls=Command,
    epilog=examples(
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
    lazy: Annotated[bool, switch("--lazy", "Update only the rows of the first layer that a batch touches.")] = False,
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
    no_capture: NoCapture = False,
    profile: Profile = False,
    trace: Trace = None,
) -> None:
    """Train a text classifier: TF-IDF features and a multilayer perceptron with a sparse first layer.

    The test split is read once, at the end. The majority class and a linear machine stand beside the result.

    Ctrl-C saves and names the command that continues.
    """
    _train("text", locals())


@train_app.command(
    "table",
    cls=Command,
    epilog=examples(
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
    no_capture: NoCapture = False,
    profile: Profile = False,
    trace: Trace = None,
) -> None:
    """Train on a table: regression or classification by a multilayer perceptron on standardised columns."""
    flags = dict(locals())
    flags["ignore"] = tuple(ignore) if ignore else None
    _train("table", flags)


@train_app.command(
    "images",
    cls=Command,
    epilog=examples(
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
    no_capture: NoCapture = False,
    profile: Profile = False,
    trace: Trace = None,
) -> None:
    """Train an image classifier: a convolutional network on pictures of one size.

    A folder holds one folder of pictures (PNG, JPEG, BMP, GIF, TIFF, WebP, PPM) per class. The test split is read once,
    at the end; the report has the majority class and a linear machine on the pixels beside the result.
    """
    _train("images", locals())


@train_app.command(
    "gan",
    cls=Command,
    epilog=examples(
        "minidl train gan --data digits --epochs 1 --out runs/first-gan",
        "minidl train gan --data mnist --out runs/mnist-gan",
        "minidl train gan --data photos --size 64 --out runs/photos-gan",
        "minidl train gan --out runs/mnist-gan --resume",
    ),
)
def train_gan(
    out: Out,
    data: Annotated[
        str | None, typer.Option("--data", help="digits, mnist, fashion-mnist, or a folder with a folder per class.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="Pixels of your pictures: 64 or 32x48, height first. Default: the most common size."
        ),
    ] = None,
    epochs: Annotated[int | None, _flag(TrainGan, "epochs")] = None,
    batch_size: Annotated[int | None, _flag(TrainGan, "batch_size")] = None,
    lr: Annotated[float | None, _flag(TrainGan, "lr")] = None,
    latent: Annotated[int | None, _flag(TrainGan, "latent")] = None,
    width: Annotated[int | None, _flag(TrainGan, "width")] = None,
    seed: Annotated[int | None, _flag(TrainGan, "seed")] = None,
    precision: Annotated[str | None, _flag(TrainGan, "precision")] = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    no_plots: Annotated[bool, switch("--no-plots", "Draw no curves; the grids of pictures are always made.")] = False,
    no_capture: NoCapture = False,
    profile: Profile = False,
    trace: Trace = None,
) -> None:
    """Train a generator of pictures: a DCGAN.

    A grid of 64 pictures from fixed noise is drawn after every epoch, a film of them at the end. Classes are not used.

    Ctrl-C saves and names the command that continues.
    """
    _train("gan", locals())


def _train(kind: str, flags: dict[str, Any]) -> None:
    with errors():
        from minidl.training import sources

        profile, trace = flags.pop("profile"), flags.pop("trace")
        check_different(data=flags["data"], trace=trace)
        if "hidden" in flags:
            flags["hidden"] = parse_sizes(flags["hidden"])
        if "size" in flags:
            flags["size"] = parse_size(flags["size"])
        session = {"plots": not flags.pop("no_plots"), "capture": not flags.pop("no_capture")}
        given = {name: value for name, value in flags.items() if value is not None}
        if not flags.get("lazy", True):
            del given["lazy"]
        config: TrainText | TrainTable | TrainImages | TrainGan = runs.settings(kind, {**given, **session})
        done = runs.finished_report(config)
        if done is not None:
            if not config.quiet:
                typer.echo(done, nl=False)
            return
        dataset = sources.load(config)
        checksum = sources.fingerprint(dataset)
        runs.check_data(config, checksum)
        choose_device(config.device)
        updates = 2 if isinstance(config, TrainGan) else 1
        with profiled(profile, trace, config.out / "trace.json", updates):
            if isinstance(config, TrainGan):
                from minidl.data import ImageDataset
                from minidl.training import gan

                assert isinstance(dataset, ImageDataset)
                gan.train(config, dataset, checksum)
                return
            from minidl.training.train import train

            train(kind, config, dataset, checksum)
