"""The settings shared by training commands, and those of `minidl evaluate` and `minidl predict`.

The fields of training commands that determine the result are the run's identity: they are written to `config.json`,
and a run can only be continued with the same values. The other fields (`Session`) concern one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from minidl.data.parsing import is_utf8
from minidl.distributed import started
from minidl.errors import ConfigError
from minidl.training.run_folder import provenance
from minidl.training.run_folder.outputs import run_folder
from minidl.training.settings import fields
from minidl.training.settings.declaration import REPEATED, Positional, Settings, flag, shown


class Session(Settings):
    """How one process trains: output folder, device and display. These settings do not change the result."""

    out: Annotated[Path, AfterValidator(run_folder), Field(description="Folder of the run; created if it is missing.")]
    device: fields.Device = "auto"
    devices: fields.AllDevices = 1
    timeout: fields.Timeout = started.TIMEOUT
    zero: Annotated[
        bool, Field(description="Share out the optimizer's state to the processes: less memory, the same result.")
    ] = False
    resume: Annotated[bool, Field(description="Continue the run in --out with its settings.")] = False
    overwrite: Annotated[bool, Field(description="Replace the run in --out once this one is finished.")] = False
    quiet: fields.Quiet = False
    workers: fields.Workers = None
    plots: Annotated[bool, Field(description="Draw no plots.")] = True
    capture: Annotated[
        bool,
        Field(description="Launch kernels one by one, not as one CUDA graph a step: slower, the same result."),
    ] = True

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        if self.resume and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite replaces it: give one of them")
        return self

    @classmethod
    def must_be_given(cls) -> set[str]:
        """Only `out`: a run to be continued has all other settings."""
        return {"out"}

    def identity(self) -> dict[str, Any]:
        """The fields that define the run, as plain JSON values, but for those that are as in `earlier` runs."""
        values = self.model_dump(mode="json", exclude=set(self.of_process().model_fields))
        return {name: value for name, value in values.items() if (name, value) not in self.earlier.items()}

    @classmethod
    def of_process(cls) -> type[Session]:
        """The class of the fields that concern one process: a task may have more of them."""
        return Session


SPLITS = {"validation", "test", "val_split", "test_split"}  # the settings of training that say how data is split


def _part(name: str) -> str:
    return f"File of your own that is the {name} split, a folder for images. Default: a share of --data."


class Training(Settings):
    """Settings of commands that train a model on labelled examples.

    `balance` b gives class c the weight (N / (C n_c))^b in the loss: 0 weights examples equally, 1 classes.
    """

    data: fields.Data
    epochs: fields.Epochs | None
    batch_size: fields.BatchSize | None
    lr: fields.LearningRate | None
    dropout: fields.Dropout | None
    optimizer: fields.Optimizer = "adamw"
    weight_decay: fields.WeightDecay
    label_smoothing: fields.LabelSmoothing = 0.0
    balance: fields.Balance = 0.0
    schedule: fields.Schedule = "cosine"
    warmup: fields.Warmup = 0.0
    patience: fields.Patience
    validation: Annotated[fields.Part, Field(description=_part("validation"))] = None
    test: Annotated[fields.Part, Field(description=_part("test"))] = None
    val_split: Annotated[fields.Share, Field(description="Share of your own data for validation. Default: 0.1.")] = None
    test_split: Annotated[fields.Share, Field(description="Share of your own data for the test. Default: 0.2.")] = None
    seed: fields.Seed = 0
    shards: fields.Shards = None
    precision: str | None

    @property
    def splits(self) -> dict[str, float | str | None]:
        """What the validation and the test split are, for the loader of the user's own data: a share or a file."""
        return {"validation": self.validation or self.val_split, "test": self.test or self.test_split}

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        for name, share in (("validation", "val_split"), ("test", "test_split")):
            if getattr(self, name) is not None and getattr(self, share) is not None:
                raise ConfigError(f"--{name} is all of the {name} split: leave out {flag(share)}")
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
    """Score a finished run on its test split or on other data; a generator (a GAN run, or mnist) by its pictures."""

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
        Field(description="A data set, or a file or folder with labels. Default: the run's own test split."),
    ] = None
    text_column: fields.TextColumn = None
    label_column: fields.LabelColumn = None
    json_file: Annotated[fields.JsonFile, Field(alias="json", description="Also write the scores to this file.")] = None
    device: fields.Device = "auto"
    devices: fields.AllDevices = 1

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        # Not by a length of the field, which takes UTF-8 only: a file may have any name.
        if self.data == "":
            raise ConfigError(f"--data is , expected {fields.DATA.text}")
        if self.json_file is not None and not is_utf8(self.data or ""):
            raise ConfigError(f"--data is {shown(self.data)}, expected a name in UTF-8, which --json can record")
        return self


class Predict(Settings):
    """Answer each input with one JSON line: label, probability and the best labels, or the predicted number.

    Standard input is read and answered line by line.

    A table run takes JSON objects, or CSV with a header line: the columns it was trained on, in any order.
    An image run takes paths of picture files.
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
            description="Texts; JSON objects for a table run; picture files, or folders of them, for an image run; "
            "default: standard input.",
        ),
        REPEATED,
    ] = ()
    file: Annotated[
        Path | None,
        Field(description=f"Inputs from {fields.FILE}, or lines of a text file."),
    ] = None
    text_column: fields.TextColumn = None
    top: Annotated[int, Field(ge=1, le=10**6, description="Number of labels listed per answer.")] = 3
    workers: fields.Workers = None
    device: fields.Device = "auto"
    devices: fields.AllDevices = 1

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.inputs and self.file is not None:
            raise ConfigError("give the inputs or --file, not both")
        return self


class Explain(Settings):
    """Show which terms of a text spoke for and against its labels, and how much each.

    A term's value is the gradient of the label's logit times the term's weight in the text; the values and the rest,
    which is what the biases give, add up to the logit. Standard input is read and explained line by line.
    """

    examples = (
        'minidl explain runs/first "Open a socket and wait for clients"',
        'minidl explain runs/mails "Your parcel has arrived" --top 3 --terms 5',
        "cat lines.txt | minidl explain runs/first --json",
    )
    run: Annotated[Path, Positional(), Field(description="Folder of a finished text run.")]
    texts: Annotated[
        tuple[str, ...], Positional(), Field(strict=False, description="Texts; default: standard input."), REPEATED
    ] = ()
    top: Annotated[int, Field(ge=1, le=10**6, description="Number of labels explained for each text.")] = 2
    terms: Annotated[int, Field(ge=1, le=10**6, description="Number of terms shown for each label.")] = 10
    as_json: Annotated[bool, Field(alias="json", description="One JSON line for each text, with all terms.")] = False
    device: fields.Device = "auto"


class Compare(Settings):
    """Show finished runs side by side: scores, time, and the settings in which they differ.

    With --html also as a page with the curves of all runs.
    """

    examples = (
        "minidl compare runs/first runs/second",
        "minidl compare runs/* --html comparison.html",
    )
    runs: Annotated[
        tuple[str, ...], Positional(), Field(strict=False, description="Folders of finished runs."),
        REPEATED,
    ]  # fmt: skip
    html: Annotated[
        Path | None, provenance.COMPARISON, Field(description="Also write a page for a browser to this file.")
    ] = None

    @model_validator(mode="after")
    def _check_runs(self) -> Self:
        if len(self.runs) < 2:
            raise ConfigError(f"there is one run, {self.runs[0]}: give two or more to compare")
        return self
