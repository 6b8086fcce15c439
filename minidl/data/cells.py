"""Cells of a table: numbers, missing values, and how a message names them."""

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


def standardised(values: Sequence[float], mean: float, scale: float, records: Records, column: str) -> np.ndarray:
    """float32 [N] of (v - mean) / scale. Raises DataError for a value of the column that float32 does not hold."""
    with np.errstate(over="ignore"):
        narrow = ((np.array(values, dtype=np.float64) - mean) / scale).astype(np.float32)
    if not np.isfinite(narrow).all():
        row = int(np.flatnonzero(~np.isfinite(narrow))[0])
        at = records.columns.index(column)
        raise DataError(
            f"{place(records, row, at)}: {shown(records.rows[row][at])} is too large; correct or rescale it"
        )
    return narrow


def read_number(records: Records, row: int, at: int, form: NumberFormat | None) -> float | None:
    """The number in a cell of a column with a format, or with plain numbers; None where there is none."""
    return to_number(records.cell(row, at)) if form is None else form.number(records.rows[row][at])


def same_cell(records: Records, row: int, at: int, form: NumberFormat | None) -> Any:
    """Equal for cells that the model cannot tell apart: 1, "1" and " 1.0"."""
    number = read_number(records, row, at, form)
    if number is not None:
        return number
    value = records.cell(row, at)
    return value.strip() if isinstance(value, str) else value


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: None, blank text, or NaN."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def is_missing_number(value: Any) -> bool:
    """Whether a cell of a column of numbers is empty or marked as missing, as by "n/a"."""
    return is_missing(value) or (isinstance(value, str) and value.strip().lower() in _MISSING_NUMBER)


def number(records: Records, row: int, at: int, expected: str, form: NumberFormat | None) -> float:
    """The number in a cell. Raises DataError, which says what is `expected` and what to do, unless it is finite."""
    found = read_number(records, row, at, form)
    if found is None:
        such = "" if form is None else f"; the column's numbers are written as {form.example!r}"
        raise DataError(f"{place(records, row, at)}: {shown(records.rows[row][at])} where {expected}{such}")
    return found


def target_number(records: Records, row: int, at: int, form: NumberFormat | None) -> float:
    """The target of a regression in a row. Raises DataError unless it is a finite number."""
    expected = "the target of a regression must be a finite number; correct it, delete the row, or choose the task"
    return number(records, row, at, f"{expected} classification", form)


def not_a_number(records: Records, row: int, at: int, more: str = "") -> DataError:
    """The error for a cell without a finite number in a column of numbers."""
    return DataError(
        f"{place(records, row, at)}: {shown(records.rows[row][at])} is not a finite number, unlike most of the column; "
        f"correct it{more}"
    )


def missing(records: Records, row: int, at: int) -> DataError:
    """The error for an empty cell."""
    return DataError(
        f"{place(records, row, at)}: the value is missing; fill it in, delete the row, ignore the column "
        "(--ignore), or let missing values be filled (--missing fill)"
    )


def place(records: Records, row: int, at: int) -> str:
    """File, line and column of a cell for a message."""
    return f"{at_line(records.path, records.lines[row])}, column {records.columns[at]!r}"


def shown(value: Any) -> str:
    """A cell's value for a message."""
    if isinstance(value, str):
        return shorten(value)
    return str(value) if isinstance(value, int | float) else kind_of(value)
