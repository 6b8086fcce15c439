"""Turn the numeric and categorical columns of a table into float32 features, with one target column.

Numbers are standardized with the training split's mean and deviation, (v - mean) / deviation; a constant column
becomes zeros. A categorical column becomes one column per category of the training split (one-hot); other categories
become zeros. The target is standardized, too, in a regression, and an index into the labels in a classification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from minidl.common import import_lock
from minidl.data import cells
from minidl.data.file_rows import Records, label_at
from minidl.data.files import check_sizes, guesses, read_records, sort_labels
from minidl.data.number_formats import NUMBERS, NumberFormat, of_column, to_number
from minidl.data.parsing import listed, shorten
from minidl.data.records import DataError, Rows
from minidl.data.schema import CLASSIFICATION, MAX_CATEGORIES, REGRESSION, Column, TableDataset, TableSchema
from minidl.data.split import Splitter, check_classes, check_labels, digests

MAX_INTEGER_CLASSES = 20  # an integer target with more values is a quantity
_FEW_CATEGORIES = 20  # no note about them
_LARGEST = 1e100  # the square of a number is summed in float64


def load_diabetes(*, validation: float = 0.1, test: float = 0.2, split_seed: int = 0) -> TableDataset:
    """Return scikit-learn's diabetes table: 442 patients, 10 measurements, disease progression after a year."""
    with import_lock.LOCK:
        from sklearn.datasets import load_diabetes as sklearn_diabetes
    bunch = sklearn_diabetes(scaled=False)
    rows = [[*map(float, row), float(y)] for row, y in zip(bunch.data, bunch.target, strict=True)]
    records = Records(
        Path("diabetes"), [*bunch.feature_names, "progression"], rows, list(range(1, len(rows) + 1)), sha256=""
    )
    dataset = load_table_file(
        records, target="progression", task=REGRESSION, validation=validation, test=test, split_seed=split_seed
    )
    source = {"name": "diabetes", "about": "scikit-learn's diabetes table, unscaled", **dataset.source}
    del source["sha256"]
    return replace(dataset, source=source)


def load_table_file(
    path: str | Path | Records,
    *,
    target: str | None = None,
    task: str | None = None,
    ignore: Sequence[str] = (),
    missing: str = "error",
    numbers: str = "auto",
    validation: float | str | Path = 0.1,
    test: float | str | Path = 0.2,
    split_seed: int = 0,
) -> TableDataset:
    """Return a data file, or its rows, as a table task, split by a hash of the inputs.

    `target` is the column to predict (default: a column named "target"); `task` is "regression" or "classification"
    (default: classification if the target is text or has at most 20 different whole numbers); `ignore` names columns
    to ignore; `missing` is "error" or "fill", see `TableSchema`; `numbers` is their format: "plain", with the decimal
    mark "point" or "comma", or "auto", decided for each column, see `number_formats`. `validation` and
    `test` are shares of the file, or other files with the same columns.

    Raises DataError as `read_records`, and for a missing column or value, a target of one value only, a column of more
    than 100 different texts, and labels in another file that this one lacks.
    """
    if task not in (None, REGRESSION, CLASSIFICATION):
        raise DataError(f"unknown task {task!r}: expected {REGRESSION!r} or {CLASSIFICATION!r}")
    if missing not in ("error", "fill"):
        raise DataError(f"unknown treatment of missing values {missing!r}: expected 'error' or 'fill'")
    if numbers not in NUMBERS:
        raise DataError(f"unknown form of numbers {numbers!r}: expected one of {', '.join(map(repr, NUMBERS))}")
    splitter = Splitter(validation, test, split_seed)
    records = path if isinstance(path, Records) else read_records(path)
    guessed = guesses(target=target, task=task)
    if target is None:
        if "target" not in records.columns:
            raise DataError(
                f"{records.path}: which column is to be predicted? Name it with --target (target in Python); "
                f"the columns are: {listed(records.columns)}"
            )
        target = "target"
    target_at = records.position(target, "target")
    if target in ignore:
        raise DataError(f"{records.path}: column {target!r} is the target (--target) and cannot be ignored (--ignore)")
    ignored = {target_at, *(records.position(column, "ignored") for column in ignore)}
    inputs = [i for i in range(len(records.columns)) if i not in ignored]
    if not inputs:
        raise DataError(f"{records.path} has no input column besides the target {target!r}")
    notes: list[str] = []
    forms = {at: _format(records, at, numbers, notes) for at in inputs}
    target_notes: list[str] = []
    target_form = None if task == CLASSIFICATION else _format(records, target_at, numbers, target_notes)
    task = task or _guess_task(records, target_at, target_form)
    if task == CLASSIFICATION:
        target_form = None
    else:
        notes = [*target_notes, *notes]

    names: list[str] = []
    labels: list[str] = []
    classes = [0] * len(records.rows)
    if task == CLASSIFICATION:
        names = records.labels(target_at)
        labels = sort_labels(set(names))
        check_classes(records.path, labels, target)
        index = {label: i for i, label in enumerate(labels)}
        classes = [index[label] for label in names]
    input_names = [records.columns[i] for i in inputs]

    def read(file: Path) -> tuple[Records, np.ndarray]:
        other = read_records(file)
        at = other.position(target, "target")
        if labels:
            check_labels(file, other.labels(at), labels, records.path)
        return other, digests(_keys(other, input_names, forms.values()), split_seed)

    keys = _keys(records, input_names, forms.values())
    sums, targets = digests(keys, split_seed), np.array(classes, dtype=np.int64)
    parts, split = splitter.split(records.path, "inputs", sums, targets, records.select, read)
    are_numbers = bool(labels) and all(to_number(label) is not None for label in labels)
    advice = "give at least three different rows of some class" if labels else "give at least three different rows"
    advice += ", or predict the numbers as such (--task regression)" if are_numbers else ""
    check_sizes(records.path, [len(part.rows) for part in parts], keys, names, target, advice)
    train = parts[0]
    columns = [_measure_column(records, train, at, missing, forms[at], notes) for at in inputs]
    mean, scale = 0.0, 1.0
    if task == REGRESSION:
        values = cells.target_numbers(train, target_at, target_form)
        mean, scale = _statistics(values, f"{records.path}: target column {target!r}")
        if min(values) == max(values):
            raise DataError(
                f"{records.path}: target column {target!r} has the one value {values[0]:g}: nothing to learn"
            )
    schema = TableSchema(columns, target, task, labels, mean, scale, missing, target_form)
    train_rows, validation_rows, test_rows = (Rows(schema.features(part), schema.targets(part)) for part in parts)
    source = {
        "name": str(records.path),
        "sha256": records.sha256,
        "rows": len(records.rows),
        "target": target,
        "task": task,
        "guessed": guessed,
        "inputs": input_names,
        **({"notes": notes} if notes else {}),
        **split,
    }
    return TableDataset(records.path.stem, schema, train_rows, validation_rows, test_rows, source)


def read_rows(path: str | Path, schema: TableSchema) -> Rows:
    """Return the rows of a file with their targets, for a schema. Raises DataError as the schema's methods."""
    records = read_records(path)
    return Rows(schema.features(records), schema.targets(records))


def read_features(path: str | Path, schema: TableSchema) -> np.ndarray:
    """Return float32 [N, F] of a file, which needs no target column. Raises DataError as `TableSchema.features`."""
    return schema.features(read_records(path))


def _keys(records: Records, columns: Sequence[str], forms: Iterable[NumberFormat | None]) -> list[str]:
    """Return a key per row; rows with the same inputs have equal keys. Raises DataError for a missing column."""
    positions = zip(records.positions(columns, "input"), forms, strict=True)
    values = [cells.same_cells(records, at, form) for at, form in positions]
    # The repr of values that JSON lacks, such as dates of a Parquet file, which no feature can use.
    return [json.dumps(row, default=repr) for row in zip(*values, strict=True)]


def _format(records: Records, at: int, numbers: str, notes: list[str]) -> NumberFormat | None:
    """Return the format of a column of numbers that are not plain; None for any other column."""
    values = [row[at] for row in records.rows if not cells.is_missing_number(row[at])]
    form, note = of_column(values, numbers, records.decimal_comma)
    if note is not None:
        notes.append(f"column {records.columns[at]!r}: {note}")
    return form


def _measure_column(
    records: Records, train: Records, at: int, missing: str, form: NumberFormat | None, notes: list[str]
) -> Column:
    """Return a column whose kind follows from all rows and whose statistics are those of the training split."""
    name = records.columns[at]
    others = [row for row, number in enumerate(cells.read_numbers(records, at, form)) if number is None]
    not_numbers = [row for row in others if not cells.is_missing_number(records.rows[row][at])]
    present = len(records.rows) - len(others) + len(not_numbers)
    if present and not not_numbers:
        values = [value for value in cells.read_numbers(train, at, form) if value is not None]
        if len(values) < len(train.rows) and missing == "error":
            row = next(i for i, values in enumerate(records.rows) if cells.is_missing_number(values[at]))
            raise cells.missing(records, row, at)
        if not values:
            raise DataError(f"{records.path}: column {name!r} has no value in the training split; ignore the column")
        mean, scale = _statistics(values, f"{records.path}: column {name!r}")
        return Column(name, mean, scale, number_format=form)
    if 2 * len(not_numbers) < present:
        raise cells.not_a_number(records, not_numbers[0], at)
    categories: set[str] = set()
    for row in range(len(train.rows)):
        if cells.is_missing(train.rows[row][at]):
            if missing == "error":
                raise cells.missing(train, row, at)
        else:
            categories.add(label_at(train, row, at))
    if not categories:
        raise DataError(f"{records.path}: column {name!r} is empty; ignore the column")
    if len(categories) > MAX_CATEGORIES:
        raise DataError(
            f"{records.path}: column {name!r} has {len(categories)} different texts, at most {MAX_CATEGORIES} "
            "categories are taken; ignore the column (--ignore), or use it as the text of a text task"
        )
    if len(categories) > _FEW_CATEGORIES and 2 * len(categories) > len(train.rows):
        notes.append(
            f"column {name!r} has {len(categories)} categories in {len(train.rows)} training rows, such as "
            f"{shorten(min(categories))}: few rows share one; write its values as numbers, or ignore it (--ignore)"
        )
    return Column(name, categories=sort_labels(categories))


def _guess_task(records: Records, at: int, form: NumberFormat | None) -> str:
    """Return the task that the target's values suggest. Raises DataError if a few values look like mistyped numbers.

    Other values are mistakes if most values are quantities, or if at least 9 of 10 values are whole numbers that could
    be classes.
    """
    numbers: list[float] = []
    others: list[int] = []
    for row, number in enumerate(cells.read_numbers(records, at, form)):
        if number is not None:
            numbers.append(number)
        elif not cells.is_missing_number(records.rows[row][at]):
            others.append(row)
    distinct = set(numbers)
    classes = len(distinct) <= MAX_INTEGER_CLASSES and all(number.is_integer() for number in distinct)
    if others and len(numbers) >= (9 * len(others) if classes else len(others) + 1):
        more = ", delete the row, or choose a classification (--task classification)"
        raise cells.not_a_number(records, others[0], at, more)
    return CLASSIFICATION if others or classes else REGRESSION


def _statistics(values: Sequence[float], where: str) -> tuple[float, float]:
    if min(values) == max(values):  # the computed mean of equal numbers may differ from them
        return float(values[0]), 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(values, dtype=np.float64)
        mean, scale = float(array.mean()), float(array.std())
    if not (math.isfinite(mean) and math.isfinite(scale) and max(map(abs, values)) < _LARGEST):
        raise DataError(f"{where} has numbers too large to standardise (up to {max(map(abs, values)):g}); rescale it")
    # A smaller deviation is a rounding error of a constant column.
    return mean, scale if scale > 1e-12 * max(1e-290, abs(mean)) else 1.0
