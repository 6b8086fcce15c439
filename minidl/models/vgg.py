"""VGG-16 with batch norms, with torchvision's module names. Simonyan and Zisserman, arXiv 1409.1556."""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn
from minidl.tensors import Tensor

Device = torch.device | str | None
STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions, a max pool after each


class VGG(nn.Module):
    """[N, channels, H, W] -> [N, classes]: 13 convolutions of 3x3 in five stages, each with a batch norm and a ReLU;
    a mean to 7x7 pixels, and three linear layers.

    With `small`, for pictures of 32x32 as CIFAR's or smaller, the mean is over all pixels, and pools round sizes up.
    """

    def __init__(
        self, classes: int = 1000, channels: int = 3, dropout: float = 0.5, small: bool = False, device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = []
        for width, count in STAGES:
            for _ in range(count):
                conv = nn.Conv2d(channels, width, 3, padding=1, **options)
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                _zero_bias(conv)
                layers += [conv, nn.BatchNorm2d(width, device=device), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=small))
        self.features = nn.Sequential(*layers)
        side = 1 if small else 7
        self.avgpool = nn.AdaptiveAvgPool2d((side, side))
        features = channels * side * side
        first, second, last = (
            nn.Linear(*sizes, **options) for sizes in ((features, 4096), (4096, 4096), (4096, classes))
        )
        for linear in (first, second, last):
            nn.init.normal_(linear.weight, 0.0, 0.01)
            _zero_bias(linear)
        self.classifier = nn.Sequential(
            first, nn.ReLU(), nn.Dropout(dropout), second, nn.ReLU(), nn.Dropout(dropout), last
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def _zero_bias(layer: nn.Conv2d | nn.Linear) -> None:
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def vgg16_bn(classes: int = 1000, **options: Any) -> VGG:
    """138.4 million parameters, 15.5 billion multiplications for 224x224 pixels. Options as `VGG`'s."""
    return VGG(classes, **options)
