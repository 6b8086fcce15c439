"""`minidl predict` and `minidl evaluate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from minidl.data import DataError
from minidl.data.workers import Message, Workers, available
from minidl.errors import DamagedError
from minidl.training.prediction import inputs
from minidl.training.prediction.multi_gpu import spread
from minidl.training.process import helpers, out_of_memory
from minidl.training.run_folder import files
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.saved_run import SavedRun
from minidl.training.settings.command import Evaluate, Predict
from minidl.training.task import Predictor
from minidl.training.tasks import TASKS

_LARGE = 2**21  # bytes
_FOLDERS = 16  # arguments that may be folders


class Prepared(NamedTuple):
    """A chunk of inputs with their features, or with the error of its first invalid input."""

    chunk: Any
    features: Any
    fault: DataError | None = None


@dataclass(frozen=True)
class Reading:
    """The inputs of a command, read by a thread; `predictor` waits for the run's documents."""

    run: SavedRun
    predictor: Callable[[], Predictor[Any]]
    prepared: Iterator[Prepared]


def load(folder: Path) -> Predictor[Any]:
    """Return the predictor of a finished run. Raises ConfigError without one, DamagedError for damaged files."""
    run = RunFolder(folder).read_finished()
    return _with_model(run, lambda: _of_documents(run))


def _with_model(run: SavedRun, predictor: Callable[[], Predictor[Any]]) -> Predictor[Any]:
    run.show_notes()
    loaded = predictor()
    with _of_run():
        _ = loaded.targets, loaded.model
    return loaded


def _of_documents(run: SavedRun) -> Predictor[Any]:
    with _of_run():
        return run.predictor()


@contextlib.contextmanager
def _of_run() -> Iterator[None]:
    """Raise DamagedError for invalid files inside this context, which reads files of a run."""
    try:
        with out_of_memory.used_for("the model", "a smaller model"):
            yield
    except DataError as error:
        raise DamagedError(str(error)) from None


@contextlib.contextmanager
def reading(config: Predict) -> Iterator[Reading]:
    """Start threads and processes that read the inputs while torch is imported and the model is loaded.

    Standard input is read on demand, and answered line by line. `answer` raises the errors of documents and inputs.
    """
    import numpy as np  # noqa: F401 (the threads would import it at the same time)

    from minidl.training.prediction import json_lines as lines

    run = RunFolder(config.run).read_finished()
    shared = spread(run, config.devices, config.device)
    with Workers(config.workers or available()) as workers, shared.processes:
        if _is_much(config):
            shared.begin()
            workers.start()
            for _ in range(workers.count):
                workers.submit(lines.import_module, Message({}))
        predictor = helpers.in_thread(
            lambda: replace(_of_documents(run), workers=workers, devices=shared, reject=config.reject)
        )
        prepared = _prepared(predictor, config)
        is_available = config.inputs or config.file is not None
        yield Reading(run, predictor, helpers.one_ahead(prepared) if is_available else prepared)


def _prepared(predictor: Callable[[], Predictor[Any]], config: Predict) -> Iterator[Prepared]:
    loaded = predictor()
    for chunk in loaded.chunks(config):
        try:
            features = loaded.features(chunk)
        except DataError as error:
            yield Prepared(chunk, None, error)
            return
        yield Prepared(chunk, features)


def predict(config: Predict, write: IO[str]) -> None:
    """Read and `answer` the inputs of a command."""
    with reading(config) as inputs_of_run:
        answer(inputs_of_run, config, write)


def answer(reading: Reading, config: Predict, write: IO[str]) -> None:
    """Write one JSON line per input, as soon as its answer is known.

    Raises DataError for an invalid input, after writing the answers before it; a file is read completely first.
    """
    predictor: Any = _with_model(reading.run, reading.predictor)
    if predictor.argument:
        inputs.note_files(config.inputs, predictor.argument)
    total = unknown = 0
    for features, lines in _lines(predictor, reading.prepared, config.top):
        write.writelines(lines)
        write.flush()
        if TASKS[reading.run.kind].has_terms:
            total += features.shape[0]
            unknown += int((predictor.known_terms(features) == 0).sum())
    inputs.note_unknown(unknown, total)


def _is_much(config: Predict) -> bool:
    """Return whether the inputs need processes: a large file, many arguments, or a folder of many files."""
    try:
        if config.file is not None:
            return config.file.stat().st_size >= _LARGE
        folders = filter(Path.is_dir, map(Path, config.inputs[:_FOLDERS]))
        return len(config.inputs) + sum(1 for folder in folders for _ in folder.iterdir()) > inputs.CHUNK
    except (OSError, ValueError):  # a text that is not a path, or a fault that the reader will report
        return len(config.inputs) > inputs.CHUNK


def _lines(predictor: Predictor[Any], prepared: Iterable[Prepared], top: int) -> Iterator[tuple[Any, Iterable[str]]]:
    """Yield features and lines of each chunk."""
    for chunk, features, fault in prepared:
        if fault is not None:
            for part in predictor.before_fault(chunk):
                features = predictor.features(part)
                yield features, predictor.lines(part, features, top)
            raise fault
        yield features, predictor.lines(chunk, features, top)


def evaluate(config: Evaluate) -> dict[str, Any]:
    """Return the scores of a run on other data or on its test split, with those of a constant as a baseline.

    The constant is the most frequent label of the data, or the mean of the training split. Raises DataError for data
    that does not fit the run, such as an unknown label.
    """
    # Read once: another command may replace the run in the folder.
    run = RunFolder(config.run).read_finished()
    shared, task = spread(run, config.devices, config.device), TASKS[run.kind]
    with shared.processes:
        predictor = _with_model(run, lambda: replace(_of_documents(run), devices=shared, reject=config.reject))
        predictor.check_columns(config)
        with out_of_memory.used_for("the data", "less data"):
            if config.data is not None and config.data not in task.data_sets:
                features, truth, source = predictor.labelled(config)
            else:
                dataset = run.load_data() if config.data is None else task.read(config.data)
                features, truth = predictor.test(dataset, config)
                source = {"name": config.data or run.config.get("test") or run.config["data"], "part": "test split"}
        source = {**source, "examples": len(truth)}
        targets = predictor.targets
        predictions = targets.predictions(predictor.outputs(features), confidence=True)
    scores = targets.evaluation(truth, predictions)
    report = {"task": targets.task, "data": source["name"], "run": str(config.run), "source": source, **scores}
    if config.json_file is not None:
        files.write_json(config.json_file, report)
    return report
