"""DenseNet-121: each layer sees all layers before it, with torchvision's module names.

Huang, Liu, van der Maaten and Weinberger, arXiv 1608.06993.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn, ops
from minidl.tensors import Tensor

Device = torch.device | str | None


class Named(nn.Module):
    """Modules applied one after another, each under its own name."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class DenseLayer(nn.Module):
    """conv3x3(relu(bn(conv1x1(relu(bn(x)))))). [N, channels, H, W] -> [N, growth, H, W]"""

    def __init__(self, channels: int, growth: int, inside: int, **place: Any) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels, device=place["device"])
        self.relu1 = nn.ReLU()
        self.conv1 = _conv(channels, inside, 1, **place)
        self.norm2 = nn.BatchNorm2d(inside, device=place["device"])
        self.relu2 = nn.ReLU()
        self.conv2 = _conv(inside, growth, 3, padding=1, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))


class DenseBlock(nn.Module):
    """Layers whose results are joined along the channels, each for all layers after it."""

    def __init__(self, count: int, channels: int, growth: int, inside: int, **place: Any) -> None:
        super().__init__()
        for index in range(count):
            setattr(self, f"denselayer{index + 1}", DenseLayer(channels + index * growth, growth, inside, **place))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = ops.cat([x, layer(x)], 1)
        return x


class DenseNet(nn.Module):
    """[N, channels, H, W] -> [N, classes]: a 7x7 convolution and a max pool, four dense blocks with a 1x1 convolution
    to half of the channels and a mean over 2x2 pixels between them, batch norm, ReLU, the mean over pixels, linear.

    With `small`, for pictures of 32x32 as CIFAR's or less, the first convolution is 3x3 without a stride, nothing pools
    after it, and the means between blocks round sizes up.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        classes: int = 1000,
        channels: int = 3,
        growth: int = 32,
        first: int = 64,
        small: bool = False,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        features = Named()
        features.conv0 = _conv(channels, first, *((3, 1, 1) if small else (7, 2, 3)), **place)
        features.norm0 = nn.BatchNorm2d(first, device=device)
        features.relu0 = nn.ReLU()
        features.pool0 = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        reached = first
        for index, count in enumerate(blocks, start=1):
            setattr(features, f"denseblock{index}", DenseBlock(count, reached, growth, 4 * growth, **place))
            reached += count * growth
            if index < len(blocks):
                between = Named()
                between.norm, between.relu = nn.BatchNorm2d(reached, device=device), nn.ReLU()
                between.conv = _conv(reached, reached // 2, 1, **place)
                between.pool = nn.AvgPool2d(2, 2, ceil_mode=small)
                setattr(features, f"transition{index}", between)
                reached //= 2
        features.norm5 = nn.BatchNorm2d(reached, device=device)
        self.features = features
        self.classifier = nn.Linear(reached, classes, **place)
        assert self.classifier.bias is not None
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(ops.adaptive_avg_pool2d(ops.relu(self.features(x)), (1, 1)).flatten(1))


def _conv(channels: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, **place: Any) -> nn.Conv2d:
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False, **place)
    nn.init.kaiming_normal_(layer.weight)
    return layer


def densenet121(classes: int = 1000, **options: Any) -> DenseNet:
    """8.0 million parameters, 2.9 billion multiplications for 224x224 pixels. Options as `DenseNet`'s."""
    return DenseNet((6, 12, 24, 16), classes, **options)
