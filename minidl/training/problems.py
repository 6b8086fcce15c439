"""What a training command learns, as arrays: features, targets, and how answers are read.

A text problem has sparse features, a table problem dense ones; everything after this page is the same for both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import data, models, nn
from minidl.data import DataError, Rows, TableDataset, TextDataset, Texts
from minidl.data.vectorizer import Tfidf, TfidfOptions
from minidl.training.config import TrainTable, TrainText
from minidl.training.errors import ConfigError

Split = tuple[Any, np.ndarray]  # features (scipy CSR or float32 array [N, F]) and targets [N]


@dataclass(frozen=True)
class Problem:
    """Training and validation split as arrays; `test` makes the test split when it is called, once, at the end.

    `labels` is empty in a regression, whose targets are standardised with `mean` and `scale`. `documents` are the JSON
    files that a reader of the run needs, by name.
    """

    kind: str
    task: str
    source: dict[str, Any]
    sha256: str
    labels: list[str]
    train: Split
    validation: Split
    test: Callable[[], Split]
    model: Callable[[], nn.Module]
    documents: dict[str, str]
    target: str = ""
    mean: float = 0.0
    scale: float = 1.0


def text_problem(config: TrainText) -> Problem:
    """Raises DataError for data that cannot be used, ConfigError for flags that it does not take."""
    return from_texts(config, data.load_text(config.data, **text_options(config)))


def from_texts(config: TrainText, dataset: TextDataset) -> Problem:
    """The problem of a data set that is loaded already."""
    options = TfidfOptions(ngram_max=config.ngrams, min_df=config.min_df, max_features=config.max_features)
    vocabulary = Tfidf.fit(dataset.train.texts, options)
    classes = len(dataset.labels)

    def split(texts: Texts) -> Split:
        return vocabulary.transform(texts.texts), np.asarray(texts.labels, dtype=np.int64)

    return Problem(
        kind="text",
        task="classification",
        source={**dataset.source, "sizes": _sizes(dataset), "features": len(vocabulary), "classes": classes},
        sha256=text_hash(dataset),
        labels=dataset.labels,
        train=split(dataset.train),
        validation=split(dataset.validation),
        test=lambda: split(dataset.test),
        model=lambda: models.TextMLP(len(vocabulary), classes, config.hidden, config.dropout),
        documents={"labels.json": _labels_json(dataset.labels), "vocabulary.json": vocabulary.to_json()},
    )


def table_problem(config: TrainTable) -> Problem:
    """Raises DataError for data that cannot be used, ConfigError for flags that it does not take."""
    dataset = data.load_table(config.data, **table_options(config))
    schema = dataset.schema
    regression = schema.task == "regression"
    if regression and config.label_smoothing:
        raise ConfigError(f"--label-smoothing is for a classification; {config.data} is a regression")
    outputs = 1 if regression else len(schema.labels)

    def split(rows: Rows) -> Split:
        return rows.x, rows.y

    documents = {"schema.json": schema.to_json()}
    if not regression:
        documents["labels.json"] = _labels_json(schema.labels)
    return Problem(
        kind="table",
        task=schema.task,
        source={**dataset.source, "sizes": _sizes(dataset), "features": len(schema.feature_names)},
        sha256=table_hash(dataset),
        labels=schema.labels,
        train=split(dataset.train),
        validation=split(dataset.validation),
        test=lambda: split(dataset.test),
        model=lambda: models.TableMLP(len(schema.feature_names), outputs, config.hidden, config.dropout),
        documents=documents,
        target=schema.target,
        mean=schema.target_mean,
        scale=schema.target_scale,
    )


def text_options(config: TrainText) -> dict[str, Any]:
    """Options of `load_text`. Raises ConfigError for flags that only a file takes."""
    columns = {"text_column": config.text_column, "label_column": config.label_column}
    splits = {"val_split": config.val_split, "test_split": config.test_split}
    if config.data in data.TEXT_DATA:
        _refuse(config.data, {**columns, **splits}, "its columns and splits are fixed")
        return {} if config.data == "docstrings" else {"progress": not config.quiet}
    return {**columns, "validation": config.val_split, "test": config.test_split}


def table_options(config: TrainTable) -> dict[str, Any]:
    """Options of `load_table`. Raises ConfigError for flags that only a file takes."""
    splits = {"validation": config.val_split, "test": config.test_split}
    if config.data in data.TABLE_DATA:
        if config.task not in (None, "regression"):
            raise ConfigError(f"--task {config.task}: {config.data} is a regression")
        _refuse(config.data, {"target": config.target, "ignore": config.ignore or None}, "its columns are fixed")
        return splits
    ignore = config.ignore or None
    return {**splits, "target": config.target, "task": config.task, "ignore": ignore, "missing": config.missing}


def text_hash(dataset: TextDataset) -> str:
    """SHA-256 of every text with its label and split."""
    digest = hashlib.sha256(json.dumps(dataset.labels).encode())
    for part in (dataset.train, dataset.validation, dataset.test):
        digest.update(f"{len(part)}\n".encode())
        for text, label in zip(part.texts, part.labels, strict=True):
            raw = text.encode()
            digest.update(f"{label} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def table_hash(dataset: TableDataset) -> str:
    """SHA-256 of every encoded row with its target and split."""
    digest = hashlib.sha256()
    for part in (dataset.train, dataset.validation, dataset.test):
        digest.update(f"{part.x.shape} {part.y.dtype}\n".encode() + part.x.tobytes() + part.y.tobytes())
    return digest.hexdigest()


def _refuse(name: str, options: dict[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is for your own file; {name} takes none: {why}")


def _sizes(dataset: TextDataset | TableDataset) -> dict[str, int]:
    return {"train": len(dataset.train), "validation": len(dataset.validation), "test": len(dataset.test)}


def _labels_json(labels: Sequence[str]) -> str:
    return json.dumps({"labels": list(labels)}, ensure_ascii=False, indent=1) + "\n"


__all__ = ["DataError", "Problem", "Split", "from_texts", "table_problem", "text_problem"]
