"""The rows of `python -m benchmarks.bench in-torch`: models that `torch.compile` runs with minidl, and their goals."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.bench.network_rows import Net

WORD = "in-torch"
# The goals for the geometric mean and for the least of the ratios of COUNTED.
MEAN_GOAL, LEAST_GOAL = 1.1, 0.97
_GENERATOR, _DISCRIMINATOR = "dcgan_generator", "dcgan_discriminator"


@dataclass(frozen=True)
class Model(Net):
    """A row. `package` is torchvision, timm, or "" for a model of this module; the package defines the names."""

    package: str = ""

    @property
    def row(self) -> str:
        return super().row.replace("networks", WORD, 1)

    @property
    def title(self) -> str:
        return f"{super().title}, fused in torch"

    def network(self) -> nn.Module:
        """Return the model with random weights and no dropout."""
        model: nn.Module
        if self.package == "torchvision":
            library: Any = importlib.import_module("torchvision.models")
            backbone = {"weights_backbone": None} if self.name in SEGMENTATION else {}
            model = library.get_model(self.name, weights=None, **backbone)
        elif self.package == "timm":
            library = importlib.import_module("timm")
            model = library.create_model(self.name.removeprefix("timm/"), pretrained=False)
        else:
            model = _dcgan(self.name, self.channels, *self.arguments)
        for layer in model.modules():
            for probability in _DROPS.get(type(layer).__name__, ()):
                setattr(layer, probability, 0.0)
        return model

    def batch(self, images: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Return images in channels-last memory, or latents."""
        channels, size = (self.channels, 1) if self.name == _GENERATOR else (3, self.size)
        x = torch.randn(images, channels, size, size, device=device, dtype=dtype)
        return x.to(memory_format=torch.channels_last)


_DROPS = {"Dropout": ("p",), "StochasticDepth": ("p",), "DropPath": ("drop_prob",)}


def _dcgan(name: str, channels: int, width: int) -> nn.Sequential:
    """Return a network of torch's DCGAN tutorial, for images of 64x64."""
    widths = [8 * width, 4 * width, 2 * width, width]
    parts: list[nn.Module]
    if name == _GENERATOR:
        parts = [nn.ConvTranspose2d(channels, widths[0], 4, 1, 0, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(True)]
        for a, b in itertools.pairwise(widths):
            parts += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]
        return nn.Sequential(*parts, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
    parts = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for b, a in reversed(list(itertools.pairwise(widths))):
        parts += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*parts, nn.Conv2d(widths[0], 1, 4, 1, 0, bias=False), nn.Flatten())


COUNTED = (
    "resnet18", "resnet50", "mobilenet_v2", "vgg16_bn", "convnext_tiny", "efficientnet_b0", "densenet121", _GENERATOR,
    _DISCRIMINATOR,
)  # fmt: skip
SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
_TIMM = (
    "convnext_nano", "efficientnet_lite0", "resnetv2_50", "mobilenetv3_large_100", "vit_tiny_patch16_224",
    "mixer_s32_224",
)  # fmt: skip


def _of(name: str, training: bool) -> Model:
    if name in (_GENERATOR, _DISCRIMINATOR):
        return Model(name, 128, 64, training, arguments=(64,), channels=100 if name == _GENERATOR else 3)
    package = "timm" if name.startswith("timm/") else "torchvision"
    return Model(name, 16 if name in SEGMENTATION else 64, 224, training, package=package)


_NAMES = (*COUNTED, *SEGMENTATION, *(f"timm/{name}" for name in _TIMM))
NETS = {net.row: net for name in _NAMES for net in (_of(name, False), _of(name, True))}


def chosen(words: Sequence[str]) -> list[Net]:
    """Return the rows of the named models, or whose name contains another word; all without words. Raises ValueError
    for a word that no row contains."""
    fits: Callable[[str, Net], bool] = lambda word, net: word == net.name if word in _NAMES else word in net.row  # noqa: E731
    for word in words:
        if not word or not any(fits(word, net) for net in NETS.values()):
            raise ValueError(f"no model's row contains {word!r}; `python -m benchmarks.bench {WORD} --list` shows them")
    return [net for net in NETS.values() if not words or any(fits(word, net) for word in words)]


def check_installed(nets: Sequence[Net]) -> None:
    """Raise ValueError if the package of a model is not installed."""
    for package in ("torchvision", "timm"):
        missing = [net.name for net in nets if isinstance(net, Model) and net.package == package]
        if missing and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{missing[0]} is a model of {package}, which is not installed: install it, or name models of others, "
                f"as in `python -m benchmarks.bench {WORD} dcgan`"
            )


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Return a sentence: the number of right rows and of rows at their goals, and the mean and least counted ratio."""
    rows = {name: row for name, row in rows.items() if name in NETS}
    right = {name: row for name, row in rows.items() if row["error_ok"]}
    reached = sum(row["ratio"] >= 1.0 for row in right.values())
    text = f"{len(right)} of {len(rows)} rows right, {reached} not behind torch's best"
    ratios = [row["ratio"] for name, row in right.items() if NETS[name].name in COUNTED]
    if not ratios:
        return text
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    counted = f"of {len(ratios)} counted (of {2 * len(COUNTED)})"
    return (
        f"{text}; {counted} the geometric mean is {mean:.3f} (goal {MEAN_GOAL}), the "
        f"least {min(ratios):.3f} (goal {LEAST_GOAL})"
    )
