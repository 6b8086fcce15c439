"""Tables: numeric and categorical columns to float32 features, one target column.

Numbers are standardised with the training split's mean and deviation, (v - mean) / deviation; a constant column
becomes zeros. A categorical column becomes one column per category of the training split (one-hot); a category that
the training split does not have becomes zeros. The target is standardised likewise in a regression and an index into
the labels in a classification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minidl.data.files import Records, check_shares, kind_of, label_at, listed, read_records, shorten, sort_labels
from minidl.data.records import DataError, Rows, TableDataset
from minidl.data.split import TEST, TRAIN, VALIDATION, stratified_split

REGRESSION, CLASSIFICATION = "regression", "classification"
MAX_CATEGORIES = 100
MAX_INTEGER_CLASSES = 20  # an integer target with more values than this is taken for a quantity
_MISSING_NUMBER = {"", "na", "n/a", "nan", "null", "none", "?"}
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
    """All that is needed to turn rows into model inputs, and model outputs into answers.

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
                standardised = (np.array(values, dtype=np.float64) - column.mean) / column.scale
                blocks.append(_finite(standardised, records, column.name)[:, None])
            else:
                index = {value: i for i, value in enumerate(column.categories)}
                block = np.zeros((len(records.rows), len(index)), dtype=np.float32)
                for row in range(len(records.rows)):
                    value = self._category(records, row, at)
                    if value in index:
                        block[row, index[value]] = 1.0
                blocks.append(block)
        return np.concatenate(blocks, axis=1)

    def targets(self, records: Records) -> np.ndarray:
        """float32 [N] standardised (regression) or int64 [N] (classification).

        Raises DataError for a missing target column, a missing value, a value that is no number in a regression, and
        a label that the model does not know.
        """
        at = records.position(self.target, "target")
        if self.task == REGRESSION:
            values = [_target_number(records, row, at) for row in range(len(records.rows))]
            standardised = (np.array(values, dtype=np.float64) - self.target_mean) / self.target_scale
            return _finite(standardised, records, self.target)
        index = {label: i for i, label in enumerate(self.labels)}
        indices = []
        for row in range(len(records.rows)):
            label = label_at(records, row, at)
            if label not in index:
                raise DataError(
                    f"{_place(records, row, at)}: label {shorten(label)} is unknown to the model; "
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
            data = json.loads(text)
            if data.pop("format") != _FORMAT or data.pop("version") != 1:
                raise ValueError("another format or version")
            data["columns"] = [Column(**column) for column in data["columns"]]
            schema = cls(**data)
            schema._validate()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{source} is damaged ({type(error).__name__}: {error}); restore it or train again"
            ) from None
        return schema

    def _validate(self) -> None:
        for column in self.columns:
            if not (_are_strings([column.name]) and _are_numbers((column.mean, column.scale)) and column.scale > 0):
                raise ValueError(f"bad column {column.name!r}")
            if column.categories is not None and not _are_strings(column.categories):
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
        if _is_missing_number(value):
            if self.missing == "fill":
                return column.mean
            raise _missing(records, row, at)
        number = _to_number(value)
        if number is None:
            raise DataError(
                f"{_place(records, row, at)}: {_shown(value)} where a finite number is expected; correct it"
            )
        return number

    def _category(self, records: Records, row: int, at: int) -> str | None:
        value = records.rows[row][at]
        if value is None or (isinstance(value, str) and not value.strip()):
            if self.missing == "fill":
                return None
            raise _missing(records, row, at)
        return label_at(records, row, at)


def load_table_file(
    path: str | Path,
    *,
    target: str | None = None,
    task: str | None = None,
    ignore: Sequence[str] = (),
    missing: str = "error",
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
) -> TableDataset:
    """A CSV, TSV or JSONL file as a table task.

    `target` is the column to predict (default: a column named "target"); `task` is "regression" or "classification"
    (default: classification when the target is text or has at most 20 different whole numbers); `ignore` names
    columns to leave out; `missing` is "error" or "fill", see `TableSchema`.

    Raises DataError as `read_records`, and for a missing column or value, a target of one value only, and a column
    of more than 100 different texts.
    """
    records = read_records(path)
    source = {"name": str(path), "sha256": records.sha256, "rows": len(records.rows)}
    return table_dataset(
        records, Path(path).stem, source, target=target, task=task, ignore=ignore, missing=missing,
        validation=validation, test=test, split_seed=split_seed,
    )  # fmt: skip


def load_diabetes(*, validation: float = 0.1, test: float = 0.2, split_seed: int = 0) -> TableDataset:
    """scikit-learn's diabetes table (442 patients, 10 measurements, disease progression after a year): regression."""
    from sklearn.datasets import load_diabetes as sklearn_diabetes

    bunch = sklearn_diabetes(scaled=False)
    rows = [[*map(float, row), float(y)] for row, y in zip(bunch.data, bunch.target, strict=True)]
    records = Records(
        Path("diabetes"), [*bunch.feature_names, "progression"], rows, list(range(1, len(rows) + 1)), sha256=""
    )
    source = {"name": "diabetes", "about": "scikit-learn's diabetes table, unscaled", "rows": len(rows)}
    return table_dataset(
        records, "diabetes", source, target="progression", task=REGRESSION,
        validation=validation, test=test, split_seed=split_seed,
    )  # fmt: skip


def table_dataset(
    records: Records,
    name: str,
    source: dict[str, Any],
    *,
    target: str | None = None,
    task: str | None = None,
    ignore: Sequence[str] = (),
    missing: str = "error",
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
) -> TableDataset:
    """Splits the rows by a hash of their inputs, measures the training split, and encodes all three."""
    if task not in (None, REGRESSION, CLASSIFICATION):
        raise DataError(f"unknown task {task!r}: expected {REGRESSION!r} or {CLASSIFICATION!r}")
    if missing not in ("error", "fill"):
        raise DataError(f"unknown treatment of missing values {missing!r}: expected 'error' or 'fill'")
    check_shares(validation, test)
    if target is None:
        if "target" not in records.columns:
            raise DataError(
                f"{records.path}: which column is to be predicted? Name it with target (--target); "
                f"the columns are: {listed(records.columns)}"
            )
        target = "target"
    target_at = records.position(target, "target")
    left_out = {target_at, *(records.position(column, "ignored") for column in ignore)}
    inputs = [i for i in range(len(records.columns)) if i not in left_out]
    if not inputs:
        raise DataError(f"{records.path} has no input column besides the target {target!r}")
    task = task or _guess_task(records, target_at)

    labels: list[str] = []
    classes = [0] * len(records.rows)
    if task == CLASSIFICATION:
        names = [label_at(records, row, target_at) for row in range(len(records.rows))]
        labels = sort_labels(set(names))
        if len(labels) < 2:
            raise DataError(
                f"{records.path} has one class only ({shorten(labels[0])} in column {target!r}): "
                "a classifier needs rows of at least two classes"
            )
        index = {label: i for i, label in enumerate(labels)}
        classes = [index[label] for label in names]
    keys = [json.dumps([_same_cell(row[i]) for i in inputs]) for row in records.rows]
    sides = stratified_split(keys, classes, validation, test, split_seed)
    parts = [_subset(records, [i for i, its in enumerate(sides) if its == side]) for side in (TRAIN, VALIDATION, TEST)]
    if not all(part.rows for part in parts):
        raise DataError(
            f"{records.path} has too few rows to split: {len(parts[0].rows)} for training, {len(parts[1].rows)} for "
            f"validation, {len(parts[2].rows)} for the test; give at least three different rows"
        )
    train = parts[0]
    columns = [_measure_column(records, train, at, missing) for at in inputs]
    mean, scale = 0.0, 1.0
    if task == REGRESSION:
        values = [_target_number(train, row, target_at) for row in range(len(train.rows))]
        mean, scale = _statistics(values, f"{records.path}: target column {target!r}")
        if min(values) == max(values):
            raise DataError(
                f"{records.path}: target column {target!r} has the one value {values[0]:g}: nothing to learn"
            )
    schema = TableSchema(columns, target, task, labels, mean, scale, missing)
    train_rows, validation_rows, test_rows = (Rows(schema.features(part), schema.targets(part)) for part in parts)
    source = {
        **source,
        "target": target,
        "task": task,
        "inputs": [records.columns[i] for i in inputs],
        "split": f"by class and hash of the inputs, seed {split_seed}: {validation:.0%} validation, {test:.0%} test",
    }
    return TableDataset(name, schema, train_rows, validation_rows, test_rows, source)


def read_rows(path: str | Path, schema: TableSchema) -> Rows:
    """The rows of a file with their targets, for an existing schema. Raises DataError as the schema's methods."""
    records = read_records(path)
    return Rows(schema.features(records), schema.targets(records))


def read_features(path: str | Path, schema: TableSchema) -> np.ndarray:
    """float32 [N, F] of a file that needs no target column. Raises DataError as `TableSchema.features`."""
    return schema.features(read_records(path))


def _measure_column(records: Records, train: Records, at: int, missing: str) -> Column:
    """Number or category by the whole file; the statistics by the training split."""
    name = records.columns[at]
    present = [(row, values[at]) for row, values in enumerate(records.rows) if not _is_missing_number(values[at])]
    not_numbers = [row for row, value in present if _to_number(value) is None]
    if present and not not_numbers:
        known = [_to_number(row[at]) for row in train.rows if not _is_missing_number(row[at])]
        values = [value for value in known if value is not None]
        if len(values) < len(train.rows) and missing == "error":
            row = next(i for i, values in enumerate(records.rows) if _is_missing_number(values[at]))
            raise _missing(records, row, at)
        if not values:
            raise DataError(f"{records.path}: column {name!r} has no value in the training split; ignore the column")
        mean, scale = _statistics(values, f"{records.path}: column {name!r}")
        return Column(name, mean, scale)
    if 2 * len(not_numbers) < len(present):
        row = not_numbers[0]
        raise DataError(
            f"{_place(records, row, at)}: {_shown(records.rows[row][at])} is no finite number, as most of the column "
            "are; correct it"
        )
    found: set[str] = set()
    for row in range(len(train.rows)):
        value: Any = train.rows[row][at]
        if value is None or (isinstance(value, str) and not value.strip()):
            if missing == "error":
                raise _missing(train, row, at)
        else:
            found.add(label_at(train, row, at))
    if not found:
        raise DataError(f"{records.path}: column {name!r} is empty; ignore the column")
    if len(found) > MAX_CATEGORIES:
        raise DataError(
            f"{records.path}: column {name!r} has {len(found)} different texts, at most {MAX_CATEGORIES} categories "
            "are taken; ignore the column (--ignore), or use it as the text of a text task"
        )
    return Column(name, categories=sort_labels(found))


def _guess_task(records: Records, at: int) -> str:
    numbers: set[float] = set()
    for row in records.rows:
        value = row[at]
        number = None if isinstance(value, bool) else _to_number(value)
        if number is not None:
            numbers.add(number)
        elif not _is_missing_number(value):
            return CLASSIFICATION
    return CLASSIFICATION if numbers == _whole(numbers) and len(numbers) <= MAX_INTEGER_CLASSES else REGRESSION


def _whole(numbers: Iterable[float]) -> set[float]:
    return {number for number in numbers if number.is_integer()}


def _statistics(values: Sequence[float], where: str) -> tuple[float, float]:
    if min(values) == max(values):  # the mean of equal numbers need not be that number
        return float(values[0]), 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(values, dtype=np.float64)
        mean, scale = float(array.mean()), float(array.std())
    if not (math.isfinite(mean) and math.isfinite(scale)):
        raise DataError(f"{where} has numbers too large to standardise (up to {max(map(abs, values)):g}); rescale it")
    # A deviation of rounding errors only means a constant column.
    return mean, scale if scale > 1e-12 * max(1e-290, abs(mean)) else 1.0


def _finite(values: np.ndarray, records: Records, column: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.isfinite(narrow).all():
        row = int(np.flatnonzero(~np.isfinite(narrow))[0])
        at = records.columns.index(column)
        raise DataError(
            f"{_place(records, row, at)}: {_shown(records.rows[row][at])} is too large; correct or rescale it"
        )
    return narrow


def _subset(records: Records, rows: Sequence[int]) -> Records:
    chosen = [records.rows[i] for i in rows]
    return Records(records.path, records.columns, chosen, [records.lines[i] for i in rows], records.sha256)


def _to_number(value: Any) -> float | None:
    """A finite float, or None for anything else; truth values are categories."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _same_cell(value: Any) -> Any:
    """Equal for cells that the model cannot tell apart: 1, "1" and " 1.0"."""
    number = _to_number(value)
    if number is not None:
        return number
    return value.strip() if isinstance(value, str) else value


def _is_missing_number(value: Any) -> bool:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str) and value.strip().lower() in _MISSING_NUMBER


def _target_number(records: Records, row: int, at: int) -> float:
    value = records.rows[row][at]
    number = _to_number(value)
    if number is None:
        raise DataError(
            f"{_place(records, row, at)}: {_shown(value)} where the target of a regression must be a finite number; "
            "correct it, delete the row, or choose the task classification"
        )
    return number


def _missing(records: Records, row: int, at: int) -> DataError:
    return DataError(
        f"{_place(records, row, at)}: the value is missing; fill it in, delete the row, ignore the column "
        "(--ignore), or let missing values be filled (--missing fill)"
    )


def _place(records: Records, row: int, at: int) -> str:
    return f"{records.path}, line {records.lines[row]}, column {records.columns[at]!r}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return shorten(value)
    return str(value) if isinstance(value, int | float) else kind_of(value)


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _are_numbers(values: Iterable[object]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)  # type: ignore[arg-type]
