"""`minidl train table`: a perceptron on standardized columns, for a regression or a classification."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from minidl import data
from minidl.data import DataError
from minidl.data.parsing import ARGUMENT
from minidl.errors import ConfigError
from minidl.training.prediction import inputs
from minidl.training.settings import fields
from minidl.training.settings.command import Evaluate, Perceptron, Predict
from minidl.training.settings.declaration import REPEATED, Expected, flag
from minidl.training.task import Predictor, Task, only_for_files

if TYPE_CHECKING:
    import numpy as np

    from minidl import nn
    from minidl.data.file_rows import Records
    from minidl.data.schema import TableDataset, TableSchema
    from minidl.training.loop.supervised import Supervised
    from minidl.training.loop.targets import Classification, Regression
    from minidl.training.run_folder.manifest import RunFiles


class TrainTable(Perceptron):
    """Train a regression or a classification on a table: a multilayer perceptron on standardized columns."""

    examples = (
        "minidl train table --data diabetes --out runs/diabetes",
        "minidl train table --data houses.csv --target price --out runs/houses",
        "minidl train table --data cars.csv --target kind --task classification --out c",
        "minidl train table --data h.csv --target y --ignore id --missing fill --out h",
    )
    earlier = {**Perceptron.earlier, "numbers": "plain"}  # noqa: RUF012
    data: Annotated[
        fields.Data,
        Field(description=f"diabetes, or {fields.FILE}."),
    ]
    target: Annotated[fields.Column, Field(description="Column to predict. Default: the column named target.")] = None
    task: Annotated[
        Literal["regression", "classification"] | None,
        Field(
            description="regression or classification. Default: classification if the target is text or has at most "
            "20 different whole numbers, else regression."
        ),
    ] = None
    ignore: Annotated[
        tuple[str, ...],
        Field(strict=False, description="Column to ignore; may be repeated."),
        Expected("names of columns"),
        REPEATED,
    ] = ()
    missing: Annotated[Literal["error", "fill"], Field(description="Treatment of missing values:")] = "error"
    numbers: Annotated[
        Literal["auto", "plain", "point", "comma"],
        Field(
            description="Format of numbers: auto (detected per column, such as $1,234 or 12%), plain (only 1234.5), "
            "or point or comma (the decimal separator of ambiguous columns)."
        ),
    ] = "auto"
    hidden: fields.Hidden = (64, 64)
    epochs: fields.Epochs = 40
    batch_size: fields.BatchSize = 32
    lr: fields.LearningRate = 0.003
    dropout: fields.Dropout = 0.3
    weight_decay: fields.WeightDecay = 0.1
    patience: fields.Patience = 10


class TableTask(Task[TrainTable]):
    """The task of predicting a column of a table."""

    name = "table"
    run = "a table run"
    settings = TrainTable
    data_sets = data.TABLE_DATA
    files = ("labels.json", "calibration.json", "schema.json", "confusion.png", "reliability.png", "predictions.png")

    def read(self, name: str, **options: Any) -> TableDataset:
        return data.load_table(name, **options)

    def options(self, config: TrainTable) -> dict[str, Any]:
        ignore = config.ignore or None
        if config.data not in data.TABLE_DATA:
            return {
                **config.splits, "target": config.target, "task": config.task, "ignore": ignore,
                "missing": config.missing, "numbers": config.numbers,
            }  # fmt: skip
        if config.task not in (None, "regression"):
            raise ConfigError(f"--task {config.task}: {config.data} is a regression")
        numbers = config.numbers if config.numbers in ("point", "comma") else None
        columns = {"target": config.target, "ignore": ignore, "numbers": numbers}
        only_for_files(config.data, columns, "its columns are fixed")
        files = {"validation": config.validation, "test": config.test}
        only_for_files(config.data, files, "--val-split and --test-split split it")
        return config.splits

    def fingerprints(self, dataset: TableDataset) -> Iterator[str]:
        """Yield the fingerprint of schema and values, then that of the values."""
        digest = hashlib.sha256()
        for part in (dataset.train, dataset.validation, dataset.test):
            digest.update(f"{part.x.shape} {part.y.dtype}\n".encode() + part.x.tobytes() + part.y.tobytes())
        values = digest.hexdigest()
        yield hashlib.sha256(f"{dataset.schema.to_json()}\n{values}".encode()).hexdigest()
        yield values

    def prepare(self, config: TrainTable, dataset: TableDataset) -> Supervised[TrainTable]:
        """Return the experiment. Raises ConfigError for classification flags if the task is a regression."""
        from minidl import models
        from minidl.training.loop.supervised import Supervised, sizes

        schema = dataset.schema
        targets = _targets(schema)
        for option in ("label_smoothing", "balance"):
            if not targets.labels and getattr(config, option):
                raise ConfigError(f"{flag(option)} is for a classification; {config.data} is a regression")
        count = len(schema.feature_names)
        return Supervised(
            name=self.name,
            config=config,
            source={**dataset.source, "sizes": sizes(dataset), "features": count},
            features=f"{count:,} features",
            targets=targets,
            train=(dataset.train.x, dataset.train.y),
            validation=(dataset.validation.x, dataset.validation.y),
            test=lambda: (dataset.test.x, dataset.test.y),
            make_model=lambda config, device: models.TableMLP(
                count, targets.outputs, config.hidden, config.dropout, device=device
            ),
            documents={"schema.json": schema.to_json(), **targets.documents},
        )

    def predictor(self, config: TrainTable, run: RunFiles) -> TablePredictor:
        from minidl.data.schema import TableSchema

        schema = TableSchema.from_json(run.text("schema.json"), str(config.out / "schema.json"))
        return TablePredictor(config, run, schema)


@dataclass(frozen=True)
class TablePredictor(Predictor[TrainTable]):
    """The model of a table run with the schema that turns rows into its inputs."""

    schema: TableSchema
    argument = "a row"
    no_columns_reason = "a table run knows its columns"

    @cached_property
    def targets(self) -> Classification | Regression:
        targets: Any = _targets(self.schema)
        if targets.labels:
            return replace(targets.calibrated(self.run), reject=self.reject)
        if self.reject:
            raise ConfigError("--reject is for classifications, and this run predicts numbers")
        return targets

    @cached_property
    def model(self) -> nn.Module:
        from minidl import models
        from minidl.training.loop.supervised import saved_perceptron

        features, outputs = len(self.schema.feature_names), self.targets.outputs
        return saved_perceptron(self.run, self.config, models.TableMLP, features, outputs)

    def chunks(self, config: Predict) -> Iterable[Records]:
        from minidl.data.files import read_records

        if config.text_column is not None:
            raise ConfigError(f"--text-column is for text runs; {self.no_columns_reason}")
        # With --missing fill, a column that no line of a chunk names is filled, too.
        expected = [column.name for column in self.schema.columns] if self.schema.missing == "fill" else []
        if config.inputs:
            return inputs.json_rows(list(enumerate(config.inputs, 1)), ARGUMENT, expected)
        if config.file is not None:
            return [read_records(config.file)]
        return inputs.rows_as_they_come(inputs.standard_input(), expected)

    def features(self, records: Records) -> np.ndarray:
        return self.schema.features(records)

    def answers(self, records: Records, features: np.ndarray, top: int) -> list[dict[str, Any]]:
        """Return an answer per row: a number in the target's units, or label, probability and the `top` best labels.

        `unknown` names the columns with a category that training never saw, if there are any.
        """
        pairs = zip(self.targets.answers(self.outputs(features), top), self.schema.unknown(records), strict=True)
        return [{**answer, "unknown": unknown} if unknown else answer for answer, unknown in pairs]

    def before_fault(self, records: Records) -> Iterable[Records]:
        """Return the rows before the first invalid one."""

        def fails(count: int) -> bool:
            try:
                self.schema.features(records.select(range(count)))
            except DataError:
                return True
            return False

        readable = bisect.bisect_left(range(1, len(records.rows) + 1), True, key=fails)
        return [records.select(range(readable))] if readable else []

    def labelled(self, config: Evaluate) -> tuple[Any, np.ndarray, dict[str, Any]]:
        assert config.data is not None
        rows = data.read_rows(config.data, self.schema)
        return rows.x, rows.y, {"name": config.data}

    def test(self, dataset: TableDataset, config: Evaluate) -> tuple[Any, np.ndarray]:
        if config.data is not None and dataset.schema != self.schema:
            raise DataError(
                f"{config.data} is not the table that {config.run} was trained on: its columns or scales differ"
            )
        return dataset.test.x, dataset.test.y


def _targets(schema: TableSchema) -> Classification | Regression:
    from minidl.training.loop.targets import Classification, Regression

    if schema.task == "regression":
        return Regression(schema.target, schema.target_mean, schema.target_scale)
    return Classification(schema.labels)
