"""Cells of a table: numbers, missing values, and their names in messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.data.file_rows import Records
from minidl.data.number_formats import NumberFormat, to_number
from minidl.data.parsing import at_line, kind_of, shorten
from minidl.data.records import DataError

_MISSING_NUMBER = {"", "na", "n/a", "nan", "null", "none", "?"}


def standardize(values: Sequence[float], mean: float, scale: float, records: Records, column: str) -> np.ndarray:
    """Return float32 [N] of (v - mean) / scale. Raises DataError for a value of the column beyond float32."""
    with np.errstate(over="ignore"):
        result = ((np.array(values, dtype=np.float64) - mean) / scale).astype(np.float32)
    if not np.isfinite(result).all():
        row = int(np.flatnonzero(~np.isfinite(result))[0])
        at = records.columns.index(column)
        raise DataError(
            f"{location(records, row, at)}: {shown(records.rows[row][at])} is too large; correct or rescale it"
        )
    return result


def read_numbers(records: Records, at: int, form: NumberFormat | None) -> list[float | None]:
    """Return the number in each cell of a column with this format, or with plain numbers; None for other cells."""
    if form is not None:
        return [form.number(values[at]) for values in records.rows]
    if records.decimal_comma:
        return [to_number(records.cell(row, at)) for row in range(len(records.rows))]
    return [to_number(values[at]) for values in records.rows]


def same_cells(records: Records, at: int, form: NumberFormat | None) -> list[Any]:
    """Return for each cell of a column a value that is equal if the model sees equal input: for 1, "1" and " 1.0"."""

    def other(row: int) -> Any:
        value = records.cell(row, at)
        return value.strip() if isinstance(value, str) else value

    numbers = read_numbers(records, at, form)
    return [other(row) if number is None else number for row, number in enumerate(numbers)]


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: None, blank text, or NaN."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def is_missing_number(value: Any) -> bool:
    """Return whether a cell of a column of numbers is empty or marked as missing, as by "n/a"."""
    return is_missing(value) or (isinstance(value, str) and value.strip().lower() in _MISSING_NUMBER)


def no_number(records: Records, row: int, at: int, expected: str, form: NumberFormat | None) -> DataError:
    """Return the error for a cell without a finite number; `expected` includes the remedy."""
    written = "" if form is None else f"; the column's numbers are written as {form.example!r}"
    return DataError(f"{location(records, row, at)}: {shown(records.rows[row][at])} where {expected}{written}")


def target_numbers(records: Records, at: int, form: NumberFormat | None) -> list[float]:
    """Return the targets of a regression. Raises DataError unless all are finite numbers."""
    expected = "the target of a regression must be a finite number; correct it, delete the row, or choose the task"
    numbers: list[float] = []
    for row, number in enumerate(read_numbers(records, at, form)):
        if number is None:
            raise no_number(records, row, at, f"{expected} classification", form)
        numbers.append(number)
    return numbers


def not_a_number(records: Records, row: int, at: int, more: str = "") -> DataError:
    """Return the error for a cell without a finite number in a column of numbers."""
    return DataError(
        f"{location(records, row, at)}: {shown(records.rows[row][at])} is not a finite number, unlike most of the "
        f"column; correct it{more}"
    )


def missing(records: Records, row: int, at: int) -> DataError:
    """Return the error for an empty cell."""
    return DataError(
        f"{location(records, row, at)}: the value is missing; fill it in, delete the row, ignore the column "
        "(--ignore), or let missing values be filled (--missing fill)"
    )


def location(records: Records, row: int, at: int) -> str:
    """Return the file, line and column of a cell for a message."""
    return f"{at_line(records.path, records.lines[row])}, column {records.columns[at]!r}"


def shown(value: Any) -> str:
    """Return a cell's value for a message."""
    if isinstance(value, str):
        return shorten(value)
    return str(value) if isinstance(value, int | float) else kind_of(value)
