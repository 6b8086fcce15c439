"""Read the user's data files: CSV, TSV and JSONL in UTF-8, and the tables of `formats`.

CSV and TSV have a header line; quoted fields may contain line ends. JSONL has one object per line.
Every error is a DataError that names the file, the line and the remedy.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minidl.data import formats, limits
from minidl.data.file_rows import Records, check_characters
from minidl.data.parsing import CsvRows, decode, in_columns, json_object, listed, shorten
from minidl.data.records import DataError

TEXT_NAMES = ("text", "sentence", "content", "body", "message", "review", "document")
LABEL_NAMES = ("label", "class", "category", "target", "topic")
_EXAMPLE = '{"text": "...", "label": "..."}'


def read_records(path: str | Path) -> Records:
    """Return all rows of a file whose suffix `formats` knows.

    Raises DataError for a file that is missing, empty, binary, not UTF-8, or not of the format its suffix names.
    """
    path = Path(path)
    return parse_records(path, *read_bytes(path))


def read_bytes(path: Path) -> tuple[str, bytes]:
    """Return the kind of a data file, as `formats.kind_of`, and its unpacked bytes. Raises DataError."""
    kind = formats.kind_of(path)
    if kind is None:
        raise formats.no_data_file(path)
    return kind, formats.read_bytes(path)


def parse_records(path: Path, kind: str, raw: bytes) -> Records:
    """Return the rows in the bytes of a file. Raises DataError as `read_records`."""
    if kind in formats.TABLES:
        columns, rows = formats.table(raw, path)
        records = Records(path, columns, rows, list(range(1, len(rows) + 1)), "")
    else:
        text = decode(raw, path)
        if not text.strip():
            header = "" if kind == ".jsonl" else ", after a header line that names the columns"
            raise DataError(f"{path} is empty: it needs a line per example{header}")
        records = parse_jsonl(text, path) if kind == ".jsonl" else parse_csv(text, path, kind)
    if not records.rows:
        raise no_rows(path)
    return replace(records, sha256=hashlib.sha256(raw).hexdigest())


def no_rows(path: Path) -> DataError:
    """Return the error for CSV that ends after its first line."""
    return DataError(f"{path} has a header and no rows: add a line per example")


def read_texts(path: str | Path, text_column: str | None = None, usual: str | None = None) -> list[str]:
    """Return the texts to classify in a file: a column of a data file, or the lines of any other file.

    Without `text_column` the column is the only one, the `usual` one if the file has it, or a guess.

    Raises DataError as `read_records`.
    """
    path = Path(path)
    if formats.kind_of(path) is not None:
        records = read_records(path)
        return records.texts(text_position(records, text_column, usual))
    lines = decode(formats.read_bytes(path), path).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def text_position(records: Records, text_column: str | None, usual: str | None) -> int:
    """Return the index of the column that `read_texts` reads. Raises DataError."""
    if text_column is None and len(records.columns) == 1:
        text_column = records.columns[0]
    if text_column is None and usual in records.columns:
        text_column = usual
    if text_column is None:
        text_column = _guess(records, TEXT_NAMES, None, "text")
    return records.position(text_column, "text")


def check_sizes(
    path: str | Path, sizes: Sequence[int], keys: Sequence[Any], names: Sequence[str], column: str, advice: str
) -> None:
    """Raise DataError if training, validation or test has no rows, such as when nearly every row has a different class.

    `names` are the labels of the rows, empty in a regression; rows with equal `keys` count as one.
    """
    if all(sizes):
        return
    classes = len(set(names))
    most = max(Counter(name for name, _ in set(zip(names or [""] * len(keys), keys, strict=True))).values())
    rows = "1 row" if most == 1 else f"{most} different rows"
    cause = f"each of the {classes} classes in column {column!r} has at most {rows}" if names else f"it has {rows}"
    raise DataError(
        f"{path} has too few rows to split: {sizes[0]} for training, {sizes[1]} for validation, {sizes[2]} for the "
        f"test; {cause}; {advice}"
    )


def guesses(**options: str | None) -> list[str]:
    """Return the names of the options that are None: their values are guessed, and the report says so."""
    return [name for name, value in options.items() if value is None]


def choose_columns(records: Records, text_column: str | None, label_column: str | None) -> tuple[str, str]:
    """Return the text and the label column. None is guessed: by common names, or as the other one of two columns.

    Raises DataError if a column cannot be guessed or is named twice.
    """
    if label_column is None:
        label_column = _guess(records, LABEL_NAMES, text_column, "label", TEXT_NAMES)
    if text_column is None:
        text_column = _guess(records, TEXT_NAMES, label_column, "text")
    if text_column == label_column:
        raise DataError(f"{records.path}: column {text_column!r} is named as text and as label; name two columns")
    return text_column, label_column


def sort_labels(names: set[str]) -> list[str]:
    """Return label names in order: by value if all are whole numbers, otherwise as text."""
    if all(name.removeprefix("-").isdecimal() and name.isascii() and len(name) < 19 for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def parse_csv(text: str, path: Path, kind: str, header_line: str | None = None, columns: Sequence[str] = ()) -> Records:
    """Return the rows of CSV or TSV; text without its header needs the file's `header_line` and `columns`."""
    header_line = text.lstrip("\r\n").split("\n", 1)[0] if header_line is None else header_line
    reader = CsvRows(path, header_line, tabs=kind == ".tsv")
    reader.columns = list(columns)
    rows = list(reader.read(io.StringIO(text, newline="")))
    lines = [line for line, _ in rows]
    return Records(path, reader.columns, [cells for _, cells in rows], lines, "", reader.decimal_comma)


def parse_jsonl(text: str, path: Path, columns: Sequence[str] = ()) -> Records:
    """Return the rows of JSON objects, one per line. With `columns`, other keys or another order raise DataError."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    objects = [json_object(line, path, number, _EXAMPLE) for number, line in lines]
    if columns:
        if any(list(value) != columns for value in objects):
            raise DataError(f"{path}: objects with different keys")
        return Records(path, list(columns), [list(value.values()) for value in objects], [n for n, _ in lines], "")
    keys: dict[str, int] = {}
    for (number, _), value in zip(lines, objects, strict=True):
        for key in value:
            keys.setdefault(key, number)
    for key, number in keys.items():
        check_characters(key, f"{path}, line {number}: key {shorten(key)}")
    limits.check_cells(path, len(keys), len(objects), sum(map(len, objects)))
    return Records(path, *in_columns(objects), [number for number, _ in lines], "")


def _guess(
    records: Records, names: Sequence[str], other: str | None, role: str, other_names: Sequence[str] = ()
) -> str:
    for name in names:
        for column in records.columns:
            if column.lower() == name and column != other:
                return column
    if len(records.columns) == 2:
        rest = [column for column in records.columns if column != other and column.lower() not in other_names]
        if len(rest) == 1:
            return rest[0]
    raise DataError(
        f"{records.path}: which column is the {role}? Name it with --{role}-column ({role}_column in Python); "
        f"the columns are: {listed(records.columns)}"
    )
