"""Image classifiers: the network of the ECE 408 course project, and a small modern one."""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn, ops
from minidl.tensors import Tensor

Device = torch.device | str | None


class ECE408(nn.Sequential):
    """LeNet-5 as widened in ECE 408 (Applied Parallel Programming, University of Illinois).

    [N, 1, 28, 28] -> [N, classes]

        convolution 5x5, 32    24x24    ReLU
        average pool 2x2       12x12
        convolution 5x5, 64      8x8    ReLU
        average pool 2x2         4x4
        linear 1024 -> 128              ReLU
        linear 128 -> classes

    After LeCun, Bottou, Bengio and Haffner, Proc. IEEE 86(11), 1998.
    """

    def __init__(self, classes: int = 10, device: Device = None, dtype: torch.dtype = torch.float32) -> None:
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            nn.Conv2d(1, 32, 5, act="relu", pool="avg", **options),
            nn.Conv2d(32, 64, 5, act="relu", pool="avg", **options),
            nn.Flatten(),
            nn.Linear(1024, 128, act="relu", **options),
            nn.Linear(128, classes, **options),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second, _, hidden, last = self
        x = second(first(x)).permute(0, 2, 3, 1)
        # x is in channels-last memory: permuting 128 rows of weights is cheaper than permuting all images.
        weight = hidden.weight.reshape(-1, x.shape[3], *x.shape[1:3]).permute(0, 2, 3, 1)
        return last(ops.linear(x.flatten(1), weight.flatten(1), hidden.bias, hidden.act))


class SmallCNN(nn.Module):
    """3x3 convolutions with batch norm and ReLU, halved by max pooling, then the mean over all pixels.

    [N, channels, H, W] -> [N, classes], for any H and W; for 28 x 28 pixels

        2 x convolution 3x3,  32    28x28
        max pool 2x2                14x14
        2 x convolution 3x3,  64    14x14
        max pool 2x2                  7x7
        2 x convolution 3x3, 128      7x7
        mean over pixels, dropout
        linear 128 -> classes

    Smaller pictures have fewer stages (`stages`); from 64 pixels on, the first convolution has a stride
    (`first_stride`).
    With ten classes there are 10,000 to 400,000 parameters. Batch norms are always in float32.
    After Simonyan and Zisserman, arXiv 1409.1556; Ioffe and Szegedy, arXiv 1502.03167; Lin, Chen and Yan, arXiv
    1312.4400.
    """

    def __init__(
        self, channels: int, size: tuple[int, int], classes: int, dropout: float = 0.0, device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        stride = first_stride(size)
        for stage in range(stages(size)):
            width = 32 << stage
            if stage > 0:
                layers.append(nn.MaxPool2d(2))
            for _ in range(2):
                layers += [
                    nn.Conv2d(
                        channels, width, 2 * stride + 1, stride, padding=stride, bias=False, device=device, dtype=dtype
                    ),
                    nn.BatchNorm2d(width, act="relu", device=device),
                ]
                channels, stride = width, 1
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(channels, classes, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.pool(self.features(x)).flatten(1)))


def stages(size: tuple[int, int]) -> int:
    """The number of stages, from 1 to 3. The picture is halved between them; its shorter side stays 4 or more."""
    side = min(size)
    return 3 if side >= 16 else 2 if side >= 8 else 1


def first_stride(size: tuple[int, int]) -> int:
    """The power of two, at most 16, that reduces the shorter side to 32 to 63 pixels; 1 if it has fewer."""
    return min(16, max(1, 1 << (min(size) // 32).bit_length() >> 1))
