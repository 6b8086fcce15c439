"""Sets of pictures: the base of their tasks, and the format of a model's input pictures."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from minidl import data
from minidl.data import ImageDataset, Pictures
from minidl.data.saved import Record
from minidl.data.workers import Workers, available
from minidl.errors import ConfigError
from minidl.training.process.display import Display
from minidl.training.settings.command import SPLITS
from minidl.training.settings.declaration import flag
from minidl.training.task import Task
from minidl.training.tasks.images.settings import PictureSettings

if TYPE_CHECKING:
    import numpy as np

PicturesT = TypeVar("PicturesT", bound=PictureSettings)
_Side = Annotated[int, Field(ge=1, le=1024)]


@dataclass(frozen=True)
class PictureFormat(Record):
    """Size and channels of a model's input pictures, with each channel's mean and standard deviation."""

    format = "minidl-pictures"
    height: _Side
    width: _Side
    channels: int
    mean: tuple[Annotated[float, Field(ge=0, le=255)], ...]
    std: tuple[Annotated[float, Field(ge=1e-9, le=255)], ...]

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(
                f"{self.channels} channels with means {list(self.mean)} and deviations {list(self.std)}, expected 1 or "
                "3 channels with one of each"
            )

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (height, width, channels)."""
        return self.height, self.width, self.channels

    @property
    def colours(self) -> str:
        """Return the kind of the colours, for display."""
        return "grey" if self.channels == 1 else "colour"

    def pictures(self, pixels: np.ndarray) -> Pictures:
        """Return pictures of pixels uint8 [N, H, W, C] with the mean and deviation that standardize them."""
        return Pictures(pixels, self.mean, self.std)


class PictureTask(Task[PicturesT]):
    """The base of tasks on sets of pictures."""

    data_sets = data.IMAGE_DATA
    convolves = True

    def read(self, name: str, **options: Any) -> ImageDataset:
        return data.load_images(name, **options)

    def load(self, config: PicturesT) -> ImageDataset:
        if config.data in data.IMAGE_DATA:
            return super().load(config)
        options = self.options(config)
        if getattr(config, "cache", False):
            from minidl.data.picture_cache import PictureCache

            options["cache"] = PictureCache(Display(config.quiet).note)
        group = sys.modules.get("minidl.distributed.group")  # imported if there are several processes
        if group is not None and group.current().size > 1:
            from minidl.training.tasks.images.once import OncePerHost

            options["cache"] = OncePerHost(group.current(), options.get("cache"))
        with Workers(config.workers or available()) as workers:
            return self.read(config.data, **options, workers=workers)

    def options(self, config: PicturesT) -> dict[str, Any]:
        if config.data not in data.IMAGE_DATA:
            return {"size": config.size, **getattr(config, "splits", {})}
        for option, value in {"size": config.size, **config.model_dump(include=SPLITS)}.items():
            if value is not None:
                raise ConfigError(
                    f"{flag(option)} is for your own folder: the size and splits of {config.data} are fixed"
                )
        if getattr(config, "cache", False):
            raise ConfigError(f"--cache is for your own folder: {config.data} is not decoded")
        return {} if config.data == "digits" else {"progress": not config.quiet}

    def fingerprints(self, dataset: ImageDataset) -> Iterator[str]:
        import numpy as np

        digest = hashlib.sha256(json.dumps(dataset.labels).encode())
        for part in (dataset.train, dataset.validation, dataset.test):
            digest.update(f"{part.pixels.shape}\n".encode())
            digest.update(np.ascontiguousarray(part.pixels).data)
            digest.update(part.labels.tobytes())
        yield digest.hexdigest()
