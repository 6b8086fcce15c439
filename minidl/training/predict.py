"""`minidl predict` and `minidl evaluate`: a finished run put to use."""

from __future__ import annotations

import csv
import json
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from minidl import data, models, nn, ops
from minidl.data import DataError
from minidl.data.files import Records, read_records
from minidl.data.tables import TableSchema
from minidl.data.vectorizer import Tfidf
from minidl.tensor import Tensor
from minidl.training import files, metrics, reports, runs, sources
from minidl.training.config import Evaluate, Predict, TrainText
from minidl.training.errors import ConfigError, DamagedError
from minidl.training.forward import outputs

STANDARD_INPUT = Path("standard input")
CHUNK = 256


@dataclass(frozen=True)
class TextClassifier:
    """The model of a text run with what turns a text into its input."""

    labels: list[str]
    vocabulary: Tfidf
    model: nn.Module

    def answers(self, texts: list[str], top: int) -> list[dict[str, Any]]:
        """One answer per text: label, probability and the `top` best labels."""
        return _ranked(outputs(self.model, self.vocabulary.transform(texts)), self.labels, top)


@dataclass(frozen=True)
class TablePredictor:
    """The model of a table run with what turns a row into its input."""

    schema: TableSchema
    model: nn.Module

    def answers(self, records: Records, top: int) -> list[dict[str, Any]]:
        """One answer per row: the prediction in the target's units, or label, probability and the `top` best labels."""
        raw = outputs(self.model, self.schema.features(records))
        if self.schema.task == "classification":
            return _ranked(raw, self.schema.labels, top)
        return [
            {"prediction": float(value)} for value in in_units(raw, self.schema.target_mean, self.schema.target_scale)
        ]


def load(folder: Path) -> TextClassifier | TablePredictor:
    """The model of a finished run. Raises ConfigError when there is none, DamagedError when a file is not whole."""
    run = runs.finished_run(folder)
    config = runs.saved_settings(run)
    try:
        if isinstance(config, TrainText):
            labels = files.read_json(folder / "labels.json").get("labels")
            if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
                raise DamagedError(f"{folder / 'labels.json'} is damaged; restore it or train again")
            vocabulary = Tfidf.from_json(_text(folder / "vocabulary.json"), str(folder / "vocabulary.json"))
            model: nn.Module = models.TextMLP(len(vocabulary), len(labels), config.hidden, config.dropout)
            _load_weights(model, folder / "model.safetensors")
            return TextClassifier(labels, vocabulary, model)
        schema = TableSchema.from_json(_text(folder / "schema.json"), str(folder / "schema.json"))
        size = 1 if schema.task == "regression" else len(schema.labels)
        model = models.TableMLP(len(schema.feature_names), size, config.hidden, config.dropout)
        _load_weights(model, folder / "model.safetensors")
        return TablePredictor(schema, model)
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename} is gone; restore it or train again") from None


def in_units(raw: np.ndarray, mean: float, scale: float) -> np.ndarray:
    """Standardised outputs [N, 1] in the target's units, float64 [N]."""
    return raw.reshape(-1).astype(np.float64) * scale + mean


def predict(config: Predict, write: IO[str]) -> None:
    """Write one JSON line per input: streaming, a line as soon as its answer is known.

    Raises DataError for an input that cannot be read; the answers before it are written.
    """
    predictor = load(config.run)
    answers = (
        _answer_texts(config, predictor) if isinstance(predictor, TextClassifier) else _answer_rows(config, predictor)
    )
    for chunk in answers:
        write.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in chunk)
        write.flush()


def evaluate(config: Evaluate) -> dict[str, Any]:
    """The scores of a run on other data, or again on its own test split.

    Raises DataError for data that does not fit the run, such as a label that the model does not know.
    """
    predictor = load(config.run)
    settings = runs.saved_settings(runs.read_run(config.run))
    if isinstance(predictor, TextClassifier):
        texts, source = _labelled_texts(config, settings, predictor.labels)
        features = predictor.vocabulary.transform(texts.texts)
        truth = np.asarray(texts.labels, dtype=np.int64)
        scores = reports.classification(truth, outputs(predictor.model, features).argmax(1), predictor.labels)
        task = "classification"
    else:
        if config.text_column or config.label_column:
            raise ConfigError("--text-column and --label-column are for text runs; a table run knows its columns")
        rows, source = _rows(config, settings, predictor.schema)
        raw = outputs(predictor.model, rows.x)
        schema = predictor.schema
        task = schema.task
        if task == "classification":
            scores = reports.classification(rows.y, raw.argmax(1), schema.labels)
        else:
            mean, scale = schema.target_mean, schema.target_scale
            scores = metrics.regression(in_units(rows.y, mean, scale), in_units(raw, mean, scale))
    report = {"task": task, "data": source["name"], "run": str(config.run), "source": source, **scores}
    if config.json is not None:
        files.write_json(config.json, report)
    return report


def _labelled_texts(config: Evaluate, settings: TrainText, labels: list[str]) -> tuple[data.Texts, dict[str, Any]]:
    name = settings.data if config.data is None else config.data
    if config.data is not None and name not in data.TEXT_DATA:
        texts, _, source = data.read_labelled(
            name, labels, text_column=config.text_column or settings.text_column,
            label_column=config.label_column or settings.label_column,
        )  # fmt: skip
        return texts, {**source, "examples": len(texts)}
    if config.text_column or config.label_column:
        raise ConfigError(f"--text-column and --label-column are for a file given by --data, not for {name}")
    if config.data is None:
        dataset = data.load_text(name, **sources.text_options(settings))
        runs.same_data(runs.read_run(config.run), sources.fingerprint(dataset))
    else:
        dataset = data.load_text(name)
    index = {label: i for i, label in enumerate(labels)}
    unknown = [label for label in dataset.labels if label not in index]
    if unknown:
        raise DataError(
            f"{name} has labels that the model does not know: {data_list(unknown)}; its labels are: {data_list(labels)}"
        )
    texts = data.Texts(dataset.test.texts, [index[dataset.labels[label]] for label in dataset.test.labels])
    return texts, {"name": name, "part": "test split", "examples": len(texts)}


def _rows(config: Evaluate, settings: Any, schema: TableSchema) -> tuple[data.Rows, dict[str, Any]]:
    name = settings.data if config.data is None else config.data
    if config.data is not None and name not in data.TABLE_DATA:
        rows = data.read_rows(name, schema)
        return rows, {"name": name, "examples": len(rows)}
    dataset = data.load_table(name, **(sources.table_options(settings) if config.data is None else {}))
    if config.data is None:
        runs.same_data(runs.read_run(config.run), sources.fingerprint(dataset))
    elif dataset.schema != schema:
        raise DataError(f"{name} is not the table that {config.run} was trained on: its columns or scales differ")
    return dataset.test, {"name": name, "part": "test split", "examples": len(dataset.test)}


def data_list(labels: list[str]) -> str:
    """Labels for a message, the first twenty of them."""
    return ", ".join(map(repr, labels[:20])) + (f" and {len(labels) - 20} more" if len(labels) > 20 else "")


def _ranked(logits: np.ndarray, labels: list[str], top: int) -> list[dict[str, Any]]:
    if not len(logits):
        return []
    probabilities = ops.softmax(Tensor(_torch(logits)), -1).data.cpu().numpy()
    answers = []
    for row in probabilities:
        order = np.argsort(-row, kind="stable")[:top]
        best = [{"label": labels[i], "probability": round(float(row[i]), 6)} for i in order]
        answers.append({**best[0], "top": best})
    return answers


def _torch(array: np.ndarray) -> Any:
    import torch

    from minidl.tensor import default_device

    return torch.from_numpy(array).to(default_device())


def _answer_texts(config: Predict, classifier: TextClassifier) -> Iterator[list[dict[str, Any]]]:
    """The answers to the texts of a command, in chunks."""
    chunks: Iterable[list[str]]
    if config.inputs:
        chunks = [list(config.inputs)]
    elif config.file is not None:
        texts = data.read_texts(config.file, config.text_column)
        chunks = (texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK))
    else:
        chunks = ([line for _, line in chunk] for chunk in _lines_as_they_come(sys.stdin.buffer))
    return (classifier.answers(chunk, config.top) for chunk in chunks)


def _answer_rows(config: Predict, predictor: TablePredictor) -> Iterator[list[dict[str, Any]]]:
    """The answers to the table rows of a command, in chunks."""
    chunks: Iterable[Records]
    if config.text_column is not None:
        raise ConfigError("--text-column is for text runs; a table run knows its columns")
    # Where missing values are filled, so is a column that no line of a chunk names.
    expected = [column.name for column in predictor.schema.columns] if predictor.schema.missing == "fill" else []
    if config.inputs:
        chunks = [_json_rows(list(enumerate(config.inputs, 1)), Path("argument"), expected)]
    elif config.file is not None:
        chunks = [read_records(config.file)]
    else:
        chunks = _rows_as_they_come(sys.stdin.buffer, expected)
    return (predictor.answers(chunk, config.top) for chunk in chunks)


def _lines_as_they_come(stream: IO[bytes]) -> Iterator[list[tuple[int, str]]]:
    """Numbered lines in chunks of what has arrived: the first is answered at once, many are answered together.

    A thread reads, so that a chunk can be closed when no further line is waiting.
    """
    arrived: queue.Queue[bytes | None] = queue.Queue(maxsize=4 * CHUNK)

    def read() -> None:
        for line in stream:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    number, open_ = 0, True
    while open_:
        waiting = [arrived.get()]
        while len(waiting) < CHUNK and not arrived.empty():
            waiting.append(arrived.get())
        if waiting[-1] is None:
            open_ = False
            waiting.pop()
        chunk = []
        failure = None
        for raw in waiting:
            number += 1
            try:
                chunk.append((number, _line(raw, number)))
            except DataError as error:
                failure = error
                break
        if chunk:
            yield chunk
        if failure is not None:
            raise failure


def _line(raw: bytes | None, number: int) -> str:
    assert raw is not None
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{STANDARD_INPUT}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8 text; convert the input"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _rows_as_they_come(stream: IO[bytes], expected: Sequence[str]) -> Iterator[Records]:
    """Table rows from JSON lines or from CSV with a header line: a first line that begins with { decides."""
    header: list[str] | None = None
    is_json: bool | None = None
    for chunk in _lines_as_they_come(stream):
        lines = [(number, line) for number, line in chunk if line.strip()]
        if lines and is_json is None:
            is_json = lines[0][1].lstrip().startswith("{")
        if lines and not is_json and header is None:
            header = _csv_fields(*lines.pop(0))
        if not lines:
            continue
        if is_json:
            yield _json_rows(lines, STANDARD_INPUT, expected)
        else:
            assert header is not None
            rows = [_csv_row(number, line, header) for number, line in lines]
            yield Records(STANDARD_INPUT, header, rows, [number for number, _ in lines], "")


def _csv_fields(number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise DataError(f"{STANDARD_INPUT}, line {number}: {error}; a row must stand on one line") from None


def _csv_row(number: int, line: str, header: list[str]) -> list[str]:
    fields = _csv_fields(number, line)
    if len(fields) != len(header):
        raise DataError(f"{STANDARD_INPUT}, line {number}: {len(fields)} fields where the header has {len(header)}")
    return fields


def _json_rows(lines: list[tuple[int, str]], where: Path, expected: Sequence[str] = ()) -> Records:
    """Rows with the `expected` columns, whether or not one of the lines has them, and those that the lines have."""
    rows = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}, line {number}: not JSON ({error}); give an object per row") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}, line {number}: no JSON object; give an object per row")
        rows.append(value)
    columns = list(dict.fromkeys([*expected, *(key for row in rows for key in row)]))
    cells = [[row.get(column) for column in columns] for row in rows]
    return Records(where, columns, cells, [number for number, _ in lines], "")


def _load_weights(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(files.read_tensors(path))
    except (KeyError, ValueError) as error:
        raise DamagedError(
            f"{path} does not fit the settings of its run ({error}); restore it or train again"
        ) from None


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path} is damaged ({error}); restore it or train again") from None
