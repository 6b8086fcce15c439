"""Residual networks for 224x224 pictures, with torchvision's module names.

He, Zhang, Ren and Sun, arXiv 1512.03385. As in torchvision, the 3x3 convolution of a bottleneck has the stride.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn
from minidl.tensors import Tensor

Device = torch.device | str | None


def conv(channels: int, outputs: int, kernel: int, stride: int = 1, **options: Any) -> nn.Conv2d:
    """Return a convolution without bias, padded so that only the stride changes the image's size."""
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, bias=False, **options)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class BasicBlock(nn.Module):
    """relu(bn(conv3x3(relu(bn(conv3x3(x))))) + x). [N, channels, H, W] -> [N, width, H / stride, W / stride]"""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, downsample: nn.Module | None, **options: Any) -> None:
        super().__init__()
        self.conv1 = conv(channels, width, 3, stride, **options)
        self.bn1 = nn.BatchNorm2d(width, device=options.get("device"))
        self.relu = nn.ReLU()
        self.conv2 = conv(width, width, 3, **options)
        self.bn2 = nn.BatchNorm2d(width, device=options.get("device"))
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + identity)


class Bottleneck(nn.Module):
    """1x1 to `width` channels, 3x3, 1x1 to 4 `width`, and the input added. [N, channels, H, W] -> [N, 4 width, ...]"""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, downsample: nn.Module | None, **options: Any) -> None:
        super().__init__()
        device = options.get("device")
        self.conv1 = conv(channels, width, 1, **options)
        self.bn1 = nn.BatchNorm2d(width, device=device)
        self.conv2 = conv(width, width, 3, stride, **options)
        self.bn2 = nn.BatchNorm2d(width, device=device)
        self.conv3 = conv(width, 4 * width, 1, **options)
        self.bn3 = nn.BatchNorm2d(4 * width, device=device)
        self.relu = nn.ReLU()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + identity)


class ResNet(nn.Module):
    """[N, channels, H, W] -> [N, classes].

        convolution 7x7, 64, stride 2, batch norm, ReLU, max pool 3x3 stride 2
        four stages of `blocks` blocks of 64, 128, 256 and 512 channels, halved by the first block of each but the first
        mean over pixels, linear -> classes

    With `small`, for pictures of 32x32 as in CIFAR, the first convolution is 3x3, stride 1, without the max pool.
    """

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, int, int, int], classes: int = 1000,
        channels: int = 3, small: bool = False, device: Device = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.conv1 = conv(channels, 64, 3 if small else 7, 1 if small else 2, **options)
        self.bn1 = nn.BatchNorm2d(64, device=device)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        inputs = 64
        for stage, count in enumerate(blocks):
            width, layers = 64 << stage, []
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(_block(block, inputs, width, stride, **options))
                inputs = width * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes, **options)

    def features(self, x: Tensor) -> Tensor:
        """Return the output of the last stage, before the mean over pixels."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(self.features(x)).flatten(1))


def _block(block: type[Any], channels: int, width: int, stride: int, **options: Any) -> nn.Module:
    outputs, shortcut = width * block.expansion, None
    if stride > 1 or channels != outputs:
        norm = nn.BatchNorm2d(outputs, device=options["device"])
        shortcut = nn.Sequential(conv(channels, outputs, 1, stride, **options), norm)
    return block(channels, width, stride, shortcut, **options)


def resnet18(classes: int = 1000, **options: Any) -> ResNet:
    """11.7 million parameters, 1.8 billion multiplications for 224x224 pixels. Options as `ResNet`'s."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, **options)


def resnet34(classes: int = 1000, **options: Any) -> ResNet:
    """21.8 million parameters, 3.6 billion multiplications for 224x224 pixels. Options as `ResNet`'s."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, **options)


def resnet50(classes: int = 1000, **options: Any) -> ResNet:
    """25.6 million parameters, 4.1 billion multiplications for 224x224 pixels. Options as `ResNet`'s."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, **options)
