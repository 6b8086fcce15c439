"""Parts of a file of texts: their ends, and the job with which a worker counts one. See `corpus`."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from minidl.data import files
from minidl.data.analyzers import Analyzer
from minidl.data.digests import content_digest
from minidl.data.file_rows import Records
from minidl.data.parsing import CsvRows, can_encode_utf8, decode, json_object
from minidl.data.records import DataError
from minidl.data.terms import TermCounter
from minidl.data.workers import Message

PART = 2**21  # bytes of a worker's part of a file
_HEAD = 2**16  # bytes that must contain the header and the first row
_BOM = b"\xef\xbb\xbf"


class Doubt(Exception):  # noqa: N818  (not an error: one process then reads the file)
    """A file cannot be read in parts: it is invalid, or its columns depend on all of its rows."""


@dataclass(frozen=True)
class Form:
    """How the parts of a file are read: its path, kind, header line (None for JSONL) and columns."""

    path: str
    kind: str
    header_line: str | None
    columns: list[str]

    @classmethod
    def of(cls, path: Path, kind: str, raw: bytes) -> Form:
        """Return the form of a file. Raises Doubt and DataError for files that cannot be read in parts."""
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
            if any("\0" in name or not can_encode_utf8(name) for name in columns):
                raise Doubt
            return cls(str(path), kind, None, columns)
        header_line = text.lstrip("\r\n").split("\n", 1)[0]
        reader = CsvRows(path, header_line, tabs=kind == ".tsv")
        # The reader has read the header once it returns the first row.
        if next(reader.read(io.StringIO(text, newline="")), None) is None:
            raise Doubt
        return cls(str(path), kind, header_line, reader.columns)

    def records(self, raw: bytes, has_header: bool) -> Records:
        """Return the rows of a part. Raises DataError, whose line numbers count from the start of the part."""
        path = Path(self.path)
        text = decode(raw, path, first=2)  # a byte order mark is valid only at the start of the file
        if self.header_line is None:
            return files.parse_jsonl(text, path, self.columns)
        return files.parse_csv(text, path, self.kind, self.header_line, () if has_header else self.columns)

    def messages(
        self, raw: bytes, analyzer: Analyzer, text: int, label: int | None = None, seed: int = 0
    ) -> Iterator[Message]:
        """Return the requests for `count_part`; `text` and `label` are indices of columns."""
        values = {"form": asdict(self), "analyzer": asdict(analyzer), "text": text, "label": label, "seed": seed}
        start, view = len(_BOM) if raw.startswith(_BOM) else 0, memoryview(raw)
        for first, last in self._ranges(raw, start):
            yield Message({**values, "has_header": first == start}, [view[first:last]])

    def _ranges(self, raw: bytes, start: int) -> Iterator[tuple[int, int]]:
        """Return parts that end with a line; in CSV and TSV, with a line after which all quotes are closed.

        A reader that begins between two records and reaches the end outside of quotes has ended between two records,
        so the parts have the rows of the file.
        """
        quoted = self.header_line is not None
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


def count_part(request: Message) -> Message:
    """Return the counts of the texts in a part and, with a label column, their labels and digests.

    A worker's job. The message has no buffers if the part is invalid.
    """
    values = request.values
    counter = TermCounter(Analyzer(**values["analyzer"]))
    try:
        records = Form(**values["form"]).records(bytes(request.buffers[0]), values["has_header"])
        texts, labels, digests = records.texts(values["text"]), list[str](), b""
        if values["label"] is not None:
            labels = records.labels(values["label"])
            digests = b"".join(content_digest(text, values["seed"]) for text in texts)
    except DataError:
        return Message({})
    for text in texts:
        counter.add(text)
    names: dict[str, int] = {}
    codes = array("i", [names.setdefault(label, len(names)) for label in labels])
    counts = counter.message(labels=list(names))
    return Message(counts.values, [*counts.buffers, codes, digests])
