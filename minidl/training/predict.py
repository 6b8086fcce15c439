"""`minidl predict` and `minidl evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from minidl.data import DataError
from minidl.data.parsing import is_utf8
from minidl.data.workers import Workers, available
from minidl.training import files, memory
from minidl.training.config import Evaluate, Predict
from minidl.training.errors import DamagedError
from minidl.training.forward import saved_outputs
from minidl.training.saved_run import SavedRun, finished_run, own_data, saved_settings, tell
from minidl.training.task import Predictor
from minidl.training.tasks import TASKS


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
        for answers in _answers(replace(load(config.run), workers=workers), config):
            write.writelines(map(_line, answers))
            write.flush()


def _answers(predictor: Predictor, config: Predict) -> Iterator[list[dict[str, Any]]]:
    for chunk in predictor.chunks(config):
        try:
            answers = predictor.answers(chunk, config.top)
        except DataError:
            for part in predictor.before_fault(chunk):
                yield predictor.answers(part, config.top)
            raise
        yield answers


_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _line(answer: dict[str, Any]) -> str:
    """An answer as a line of JSON. Bytes of a file name that are not UTF-8 become escapes, which Python reads back as
    the same name."""
    line = _encoded(answer)
    if not is_utf8(answer.get("file", "")):
        line = json.dumps(answer, allow_nan=False)
    return line + "\n"


def evaluate(config: Evaluate) -> dict[str, Any]:
    """The scores of a run on other data or on its own test split, with those of a constant answer as a baseline.

    The constant is the most frequent label of the data, or the mean of the training split.

    Raises DataError for data that does not fit the run, such as an unknown label.
    """
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
