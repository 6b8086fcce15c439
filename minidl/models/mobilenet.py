"""MobileNetV2: inverted residuals of depthwise convolutions, with torchvision's module names.

Sandler, Howard, Zhu, Zhmoginov and Chen, arXiv 1801.04381.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn, ops
from minidl.tensors import Tensor

Device = torch.device | str | None
# Per stage: expansion, channels, blocks, stride of the first block.
STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


class ConvNorm(nn.Sequential):
    """A convolution without bias, batch norm and ReLU6."""

    def __init__(
        self, channels: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, **options: Any
    ) -> None:
        conv = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=False, **options)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out")
        super().__init__(conv, nn.BatchNorm2d(outputs, device=options.get("device")), nn.ReLU6())


class InvertedResidual(nn.Module):
    """1x1 to `expansion` times the channels, 3x3 depthwise, 1x1 to `outputs`, plus x if the shapes are equal."""

    def __init__(self, channels: int, outputs: int, stride: int, expansion: int, **options: Any) -> None:
        super().__init__()
        hidden = channels * expansion
        last = nn.Conv2d(hidden, outputs, 1, bias=False, **options)
        nn.init.kaiming_normal_(last.weight, mode="fan_out")
        layers: list[nn.Module] = [ConvNorm(channels, hidden, 1, **options)] if expansion > 1 else []
        layers += [ConvNorm(hidden, hidden, 3, stride, hidden, **options), last]
        self.conv = nn.Sequential(*layers, nn.BatchNorm2d(outputs, device=options.get("device")))
        self.has_shortcut = stride == 1 and channels == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return x + y if self.has_shortcut else y


class MobileNetV2(nn.Module):
    """[N, channels, H, W] -> [N, classes]: a 3x3 convolution of stride 2, 17 inverted residuals, a 1x1 convolution to
    1280 channels, the mean over pixels, dropout and a linear layer.

    With `small`, for pictures of 32x32 as CIFAR's, the first two strides are 1.
    """

    def __init__(
        self, classes: int = 1000, channels: int = 3, dropout: float = 0.2, small: bool = False, device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = [ConvNorm(channels, 32, stride=1 if small else 2, **options)]
        inputs = 32
        for expansion, outputs, count, stride in STAGES:
            stride = 1 if small and outputs == 24 else stride
            for index in range(count):
                layers.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expansion, **options))
                inputs = outputs
        self.features = nn.Sequential(*layers, ConvNorm(inputs, 1280, 1, **options))
        last = nn.Linear(1280, classes, **options)
        nn.init.normal_(last.weight, 0.0, 0.01)
        assert last.bias is not None
        nn.init.zeros_(last.bias)
        self.classifier = nn.Sequential(nn.Dropout(dropout), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(ops.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1))


def mobilenet_v2(classes: int = 1000, **options: Any) -> MobileNetV2:
    """3.5 million parameters, 0.3 billion multiplications for 224x224 pixels. Options as `MobileNetV2`'s."""
    return MobileNetV2(classes, **options)
