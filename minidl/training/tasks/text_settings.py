"""The settings of `minidl train text`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from minidl.data.parsing import shorten
from minidl.data.patterns import linear
from minidl.errors import ConfigError
from minidl.training.settings import fields
from minidl.training.settings.command import Perceptron
from minidl.training.settings.declaration import FLOAT32, IN_FLOAT32, UTF8, Expected, flag, shown

# Weights, gradient and AdamW's state take 2 KiB per column with 128 hidden units: here 128 MiB. Trained on one half of
# the docstrings' training split and tested on the other, 2^13 to 2^18 columns have accuracy 0.739, 0.744, 0.749, 0.753,
# 0.755, 0.755.
_COLUMNS = 2**16
_MOST_COLUMNS = 2**24  # `hashing.MOST_COLUMNS`, whose module the help does not import

_OF_ATTENTION = {"batch_size": 32, "lr": 0.002, "dropout": 0.2, "warmup": 0.5}


def _by_features(hashed: int, default: int, text: str) -> Any:
    """Return a field whose default depends on the features."""
    return Field(
        default_factory=lambda values: hashed if values.get("features") == "hash" else default,
        description=f"{text} Default: {hashed} with hash, else {default}.",
    )


def _by_texts(text: str, values: str, **limits: Any) -> Any:
    """Return a field whose default depends on the number of training texts, see `text_defaults`."""
    return Field(description=f"{text} Default: {values}, depending on the number of training texts.", **limits)


class TrainText(Perceptron):
    """Train a text classifier: TF-IDF features and a multilayer perceptron with a sparse first layer, or attention.

    The report compares the test scores with a majority-class baseline and a linear classifier. The test split is used
    once, at the end. Ctrl-C saves the run and prints the command that continues it.
    """

    examples = (
        "minidl train text --data docstrings --out runs/first",
        "minidl train text --data mails.csv --label-column folder --out runs/mails",
        "minidl train text --data train.csv --test test.csv --out runs/reviews",
        "minidl train text --data logs.csv --features hash --out runs/logs",
        "minidl train text --out runs/mails --resume",
    )
    earlier = {**Perceptron.earlier, "nfc": False, "model": "mlp", "activation": "relu"}  # noqa: RUF012
    data: Annotated[
        fields.Data,
        Field(description=f"docstrings, reuters-r8, reuters-r52, or {fields.FILE}."),
    ]
    text_column: fields.TextColumn = None
    label_column: fields.LabelColumn = None
    features: Annotated[
        Literal["tfidf", "hash"] | None,
        Field(
            description="tfidf (one column per term of a vocabulary) or hash (columns are hashes of terms). Default: "
            "tfidf."
        ),
    ] = None
    analyzer: Annotated[
        Literal["word", "char", "char_wb"] | None,
        Field(
            description="Unit of the n-grams: word, char (for text without spaces, such as Chinese, Japanese or "
            "Thai), or char_wb (characters within words, padded with spaces). Default: word."
        ),
    ] = None
    ngrams: fields.Ngrams = 1
    token_pattern: Annotated[
        str | None,
        Field(
            description="Regular expression that matches a word. Default: two letters or digits, the first a letter."
        ),
        UTF8,
        Expected("a regular expression", utf8="a regular expression in UTF-8"),
    ] = None
    nfc: Annotated[
        bool,
        Field(description="Do not normalize texts to NFC; combining marks then end a word, as in scikit-learn."),
    ] = True
    min_df: Annotated[int, Field(ge=1, le=10**9)] = _by_features(
        1, 2, "Minimum number of texts that contain a feature."
    )
    max_features: Annotated[int, Field(ge=1, le=10**9)] = _by_features(
        _COLUMNS, 20_000, f"Maximum number of features; with hash, the number of columns, at most {_MOST_COLUMNS}."
    )
    lazy: Annotated[
        bool, Field(description="Update only the rows of the first layer whose terms occur in the batch.")
    ] = False
    model: Annotated[
        Literal["mlp", "attention"],
        Field(
            description="mlp (a perceptron of TF-IDF features) or attention (two layers of a transformer's encoder, "
            "of width --hidden, which read the terms in order; by default with "
            + ", ".join(f"{flag(name)} {value}" for name, value in _OF_ATTENTION.items())
            + ")."
        ),
    ] = "mlp"
    hidden: fields.Hidden = (128,)
    activation: Annotated[
        Literal["relu", "sigmoid", "tanh", "gelu"], Field(description="Activation of the hidden units of mlp:")
    ] = "relu"
    epochs: Annotated[int | None, _by_texts("Number of passes over the training split.", "12 to 3", ge=1, le=10**6)] = (
        None
    )
    batch_size: Annotated[int | None, _by_texts("Number of examples per step.", "256 to 1024", ge=1, le=10**6)] = None
    lr: Annotated[
        float | None, _by_texts("Learning rate.", "0.01 to 0.0004, of sgd 1.5", gt=0, le=FLOAT32), IN_FLOAT32
    ] = None
    dropout: fields.Dropout = 0.5
    weight_decay: fields.WeightDecay = 0.0
    label_smoothing: Annotated[
        float | None,
        _by_texts("Label smoothing: share of each label that is spread over all classes.", "0.1 or 0", ge=0, lt=1),
    ] = None
    balance: fields.Balance = 0.3
    patience: fields.Patience = 5

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.features == "hash" and self.max_features > _MOST_COLUMNS:
            raise ConfigError(
                f"--max-features is {self.max_features}, expected at most {_MOST_COLUMNS} columns with --features hash"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_of_attention(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**_OF_ATTENTION, **values} if values.get("model") == "attention" else values

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        of_mlp = {
            "features": self.features == "hash", "ngrams": self.ngrams != 1, "hidden": len(self.hidden) > 1,
            "lazy": self.lazy, "activation": self.activation != "relu",
        }  # fmt: skip
        for name in [name for name, is_set in of_mlp.items() if is_set and self.model == "attention"]:
            raise ConfigError(
                f"{flag(name)} is {shown(getattr(self, name))}, which is for --model mlp: attention reads the single "
                "terms of a vocabulary, in layers of one width, and updates all of its rows"
            )
        return self

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.token_pattern is None:
            return self
        if self.analyzer in ("char", "char_wb"):
            raise ConfigError(f"--token-pattern finds words, and --analyzer {self.analyzer} takes characters: give one")
        try:
            linear(self.token_pattern)
        except ValueError as error:
            raise ConfigError(f"--token-pattern is {shorten(self.token_pattern)}: {error}") from None
        return self
