"""The rows of a file or of standard input, without conversions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minidl.data.parsing import ARGUMENT, at_line, can_encode_utf8, kind_of, listed, with_point
from minidl.data.records import DataError


@dataclass(frozen=True)
class Records:
    """The rows of a file. `rows[i]` has one value per column, from line `lines[i]`; JSONL values keep their type.

    A missing key of a JSONL object is None. With `decimal_comma` the file's decimal mark is the comma.
    """

    path: Path
    columns: list[str]
    rows: list[list[Any]]
    lines: list[int]
    sha256: str
    decimal_comma: bool = False

    def cell(self, row: int, at: int) -> Any:
        """Return the value in a cell; a number with a decimal comma gets a point."""
        value = self.rows[row][at]
        return with_point(value) if self.decimal_comma and isinstance(value, str) else value

    def position(self, column: str, role: str) -> int:
        """Return the index of a column. Raises DataError as `positions`."""
        return self.positions([column], role)[0]

    def positions(self, columns: Sequence[str], role: str) -> list[int]:
        """Return the indices of columns. Raises DataError that lists missing columns and all columns of the file."""
        missing = [column for column in columns if column not in self._positions]
        if missing:
            source = at_line(self.path, self.lines[0]) if self.path == ARGUMENT else self.path
            named = f"column{'s' if len(missing) > 1 else ''} {listed(missing)}"
            raise DataError(f"{source} has no {role} {named}; its columns are: {listed(self.columns)}")
        return [self._positions[column] for column in columns]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {column: i for i, column in enumerate(self.columns)}

    def texts(self, at: int) -> list[str]:
        """Return the texts of a column. Raises DataError for a value of another type and for invalid characters."""
        texts = [self.cell(row, at) for row in range(len(self.rows))]
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(
                    f"{self.path}, line {self.lines[row]}: {kind_of(text)} in text column {self.columns[at]!r} where "
                    "a string is expected"
                )
            if "\0" in text or not can_encode_utf8(text):
                check_characters(text, f"{self.path}, line {self.lines[row]}")
        return texts

    def labels(self, at: int) -> list[str]:
        """Return the labels of a column. Raises DataError as `label_at`."""
        return [label_at(self, row, at) for row in range(len(self.rows))]

    def select(self, rows: Iterable[int]) -> Records:
        """Return the rows with these indices."""
        indices = list(rows)
        return replace(self, rows=[self.rows[i] for i in indices], lines=[self.lines[i] for i in indices])


def label_at(records: Records, row: int, at: int) -> str:
    """Return the label in a cell; numbers and booleans as JSON writes them.

    Raises DataError for an empty cell and for NaN or infinity, with which tables mark missing values.
    """
    value = records.cell(row, at)
    label = as_label(value)
    if label is not None and "\0" not in label and can_encode_utf8(label):
        return label
    where = f"{records.path}, line {records.lines[row]}"
    if label is not None:
        check_characters(label, where)
    if value is None or isinstance(value, str | float):
        raise DataError(f"{where}: no label in column {records.columns[at]!r}; fill it in or delete the row")
    raise DataError(f"{where}: {kind_of(value)} in label column {records.columns[at]!r} where one label is expected")


def as_label(value: object) -> str | None:
    """Return a cell as a label; None for an empty cell or a value that is not a label."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    return value.strip() or None if isinstance(value, str) else None


def check_characters(value: str, where: str) -> None:
    """Raise DataError for characters that `decode` refuses in bytes, which JSON escapes can contain."""
    if "\0" in value:
        raise DataError(f"{where}: a zero character, so this is not text; remove it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: half of a surrogate pair, which is not a character; remove it") from None
