"""One frozen dataclass of settings per command, checked when it is made.

The fields of the training commands that decide the result are the run's identity: they are written to
`config.json`, and a run is only continued with the same ones. The other fields (`Session`) say how this one process
goes about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from minidl.data.parsing import is_utf8, shorten
from minidl.training.errors import ConfigError

DEVICES = ("auto", "cuda", "cpu")
OPTIMIZERS = ("adamw", "adam", "rmsprop", "adagrad", "sgd")
SCHEDULES = ("constant", "cosine", "linear")
PRECISIONS = ("float32", "tf32")
IMAGE_PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
MODELS = ("small", "ece408")
TASKS = ("regression", "classification")
MISSING = ("error", "fill")
# Settings of a GAN: for pictures of 28 pixels or more, and for digits, which an interpreter trains on, too.
GAN_DEFAULTS: dict[str, tuple[float, float]] = {
    "latent": (100, 32), "width": (64, 16), "epochs": (65, 10), "batch_size": (128, 32), "lr": (6e-4, 1e-3),
}  # fmt: skip
_LARGEST = 3.4028234663852886e38  # of float32: what the device gets


def flag(name: str) -> str:
    """The command-line flag of a field: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Session:
    """How one process trains: where to, on what, and what it shows. None of it changes the result's definition.

    `capture`: on a GPU a step is one CUDA graph.
    """

    out: Path
    device: str = "auto"
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    plots: bool = True
    capture: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _choice(self, "device", DEVICES)
        if self.resume and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite replaces it: give one of them")

    def identity(self) -> dict[str, Any]:
        """The fields that define the run, as plain JSON values."""
        session = {field.name for field in fields(Session)}
        names = (field.name for field in fields(self) if field.name not in session)
        return {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every training command shares. `warmup` is the number of epochs in which the rate rises from 0 to `lr`.

    `patience` is the number of epochs far from the best validation score after which training stops (0: never).
    `balance` b gives class c the weight (N / (C n_c))^b in the loss: 0 weighs examples alike, 1 weighs classes alike.
    """

    data: str
    dropout: float
    optimizer: str = "adamw"
    lr: float
    weight_decay: float
    schedule: str = "constant"
    warmup: float = 0.0
    label_smoothing: float = 0.0
    balance: float = 0.0
    epochs: int
    batch_size: int
    patience: int
    seed: int = 0
    precision: str = "float32"
    val_split: float | None = None
    test_split: float | None = None
    precisions: ClassVar[tuple[str, ...]] = PRECISIONS

    def __post_init__(self) -> None:
        """Raises ConfigError for the first setting of a wrong type or range."""
        data: Any = self.data  # what was read from config.json may be anything
        _require(self, "data", isinstance(data, str) and data != "", "a name or a file")
        _utf8(self, "data")
        _number(self, "dropout", lambda value: 0 <= value < 1, "a number from 0 to below 1")
        _choice(self, "optimizer", OPTIMIZERS)
        _number(self, "lr", lambda value: value > 0, "a number above 0 that float32 holds")
        _number(self, "weight_decay", lambda value: value >= 0, "a number of at least 0 that float32 holds")
        _choice(self, "schedule", SCHEDULES)
        _number(self, "warmup", lambda value: value >= 0, "a number of epochs of at least 0")
        _number(self, "label_smoothing", lambda value: 0 <= value < 1, "a number from 0 to below 1")
        _number(self, "balance", lambda value: 0 <= value <= 1, "a number from 0 to 1")
        _whole(self, "epochs", 1, 10**6)
        _whole(self, "batch_size", 1, 10**6)
        _whole(self, "patience", 0, 10**6)
        _whole(self, "seed", 0, 2**63 - 1)
        _choice(self, "precision", self.precisions)
        for name in ("val_split", "test_split"):
            if getattr(self, name) is not None:
                _number(self, name, lambda value: 0 < value < 1, "a share between 0 and 1")
        if self.warmup >= self.epochs:
            raise ConfigError(f"--warmup {self.warmup:g} must be shorter than the {self.epochs} epochs of training")


@dataclass(frozen=True, kw_only=True)
class Perceptron(Training):
    """What the commands share that train a multilayer perceptron."""

    hidden: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        Training.__post_init__(self)
        hidden: Any = self.hidden
        sizes = isinstance(hidden, tuple) and all(type(size) is int and 1 <= size <= 65536 for size in hidden)
        _require(self, "hidden", sizes, "layer sizes from 1 to 65536, such as 128 or 256,128")
        _require(self, "hidden", len(self.hidden) >= 1, "at least one layer size")


@dataclass(frozen=True, kw_only=True)
class TrainText(Perceptron, Session):
    """`minidl train text`."""

    text_column: str | None = None
    label_column: str | None = None
    hidden: tuple[int, ...] = (128,)
    dropout: float = 0.5
    lr: float = 0.01
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    balance: float = 0.3
    schedule: str = "cosine"
    epochs: int = 12
    batch_size: int = 256
    patience: int = 5
    lazy: bool = False
    ngrams: int = 1
    min_df: int = 2
    max_features: int = 20_000

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        Session.__post_init__(self)
        Perceptron.__post_init__(self)
        _name(self, "text_column")
        _name(self, "label_column")
        _whole(self, "ngrams", 1, 5)
        _whole(self, "min_df", 1, 10**9)
        _whole(self, "max_features", 1, 10**9)
        _require(self, "lazy", type(self.lazy) is bool, "true or false")


@dataclass(frozen=True, kw_only=True)
class TrainTable(Perceptron, Session):
    """`minidl train table`. `task` None: decided by the target column."""

    target: str | None = None
    task: str | None = None
    ignore: tuple[str, ...] = ()
    missing: str = "error"
    hidden: tuple[int, ...] = (64, 64)
    dropout: float = 0.3
    lr: float = 0.003
    weight_decay: float = 0.1
    schedule: str = "cosine"
    epochs: int = 40
    batch_size: int = 32
    patience: int = 10

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        Session.__post_init__(self)
        Perceptron.__post_init__(self)
        _name(self, "target")
        if self.task is not None:
            _choice(self, "task", TASKS)
        ignore: Any = self.ignore
        names = isinstance(ignore, tuple) and all(isinstance(name, str) for name in ignore)
        _require(self, "ignore", names, "names of columns")
        _choice(self, "missing", MISSING)


@dataclass(frozen=True, kw_only=True)
class TrainImages(Training, Session):
    """`minidl train images`. `size` (height, width), `shift` and `flip` None: what suits the data."""

    model: str = "small"
    size: tuple[int, int] | None = None
    shift: int | None = None
    flip: bool | None = None
    dropout: float = 0.0
    lr: float = 0.01
    weight_decay: float = 0.05
    schedule: str = "cosine"
    warmup: float = 0.5
    epochs: int = 20
    batch_size: int = 128
    patience: int = 5
    precisions: ClassVar[tuple[str, ...]] = IMAGE_PRECISIONS

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        Session.__post_init__(self)
        Training.__post_init__(self)
        _choice(self, "model", MODELS)
        _size(self)
        if self.shift is not None:
            _whole(self, "shift", 0, 1024)
        _require(self, "flip", self.flip is None or type(self.flip) is bool, "true or false")


@dataclass(frozen=True, kw_only=True)
class TrainGan(Session):
    """`minidl train gan`. What is left at None becomes what suits the data, see GAN_DEFAULTS."""

    data: str
    size: tuple[int, int] | None = None
    latent: int | None = None
    width: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        """Raises ConfigError for the first setting of a wrong type or range."""
        Session.__post_init__(self)
        data: Any = self.data
        _require(self, "data", isinstance(data, str) and data != "", "a name or a folder")
        _utf8(self, "data")
        for name, values in GAN_DEFAULTS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, values[data == "digits"])
        _size(self)
        _whole(self, "latent", 1, 65536)
        _whole(self, "width", 1, 1024)
        _whole(self, "epochs", 1, 10**6)
        _whole(self, "batch_size", 2, 10**6)
        _number(self, "lr", lambda value: value > 0, "a number above 0 that float32 holds")
        _whole(self, "seed", 0, 2**63 - 1)
        _choice(self, "precision", PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """`minidl evaluate`. `data` None: the test split of the run's own data."""

    run: Path
    data: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    json: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _choice(self, "device", DEVICES)
        _require(self, "data", self.data is None or self.data, "a data set, a file or a folder")
        if self.json is not None:
            check_output("--json", self.json)


@dataclass(frozen=True, kw_only=True)
class Predict:
    """`minidl predict`. Neither inputs nor file: standard input."""

    run: Path
    inputs: tuple[str, ...] = ()
    file: Path | None = None
    text_column: str | None = None
    top: int = 3
    device: str = "auto"

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _choice(self, "device", DEVICES)
        _whole(self, "top", 1, 10**6)
        if self.inputs and self.file is not None:
            raise ConfigError("give the inputs or --file, not both")


def from_saved(cls: Callable[..., Any], saved: Mapping[str, Any], session: Mapping[str, Any]) -> Any:
    """The settings that `identity` wrote, with this process's session. Raises ConfigError, TypeError."""
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return cls(**known, **session)


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What `given` settings change in a run's saved ones, in words: "--epochs is 10 in the run, 20 was given"."""
    return [
        f"{flag(name)} is {_shown(saved.get(name))} in the run, {_shown(_plain(value))} was given"
        for name, value in given.items()
        if saved.get(name) != _plain(value)
    ]


def check_output(name: str, path: Path) -> None:
    """Raises ConfigError when the file that a flag names cannot be made: told before the work, not after it.

    A link, a device and a pipe are refused, too: a file would take their place, also that of /dev/null.
    """
    try:
        is_folder, has_folder, is_other = path.is_dir(), path.parent.is_dir(), path.exists() and not path.is_file()
    except OSError as error:
        raise ConfigError(f"{name} cannot be made: {error.strerror}; give another name") from None
    if is_folder:
        raise ConfigError(f"{name} {path} is a folder: give the name of a file")
    if path.is_symlink():
        raise ConfigError(f"{name} {path} is a link: give the name of the file, {os.path.realpath(path)}")
    if is_other:
        raise ConfigError(f"{name} {path} is a device or a pipe: give the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{name} {path} cannot be written; make it writable, or give another file")
    if not has_folder:
        raise ConfigError(f"{name} {path}: {path.parent} is no folder; make it, or give a file in another folder")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name} {path}: {path.parent} cannot be written; give a file in another folder")


def check_different(**paths: Path | str | None) -> None:
    """Raises ConfigError when two flags, given without their dashes, name one file: what is in it would be lost."""
    names: dict[str, str] = {}
    for name, path in paths.items():
        if path is not None:
            try:
                real = os.path.realpath(path)
            except ValueError:  # a zero character, or half of a surrogate pair
                raise ConfigError(
                    f"--{name} is {shorten(str(path))}, which no file can be named; give another"
                ) from None
            before = names.setdefault(real, name)
            if before != name:
                raise ConfigError(f"--{before} and --{name} are one file, {path}: give two names")


def parse_sizes(texts: list[str] | None) -> tuple[int, ...] | None:
    """Layer sizes from repeated or comma-separated values: ["256,128"] or ["256", "128"]. Raises ConfigError."""
    if not texts:
        return None
    sizes = []
    for part in ",".join(texts).split(","):
        if not is_number(part.strip()):
            raise ConfigError(
                f"--hidden: {shorten(part.strip())} is no layer size; give numbers, such as 128 or 256,128"
            )
        sizes.append(int(part))
    return tuple(sizes)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) from 32 or 32x48. Raises ConfigError."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 2 or not all(map(is_number, parts)):
        raise ConfigError(f"--size is {text[:40]}, expected a height and width in pixels, such as 32 or 32x48")
    return int(parts[0]), int(parts[-1])


def is_number(text: str) -> bool:
    """Whether this is a whole number that `int` reads: it refuses long ones."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def _utf8(config: Any, name: str) -> None:
    value = getattr(config, name)
    _require(config, name, value is None or is_utf8(value), "a name in UTF-8, which the run's files can record")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def _require(config: Any, name: str, good: Any, expected: str) -> None:
    if not good:
        raise ConfigError(f"{flag(name)} is {_shown(_plain(getattr(config, name)))}, expected {expected}")


def _choice(config: Any, name: str, known: tuple[str, ...]) -> None:
    _require(config, name, getattr(config, name) in known, "one of " + ", ".join(known))


def _number(config: Any, name: str, good: Callable[[float], bool], expected: str) -> None:
    value = getattr(config, name)
    number = type(value) in (int, float) and abs(value) <= _LARGEST
    _require(config, name, number and good(value), expected)


def _size(config: Any) -> None:
    size: Any = config.size
    pair = isinstance(size, tuple) and len(size) == 2
    sides = pair and all(type(side) is int and 1 <= side <= 1024 for side in size)
    _require(config, "size", size is None or sides, "a height and width from 1 to 1024, such as 32 or 32x48")


def _name(config: Any, name: str) -> None:
    value = getattr(config, name)
    _require(config, name, value is None or isinstance(value, str), "the name of a column")
    _utf8(config, name)


def _whole(config: Any, name: str, low: int, high: int) -> None:
    value = getattr(config, name)
    _require(config, name, type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")
