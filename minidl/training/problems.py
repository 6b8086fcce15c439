"""What a training command learns, as arrays: features, targets, and how answers are read.

A text problem has sparse features, a table problem dense ones, an image problem pixels; everything after this page is
the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minidl import models, nn
from minidl.data import Augment, ImageDataset, Images, Pictures, Rows, TableDataset, TextDataset, Texts
from minidl.data.vectorizer import Tfidf, TfidfOptions
from minidl.training.config import TrainImages, TrainTable, TrainText
from minidl.training.errors import ConfigError
from minidl.training.pictures import HALVES, PictureFormat

Split = tuple[Any, np.ndarray]  # features (scipy CSR, float32 array [N, F] or Pictures) and targets [N]


@dataclass(frozen=True)
class Problem:
    """Training and validation split as arrays; `test` makes the test split when it is called, once, at the end.

    `labels` is empty in a regression, whose targets are standardised with `mean` and `scale`. `documents` are the JSON
    files that a reader of the run needs, by name.
    """

    kind: str
    task: str
    source: dict[str, Any]
    labels: list[str]
    train: Split
    validation: Split
    test: Callable[[], Split]
    model: Callable[[], nn.Module]
    documents: dict[str, str]
    target: str = ""
    mean: float = 0.0
    scale: float = 1.0
    augment: Augment | None = None


def make_problem(
    config: TrainText | TrainTable | TrainImages, dataset: TextDataset | TableDataset | ImageDataset
) -> Problem:
    """The problem of a data set. Raises DataError when no feature is left, ConfigError for flags that do not fit."""
    if isinstance(config, TrainText) and isinstance(dataset, TextDataset):
        return _text_problem(config, dataset)
    if isinstance(config, TrainTable) and isinstance(dataset, TableDataset):
        return _table_problem(config, dataset)
    if isinstance(config, TrainImages) and isinstance(dataset, ImageDataset):
        return _image_problem(config, dataset)
    raise TypeError(f"{type(config).__name__} does not take a {type(dataset).__name__}")


def _text_problem(config: TrainText, dataset: TextDataset) -> Problem:
    options = TfidfOptions(ngram_max=config.ngrams, min_df=config.min_df, max_features=config.max_features)
    vocabulary = Tfidf.fit(dataset.train.texts, options)
    classes = len(dataset.labels)

    def split(texts: Texts) -> Split:
        return vocabulary.transform(texts.texts), np.asarray(texts.labels, dtype=np.int64)

    return Problem(
        kind="text",
        task="classification",
        source={**dataset.source, "sizes": _sizes(dataset), "features": len(vocabulary), "classes": classes},
        labels=dataset.labels,
        train=split(dataset.train),
        validation=split(dataset.validation),
        test=lambda: split(dataset.test),
        model=lambda: models.TextMLP(len(vocabulary), classes, config.hidden, config.dropout),
        documents={"labels.json": _labels_json(dataset.labels), "vocabulary.json": vocabulary.to_json()},
    )


def _table_problem(config: TrainTable, dataset: TableDataset) -> Problem:
    schema = dataset.schema
    regression = schema.task == "regression"
    if regression and config.label_smoothing:
        raise ConfigError(f"--label-smoothing is for a classification; {config.data} is a regression")
    if regression and config.balance:
        raise ConfigError(f"--balance is for a classification; {config.data} is a regression")
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


def _image_problem(config: TrainImages, dataset: ImageDataset) -> Problem:
    height, width, channels = dataset.train.pixels.shape[1:]
    described = PictureFormat(height, width, channels, dataset.mean, dataset.std)
    suited = dataset.augment
    augment = Augment(
        shift=suited.shift if config.shift is None else config.shift,
        flip=suited.flip if config.flip is None else config.flip,
        replicate=suited.replicate,
    )
    if augment.shift >= min(height, width):
        raise ConfigError(f"--shift {augment.shift} moves pictures of {height} x {width} out of sight; give less")
    build = described.model(config, len(dataset.labels))
    if height * width == 1 and (len(dataset.train) - 1) % config.batch_size == 0:
        raise ConfigError(
            f"--batch-size {config.batch_size} leaves a batch of one picture of one pixel, which batch norm cannot "
            "learn from; give another, or a --size of 2 or more"
        )

    def split(images: Images) -> Split:
        return Pictures(images.pixels, dataset.mean, dataset.std), images.labels

    return Problem(
        kind="images",
        task="classification",
        source={
            **dataset.source,
            "sizes": _sizes(dataset),
            "features": height * width * channels,
            "augment": {"shift": augment.shift, "flip": augment.flip},
        },
        labels=dataset.labels,
        train=split(dataset.train),
        validation=split(dataset.validation),
        test=lambda: split(dataset.test),
        model=lambda: build(HALVES.get(config.precision, torch.float32)),
        documents={"labels.json": _labels_json(dataset.labels), "pictures.json": described.to_json()},
        augment=augment,
    )


def _sizes(dataset: TextDataset | TableDataset | ImageDataset) -> dict[str, int]:
    return {"train": len(dataset.train), "validation": len(dataset.validation), "test": len(dataset.test)}


def _labels_json(labels: Sequence[str]) -> str:
    return json.dumps({"labels": list(labels)}, ensure_ascii=False, indent=1) + "\n"
