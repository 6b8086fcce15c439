"""The picture format that an image run saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from minidl.data import Pictures
from minidl.data.saved import Record

if TYPE_CHECKING:
    import numpy as np

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
            raise ValueError("pictures have 1 or 3 channels, each with a mean and a deviation")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return self.height, self.width, self.channels

    @property
    def colours(self) -> str:
        """For display."""
        return "grey" if self.channels == 1 else "colour"

    def pictures(self, pixels: np.ndarray) -> Pictures:
        """Pixels uint8 [N, H, W, C] with the mean and deviation that they are standardised by."""
        return Pictures(pixels, self.mean, self.std)
