"""The settings shared by training commands, and those of `minidl evaluate` and `minidl predict`.

The fields of training commands that determine the result are the run's identity: they are written to `config.json`,
and a run can only be continued with the same values. The other fields (`Session`) concern one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from minidl.data.parsing import can_encode_utf8
from minidl.distributed import started
from minidl.errors import ConfigError
from minidl.training.run_folder import provenance
from minidl.training.run_folder.outputs import run_folder
from minidl.training.settings import fields
from minidl.training.settings.declaration import REPEATED, Positional, Settings, flag, shown


class Session(Settings):
    """How one process trains: output folder, device and display. These settings do not change the result."""

    out: Annotated[Path, AfterValidator(run_folder), Field(description="Folder of the run; created if missing.")]
    device: fields.Device = "auto"
    devices: fields.AllDevices = 1
    timeout: fields.Timeout = started.TIMEOUT
    zero: Annotated[
        bool, Field(description="Shard the optimizer state over the processes: less memory, same result.")
    ] = False
    resume: Annotated[bool, Field(description="Continue the run in --out with the settings it was started with.")] = (
        False
    )
    overwrite: Annotated[bool, Field(description="Replace the run in --out when the new run is finished.")] = False
    quiet: fields.Quiet = False
    workers: fields.Workers = None
    plots: Annotated[bool, Field(description="Do not draw plots.")] = True
    capture: Annotated[
        bool,
        Field(description="Launch kernels one by one instead of one CUDA graph per step: slower, same result."),
    ] = True

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        if self.resume and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite replaces it: use one of them")
        return self

    @classmethod
    def must_be_given(cls) -> set[str]:
        """Return only `out`: a resumed run has all other settings."""
        return {"out"}

    def identity(self) -> dict[str, Any]:
        """Return the fields that define the run, as plain JSON values, without the values of `earlier` versions."""
        values = self.model_dump(mode="json", exclude=set(self.of_process().model_fields))
        return {name: value for name, value in values.items() if (name, value) not in self.earlier.items()}

    @classmethod
    def of_process(cls) -> type[Session]:
        """Return the class of the fields that concern one process; a task may add fields."""
        return Session


MOMENTUM = 0.9
SPLITS = {"validation", "test", "val_split", "test_split"}  # the settings of the data's split


def _part(name: str) -> str:
    return f"File (for images: folder) with the {name} split. Default: a share of --data."


class TrainSettings(Session):
    """The settings that every training command declares, in an order of its own."""

    if TYPE_CHECKING:
        data: str
        batch_size: int | None
        shards: int | None
        precision: str | None


class Training(TrainSettings):
    """Settings of commands that train a model on labelled examples.

    `balance` b gives class c the weight (N / (C n_c))^b in the loss: 0 weights examples equally, 1 classes.
    """

    earlier = {"momentum": MOMENTUM}  # noqa: RUF012
    data: fields.Data
    epochs: fields.Epochs | None
    batch_size: fields.BatchSize | None
    lr: fields.LearningRate | None
    dropout: fields.Dropout | None
    optimizer: fields.Optimizer = "adamw"
    momentum: fields.Momentum = MOMENTUM
    weight_decay: fields.WeightDecay
    label_smoothing: fields.LabelSmoothing = 0.0
    balance: fields.Balance = 0.0
    schedule: fields.Schedule = "cosine"
    warmup: fields.Warmup = 0.0
    patience: fields.Patience
    validation: Annotated[fields.Part, Field(description=_part("validation"))] = None
    test: Annotated[fields.Part, Field(description=_part("test"))] = None
    val_split: Annotated[fields.Share, Field(description="Share of --data used for validation. Default: 0.1.")] = None
    test_split: Annotated[fields.Share, Field(description="Share of --data used for testing. Default: 0.2.")] = None
    seed: fields.Seed = 0
    shards: fields.Shards = None
    precision: str | None

    @property
    def splits(self) -> dict[str, float | str | None]:
        """Return the validation and the test split for the loader of the user's own data, each a share or a file."""
        return {"validation": self.validation or self.val_split, "test": self.test or self.test_split}

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        for name, share in (("validation", "val_split"), ("test", "test_split")):
            if getattr(self, name) is not None and getattr(self, share) is not None:
                raise ConfigError(f"--{name} names the {name} split: remove {flag(share)}")
        return self

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        if self.momentum != MOMENTUM and self.optimizer != "sgd":
            raise ConfigError(f"--momentum is for --optimizer sgd, not for {self.optimizer}")
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.epochs is not None and self.warmup >= self.epochs:
            raise ConfigError(f"--warmup {self.warmup:g} must be less than --epochs {self.epochs}")
        return self


class Perceptron(Training):
    """Settings of commands that train a multilayer perceptron."""

    hidden: fields.Hidden
    precision: fields.Precision = "float32"


class Evaluate(Settings):
    """Score a finished run on its test split or on other data, or a generator by its pictures.

    A generator is a run of `minidl train gan`, or the built-in model mnist.
    """

    examples = (
        "minidl evaluate runs/first",
        "minidl evaluate runs/mails --data new.csv",
        "minidl evaluate runs/photos --data later_photos",
        "minidl evaluate mnist",
    )
    run: Annotated[Path, Positional(), Field(description="Folder of a finished run.")]
    data: Annotated[
        str | None,
        fields.DATA,
        Field(
            description="Data set, labelled file, or folder of labelled pictures. Default: the run's own test split."
        ),
    ] = None
    text_column: fields.TextColumn = None
    label_column: fields.LabelColumn = None
    reject: fields.Reject = 0.0
    json_file: Annotated[
        fields.JsonFile, Field(alias="json", description="Also write the scores to this file as JSON.")
    ] = None
    device: fields.Device = "auto"
    devices: fields.AllDevices = 1

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        # A minimum length of the field would accept only UTF-8, but a file may have any name.
        if self.data == "":
            raise ConfigError(f"--data is empty, expected {fields.DATA.text}")
        if self.json_file is not None and not can_encode_utf8(self.data or ""):
            raise ConfigError(f"--data is {shown(self.data)}, expected a name in UTF-8, which --json can record")
        return self


class Predict(Settings):
    """Predict each input: print one JSON line with the label and its probability, or with the number.

    Standard input is read line by line, and each line is answered at once. A text run reads texts, and an image run
    paths of pictures. A table run reads JSON objects, or CSV with a header line; the columns are those of the training
    data, in any order.
    """

    examples = (
        'minidl predict runs/first "Open a socket" "Compute a logarithm"',
        "minidl predict runs/mails --file new.csv",
        "minidl predict runs/photos a.png b.jpg",
        "cat lines.txt | minidl predict runs/first",
        """minidl predict runs/houses '{"area": 100, "rooms": 3, "city": "Bern"}'""",
        "cat houses.csv | minidl predict runs/houses",
    )
    run: Annotated[Path, Positional(), Field(description="Folder of a finished run.")]
    inputs: Annotated[
        tuple[str, ...],
        Positional(),
        Field(
            strict=False,
            description="Texts, JSON objects (table run), or picture files and folders (image run). Without inputs, "
            "standard input is read.",
        ),
        REPEATED,
    ] = ()
    file: Annotated[
        Path | None,
        Field(description=f"Read the inputs from {fields.FILE}, or from the lines of a text file."),
    ] = None
    text_column: fields.TextColumn = None
    top: Annotated[int, Field(ge=1, le=10**6, description="Number of labels per prediction.")] = 3
    reject: fields.Reject = 0.0
    workers: fields.Workers = None
    device: fields.Device = "auto"
    devices: fields.AllDevices = 1

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.inputs and self.file is not None:
            raise ConfigError("inputs were given as arguments and by --file: use one of them")
        return self


class Explain(Settings):
    """Show how much each term of a text raised or lowered the score of its labels.

    A term's value is the gradient of the label's logit times the term's weight in the text. The values and the rest
    (the contribution of the biases) sum to the logit. Standard input is read line by line.
    """

    examples = (
        'minidl explain runs/first "Open a socket and wait for clients"',
        'minidl explain runs/mails "Your parcel has arrived" --top 3 --terms 5',
        "cat lines.txt | minidl explain runs/first --json",
    )
    run: Annotated[Path, Positional(), Field(description="Folder of a finished text run.")]
    texts: Annotated[
        tuple[str, ...],
        Positional(),
        Field(strict=False, description="Texts. Without texts, standard input is read."),
        REPEATED,
    ] = ()
    top: Annotated[int, Field(ge=1, le=10**6, description="Number of labels to explain for each text.")] = 2
    terms: Annotated[int, Field(ge=1, le=10**6, description="Number of terms to show for each label.")] = 10
    as_json: Annotated[bool, Field(alias="json", description="Print one JSON line for each text, with all terms.")] = (
        False
    )
    device: fields.Device = "auto"


class Compare(Settings):
    """Compare finished runs: scores, time, and the settings that differ.

    --html writes a page that also has the training curves of all runs.
    """

    examples = (
        "minidl compare runs/first runs/second",
        "minidl compare runs/* --html comparison.html",
    )
    runs: Annotated[
        tuple[str, ...], Positional(), Field(strict=False, description="Folders of finished runs."),
        REPEATED,
    ]  # fmt: skip
    html: Annotated[Path | None, provenance.COMPARISON, Field(description="Also write an HTML page to this file.")] = (
        None
    )

    @model_validator(mode="after")
    def _check_runs(self) -> Self:
        if len(self.runs) < 2:
            raise ConfigError(f"only one run was given, {self.runs[0]}: name two or more to compare")
        return self
