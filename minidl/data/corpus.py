"""Read files of labelled texts; with an analyzer, their terms are counted by all processors.

Each worker gets a part of the file that begins and ends between two records; the texts stay with the workers. If a part
is invalid, or its columns differ, one process parses the complete file, and the error names the line.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidl.common import timing
from minidl.data import files, formats, terms
from minidl.data.analyzers import Analyzer
from minidl.data.file_rows import Records
from minidl.data.parsing import listed, shorten
from minidl.data.parts import PART, Doubt, Form, count_part
from minidl.data.records import DataError, TextDataset, Texts
from minidl.data.split import Splitter, check_classes, check_labels, digests
from minidl.data.terms import Counted
from minidl.data.workers import Message, Workers


@dataclass(frozen=True)
class Corpus:
    """Labelled texts: `classes[i]` is the class of text i, `digests[i]` the SHA-256 of the split seed and the text.

    `content` has the counts of the texts or the texts. `source` describes their origin, for the report.
    """

    labels: list[str]
    classes: np.ndarray  # int64 [texts]
    digests: np.ndarray  # uint8 [texts, 32]
    content: Any  # Counted or list[str]
    source: dict[str, Any]

    def __len__(self) -> int:
        return len(self.classes)

    def select(self, rows: np.ndarray) -> Corpus:
        """Return the texts with these indices."""
        content = self.content
        content = content.select(rows) if isinstance(content, Counted) else [content[row] for row in rows.tolist()]
        return replace(self, classes=self.classes[rows], digests=self.digests[rows], content=content)


@dataclass(frozen=True)
class CorpusDataset:
    """A text classification task. `texts` returns it with the texts themselves."""

    name: str
    labels: list[str]
    train: Corpus
    validation: Corpus
    test: Corpus
    source: dict[str, Any]
    texts: Callable[[], TextDataset]


def count_dataset(dataset: TextDataset, analyzer: Analyzer | None, workers: Workers) -> CorpusDataset:
    """Return the task of texts in memory, counted if there is an analyzer."""
    train, validation, test = (
        _corpus(part, dataset.labels, dataset.source, analyzer, workers=workers)
        for part in (dataset.train, dataset.validation, dataset.test)
    )
    return CorpusDataset(dataset.name, dataset.labels, train, validation, test, dataset.source, lambda: dataset)


def load_corpus(
    path: str | Path,
    analyzer: Analyzer | None = None,
    workers: Workers | None = None,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    validation: float | str | Path = 0.1,
    test: float | str | Path = 0.2,
    split_seed: int = 0,
) -> CorpusDataset:
    """Return the user's file as a text classification task, split by class and by hash of the text.

    Rows with the same text are in the same split. `validation` and `test` are shares of the file, or other files with
    the same columns. Raises DataError as `read_labelled`, for a file with only one class or too few rows for the
    splits, and for labels in another file that this one lacks.
    """
    splitter = Splitter(validation, test, split_seed)
    names: Any = {"text_column": text_column, "label_column": label_column}
    corpus = read_corpus(path, analyzer, **names, seed=split_seed, workers=workers)
    labels, columns = corpus.labels, {name: corpus.source[name] for name in names}
    check_classes(path, labels, columns["label_column"])

    def read(file: Path) -> tuple[Corpus, np.ndarray]:
        other = read_corpus(file, analyzer, **columns, seed=split_seed, workers=workers)
        check_labels(file, other.labels, labels, path)
        index = np.array([labels.index(name) for name in other.labels], dtype=np.int64)
        return replace(other, labels=labels, classes=index[other.classes]), other.digests

    with timing.timed("split"):
        parts, split = splitter.split(path, "text", corpus.digests, corpus.classes, corpus.select, read)
    if not all(map(len, parts)):
        classes = [labels[label] for label in corpus.classes]
        keys = [digest.tobytes() for digest in corpus.digests]
        advice = "give at least three different texts of some class"
        files.check_sizes(path, [len(part) for part in parts], keys, classes, columns["label_column"], advice)
    name, source = Path(path).stem, {**corpus.source, **split}

    def dataset() -> TextDataset:
        if analyzer is not None:
            return load_corpus(path, **names, validation=validation, test=test, split_seed=split_seed).texts()
        texts = [Texts(part.content, part.classes.tolist()) for part in parts]
        return TextDataset(name, labels, texts[0], texts[1], texts[2], source)

    return CorpusDataset(name, labels, parts[0], parts[1], parts[2], source, dataset)


def read_labelled(
    path: str | Path,
    labels: Sequence[str] | None = None,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
) -> tuple[Texts, list[str], dict[str, Any]]:
    """Return all texts of a file with their labels: (texts, label names, source).

    If `labels` are given (those of a trained model), the label indices refer to them, and any other label is an error.
    Otherwise the names are those in the file, sorted, numbers by value. Columns that are not named are guessed.

    Raises DataError as `files.read_records`, and for a missing column, a missing text or an empty label.
    """
    return _labelled(files.read_records(path), labels, text_column, label_column)


def read_corpus(
    path: str | Path,
    analyzer: Analyzer | None,
    labels: Sequence[str] | None = None,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    seed: int = 0,
    workers: Workers | None = None,
) -> Corpus:
    """Return all texts of a file with their labels, as `read_labelled`; with an `analyzer`, their counts."""
    path = Path(path)
    kind, raw = files.read_bytes(path)
    if analyzer is not None and kind in formats.LINES:
        with contextlib.suppress(DataError, Doubt):
            form = Form.of(path, kind, raw)
            records = Records(path, form.columns, [], [], hashlib.sha256(raw).hexdigest())
            source, text, label = _source(records, text_column, label_column)
            pool = Workers(1) if workers is None or len(raw) < 2 * PART else workers
            names: dict[str, int] = {}
            codes, sums = [], []

            def messages() -> Iterator[Message]:
                for message in _map(pool, form.messages(raw, analyzer, text, label, seed)):
                    numbers = [names.setdefault(name, len(names)) for name in message.values["labels"]]
                    codes.append(np.array(numbers, dtype=np.int64)[np.frombuffer(message.buffers[6], dtype=np.int32)])
                    sums.append(np.frombuffer(message.buffers[7], dtype=np.uint8))
                    yield message

            counts = terms.merge(messages())
            _release_memory()
            if not len(counts) or not names.keys() <= set(names if labels is None else labels):
                raise Doubt
            label_names, classes = _classes(records, list(names), np.concatenate(codes), labels)
            source["rows"] = len(counts)
            return Corpus(label_names, classes, np.concatenate(sums).reshape(-1, 32), counts, source)
    labelled = _labelled(files.parse_records(path, kind, raw), labels, text_column, label_column)
    raw = b""  # counting needs the memory
    return _corpus(*labelled, analyzer, seed, workers)


def read_counted(
    path: Path, analyzer: Analyzer | None, text_column: str | None, usual: str | None, workers: Workers
) -> Counted | None:
    """Return the counts of the texts of `files.read_texts`; None for small and invalid files, which it must read."""
    kind = formats.kind_of(path)
    # A pipe can be read only once, and small files need no processes.
    if analyzer is None or kind not in formats.LINES or workers.count == 1:
        return None
    try:
        if not path.is_file() or path.stat().st_size < PART // 4 or len(raw := formats.read_bytes(path)) < 2 * PART:
            return None
        form = Form.of(path, kind, raw)
        text = files.text_position(Records(path, form.columns, [], [], ""), text_column, usual)
        counts = terms.merge(_map(workers, form.messages(raw, analyzer, text)))
    except (OSError, DataError, Doubt):
        return None
    return counts if len(counts) else None


def _map(workers: Workers, requests: Iterator[Message]) -> Iterator[Message]:
    """Return the counts of the parts of a file. Raises Doubt for an invalid part."""
    for message in workers.map(count_part, requests):
        if not message.buffers:
            raise Doubt
        yield message


def _labelled(
    records: Records, labels: Sequence[str] | None, text_column: str | None, label_column: str | None
) -> tuple[Texts, list[str], dict[str, Any]]:
    """Return what `read_labelled` returns."""
    source, text, label = _source(records, text_column, label_column)
    texts, names = records.texts(text), records.labels(label)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    codes = np.array([numbers[name] for name in names], dtype=np.int64)
    label_names, classes = _classes(records, list(numbers), codes, labels)
    return Texts(texts, classes.tolist()), label_names, source


def _source(records: Records, text_column: str | None, label_column: str | None) -> tuple[dict[str, Any], int, int]:
    """Return the origin of texts, for the report, and the indices of their columns. Raises DataError."""
    text, label = files.choose_columns(records, text_column, label_column)
    guessed = files.guesses(text_column=text_column, label_column=label_column)
    source = {
        "name": str(records.path), "sha256": records.sha256, "rows": len(records.rows), "text_column": text,
        "label_column": label, "guessed": guessed,
    }  # fmt: skip
    return source, records.position(text, "text"), records.position(label, "label")


def _classes(
    records: Records, names: Sequence[str], codes: np.ndarray, labels: Sequence[str] | None
) -> tuple[list[str], np.ndarray]:
    """Return the label names and the class of each text, where `names[codes[i]]` is the label of text i.

    Raises DataError for a label outside of `labels`.
    """
    label_names = files.sort_labels(set(names)) if labels is None else list(labels)
    index = {name: i for i, name in enumerate(label_names)}
    classes = np.array([index.get(name, -1) for name in names], dtype=np.int64)[codes]
    if (classes < 0).any():
        row = int(np.argmin(classes))
        raise DataError(
            f"{records.path}, line {records.lines[row]}: label {shorten(names[codes[row]])} is unknown to the model; "
            f"its labels are: {listed(label_names)}"
        )
    return label_names, classes


def _corpus(
    texts: Texts, labels: Sequence[str], source: dict[str, Any], analyzer: Analyzer | None, seed: int = 0,
    workers: Workers | None = None,
) -> Corpus:  # fmt: skip
    """Return the corpus of texts in memory."""
    content = texts.texts if analyzer is None else terms.count_texts(texts.texts, analyzer, workers=workers)
    classes = np.asarray(texts.labels, dtype=np.int64)
    return Corpus(list(labels), classes, digests(texts.texts, seed), content, source)


def _release_memory() -> None:
    """Return free memory to the system: after a million texts glibc keeps 600 MB of messages."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
