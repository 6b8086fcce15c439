"""What an image run keeps of its pictures, and the model for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from minidl import models, nn
from minidl.data import DataError
from minidl.data.parsing import cut, parse_json
from minidl.training.config import TrainImages
from minidl.training.errors import ConfigError

_FORMAT = "minidl-pictures"
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PictureFormat:
    """Size and channels of the pictures a model takes, with each channel's mean and deviation."""

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

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
        """The format whose fields are JSON values of a file. Raises ValueError for what is none."""
        names = {"height", "width", "channels", "mean", "std"}
        if content.keys() != names:
            raise ValueError(f"it has {sorted(content)}, expected {sorted(names)}")
        sides, channels = (content["height"], content["width"]), content["channels"]
        whole = all(type(number) is int for number in (*sides, channels))
        if not (whole and all(1 <= side <= 1024 for side in sides) and channels in (1, 3)):
            raise ValueError(f"{sides} pixels with {channels!r} channels are no pictures")
        for name, least in (("mean", 0.0), ("std", 1e-9)):
            if not _are_numbers(content[name], channels, least):
                raise ValueError(f"{name} is {content[name]!r}, expected numbers from 0 to 255")
        return cls(**{**content, "mean": tuple(content["mean"]), "std": tuple(content["std"])})

    def model(self, config: TrainImages, classes: int) -> Callable[[torch.dtype], nn.Module]:
        """What makes the model of the settings in a dtype. Raises ConfigError when it does not take the pictures."""
        if config.model == "small":
            size = (self.height, self.width)
            return lambda dtype: models.SmallCNN(self.channels, size, classes, config.dropout, dtype=dtype)
        if (self.height, self.width, self.channels) != (28, 28, 1):
            kind = "grey" if self.channels == 1 else "colour"
            raise ConfigError(
                f"--model ece408 takes grey pictures of 28 x 28 pixels, {config.data} has {kind} ones of "
                f"{self.height} x {self.width}; use --model small"
            )
        if config.dropout:
            raise ConfigError("--dropout is for --model small; ece408 has none")
        return lambda dtype: models.ECE408(classes, dtype=dtype)


def _are_numbers(values: Any, count: int, least: float) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) in (int, float) and least <= v <= 255 for v in values)
    )
