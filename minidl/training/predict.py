"""`minidl predict` and `minidl evaluate`: a finished run put to use."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from minidl import data, models, nn, ops
from minidl.data import DataError, Pictures
from minidl.data.files import Records, read_records
from minidl.data.parsing import is_utf8
from minidl.data.pictures import picture_files
from minidl.data.schema import TableSchema
from minidl.data.vectorizer import Tfidf
from minidl.kernels import launch
from minidl.tensor import Tensor
from minidl.training import baselines, files, inputs, metrics, reports, runs, sources, weights
from minidl.training.config import Evaluate, Predict, TrainImages, TrainText
from minidl.training.errors import ConfigError, DamagedError, DivergedError, damaged
from minidl.training.forward import outputs
from minidl.training.pictures import HALVES, PictureFormat


@dataclass(frozen=True)
class TextClassifier:
    """The model of a text run with what turns a text into its input."""

    labels: list[str]
    vocabulary: Tfidf
    model: nn.Module

    def answers(self, texts: list[str], top: int) -> list[dict[str, Any]]:
        """One answer per text: label, probability, the `top` best labels, and how many terms of the text are known."""
        features = self.vocabulary.transform(texts)
        known = np.diff(features.indptr).tolist()
        ranked = _ranked(_outputs(self.model, features), self.labels, top)
        return [{**answer, "known_terms": count} for answer, count in zip(ranked, known, strict=True)]


@dataclass(frozen=True)
class TablePredictor:
    """The model of a table run with what turns a row into its input."""

    schema: TableSchema
    model: nn.Module

    def answers(self, records: Records, top: int) -> list[dict[str, Any]]:
        """One answer per row: the prediction in the target's units, or label, probability and the `top` best labels.

        `unknown` names the columns with a category that training never saw, where there are some.
        """
        schema = self.schema
        raw = _outputs(self.model, schema.features(records))
        found: list[dict[str, Any]]
        if schema.task == "classification":
            found = _ranked(raw, schema.labels, top)
        else:
            # Nine digits tell all float32 numbers apart.
            found = [
                {"prediction": float(f"{value:.9g}")}
                for value in in_units(raw, schema.target_mean, schema.target_scale)
            ]
        unknown = schema.unknown(records)
        return [{**answer, "unknown": names} if names else answer for answer, names in zip(found, unknown, strict=True)]

    def readable(self, records: Records) -> int:
        """How many rows there are before the first that cannot be read."""

        def fails(count: int) -> bool:
            try:
                self.schema.features(records.taken(range(count)))
            except DataError:
                return True
            return False

        return bisect.bisect_left(range(1, len(records.rows) + 1), True, key=fails)


@dataclass(frozen=True)
class PictureClassifier:
    """The model of an image run with what turns a picture file into its input."""

    labels: list[str]
    format: PictureFormat
    model: nn.Module

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.format.height, self.format.width

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """float32 [N, classes] of pixels uint8 [N, H, W, C]."""
        return _outputs(self.model, Pictures(pixels, self.format.mean, self.format.std))

    def answers(self, paths: list[Path], top: int) -> list[dict[str, Any]]:
        """One answer per file: its path, label, probability and the `top` best labels."""
        pixels = data.read_pictures(paths, self.size, self.format.channels)
        ranked = _ranked(self.logits(pixels), self.labels, top)
        return [{"file": str(path), **answer} for path, answer in zip(paths, ranked, strict=True)]


def load(folder: Path) -> TextClassifier | TablePredictor | PictureClassifier:
    """The model of a finished run. Raises ConfigError when there is none, DamagedError when a file is not whole."""
    run = runs.finished_run(folder)
    if run.kind == "gan":
        raise ConfigError(f"{folder} is a gan run, which makes pictures and answers nothing; see {folder}/samples")
    config = runs.saved_settings(run)
    model: nn.Module
    try:
        if isinstance(config, TrainText):
            labels = _labels(run)
            vocabulary = Tfidf.from_json(runs.document(run, "vocabulary.json"), str(folder / "vocabulary.json"))
            found = _sized_weights(folder, (len(vocabulary), *config.hidden, len(labels)))
            model = models.TextMLP(len(vocabulary), len(labels), config.hidden, config.dropout)
            weights.load(model, found, folder / "model.safetensors")
            return TextClassifier(labels, vocabulary, model)
        if isinstance(config, TrainImages):
            return _load_images(run, config)
        schema = TableSchema.from_json(runs.document(run, "schema.json"), str(folder / "schema.json"))
        size = 1 if schema.task == "regression" else len(schema.labels)
        features = len(schema.feature_names)
        found = _sized_weights(folder, (features, *config.hidden, size))
        model = models.TableMLP(features, size, config.hidden, config.dropout)
        weights.load(model, found, folder / "model.safetensors")
        return TablePredictor(schema, model)
    except DataError as error:
        raise DamagedError(str(error)) from None
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename} is gone; restore it or train again with --overwrite") from None


def _load_images(run: runs.SavedRun, config: TrainImages) -> PictureClassifier:
    labels = _labels(run)
    described = PictureFormat.from_json(runs.document(run, "pictures.json"), str(run.folder / "pictures.json"))
    dtype = HALVES.get(config.precision, torch.float32)
    if launch.INTERPRETED and dtype == torch.bfloat16:
        dtype = torch.float32  # which holds every bfloat16
    try:
        model = described.model(config, len(labels))(dtype)
    except ConfigError as error:
        raise damaged(run.folder / "config.json", error) from None
    path = run.folder / "model.safetensors"
    weights.load(model, files.read_tensors(path), path)
    return PictureClassifier(labels, described, model)


def _labels(run: runs.SavedRun) -> list[str]:
    runs.document(run, "labels.json")
    path = run.folder / "labels.json"
    labels = files.read_json(path).get("labels")
    if not isinstance(labels, list) or len(labels) < 2 or not all(_is_name(label) for label in labels):
        raise damaged(path, "labels is no list of two names or more")
    if len(set(labels)) != len(labels):
        raise damaged(path, "two labels are equal")
    return labels


def _is_name(label: Any) -> bool:
    return isinstance(label, str) and is_utf8(label)


def in_units(raw: np.ndarray, mean: float, scale: float) -> np.ndarray:
    """Standardised outputs [N, 1] in the target's units, float64 [N]. Raises DamagedError for what is not finite."""
    with np.errstate(over="ignore"):
        values = raw.reshape(-1).astype(np.float64) * scale + mean
    if not np.isfinite(values).all():
        raise DamagedError(f"the model's answers, {scale:g} times its outputs, are not finite; train it again")
    return values


def predict(config: Predict, write: IO[str]) -> None:
    """Write one JSON line per input: streaming, a line as soon as its answer is known.

    Raises DataError for an input that cannot be read; the answers before it are written.
    """
    predictor = load(config.run)
    if isinstance(predictor, TextClassifier):
        answers = _answer_texts(config, predictor)
    elif isinstance(predictor, PictureClassifier):
        answers = _answer_pictures(config, predictor)
    else:
        answers = _answer_rows(config, predictor)
    for chunk in answers:
        write.writelines(_line(answer) for answer in chunk)
        write.flush()


def _line(answer: dict[str, Any]) -> str:
    """An answer as a line of JSON. Bytes of a file name that are no UTF-8 text become escapes, which Python reads back
    as the same name."""
    line = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= letter <= "\udfff" for letter in answer.get("file", "")):
        line = json.dumps(answer, allow_nan=False)
    return line + "\n"


def evaluate(config: Evaluate) -> dict[str, Any]:
    """The scores of a run on other data, or again on its own test split, with what a constant answer scores.

    The constant is the most frequent label of the data, or the mean of the training split.

    Raises DataError for data that does not fit the run, such as a label that the model does not know.
    """
    predictor = load(config.run)
    settings = runs.saved_settings(runs.read_run(config.run))
    if isinstance(predictor, TextClassifier):
        texts, source = _labelled_texts(config, settings, predictor.labels)
        features = predictor.vocabulary.transform(texts.texts)
        truth = np.asarray(texts.labels, dtype=np.int64)
        scores = _class_scores(truth, _outputs(predictor.model, features), predictor.labels)
        task = "classification"
    elif isinstance(predictor, PictureClassifier):
        if config.text_column or config.label_column:
            raise ConfigError("--text-column and --label-column are for text runs; a folder names its classes")
        images, source = _labelled_pictures(config, settings, predictor)
        scores = _class_scores(images.labels, predictor.logits(images.pixels), predictor.labels)
        task = "classification"
    else:
        if config.text_column or config.label_column:
            raise ConfigError("--text-column and --label-column are for text runs; a table run knows its columns")
        rows, source = _rows(config, settings, predictor.schema)
        raw = _outputs(predictor.model, rows.x)
        schema = predictor.schema
        task = schema.task
        if task == "classification":
            scores = _class_scores(rows.y, raw, schema.labels)
        else:
            mean, scale = schema.target_mean, schema.target_scale
            units = in_units(rows.y, mean, scale)
            constant = metrics.regression(units, np.full(len(units), mean))
            scores = {**metrics.regression(units, in_units(raw, mean, scale)), "baseline": {"mean": constant}}
    report = {"task": task, "data": source["name"], "run": str(config.run), "source": source, **scores}
    if config.json is not None:
        files.write_json(config.json, report)
    return report


def _class_scores(truth: np.ndarray, raw: np.ndarray, labels: list[str]) -> dict[str, Any]:
    majority = baselines.majority(truth, truth, len(labels))
    return {**reports.classification(truth, raw.argmax(1), labels), "baseline": {"majority": majority}}


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


def _labelled_pictures(
    config: Evaluate, settings: TrainImages, predictor: PictureClassifier
) -> tuple[data.Images, dict[str, Any]]:
    name = settings.data if config.data is None else config.data
    size, channels = predictor.size, predictor.format.channels
    if config.data is not None and name not in data.IMAGE_DATA:
        if not Path(name).is_dir():
            raise DataError(
                f"{name} is neither one of {', '.join(data.IMAGE_DATA)} nor a folder of class folders with pictures"
            )
        images, source = data.read_labelled_pictures(name, predictor.labels, size, channels)
        return images, {**source, "examples": len(images)}
    dataset = data.load_images(name, **(sources.image_options(settings) if config.data is None else {}))
    if config.data is None:
        runs.same_data(runs.read_run(config.run), sources.fingerprint(dataset))
    shape = dataset.test.pixels.shape[1:]
    if dataset.labels != predictor.labels or shape != (*size, channels):
        raise DataError(
            f"{name} has pictures of {' x '.join(map(str, shape))} in {len(dataset.labels)} classes; the model of "
            f"{config.run} takes {size[0]} x {size[1]} x {channels} and knows {data_list(predictor.labels)}"
        )
    return dataset.test, {"name": name, "part": "test split", "examples": len(dataset.test)}


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
    from minidl.tensor import default_device

    return torch.from_numpy(array).to(default_device())


def _answer_texts(config: Predict, classifier: TextClassifier) -> Iterator[list[dict[str, Any]]]:
    """The answers to the texts of a command, in chunks."""
    chunks: Iterable[list[str]]
    if config.inputs:
        chunks = [list(config.inputs)]
    elif config.file is not None:
        usual = runs.saved_settings(runs.read_run(config.run)).text_column
        texts = data.read_texts(config.file, config.text_column, usual)
        chunks = (texts[start : start + inputs.CHUNK] for start in range(0, len(texts), inputs.CHUNK))
    else:
        chunks = ([line for _, line in chunk] for chunk in inputs.lines_as_they_come(inputs.standard_input()))
    return (classifier.answers(chunk, config.top) for chunk in chunks)


def _answer_pictures(config: Predict, classifier: PictureClassifier) -> Iterator[list[dict[str, Any]]]:
    """The answers to the picture files of a command, in chunks; those before one that cannot be read come first."""
    if config.file is not None or config.text_column is not None:
        raise ConfigError(
            "--file and --text-column are for text and table runs; give picture files as arguments, or their paths on "
            "standard input"
        )
    chunks: Iterable[list[Path]]
    if config.inputs:
        if "" in config.inputs:
            raise ConfigError("an empty name was given: give picture files or folders of them")
        paths = [path for name in config.inputs for path in _pictures(Path(name))]
        chunks = (paths[start : start + inputs.CHUNK] for start in range(0, len(paths), inputs.CHUNK))
    else:
        lines = inputs.lines_as_they_come(inputs.standard_input())
        chunks = ([Path(line.strip()) for _, line in chunk if line.strip()] for chunk in lines)
    for chunk in chunks:
        try:
            answers = classifier.answers(chunk, config.top)
        except DataError:
            for path in chunk:
                yield classifier.answers([path], config.top)
            raise
        yield answers


def _pictures(path: Path) -> list[Path]:
    """The file, or the picture files in a folder. Raises DataError for a folder without pictures."""
    if not path.is_dir():
        return [path]
    found = picture_files(path)
    if not found:
        raise DataError(f"{path} is a folder without pictures; give picture files or a folder of them")
    return found


def _answer_rows(config: Predict, predictor: TablePredictor) -> Iterator[list[dict[str, Any]]]:
    """The answers to the table rows of a command, in chunks; those before a row that cannot be read come first."""
    chunks: Iterable[Records]
    if config.text_column is not None:
        raise ConfigError("--text-column is for text runs; a table run knows its columns")
    # Where missing values are filled, so is a column that no line of a chunk names.
    expected = [column.name for column in predictor.schema.columns] if predictor.schema.missing == "fill" else []
    if config.inputs:
        chunks = inputs.json_rows(list(enumerate(config.inputs, 1)), Path("argument"), expected)
    elif config.file is not None:
        chunks = [read_records(config.file)]
    else:
        chunks = inputs.rows_as_they_come(inputs.standard_input(), expected)
    for chunk in chunks:
        try:
            answers = predictor.answers(chunk, config.top)
        except DataError:
            readable = predictor.readable(chunk)
            if readable:
                yield predictor.answers(chunk.taken(range(readable)), config.top)
            raise
        yield answers


def _outputs(model: nn.Module, features: Any) -> np.ndarray:
    """`forward.outputs` of a saved model. Raises DamagedError when one is not finite."""
    try:
        return outputs(model, features)
    except DivergedError as error:
        raise DamagedError(
            f"{error}, or correct the input: a number in it may lie too far from those of the training split"
        ) from None


def _sized_weights(folder: Path, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """The saved weights of a perceptron with layers of these sizes. Raises DamagedError for those of another."""
    path = folder / "model.safetensors"
    found = files.read_tensors(path)
    weights.check_layers(sizes, found, path)
    return found
