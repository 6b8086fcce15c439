"""`minidl train text`: TF-IDF features, and a perceptron whose first layer is sparse."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from minidl import data
from minidl.data import TextDataset
from minidl.data.digests import content_digest
from minidl.data.parsing import shorten
from minidl.data.patterns import linear
from minidl.data.records import DataError
from minidl.data.workers import Workers, available
from minidl.errors import ConfigError
from minidl.training.process import helpers, out_of_memory
from minidl.training.settings import fields, text_defaults
from minidl.training.settings.command import SPLITS, Perceptron, Session
from minidl.training.settings.declaration import FLOAT32, IN_FLOAT32, UTF8, Expected
from minidl.training.task import Task, only_for_files
from minidl.training.tasks.text_answers import TextClassifier, examples

if TYPE_CHECKING:
    import numpy as np

    from minidl.data.corpus import CorpusDataset
    from minidl.data.hashing import HashedTfidf
    from minidl.data.vectorizer import Tfidf, TfidfOptions
    from minidl.training.loop.supervised import Supervised
    from minidl.training.run_folder.manifest import RunFiles


# Weights, gradient and AdamW's state take 2 KiB a column with 128 hidden units: here 128 MiB. From one half of the
# docstrings' training texts to the other, 2^13 to 2^18 columns have accuracy 0.739, 0.744, 0.749, 0.753, 0.755, 0.755.
_COLUMNS = 2**16
_MOST_TEXTS = 200_000  # of a file that is read again, for the texts of mistakes
_MOST_COLUMNS = 2**24  # `hashing.MOST_COLUMNS`, whose module the help does not load


def _by_features(hashed: int, usual: int, text: str) -> Any:
    """A setting whose default depends on the features."""
    return Field(
        default_factory=lambda given: hashed if given.get("features") == "hash" else usual,
        description=f"{text} Default: {hashed} with hash, else {usual}.",
    )


def _suited(text: str, values: str, **limits: Any) -> Any:
    """A setting whose default depends on the training texts, see `suited`."""
    return Field(description=f"{text} Default: {values}, depending on the number of training texts.", **limits)


class TrainText(Perceptron, Session):
    """Train a text classifier: TF-IDF features and a multilayer perceptron with a sparse first layer.

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
    earlier = {"nfc": False}  # noqa: RUF012
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
    hidden: fields.Hidden = (128,)
    epochs: Annotated[int | None, _suited("Number of passes over the training split.", "12 to 3", ge=1, le=10**6)] = (
        None
    )
    batch_size: Annotated[int | None, _suited("Number of examples per step.", "256 to 1024", ge=1, le=10**6)] = None
    lr: Annotated[float | None, _suited("Learning rate.", "0.01 to 0.0004", gt=0, le=FLOAT32), IN_FLOAT32] = None
    dropout: fields.Dropout = 0.5
    weight_decay: fields.WeightDecay = 0.0
    label_smoothing: Annotated[
        float | None,
        _suited("Label smoothing: share of each label that is spread over all classes.", "0.1 or 0", ge=0, lt=1),
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


class TextTask(Task):
    """Texts and their classes."""

    name = "text"
    run = "a text run"
    settings = TrainText
    data_sets = data.TEXT_DATA
    has_terms = True
    files = ("labels.json", "vocabulary.json", "hashing.json", "confusion.png")

    def read(self, name: str, **options: Any) -> TextDataset:
        return data.load_text(name, **options)

    def options(self, config: TrainText) -> dict[str, Any]:
        columns = {"text_column": config.text_column, "label_column": config.label_column}
        if config.data not in data.TEXT_DATA:
            return {**columns, **config.splits}
        only_for_files(
            config.data, {**columns, **config.model_dump(include=SPLITS)}, "its columns and splits are fixed"
        )
        return {} if config.data == "docstrings" else {"progress": not config.quiet}

    def load(self, config: TrainText) -> CorpusDataset:
        """As `Task.load`, with counted texts: those of the user's own file are counted while they are read."""
        from minidl.data.corpus import count_dataset, load_corpus

        analyzer, options = _tfidf(config).analyzer, self.options(config)
        helpers.in_thread(lambda: importlib.import_module("scipy.sparse"))  # 0.2 s; splits are the first to need it
        with out_of_memory.used_for("the data", "less data"), Workers(config.workers or available()) as workers:
            if config.data == "docstrings":
                options["workers"] = workers
            if config.data in data.TEXT_DATA:
                return count_dataset(self.read(config.data, **options), analyzer, workers)
            data.check_text_file(config.data)
            given = {name: value for name, value in options.items() if value is not None}
            return load_corpus(config.data, analyzer, workers, **given)

    def settled(self, config: TrainText, dataset: CorpusDataset) -> TrainText:
        """The settings with those that suit the number of texts, where none are given."""
        missing = {
            name: value
            for name, value in text_defaults.text(len(dataset.train), len(dataset.labels)).items()
            if getattr(config, name) is None
        }
        return TrainText(**{**dict(config), **missing}) if missing else config

    def fingerprints(self, dataset: CorpusDataset) -> Iterator[str]:
        """The first is of the digests of the texts, the other of the texts."""
        digest = hashlib.sha256(json.dumps(dataset.labels).encode())
        for part in (dataset.train, dataset.validation, dataset.test):
            digest.update(f"{len(part)}\n".encode() + part.classes.tobytes() + part.digests.tobytes())
        yield digest.hexdigest()
        digest = hashlib.sha256(json.dumps(dataset.labels).encode())
        whole = dataset.texts()
        for texts in (whole.train, whole.validation, whole.test):
            digest.update(f"{len(texts)}\n".encode())
            for text, label in zip(texts.texts, texts.labels, strict=True):
                raw = text.encode()
                digest.update(f"{label} {len(raw)}\n".encode() + raw)
        yield digest.hexdigest()

    def prepare(self, config: TrainText, dataset: CorpusDataset) -> Supervised:
        """Vocabulary and weights are those of the training split. Raises DataError when no feature is left."""
        from minidl import models
        from minidl.training.loop.supervised import Supervised, sizes
        from minidl.training.loop.targets import Classification

        kind, document = _vectorizer(config)
        vectorizer = kind.of_counts(dataset.train.content, _tfidf(config))
        count, classes = len(vectorizer), len(dataset.labels)
        targets = Classification(dataset.labels)
        return Supervised(
            name=self.name,
            config=config,
            source={**dataset.source, "sizes": sizes(dataset), "features": count, "classes": classes},
            features=f"{count:,} {'hashed ' if config.features == 'hash' else ''}features",
            targets=targets,
            train=examples(vectorizer, dataset.train),
            validation=examples(vectorizer, dataset.validation),
            test=lambda: examples(vectorizer, dataset.test),
            make_model=lambda config, device: models.TextMLP(
                count, classes, config.hidden, config.dropout, device=device
            ),
            documents={**targets.documents, document: vectorizer.to_json()},
            terms=getattr(vectorizer, "terms", None),
            texts=functools.partial(_test_texts, config, dataset),
        )

    def predictor(self, config: TrainText, own: RunFiles) -> TextClassifier:
        kind, document = _vectorizer(config)
        vectorizer = kind.from_json(own.text(document), str(config.out / document))
        # Before any input: scikit-learn cannot be loaded once the inputs have taken the memory.
        vectorizer.transform([""])
        return TextClassifier(config, own, vectorizer)


def _tfidf(config: TrainText) -> TfidfOptions:
    from minidl.data.vectorizer import TOKEN_PATTERN, TfidfOptions

    least, most = fields.ngram_range(config.ngrams)
    return TfidfOptions(
        ngram_min=least, ngram_max=most, min_df=config.min_df, max_features=config.max_features, nfc=config.nfc,
        unit=config.analyzer or "word",
        token_pattern=TOKEN_PATTERN if config.token_pattern is None else config.token_pattern,
    )  # fmt: skip


def _test_texts(config: TrainText, dataset: CorpusDataset, rows: np.ndarray) -> list[str]:
    """Return these texts of the test split; none if their file is large, cannot be read again, or has changed."""
    own = [] if config.data in data.TEXT_DATA else filter(None, (config.data, config.validation, config.test))
    parts = dataset.train, dataset.validation, dataset.test
    if sum(map(len, parts)) > _MOST_TEXTS or not all(Path(name).is_file() for name in own):
        return []
    try:
        texts = dataset.texts().test.texts
    except (DataError, OSError):
        return []
    chosen = [texts[row] for row in rows if row < len(texts)]
    digests = [dataset.test.digests[row].tobytes() for row in rows]
    return chosen if list(map(content_digest, chosen)) == digests else []


def _vectorizer(config: TrainText) -> tuple[type[Tfidf | HashedTfidf], str]:
    """The vectorizer's class, and the document of a run that has it."""
    if config.features == "hash":
        from minidl.data.hashing import HashedTfidf

        return HashedTfidf, "hashing.json"
    from minidl.data.vectorizer import Tfidf

    return Tfidf, "vocabulary.json"
