"""Fields shared by the settings of several commands: type, range, help, and their form on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from minidl.data.files import LABEL_NAMES, TEXT_NAMES
from minidl.data.parsing import shorten
from minidl.errors import ConfigError
from minidl.training.run_folder.provenance import SCORES
from minidl.training.settings.declaration import FLOAT32, IN_FLOAT32, UTF8, Expected, Written, shown

_LONGEST = 1024  # pixels of a side
MOST_NEIGHBOURS = 10  # `vectorizer.MOST_NEIGHBOURS`, whose module the help does not import
_NGRAMS = f"a length from 1 to {MOST_NEIGHBOURS}, or two such as 2-3"
_RANGE = re.compile(r"[0-9]{1,2}-[0-9]{1,2}")
_SIZE = f"a height and width from 1 to {_LONGEST}, such as 32 or 32x48"


def parse_sizes(texts: list[str]) -> tuple[int, ...]:
    """Parse layer sizes from repeated or comma-separated values: ["256,128"] or ["256", "128"]. Raises ConfigError."""
    sizes = []
    for part in ",".join(texts).split(","):
        if not is_number(part.strip()):
            raise ConfigError(
                f"--hidden: {shorten(part.strip())} is not a layer size; give numbers, such as 128 or 256,128"
            )
        sizes.append(int(part))
    return tuple(sizes)


def parse_size(text: str) -> tuple[int, int]:
    """Parse (height, width) from 32 or 32x48. Raises ConfigError."""
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 2 or not all(map(is_number, parts)):
        raise ConfigError(f"--size is {text[:40]}, expected a height and width in pixels, such as 32 or 32x48")
    size = int(parts[0]), int(parts[-1])
    if not all(1 <= side <= _LONGEST for side in size):  # here, so that the error has the user's text
        raise ConfigError(f"--size is {text}, expected {_SIZE}")
    return size


def parse_ngrams(text: str) -> int | str:
    """Parse the longest n-gram, 2, or the shortest and the longest, 2-3. Raises ConfigError."""
    return _ngrams(int(text) if is_number(text) else text)


def _ngrams(value: int | str) -> int | str:
    """Validate; a range that begins with 1 becomes its end."""
    least, most = ngram_range(value) if isinstance(value, int) or _RANGE.fullmatch(value) else (0, 0)
    if not 1 <= least <= most <= MOST_NEIGHBOURS:
        raise ConfigError(f"--ngrams is {shown(value)}, expected {_NGRAMS}")
    return most if least == 1 else f"{least}-{most}"


def ngram_range(value: int | str) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest n-gram of a value of `Ngrams`."""
    least, _, most = str(value).rpartition("-") if isinstance(value, str) else ("1", "", value)
    return int(least), int(most)


def parse_devices(text: str) -> int | str:
    """Parse a number of devices, all or auto. Raises ConfigError."""
    return text if text == "auto" else _number_or_all(text, _DEVICES.text)


def parse_all_devices(text: str) -> int | str:
    """Parse a number of devices or all. Raises ConfigError."""
    return _number_or_all(text, _ALL_DEVICES.text)


def _number_or_all(text: str, expected: str) -> int | str:
    if text == "all":
        return text
    if not is_number(text) or int(text) == 0:
        raise ConfigError(f"--devices is {shorten(text)}, expected {expected}")
    return int(text)


def is_number(text: str) -> bool:
    """Return whether the text is a non-negative integer of at most 9 digits."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def _guess(name: str, candidates: tuple[str, ...]) -> str:
    """Return the help of a column option, whose default is guessed."""
    guess = f"{', '.join(candidates[:-1])} or {candidates[-1]}"
    return f"Column with the {name}. Default: the column named {guess}, or the other one of two columns."


FILE = "a .csv, .tsv, .jsonl (also .gz or .zst), .parquet or .arrow file"  # the formats of `data.formats`
_RECORDED = "a name in UTF-8, which the run's files can record"
_COLUMN = Expected("the name of a column", utf8=_RECORDED)
DATA = Expected("a data set, a file or a folder", utf8=_RECORDED)

Data = Annotated[str, Field(min_length=1), UTF8, DATA]
Column = Annotated[str | None, UTF8, _COLUMN]
TextColumn = Annotated[Column, Field(description=_guess("text", TEXT_NAMES))]
LabelColumn = Annotated[Column, Field(description=_guess("label", LABEL_NAMES))]
Size = Annotated[
    tuple[Annotated[int, Field(ge=1, le=_LONGEST)], Annotated[int, Field(ge=1, le=_LONGEST)]] | None,
    Field(
        strict=False,
        description="Resize pictures to this size in pixels: 32, or 32x48 (height first). Default: the most common "
        "size.",
    ),
    Expected(_SIZE),
    Written(str, parse_size),
]
Part = Annotated[str | None, Field(min_length=1), UTF8, Expected("a file or a folder", utf8=_RECORDED)]
Share = Annotated[float | None, Field(gt=0, lt=1), Expected("a share between 0 and 1")]
Device = Annotated[Literal["auto", "cuda", "cpu"], Field(description="auto, cuda, or cpu (Triton's interpreter).")]
_DEVICES = Expected("a number of devices from 1 on, all or auto")
_ALL_DEVICES = Expected("a number of devices from 1 on, or all")
Devices = Annotated[
    Annotated[int, Field(ge=1)] | Literal["all", "auto"],
    Field(description="Number of GPUs to use: a number, all, or auto (as many as save time)."),
    _DEVICES,
    Written(str, parse_devices),
]
AllDevices = Annotated[
    Annotated[int, Field(ge=1)] | Literal["all"],
    Field(description="Number of GPUs to use: a number or all."),
    _ALL_DEVICES,
    Written(str, parse_all_devices),
]
Timeout = Annotated[
    float,
    Field(gt=0, le=10**6, description="Seconds that a process waits for the others before all stop."),
]
Quiet = Annotated[bool, Field(description="Print only errors and, after training, the test scores.")]
Workers = Annotated[
    int | None,
    Field(
        ge=1,
        le=1024,
        description="Number of processes that prepare data; with 1, no others are started. Default: one per processor.",
    ),
]
JsonFile = Annotated[Path | None, SCORES]

Epochs = Annotated[int, Field(ge=1, le=10**6, description="Number of passes over the training split.")]
BatchSize = Annotated[int, Field(ge=1, le=10**6, description="Number of examples per step.")]
LearningRate = Annotated[float, Field(gt=0, le=FLOAT32, description="Learning rate."), IN_FLOAT32]
WeightDecay = Annotated[float, Field(ge=0, le=FLOAT32, description="Weight decay."), IN_FLOAT32]
Dropout = Annotated[float, Field(ge=0, lt=1, description="Dropout probability of hidden units.")]
Optimizer = Annotated[Literal["adamw", "adam", "rmsprop", "adagrad", "sgd"], Field(description="Optimizer:")]
Reject = Annotated[float, Field(ge=0, le=1, description="Probability below which a prediction has no label (null).")]
Momentum = Annotated[float, Field(ge=0, lt=1, description="Momentum of --optimizer sgd; 0 is plain gradient descent.")]
Schedule = Annotated[Literal["constant", "cosine", "linear"], Field(description="Learning rate schedule:")]
Warmup = Annotated[
    float, Field(ge=0, le=FLOAT32, description="Number of epochs over which the learning rate rises from 0 to --lr.")
]
LabelSmoothing = Annotated[
    float | None, Field(ge=0, lt=1, description="Label smoothing: share of each label that is spread over all classes.")
]
Balance = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Extra weight of rare classes, from 0 (examples count equally) to 1 (classes count equally).",
    ),
]
Patience = Annotated[
    int,
    Field(
        ge=0,
        le=10**6,
        description="Stop after this many epochs in a row whose validation score is clearly below the best, by more "
        "than one standard error. 0: never stop early.",
    ),
]
Seed = Annotated[
    int,
    Field(ge=0, le=2**63 - 1, description="Seed of initial weights, example order and all other random numbers."),
]
Shards = Annotated[
    int | None,
    Field(
        ge=1,
        le=64,
        description="Number of parts a batch is split into. At most this many processes can share the training; the "
        "result does not depend on their number. Default: 1, or 8 with several processes.",
    ),
]
SyncBatchNorm = Annotated[
    bool | None,
    Field(description="With --shards: compute batch norm statistics over the whole batch instead of each shard."),
]
Precision = Annotated[Literal["float32", "tf32"], Field(description="Precision of matrix products on a GPU:")]
Ngrams = Annotated[
    int | str,
    AfterValidator(_ngrams),
    Field(description="Longest n-gram of words or characters, or shortest and longest: 2 or 2-3."),
    Expected(_NGRAMS),
    Written(str, parse_ngrams),
]
Hidden = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65536)], ...],
    Field(strict=False, min_length=1, description="Sizes of the hidden layers, such as 128 or 256,128."),
    Expected("layer sizes from 1 to 65536, such as 128 or 256,128", some="at least one layer size"),
    Written(list[str], parse_sizes),
]
