"""The data sets that loaders return, and the error type of the data layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the line if any, and the remedy."""


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

    `labels[i]` is the name of class i. `source` describes the origin of the texts for the report, in JSON values.
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
class Pictures:
    """Pixels uint8 [N, H, W, C] with the mean and standard deviation of each channel."""

    pixels: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [N, H, W, C]."""
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
    """Augmentation of training pictures: shifts by up to `shift` pixels in each direction, mirroring left to right.

    Pixels shifted in at an edge are 0 or, with `replicate`, copies of the edge. `crop` below 1 replaces shifts by crops
    of at least that share of the area, resized to the picture. `mixup` and `cutmix` are the alphas of the distribution
    of shares in which pictures of a batch and their targets are mixed; 0 disables them.
    """

    shift: int = 0
    flip: bool = False
    replicate: bool = False
    crop: float = 1.0
    mixup: float = 0.0
    cutmix: float = 0.0


@dataclass(frozen=True)
class ImageDataset:
    """An image classification task; pictures have one size and 1 (grey) or 3 (red, green, blue) channels.

    `mean` and `std` are per channel over the training split; `augment` is the recommended augmentation.
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
