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


@dataclass(frozen=True)
class Pictures:
    """Pixels uint8 [N, H, W, C] with the mean and deviation of each channel that they are standardised by."""

    pixels: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape


@dataclass(frozen=True)
class Images:
    """Pixels uint8 [N, H, W, C] and the class index of each picture, int64 [N]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class Augment:
    """How training pictures are varied: moved by up to `shift` pixels each way, mirrored left to right.

    What comes in at an edge is 0, or with `replicate` the pixels of that edge.
    """

    shift: int = 0
    flip: bool = False
    replicate: bool = False


@dataclass(frozen=True)
class ImageDataset:
    """An image classification task; pictures have one size and 1 (grey) or 3 (red, green, blue) channels.

    `mean` and `std` are those of each channel over the training split; `augment` is what suits the data.
    """

    name: str
    labels: list[str]
    train: Images
    validation: Images
    test: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment
    source: dict[str, Any] = field(default_factory=dict)
