"""A file of labelled texts, read and counted by all processors: the texts themselves stay with the workers.

Each worker gets a part of the file that begins and ends between two records, and runs the strict reader of `files` on
it. Where that finds anything wrong, or the parts do not agree, the whole file is read again by the strict reader in one
process, whose error names the line.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidl.common import timing
from minidl.data import files, formats, terms
from minidl.data.analyzers import Analyzer
from minidl.data.file_rows import Records
from minidl.data.parts import PART, Doubt, Form, count_part, ranges, read_part
from minidl.data.records import DataError, TextDataset, Texts
from minidl.data.split import Splitter, check_classes, check_labels, digests
from minidl.data.terms import Counted
from minidl.data.workers import Message, Workers


@dataclass(frozen=True)
class Corpus:
    """Texts, counted: `classes[i]` is the class of text i, and `digests[i]` the SHA-256 of the split seed and the text.

    `source` says where they come from, for the report.
    """

    labels: list[str]
    classes: np.ndarray  # int64 [texts]
    digests: np.ndarray  # uint8 [texts, 32]
    counted: Counted
    source: dict[str, Any]

    def __len__(self) -> int:
        return len(self.classes)

    def taken(self, rows: np.ndarray) -> Corpus:
        """The texts of these indices."""
        return replace(self, classes=self.classes[rows], digests=self.digests[rows], counted=self.counted.taken(rows))


@dataclass(frozen=True)
class CorpusDataset:
    """A text classification task: a `TextDataset` with counted texts. `texts` makes that, with the texts themselves."""

    name: str
    labels: list[str]
    train: Corpus
    validation: Corpus
    test: Corpus
    source: dict[str, Any]
    texts: Callable[[], TextDataset]


def counted(dataset: TextDataset, analyzer: Analyzer, workers: Workers) -> CorpusDataset:
    """The task of texts in memory."""
    train, validation, test = (
        of_texts(part, dataset.labels, dataset.source, analyzer, workers=workers)
        for part in (dataset.train, dataset.validation, dataset.test)
    )
    return CorpusDataset(dataset.name, dataset.labels, train, validation, test, dataset.source, lambda: dataset)


def read_corpus(
    path: str | Path,
    analyzer: Analyzer,
    labels: Sequence[str] | None = None,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    seed: int = 0,
    workers: Workers | None = None,
) -> Corpus:
    """All texts of a CSV, TSV or JSONL file, counted, with their labels, as `files.read_labelled` reads them.

    Raises DataError as `files.read_labelled`.
    """
    columns = {"text_column": text_column, "label_column": label_column}
    try:
        return _by_workers(Path(path), analyzer, labels, columns, seed, workers)
    except (DataError, Doubt):
        texts, names, source = files.read_labelled(path, labels, **columns)
        return of_texts(texts, names, source, analyzer, seed, workers)


def of_texts(
    texts: Texts, labels: Sequence[str], source: dict[str, Any], analyzer: Analyzer, seed: int = 0,
    workers: Workers | None = None,
) -> Corpus:  # fmt: skip
    """The corpus of texts in memory."""
    return Corpus(
        list(labels),
        np.asarray(texts.labels, dtype=np.int64),
        digests(texts.texts, seed),
        terms.count_texts(texts.texts, analyzer, workers=workers),
        source,
    )


def load_corpus(
    path: str | Path,
    analyzer: Analyzer,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    validation: float | str | Path = 0.1,
    test: float | str | Path = 0.2,
    split_seed: int = 0,
    workers: Workers | None = None,
) -> CorpusDataset:
    """The user's file as a text classification task: `files.load_text_file`, with counted texts.

    Raises DataError as that.
    """
    splitter = Splitter(validation, test, split_seed)
    columns: Any = {"text_column": text_column, "label_column": label_column}
    whole = read_corpus(path, analyzer, **columns, seed=split_seed, workers=workers)
    shares: Any = {"validation": validation, "test": test, "split_seed": split_seed}
    check_classes(path, whole.labels, whole.source["label_column"])

    def read(file: Path) -> tuple[Corpus, np.ndarray]:
        columns = {name: whole.source[name] for name in ("text_column", "label_column")}
        other = read_corpus(file, analyzer, **columns, seed=split_seed, workers=workers)
        check_labels(file, other.labels, whole.labels, path)
        index = np.array([whole.labels.index(name) for name in other.labels], dtype=np.int64)
        return replace(other, labels=whole.labels, classes=index[other.classes]), other.digests

    with timing.timed("split"):
        parts, split = splitter.split(path, "text", whole.digests, whole.classes, whole.taken, read)
    if not all(map(len, parts)):
        names = [whole.labels[label] for label in whole.classes]
        keys = [digest.tobytes() for digest in whole.digests]
        advice = "give at least three different texts of some class"
        files.check_sizes(path, [len(part) for part in parts], keys, names, whole.source["label_column"], advice)
    return CorpusDataset(
        Path(path).stem, whole.labels, parts[0], parts[1], parts[2], {**whole.source, **split},
        lambda: files.load_text_file(path, **columns, **shares),
    )  # fmt: skip


def read_counted(
    path: Path, analyzer: Analyzer, text_column: str | None, usual: str | None, workers: Workers
) -> Counted | None:
    """The texts of `files.read_texts`, counted; None where that is to read them: small files, and all doubtful ones."""
    kind = formats.kind_of(path)
    if kind not in formats.LINES or workers.count == 1:
        return None
    try:
        # A pipe can be read once only, and small files need no processes.
        if not path.is_file() or path.stat().st_size < PART // 4:
            return None
        raw = formats.read_bytes(path)
        if len(raw) < 2 * PART:
            return None
        form = Form.of(path, kind, raw)
        at = files.text_position(Records(path, form.columns, [], [], ""), text_column, usual)
    except (OSError, DataError, Doubt):
        return None
    values = {"analyzer": asdict(analyzer), "form": asdict(form), "text": at}

    def gathered() -> Iterator[Message]:
        for found in workers.map(count_part, _parts(raw, form, values)):
            if not found.buffers:
                raise Doubt
            yield found

    try:
        counted = terms.merged(gathered())
    except Doubt:
        return None
    return counted if len(counted) else None


def _parts(raw: bytes, form: Form, values: dict[str, Any]) -> Iterator[Message]:
    """The messages with the parts of a file."""
    start, view = 3 if raw.startswith(b"\xef\xbb\xbf") else 0, memoryview(raw)
    for first, last in ranges(raw, start, form):
        yield Message({**values, "first": first == start}, [view[first:last]])


def _give_back() -> None:
    """Return freed memory to the system: of a million texts glibc keeps 600 MB that messages took."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _by_workers(
    path: Path, analyzer: Analyzer, labels: Sequence[str] | None, columns: dict[str, str | None], seed: int,
    workers: Workers | None,
) -> Corpus:  # fmt: skip
    kind = formats.kind_of(path)
    if kind not in formats.LINES:
        raise Doubt
    raw = formats.read_bytes(path)
    form = Form.of(path, kind, raw)
    records = Records(path, form.columns, [], [], hashlib.sha256(raw).hexdigest())
    text, label = files.choose_columns(records, columns["text_column"], columns["label_column"])
    at = {"text": records.position(text, "text"), "label": records.position(label, "label")}
    values = {"analyzer": asdict(analyzer), "form": asdict(form), **at, "seed": seed}
    if workers is None or len(raw) < 2 * PART:
        workers = Workers(1)
    names: dict[str, int] = {}
    classes, sums = [], []

    def gathered() -> Iterator[Message]:
        for found in workers.map(read_part, _parts(raw, form, values)):
            if "labels" not in found.values:
                raise Doubt
            own = [names.setdefault(name, len(names)) for name in found.values["labels"]]
            classes.append(np.array(own, dtype=np.int64)[np.frombuffer(found.buffers[6], dtype=np.int32)])
            sums.append(np.frombuffer(found.buffers[7], dtype=np.uint8))
            yield found

    counted = terms.merged(gathered())
    _give_back()
    if not len(counted):
        raise Doubt
    known = files.sort_labels(set(names)) if labels is None else list(labels)
    index = {name: i for i, name in enumerate(known)}
    if not names.keys() <= index.keys():
        raise Doubt
    order = np.array([index[name] for name in names], dtype=np.int64)
    source = {
        "name": str(path),
        "sha256": records.sha256,
        "rows": len(counted),
        "text_column": text,
        "label_column": label,
        "guessed": files.guesses(**columns),
    }
    return Corpus(known, order[np.concatenate(classes)], np.concatenate(sums).reshape(-1, 32), counted, source)
