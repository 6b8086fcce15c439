"""The networks of `minidl train images`, and the pictures that each of them accepts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minidl.errors import ConfigError
from minidl.training.tasks.images.pictures import PictureFormat
from minidl.training.tasks.images.settings import DROPOUT, TrainImages

if TYPE_CHECKING:
    import torch

    from minidl import nn

_REDUCTION = {"full": 32, "small": 8}  # factor between a side of the picture and of the last stage, by stem
_ROUNDING_DOWN = ("vgg16_bn", "densenet121")  # networks whose strides round sizes down


def network_of(config: TrainImages, format: PictureFormat, classes: int) -> Callable[..., nn.Module]:
    """Return the constructor (dtype, device) of the network. Raises ConfigError if it does not accept the pictures."""
    from minidl import models

    height, width, channels = format.shape
    if config.published:
        options: dict[str, Any] = {"channels": channels, "small": config.stem == "small"}
        if config.model in DROPOUT:
            options["dropout"] = DROPOUT[config.model] if config.dropout is None else config.dropout
        make = getattr(models, config.model)
        return lambda dtype, device=None: make(classes, dtype=dtype, device=device, **options)
    if config.model == "small":
        return lambda dtype, device=None: models.SmallCNN(
            channels, format.size, classes, config.dropout or 0.0, dtype=dtype, device=device
        )
    if format.shape != (28, 28, 1):
        raise ConfigError(
            f"--model ece408 takes grey pictures of 28 x 28 pixels, {config.data} has {format.colours} ones of "
            f"{height} x {width}; use --model small"
        )
    return lambda dtype, device=None: models.ECE408(classes, dtype=dtype, device=device)


def check_sizes(config: TrainImages, size: tuple[int, int], pictures: int) -> None:
    """Raise ConfigError if pictures of the smallest size are too small, or if the last batch may have a single value
    per channel, which has no variance."""
    height, width = size
    if config.stem == "full" and config.model in _ROUNDING_DOWN and min(size) < _REDUCTION["full"]:
        raise ConfigError(
            f"--model {config.model} with --stem full takes pictures from 32 x 32 pixels, these have {height} x "
            f"{width}; use --stem small"
        )
    if (pictures - 1) % config.batch_size:
        return
    if config.published and max(size) < 2 * _REDUCTION[config.stem or "full"]:
        raise ConfigError(
            f"--batch-size {config.batch_size} leaves a batch of one picture, and the last layers of {config.model} "
            "have one pixel: batch norm cannot train on a single value; choose another batch size or a larger --size"
        )
    if math.prod(size) == 1:
        raise ConfigError(
            f"--batch-size {config.batch_size} leaves a batch of one picture of one pixel: batch norm cannot train "
            "on a single value; choose another batch size, or a --size of 2 or more"
        )


def dtype_of(config: TrainImages) -> torch.dtype:
    """Return the dtype of weights and activations."""
    import torch

    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(config.precision or "", torch.float32)


def last_layer(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name and module of the last linear layer, which outputs the classes."""
    from minidl import nn

    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def first_layer(model: nn.Module) -> tuple[str, nn.Conv2d]:
    """Return the name and module of the convolution that reads the picture."""
    from minidl import nn

    return next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
