"""The picture format that an image run saves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from minidl.data import DataError, Pictures
from minidl.data.parsing import cut, parse_json

if TYPE_CHECKING:
    import numpy as np

_FORMAT = "minidl-pictures"


@dataclass(frozen=True)
class PictureFormat:
    """Size and channels of a model's input pictures, with each channel's mean and standard deviation."""

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def colours(self) -> str:
        """For display."""
        return "grey" if self.channels == 1 else "colour"

    def pictures(self, pixels: np.ndarray) -> Pictures:
        """Pixels uint8 [N, H, W, C] with the mean and deviation that they are standardised by."""
        return Pictures(pixels, self.mean, self.std)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, "version": 1, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> PictureFormat:
        """What `to_json` wrote. Raises DataError, naming `source`, for anything else."""
        try:
            content = parse_json(text)
            known = isinstance(content, dict) and content.pop("format", None) == _FORMAT
            if not known or content.pop("version", None) != 1:
                raise ValueError(f"not a {_FORMAT} file of version 1")
            return cls.from_values(content)
        except ValueError as error:
            raise DataError(f"{source} is damaged: {cut(error)}; restore it or train again") from None

    @classmethod
    def from_values(cls, content: dict[str, Any]) -> PictureFormat:
        """The format whose fields are JSON values of a file. Raises ValueError for invalid values."""
        names = {"height", "width", "channels", "mean", "std"}
        if content.keys() != names:
            raise ValueError(f"it has {sorted(content)}, expected {sorted(names)}")
        sides, channels = (content["height"], content["width"]), content["channels"]
        whole = all(type(number) is int for number in (*sides, channels))
        if not (whole and all(1 <= side <= 1024 for side in sides) and channels in (1, 3)):
            raise ValueError(f"{sides} pixels with {channels!r} channels are not valid pictures")
        for name, least in (("mean", 0.0), ("std", 1e-9)):
            if not _are_numbers(content[name], channels, least):
                raise ValueError(f"{name} is {content[name]!r}, expected numbers from 0 to 255")
        return cls(**{**content, "mean": tuple(content["mean"]), "std": tuple(content["std"])})


def _are_numbers(values: Any, count: int, least: float) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) in (int, float) and least <= v <= 255 for v in values)
    )
