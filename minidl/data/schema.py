"""The schema of a table, which turns rows into model inputs; saved with the model as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minidl.data import cells
from minidl.data.file_rows import Records, label_at
from minidl.data.number_formats import NumberFormat
from minidl.data.parsing import listed, shorten
from minidl.data.records import DataError, Rows
from minidl.data.saved import Checked, Names, Record, Scale

REGRESSION, CLASSIFICATION = "regression", "classification"
MAX_CATEGORIES = 100  # of a column


@dataclass(frozen=True)
class Column(Checked):
    """An input column: a number with the training split's mean and scale, or a category with its values.

    `number_format` is the format of the numbers; None for plain numbers.
    """

    name: str
    mean: float = 0.0
    scale: Scale = 1.0
    categories: Annotated[Names, Field(min_length=1, max_length=MAX_CATEGORIES)] | None = None
    number_format: NumberFormat | None = None

    @property
    def features(self) -> list[str]:
        """Return the names of the features of this column."""
        return [self.name] if self.categories is None else [f"{self.name}={value}" for value in self.categories]


@dataclass(frozen=True)
class TableSchema(Record):
    """The columns, labels and statistics that turn rows into model inputs and model outputs into answers.

    `missing` is "error" (a missing value raises) or "fill" (a missing number becomes the mean, a missing category
    zeros). `labels` is empty in a regression; `target_mean` and `target_scale` are 0 and 1 in a classification.
    `target_format` is the format of the target's numbers; None for plain numbers.
    """

    format = "minidl-table-schema"
    _optional = ("number_format", "target_format")
    columns: Annotated[list[Column], Field(min_length=1)]
    target: str
    task: Annotated[str, Field(pattern=f"^({REGRESSION}|{CLASSIFICATION})$")]
    labels: Names = field(default_factory=list)
    target_mean: float = 0.0
    target_scale: Scale = 1.0
    missing: Annotated[str, Field(pattern="^(error|fill)$")] = "error"
    target_format: NumberFormat | None = None

    @property
    def feature_names(self) -> list[str]:
        """Return the name of each feature of the model."""
        return [name for column in self.columns for name in column.features]

    def features(self, records: Records) -> np.ndarray:
        """Return float32 [N, F]. Raises DataError for a missing column and for a value that does not fit its column."""
        blocks = [np.zeros((len(records.rows), 0), dtype=np.float32)]
        positions = records.positions([column.name for column in self.columns], "input")
        for column, at in zip(self.columns, positions, strict=True):
            if column.categories is None:
                values = self._numbers(records, at, column)
                numbers = cells.standardize(values, column.mean, column.scale, records, column.name)
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
        """Return for each row the columns whose category is not in the training split and is therefore ignored."""
        unknown: list[list[str]] = [[] for _ in records.rows]
        for column in self.columns:
            if column.categories is None:
                continue
            at, categories = records.position(column.name, "input"), {None, *column.categories}
            for row, names in enumerate(unknown):
                if self._category(records, row, at) not in categories:
                    names.append(column.name)
        return unknown

    def targets(self, records: Records) -> np.ndarray:
        """Return float32 [N], standardized (regression), or int64 [N] (classification).

        Raises DataError for a missing target column, a missing value, a value that is not a number in a regression,
        and a label that the model does not know.
        """
        at = records.position(self.target, "target")
        if self.task == REGRESSION:
            values = cells.target_numbers(records, at, self.target_format)
            return cells.standardize(values, self.target_mean, self.target_scale, records, self.target)
        index = {label: i for i, label in enumerate(self.labels)}
        indices = []
        for row in range(len(records.rows)):
            label = label_at(records, row, at)
            if label not in index:
                raise DataError(
                    f"{cells.location(records, row, at)}: label {shorten(label)} is unknown to the model; "
                    f"its labels are: {listed(self.labels)}"
                )
            indices.append(index[label])
        return np.array(indices, dtype=np.int64)

    def __post_init__(self) -> None:
        if self.task == CLASSIFICATION and len(self.labels) < 2:
            raise ValueError("a classification has two labels or more")

    def _numbers(self, records: Records, at: int, column: Column) -> list[float]:
        numbers: list[float] = []
        for row, number in enumerate(cells.read_numbers(records, at, column.number_format)):
            if number is not None:
                numbers.append(number)
            elif not cells.is_missing_number(records.rows[row][at]):
                expected = "a finite number is expected; correct it"
                raise cells.no_number(records, row, at, expected, column.number_format)
            elif self.missing == "fill":
                numbers.append(column.mean)
            else:
                raise cells.missing(records, row, at)
        return numbers

    def _category(self, records: Records, row: int, at: int) -> str | None:
        if cells.is_missing(records.rows[row][at]):
            if self.missing == "fill":
                return None
            raise cells.missing(records, row, at)
        return label_at(records, row, at)


@dataclass(frozen=True)
class TableDataset:
    """A table with one target column.

    `schema` turns a raw row into model inputs and model outputs back into the target's units; it has the names of the
    features and the target, the task, the labels of a classification and the statistics of the training split. In a
    regression y is standardized with the training split's mean and deviation.
    """

    name: str
    schema: TableSchema
    train: Rows
    validation: Rows
    test: Rows
    source: dict[str, Any] = field(default_factory=dict)
