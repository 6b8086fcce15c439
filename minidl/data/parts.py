"""Parts of a file of labelled texts: where they end, and what a worker makes of one. See `corpus`."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl.data.analyzers import Analyzer
from minidl.data.digests import content_digest
from minidl.data.file_rows import as_label
from minidl.data.parsing import CsvRows, is_utf8, json_object, with_point
from minidl.data.records import DataError
from minidl.data.terms import TermCounter
from minidl.data.workers import Message

PART = 2**21  # bytes of a worker's part of a file
_HEAD = 2**16  # bytes in which the header and a first row are looked for


class Doubt(Exception):  # noqa: N818  (the strict reader decides)
    """A file that is not as simple as the quick way takes it."""


@dataclass(frozen=True)
class Form:
    """How the parts of a file are read: its path, its kind, its header line if it has one, and its columns."""

    path: str
    kind: str
    header_line: str | None
    columns: list[str]

    @classmethod
    def of(cls, path: Path, kind: str, raw: bytes) -> Form:
        """Raises Doubt and DataError for what the strict reader is to judge."""
        head = raw[:_HEAD]
        if len(raw) > _HEAD:
            head = head[: head.rfind(b"\n") + 1]
        try:
            text = head.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Doubt from None
        if kind == ".jsonl":
            first = next((line for line in text.split("\n") if line.strip()), None)
            if first is None:
                raise Doubt
            columns = list(json_object(first, path, 1, ""))
            if any("\0" in name or not is_utf8(name) for name in columns):
                raise Doubt
            return cls(str(path), kind, None, columns)
        header_line = text.lstrip("\r\n").split("\n", 1)[0]
        reader = CsvRows(path, header_line, tabs=kind == ".tsv")
        # Its first row: with it, the header has been read.
        if next(reader.read(io.StringIO(text, newline="")), None) is None:
            raise Doubt
        return cls(str(path), kind, header_line, reader.columns)


def read_part(asked: Message) -> Message:
    """A worker's job: the rows of a part of a file. The answer is empty where the strict reader is to decide."""
    values = asked.values
    form, text_at, label_at = Form(**values["form"]), values["text"], values["label"]
    counter = TermCounter(Analyzer(**values["analyzer"]))
    labels: dict[str, int] = {}
    classes, digests, seed = array("i"), [], values["seed"]
    try:
        for row in _rows(bytes(asked.buffers[0]), form, values["first"]):
            text, label = row[text_at], as_label(row[label_at])
            if label is None or not isinstance(text, str) or "\0" in text or "\0" in label:
                return Message({})
            digests.append(content_digest(text, seed))
            counter.add(text)
            classes.append(labels.setdefault(label, len(labels)))
    except (DataError, UnicodeError):
        return Message({})
    if not all(map(is_utf8, labels)):
        return Message({})
    values, buffers = counter.message(labels=list(labels))
    return Message(values, [*buffers, classes, b"".join(digests)])


def count_part(asked: Message) -> Message:
    """A worker's job: the texts of a part of a file, counted. The answer is empty where the strict reader decides."""
    values = asked.values
    counter = TermCounter(Analyzer(**values["analyzer"]))
    try:
        for row in _rows(bytes(asked.buffers[0]), Form(**values["form"]), values["first"]):
            text = row[values["text"]]
            if not isinstance(text, str) or "\0" in text or not is_utf8(text):
                return Message({})
            counter.add(text)
    except (DataError, UnicodeError):
        return Message({})
    return counter.message()


def _rows(raw: bytes, form: Form, first: bool) -> Iterator[Sequence[Any]]:
    """The rows of a part. Raises DataError and UnicodeError for what the strict reader is to judge."""
    if b"\0" in raw:
        raise DataError("a zero byte")
    text, path = raw.decode(), Path(form.path)
    if form.header_line is not None:
        reader = CsvRows(path, form.header_line, tabs=form.kind == ".tsv")
        if not first:
            reader.columns = form.columns
        for _, row in reader.read(io.StringIO(text, newline="")):
            yield list(map(with_point, row)) if reader.decimal_comma else row
        return
    for line in text.split("\n"):
        if line.strip():
            value = json_object(line, path, 1, "")
            # Where objects have other keys, all of them decide on the columns.
            if list(value) != form.columns or any(isinstance(cell, dict | list) for cell in value.values()):
                raise DataError("other keys")
            yield list(value.values())


def ranges(raw: bytes, start: int, form: Form) -> Iterator[tuple[int, int]]:
    """Parts that end with a line; in CSV and TSV with one after which as many quotes were opened as closed.

    A reader that begins between records and ends without an error inside of quotes has also ended between records, so
    the parts are read as the whole is.
    """
    quoted = form.header_line is not None
    while start < len(raw):
        end = min(start + PART, len(raw))
        odd = quoted and raw.count(b'"', start, end) % 2 == 1
        while end < len(raw):
            line = raw.find(b"\n", end)
            if line < 0:
                end = len(raw)
                break
            odd ^= quoted and raw.count(b'"', end, line) % 2 == 1
            end = line + 1
            if not odd:
                break
        yield start, end
        start = end
