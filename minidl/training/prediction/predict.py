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
from minidl.training.run_folder.saved_run import SavedRun, finished_run, own_data, saved_settings, tell
from minidl.training.settings.command import Evaluate, Predict
from minidl.training.task import Predictor
from minidl.training.tasks import TASKS

_LARGE = 2**21  # bytes
_FOLDERS = 16  # arguments that may be folders


class Prepared(NamedTuple):
    """Some inputs with their features, or with the error of the first that has none."""

    chunk: Any
    features: Any
    fault: DataError | None = None


@dataclass(frozen=True)
class Reading:
    """Inputs that are being read for a run; `predictor` waits for its documents."""

    run: SavedRun
    predictor: Callable[[], Predictor[Any]]
    prepared: Iterator[Prepared]


def load(folder: Path) -> Predictor[Any]:
    """A finished run with its model. Raises ConfigError if there is none, DamagedError for missing or invalid files."""
    run = finished_run(folder)
    return _with_model(run, lambda: _of_documents(run))


def _with_model(run: SavedRun, predictor: Callable[[], Predictor[Any]]) -> Predictor[Any]:
    tell(run.notes)
    found = predictor()
    with _of_run():
        _ = found.targets, found.model
    return found


def _of_documents(run: SavedRun) -> Predictor[Any]:
    with _of_run():
        return TASKS[run.kind].predictor(saved_settings(run), run.files)


@contextlib.contextmanager
def _of_run() -> Iterator[None]:
    """A block that reads files of a run: what is wrong with them is a damage."""
    try:
        with out_of_memory.used_for("the model", "a smaller model"):
            yield
    except DataError as error:
        raise DamagedError(str(error)) from None


@contextlib.contextmanager
def reading(config: Predict) -> Iterator[Reading]:
    """A block at whose beginning threads and processes begin to read the inputs: importing torch, waking a GPU and
    loading the model take seconds.

    Standard input is read when it is asked for, and answered as it comes. What is wrong with the documents or with an
    input is told by `answer`, after what is wrong before it.
    """
    import numpy as np  # noqa: F401 (before the threads, which need it, too)

    from minidl.training.prediction import json_lines as lines

    run = finished_run(config.run)
    shared = spread(run, config.devices, config.device)
    with Workers(config.workers or available()) as workers, shared.processes:
        if _is_much(config):
            shared.begin()
            workers.start()
            for _ in range(workers.count):
                workers.later(lines.nothing, Message({}))
        predictor = helpers.in_thread(lambda: replace(_of_documents(run), workers=workers, devices=shared))
        prepared = _prepared(predictor, config)
        there = config.inputs or config.file is not None
        yield Reading(run, predictor, helpers.one_ahead(prepared) if there else prepared)


def _prepared(predictor: Callable[[], Predictor[Any]], config: Predict) -> Iterator[Prepared]:
    found = predictor()
    for chunk in found.chunks(config):
        try:
            features = found.features(chunk)
        except DataError as error:
            yield Prepared(chunk, None, error)
            return
        yield Prepared(chunk, features)


def predict(config: Predict, write: IO[str]) -> None:
    """`answer` the inputs of a command."""
    with reading(config) as begun:
        answer(begun, config, write)


def answer(begun: Reading, config: Predict, write: IO[str]) -> None:
    """Write one JSON line per input, as soon as its answer is known.

    Raises DataError for an input that cannot be read; the answers before it are written, but a file is read as a whole.
    """
    predictor = _with_model(begun.run, begun.predictor)
    if predictor.argument:
        inputs.tell_files(config.inputs, predictor.argument)
    total = unknown = 0
    for features, lines in _lines(predictor, begun.prepared, config.top):
        write.writelines(lines)
        write.flush()
        if TASKS[begun.run.kind].has_terms:
            total, unknown = (
                total + features.shape[0],
                unknown + int((features.indptr[1:] == features.indptr[:-1]).sum()),
            )
    inputs.note_unknown(unknown, total)


def _is_much(config: Predict) -> bool:
    """Whether the processes are needed: for a large file, many arguments, or a folder of many files."""
    try:
        if config.file is not None:
            return config.file.stat().st_size >= _LARGE
        folders = filter(Path.is_dir, map(Path, config.inputs[:_FOLDERS]))
        return len(config.inputs) + sum(1 for folder in folders for _ in folder.iterdir()) > inputs.CHUNK
    except (OSError, ValueError):  # is told by who reads it, or a text that cannot be a name
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
    """The scores of a run on other data or on its own test split, with those of a constant answer as a baseline.

    The constant is the most frequent label of the data, or the mean of the training split.

    Raises DataError for data that does not fit the run, such as an unknown label.
    """
    # Read once: in the meantime, another command may put another run into the folder.
    run = finished_run(config.run)
    shared, task = spread(run, config.devices, config.device), TASKS[run.kind]
    with shared.processes:
        predictor = _with_model(run, lambda: replace(_of_documents(run), devices=shared))
        predictor.check_columns(config)
        with out_of_memory.used_for("the data", "less data"):
            if config.data is not None and config.data not in task.data_sets:
                features, truth, source = predictor.labelled(config)
            else:
                dataset = own_data(run) if config.data is None else task.read(config.data)
                features, truth = predictor.test(dataset, config)
                source = {"name": config.data or run.config.get("test") or run.config["data"], "part": "test split"}
        source = {**source, "examples": len(truth)}
        targets = predictor.targets
        found = targets.found(predictor.outputs(features))
    scores = targets.evaluation(truth, found)
    report = {"task": targets.task, "data": source["name"], "run": str(config.run), "source": source, **scores}
    if config.json_file is not None:
        files.write_json(config.json_file, report)
    return report
