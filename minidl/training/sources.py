"""The data of a training command, by name or from a file. Nothing here needs torch, so bad data is told at once."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from minidl import data
from minidl.data import ImageDataset, TableDataset, TextDataset
from minidl.training.config import TrainGan, TrainImages, TrainTable, TrainText
from minidl.training.errors import ConfigError


def load(config: TrainText | TrainTable | TrainImages | TrainGan) -> TextDataset | TableDataset | ImageDataset:
    """Raises DataError for data that cannot be used, ConfigError for flags that the data does not take."""
    if isinstance(config, TrainText):
        return data.load_text(config.data, **text_options(config))
    if isinstance(config, TrainImages | TrainGan):
        return data.load_images(config.data, **image_options(config))
    return data.load_table(config.data, **table_options(config))


def fingerprint(dataset: TextDataset | TableDataset | ImageDataset) -> str:
    """SHA-256 of every example with its target and split: a run is continued on the same data only."""
    if isinstance(dataset, TextDataset):
        return _text_hash(dataset)
    return _image_hash(dataset) if isinstance(dataset, ImageDataset) else _table_hash(dataset)


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


def image_options(config: TrainImages | TrainGan) -> dict[str, Any]:
    """Options of `load_images`. Raises ConfigError for flags that only a folder takes."""
    splits: dict[str, float | None] = {"val_split": None, "test_split": None}
    if isinstance(config, TrainImages):
        splits = {"val_split": config.val_split, "test_split": config.test_split}
    if config.data in data.IMAGE_DATA:
        for option, value in {"size": config.size, **splits}.items():
            if value is not None:
                flag = "--" + option.replace("_", "-")
                raise ConfigError(f"{flag} is for your own folder: the size and splits of {config.data} are fixed")
        return {} if config.data == "digits" else {"progress": not config.quiet}
    return {"size": config.size, "validation": splits["val_split"], "test": splits["test_split"]}


def _image_hash(dataset: ImageDataset) -> str:
    digest = hashlib.sha256(json.dumps(dataset.labels).encode())
    for part in (dataset.train, dataset.validation, dataset.test):
        digest.update(f"{part.pixels.shape}\n".encode() + part.pixels.tobytes() + part.labels.tobytes())
    return digest.hexdigest()


def _text_hash(dataset: TextDataset) -> str:
    digest = hashlib.sha256(json.dumps(dataset.labels).encode())
    for part in (dataset.train, dataset.validation, dataset.test):
        digest.update(f"{len(part)}\n".encode())
        for text, label in zip(part.texts, part.labels, strict=True):
            raw = text.encode()
            digest.update(f"{label} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def _table_hash(dataset: TableDataset) -> str:
    digest = hashlib.sha256()
    for part in (dataset.train, dataset.validation, dataset.test):
        digest.update(f"{part.x.shape} {part.y.dtype}\n".encode() + part.x.tobytes() + part.y.tobytes())
    return digest.hexdigest()


def _refuse(name: str, options: dict[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is for your own file; {name} takes none: {why}")
