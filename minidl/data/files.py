"""The user's own data: CSV, TSV and JSONL files in UTF-8, read strictly, and tables of `formats`.

CSV and TSV have a header line; fields may be quoted and then contain line ends. JSONL has one object per line.
Every error is a DataError that names the file, the line and what to do.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.data import formats, limits
from minidl.data.file_rows import Records, check_characters, label_at, text_at
from minidl.data.parsing import (
    CsvRows,
    decode,
    in_columns,
    json_object,
    listed,
    shorten,
)
from minidl.data.records import DataError, TextDataset, Texts

if TYPE_CHECKING:
    import numpy as np

TEXT_NAMES = ("text", "sentence", "content", "body", "message", "review", "document")
LABEL_NAMES = ("label", "class", "category", "target", "topic")
_EXAMPLE = '{"text": "...", "label": "..."}'


def read_records(path: str | Path) -> Records:
    """All rows of a file that `formats` knows by its ending.

    Raises DataError for a file that is missing, empty, binary, not UTF-8, or not of the form its ending names.
    """
    path = Path(path)
    kind = formats.kind_of(path)
    if kind is None:
        raise formats.no_data_file(path)
    raw = formats.read_bytes(path)
    records = replace(_parsed(raw, kind, path), sha256=hashlib.sha256(raw).hexdigest())
    if not records.rows:
        raise no_rows(path)
    return records


def _parsed(raw: bytes, kind: str, path: Path) -> Records:
    if kind in formats.TABLES:
        columns, rows = formats.table(raw, path)
        return Records(path, columns, rows, list(range(1, len(rows) + 1)), "")
    text = decode(raw, path)
    if not text.strip():
        header = "" if kind == ".jsonl" else ", after a header line that names the columns"
        raise DataError(f"{path} is empty: it needs a line per example{header}")
    return _parse_jsonl(text, path) if kind == ".jsonl" else _parse_csv(text, path, kind)


def no_rows(path: Path) -> DataError:
    """The error for CSV that ends after its first line."""
    return DataError(f"{path} has a header and no rows: add a line per example")


def read_texts(path: str | Path, text_column: str | None = None, usual: str | None = None) -> list[str]:
    """The texts to be classified in a file: a column of one that `read_records` reads, or the lines of any other.

    If no column is named, it is the only one, the `usual` one if the file has it, or a guess.

    Raises DataError as `read_records`.
    """
    path = Path(path)
    if formats.kind_of(path) is not None:
        records = read_records(path)
        at = text_position(records, text_column, usual)
        return [text_at(records, i, at) for i in range(len(records.rows))]
    lines = decode(formats.read_bytes(path), path).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def text_position(records: Records, text_column: str | None, usual: str | None) -> int:
    """The place of the column of `read_texts`. Raises DataError."""
    if text_column is None and len(records.columns) == 1:
        text_column = records.columns[0]
    if text_column is None and usual in records.columns:
        text_column = usual
    if text_column is None:
        text_column = _guess(records, TEXT_NAMES, None, "text")
    return records.position(text_column, "text")


def read_labelled(
    path: str | Path,
    labels: Sequence[str] | None = None,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
) -> tuple[Texts, list[str], dict[str, Any]]:
    """All texts of a file with their labels: (texts, label names, where they come from).

    With `labels` given (an existing model's), label indices are those of that list and a label outside it is an
    error; otherwise the names are those found, sorted, numbers by value. Columns that are not named are guessed.

    Raises DataError as `read_records`, and for a missing column, a missing text or an empty label.
    """
    records = read_records(path)
    guessed = guesses(text_column=text_column, label_column=label_column)
    text_column, label_column = choose_columns(records, text_column, label_column)
    text_position = records.position(text_column, "text")
    label_position = records.position(label_column, "label")
    texts = [text_at(records, i, text_position) for i in range(len(records.rows))]
    names = [label_at(records, i, label_position) for i in range(len(records.rows))]
    known = sort_labels(set(names)) if labels is None else list(labels)
    index = {name: i for i, name in enumerate(known)}
    for i, name in enumerate(names):
        if name not in index:
            raise DataError(
                f"{records.path}, line {records.lines[i]}: label {shorten(name)} is unknown to the model; "
                f"its labels are: {listed(known)}"
            )
    source = {
        "name": str(records.path),
        "sha256": records.sha256,
        "rows": len(texts),
        "text_column": text_column,
        "label_column": label_column,
        "guessed": guessed,
    }
    return Texts(texts, [index[name] for name in names]), known, source


def load_text_file(
    path: str | Path,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    validation: float | str | Path = 0.1,
    test: float | str | Path = 0.2,
    split_seed: int = 0,
) -> TextDataset:
    """The user's file as a text classification task, split by class and by hash of the text.

    Rows with the same text fall into the same split. `validation` and `test` are shares of the file, or other files
    with the same columns. Raises DataError as `read_labelled`, when there is only one class, when there are too few
    rows for the splits, and for labels in another file that this one lacks.
    """
    import numpy as np

    from minidl.data.split import Splitter, check_classes, check_labels, digests

    splitter = Splitter(validation, test, split_seed)
    whole, labels, source = read_labelled(path, text_column=text_column, label_column=label_column)
    check_classes(path, labels, source["label_column"])

    def taken(chosen: np.ndarray) -> Texts:
        rows = chosen.tolist()
        return Texts([whole.texts[i] for i in rows], [whole.labels[i] for i in rows])

    def read(file: Path) -> tuple[Texts, np.ndarray]:
        columns = {name: source[name] for name in ("text_column", "label_column")}
        texts, found, _ = read_labelled(file, **columns)
        check_labels(file, found, labels, path)
        index = [labels.index(name) for name in found]
        return Texts(texts.texts, [index[label] for label in texts.labels]), digests(texts.texts, split_seed)

    own = digests(whole.texts, split_seed), np.array(whole.labels, dtype=np.int64)
    parts, split = splitter.split(path, "text", *own, taken, read)
    advice = "give at least three different texts of some class"
    names = [labels[label] for label in whole.labels]
    check_sizes(path, [len(part) for part in parts], whole.texts, names, source["label_column"], advice)
    return TextDataset(Path(path).stem, labels, parts[0], parts[1], parts[2], {**source, **split})


def check_sizes(
    path: str | Path, sizes: Sequence[int], keys: Sequence[Any], names: Sequence[str], column: str, advice: str
) -> None:
    """Raises DataError if training, validation or test has no rows, as when nearly every row has a class of its own.

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


def guesses(**given: str | None) -> list[str]:
    """Names of the options that were not given: their values are guessed, and the report says so."""
    return [name for name, value in given.items() if value is None]


def choose_columns(records: Records, text_column: str | None, label_column: str | None) -> tuple[str, str]:
    """The text and the label column, guessed where not named: by usual names, or the other one of two columns.

    Raises DataError when a named column does not exist or one cannot be guessed.
    """
    if label_column is None:
        label_column = _guess(records, LABEL_NAMES, text_column, "label", TEXT_NAMES)
    if text_column is None:
        text_column = _guess(records, TEXT_NAMES, label_column, "text")
    if text_column == label_column:
        raise DataError(f"{records.path}: column {text_column!r} is named as text and as label; name two columns")
    return text_column, label_column


def sort_labels(names: set[str]) -> list[str]:
    """Label names in order: by value when every one is a whole number, else as text."""
    if all(name.removeprefix("-").isdecimal() and name.isascii() and len(name) < 19 for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _parse_csv(text: str, path: Path, kind: str) -> Records:
    reader = CsvRows(path, text.lstrip("\r\n").split("\n", 1)[0], tabs=kind == ".tsv")
    rows = list(reader.read(io.StringIO(text, newline="")))
    lines = [line for line, _ in rows]
    return Records(path, reader.columns, [cells for _, cells in rows], lines, "", reader.decimal_comma)


def _parse_jsonl(text: str, path: Path) -> Records:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    found = [json_object(line, path, number, _EXAMPLE) for number, line in lines]
    keys: dict[str, int] = {}
    for (number, _), value in zip(lines, found, strict=True):
        for key in value:
            keys.setdefault(key, number)
    for key, number in keys.items():
        check_characters(key, f"{path}, line {number}: key {shorten(key)}")
    limits.check_cells(path, len(keys), len(found), sum(map(len, found)))
    return Records(path, *in_columns(found), [number for number, _ in lines], "")


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
