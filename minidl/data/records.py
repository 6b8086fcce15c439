"""What every loader returns, and the one error type of the data layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from minidl.data.schema import TableSchema


class DataError(ValueError):
    """Data that cannot be used: the message names the file, the line where there is one, and what to do."""


@dataclass(frozen=True)
class Texts:
    """Texts and the class index of each; `labels` is as long as `texts`."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextDataset:
    """A text classification task.

    `labels[i]` is the name of class i. `source` says where the texts come from (for the report): plain JSON values.
    """

    name: str
    labels: list[str]
    train: Texts
    validation: Texts
    test: Texts
    source: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """Table rows ready for a model: x float32 [N, F]; y float32 [N] (regression) or int64 [N] (classification)."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class TableDataset:
    """A table with one target column.

    `schema` turns a raw row into model inputs and model outputs back into the target's units; it holds the feature
    names, the target's name, the task, the labels of a classification and every statistic of the training split.
    In a regression y is standardised with the training split's mean and deviation.
    """

    name: str
    schema: TableSchema
    train: Rows
    validation: Rows
    test: Rows
    source: dict[str, Any] = field(default_factory=dict)
