"""DenseNet-121: each layer uses the outputs of all layers before it, with torchvision's module names.

Huang, Liu, van der Maaten and Weinberger, arXiv 1608.06993.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn, ops
from minidl.tensors import Tensor

Device = torch.device | str | None


class NamedSequential(nn.Module):
    """Modules applied in order, as in Sequential, with names set as attributes."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class DenseLayer(nn.Module):
    """conv3x3(relu(bn(conv1x1(relu(bn(x)))))). [N, channels, H, W] -> [N, growth, H, W]"""

    def __init__(self, channels: int, growth: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels, device=options["device"])
        self.relu1 = nn.ReLU()
        self.conv1 = _conv(channels, hidden, 1, **options)
        self.norm2 = nn.BatchNorm2d(hidden, device=options["device"])
        self.relu2 = nn.ReLU()
        self.conv2 = _conv(hidden, growth, 3, padding=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))


class DenseBlock(nn.Module):
    """Layers that each take the input and all previous outputs, concatenated along the channels."""

    def __init__(self, count: int, channels: int, growth: int, hidden: int, **options: Any) -> None:
        super().__init__()
        for index in range(count):
            setattr(self, f"denselayer{index + 1}", DenseLayer(channels + index * growth, growth, hidden, **options))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = ops.cat([x, layer(x)], 1)
        return x


class DenseNet(nn.Module):
    """[N, channels, H, W] -> [N, classes]: a 7x7 convolution and a max pool, four dense blocks with a 1x1 convolution
    to half of the channels and a mean over 2x2 pixels between them, batch norm, ReLU, the mean over pixels, linear.

    With `small`, for pictures of 32x32 as CIFAR's or smaller, the first convolution is 3x3 with stride 1, there is no
    max pool after it, and the means between blocks round sizes up.
    """

    def __init__(
        self, blocks: tuple[int, ...], classes: int = 1000, channels: int = 3, growth: int = 32, first: int = 64,
        small: bool = False, device: Device = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        features = NamedSequential()
        features.conv0 = _conv(channels, first, *((3, 1, 1) if small else (7, 2, 3)), **options)
        features.norm0 = nn.BatchNorm2d(first, device=device)
        features.relu0 = nn.ReLU()
        features.pool0 = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        inputs = first
        for index, count in enumerate(blocks, start=1):
            setattr(features, f"denseblock{index}", DenseBlock(count, inputs, growth, 4 * growth, **options))
            inputs += count * growth
            if index < len(blocks):
                transition = NamedSequential()
                transition.norm, transition.relu = nn.BatchNorm2d(inputs, device=device), nn.ReLU()
                transition.conv = _conv(inputs, inputs // 2, 1, **options)
                transition.pool = nn.AvgPool2d(2, 2, ceil_mode=small)
                setattr(features, f"transition{index}", transition)
                inputs //= 2
        features.norm5 = nn.BatchNorm2d(inputs, device=device)
        self.features = features
        self.classifier = nn.Linear(inputs, classes, **options)
        assert self.classifier.bias is not None
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(ops.adaptive_avg_pool2d(ops.relu(self.features(x)), (1, 1)).flatten(1))


def _conv(channels: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, **options: Any) -> nn.Conv2d:
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False, **options)
    nn.init.kaiming_normal_(layer.weight)
    return layer


def densenet121(classes: int = 1000, **options: Any) -> DenseNet:
    """8.0 million parameters, 2.9 billion multiplications for 224x224 pixels. Options as `DenseNet`'s."""
    return DenseNet((6, 12, 24, 16), classes, **options)
