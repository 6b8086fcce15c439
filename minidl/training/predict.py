"""`minidl predict` and `minidl evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from minidl.data import DataError
from minidl.data.workers import Workers, available
from minidl.training import files, memory
from minidl.training.config import Evaluate, Predict
from minidl.training.errors import DamagedError
from minidl.training.inputs import CHUNK
from minidl.training.saved_run import SavedRun, finished_run, own_data, saved_settings, tell
from minidl.training.task import Predictor
from minidl.training.tasks import TASKS

_LARGE = 2**21  # bytes
_FOLDERS = 16  # arguments that may be folders


def load(folder: Path) -> Predictor:
    """The model of a finished run. Raises ConfigError if there is none, DamagedError for a missing or invalid file."""
    return _load(finished_run(folder))


def _load(run: SavedRun) -> Predictor:
    tell(run.notes)
    try:
        with memory.used_for("the model", "a smaller model"):
            return TASKS[run.kind].predictor(saved_settings(run), run.files)
    except DataError as error:
        raise DamagedError(str(error)) from None


def predict(config: Predict, write: IO[str]) -> None:
    """Write one JSON line per input, as soon as its answer is known.

    Raises DataError for an input that cannot be read; the answers before it are written.
    """
    with Workers(config.workers or available()) as workers:
        if _is_much(config):
            workers.start()  # while the model is loaded
        for lines in _lines(replace(load(config.run), workers=workers), config):
            write.writelines(lines)
            write.flush()


def _is_much(config: Predict) -> bool:
    """Whether the processes are needed: for a large file, many arguments, or a folder of many files."""
    try:
        if config.file is not None:
            return config.file.stat().st_size >= _LARGE
        folders = filter(Path.is_dir, map(Path, config.inputs[:_FOLDERS]))
        return len(config.inputs) + sum(1 for folder in folders for _ in folder.iterdir()) > CHUNK
    except (OSError, ValueError):  # is told by who reads it, or a text that cannot be a name
        return len(config.inputs) > CHUNK


def _lines(predictor: Predictor, config: Predict) -> Iterator[Iterable[str]]:
    for chunk in predictor.chunks(config):
        try:
            lines = predictor.lines(chunk, config.top)
        except DataError:
            for part in predictor.before_fault(chunk):
                yield predictor.lines(part, config.top)
            raise
        yield lines


def evaluate(config: Evaluate) -> dict[str, Any]:
    """The scores of a run on other data or on its own test split, with those of a constant answer as a baseline.

    The constant is the most frequent label of the data, or the mean of the training split.

    Raises DataError for data that does not fit the run, such as an unknown label.
    """
    from minidl.training.forward import saved_outputs

    # Read once: in the meantime, another command may put another run into the folder.
    run = finished_run(config.run)
    predictor, task = _load(run), TASKS[run.kind]
    predictor.check_columns(config)
    with memory.used_for("the data", "less data"):
        if config.data is not None and config.data not in task.data_sets:
            features, truth, source = predictor.labelled(config)
        else:
            dataset = own_data(run) if config.data is None else task.read(config.data)
            features, truth = predictor.test(dataset, config)
            source = {"name": config.data or run.config.get("test") or run.config["data"], "part": "test split"}
    source = {**source, "examples": len(truth)}
    targets = predictor.targets
    found = targets.found(saved_outputs(predictor.model, features, targets.outputs))
    scores = targets.evaluation(truth, found)
    report = {"task": targets.task, "data": source["name"], "run": str(config.run), "source": source, **scores}
    if config.json_file is not None:
        files.write_json(config.json_file, report)
    return report
