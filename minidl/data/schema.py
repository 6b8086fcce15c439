"""The schema of a table: turns rows into model inputs and model outputs into answers; saved with the model as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from minidl.data import cells
from minidl.data.files import Records, label_at
from minidl.data.parsing import cut, is_utf8, listed, parse_json, shorten
from minidl.data.records import DataError, Rows

REGRESSION, CLASSIFICATION = "regression", "classification"
MAX_CATEGORIES = 100  # of a column
_FORMAT = "minidl-table-schema"


@dataclass(frozen=True)
class Column:
    """One input column: a number with the training split's mean and scale, or a category with its known values."""

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: list[str] | None = None

    @property
    def features(self) -> list[str]:
        """Names of the features this column becomes."""
        return [self.name] if self.categories is None else [f"{self.name}={value}" for value in self.categories]


@dataclass(frozen=True)
class TableSchema:
    """Everything needed to turn rows into model inputs, and model outputs into answers.

    `missing` is "error" (a missing value raises) or "fill" (a missing number becomes the mean, a missing category
    zeros). `labels` is empty in a regression; `target_mean` and `target_scale` are 0 and 1 in a classification.
    """

    columns: list[Column]
    target: str
    task: str
    labels: list[str] = field(default_factory=list)
    target_mean: float = 0.0
    target_scale: float = 1.0
    missing: str = "error"

    @property
    def feature_names(self) -> list[str]:
        return [name for column in self.columns for name in column.features]

    def features(self, records: Records) -> np.ndarray:
        """float32 [N, F]. Raises DataError for a missing column and for a value that does not fit its column."""
        blocks = [np.zeros((len(records.rows), 0), dtype=np.float32)]
        for column in self.columns:
            at = records.position(column.name, "input")
            if column.categories is None:
                values = [self._number(records, row, at, column) for row in range(len(records.rows))]
                numbers = cells.standardised(values, column.mean, column.scale, records, column.name)
                blocks.append(numbers[:, None])
            else:
                index = {value: i for i, value in enumerate(column.categories)}
                block = np.zeros((len(records.rows), len(index)), dtype=np.float32)
                for row in range(len(records.rows)):
                    value = self._category(records, row, at)
                    if value in index:
                        block[row, index[value]] = 1.0
                blocks.append(block)
        return np.concatenate(blocks, axis=1)

    def unknown(self, records: Records) -> list[list[str]]:
        """For each row, the columns whose category is not in the training split and is therefore ignored."""
        found: list[list[str]] = [[] for _ in records.rows]
        for column in self.columns:
            if column.categories is None:
                continue
            at, known = records.position(column.name, "input"), {None, *column.categories}
            for row, names in enumerate(found):
                if self._category(records, row, at) not in known:
                    names.append(column.name)
        return found

    def targets(self, records: Records) -> np.ndarray:
        """float32 [N] standardised (regression) or int64 [N] (classification).

        Raises DataError for a missing target column, a missing value, a value that is not a number in a regression,
        and a label that the model does not know.
        """
        at = records.position(self.target, "target")
        if self.task == REGRESSION:
            values = [cells.target_number(records, row, at) for row in range(len(records.rows))]
            return cells.standardised(values, self.target_mean, self.target_scale, records, self.target)
        index = {label: i for i, label in enumerate(self.labels)}
        indices = []
        for row in range(len(records.rows)):
            label = label_at(records, row, at)
            if label not in index:
                raise DataError(
                    f"{cells.place(records, row, at)}: label {shorten(label)} is unknown to the model; "
                    f"its labels are: {listed(self.labels)}"
                )
            indices.append(index[label])
        return np.array(indices, dtype=np.int64)

    def to_json(self) -> str:
        """The schema as JSON text."""
        return json.dumps({"format": _FORMAT, "version": 1, **asdict(self)}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "the table schema") -> TableSchema:
        """The schema that `to_json` wrote. Raises DataError, naming `source`, for anything else."""
        try:
            data = parse_json(text)
            if data.pop("format") != _FORMAT or data.pop("version") != 1:
                raise ValueError("another format or version")
            _require_fields(data, cls, "the schema")
            for column in data["columns"]:
                _require_fields(column, Column, "a column")
            data["columns"] = [Column(**column) for column in data["columns"]]
            schema = cls(**data)
            schema._validate()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{source} is damaged ({type(error).__name__}: {cut(error)}); restore it or train again"
            ) from None
        return schema

    def _validate(self) -> None:
        if not self.columns:
            raise ValueError("no columns")
        for column in self.columns:
            if not (_are_strings([column.name]) and _are_numbers((column.mean, column.scale)) and column.scale > 0):
                raise ValueError(f"bad column {column.name!r}")
            known = column.categories
            if known is not None and not (_are_strings(known) and 1 <= len(known) <= MAX_CATEGORIES):
                raise ValueError(f"bad categories of column {column.name!r}")
        if not _are_strings([self.target]) or self.task not in (REGRESSION, CLASSIFICATION):
            raise ValueError("bad target or task")
        if self.missing not in ("error", "fill") or not _are_strings(self.labels):
            raise ValueError("bad labels or option")
        if not _are_numbers((self.target_mean, self.target_scale)) or self.target_scale <= 0:
            raise ValueError("bad target statistics")
        if self.task == CLASSIFICATION and len(self.labels) < 2:
            raise ValueError("fewer than two labels")

    def _number(self, records: Records, row: int, at: int, column: Column) -> float:
        value = records.rows[row][at]
        if cells.is_missing_number(value):
            if self.missing == "fill":
                return column.mean
            raise cells.missing(records, row, at)
        number = cells.to_number(value)
        if number is None:
            raise DataError(
                f"{cells.place(records, row, at)}: {cells.shown(value)} where a finite number is expected; correct it"
            )
        return number

    def _category(self, records: Records, row: int, at: int) -> str | None:
        value = records.rows[row][at]
        if cells.is_missing(value):
            if self.missing == "fill":
                return None
            raise cells.missing(records, row, at)
        return label_at(records, row, at)


@dataclass(frozen=True)
class TableDataset:
    """A table with one target column.

    `schema` turns a raw row into model inputs and model outputs back into the target's units; it holds the feature
    names, the target's name, the task, the labels of a classification and every statistic of the training split.
    In a regression y is standardised with the training split's mean and deviation.
    """

    name: str
    schema: TableSchema
    train: Rows
    validation: Rows
    test: Rows
    source: dict[str, Any] = field(default_factory=dict)


def _require_fields(data: dict[str, Any], cls: type, what: str) -> None:
    """Raises ValueError unless a saved object has exactly the fields of `cls`, those with defaults included."""
    names = {entry.name for entry in fields(cls)}
    if names != data.keys():
        missing, unknown = ", ".join(sorted(names - data.keys())), ", ".join(sorted(data.keys() - names))
        raise ValueError(f"{what} lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}")


def _are_strings(values: object) -> bool:
    """Whether this is a list of distinct strings in UTF-8."""
    strings = isinstance(values, list) and all(isinstance(value, str) and is_utf8(value) for value in values)
    return strings and len(set(values)) == len(values)  # type: ignore[call-overload, arg-type]


def _are_numbers(values: Iterable[object]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)  # type: ignore[arg-type]
