"""U-Net: an image in, a class for each pixel out. Ronneberger, Fischer and Brox, arXiv 1505.04597.

As it is built today: convolutions keep the size of the image, and a batch norm follows each.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl import nn, ops
from minidl.tensors import Tensor

Device = torch.device | str | None


class DoubleConv(nn.Sequential):
    """Twice a 3x3 convolution, batch norm and ReLU. [N, channels, H, W] -> [N, outputs, H, W]"""

    def __init__(self, channels: int, outputs: int, **options: Any) -> None:
        layers: list[nn.Module] = []
        for width in (channels, outputs):
            conv = nn.Conv2d(width, outputs, 3, padding=1, bias=False, **options)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            layers += [conv, nn.BatchNorm2d(outputs, device=options["device"]), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """[N, channels, H, W] -> [N, classes, H, W], for sizes that are multiples of 2^depth.

    Down: `depth` times two convolutions and a 2x2 max pool, with twice the channels each time; up: a 2x2 transposed
    convolution of stride 2, concatenated with the result of this level on the way down, and two convolutions.
    """

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        width: int = 64,
        depth: int = 4,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.depth = depth
        widths = [width << level for level in range(depth + 1)]
        self.pool = nn.MaxPool2d(2)
        for level, (before, after) in enumerate(zip([channels, *widths], widths, strict=False)):
            setattr(self, f"down{level}", DoubleConv(before, after, **options))
        for level in reversed(range(depth)):
            setattr(self, f"up{level}", nn.ConvTranspose2d(widths[level + 1], widths[level], 2, 2, **options))
            setattr(self, f"join{level}", DoubleConv(2 * widths[level], widths[level], **options))
        self.head = nn.Conv2d(width, classes, 1, **options)

    def forward(self, x: Tensor) -> Tensor:
        if any(size % 2**self.depth for size in x.shape[2:]):
            raise ValueError(
                f"UNet: x has shape {list(x.shape)}, expected a height and width that are multiples of "
                f"{2**self.depth}; pad the image, or use a smaller depth"
            )
        levels = []
        for level in range(self.depth):
            levels.append(getattr(self, f"down{level}")(x))
            x = self.pool(levels[-1])
        x = getattr(self, f"down{self.depth}")(x)
        for level in reversed(range(self.depth)):
            x = ops.cat([levels[level], getattr(self, f"up{level}")(x)], 1)
            x = getattr(self, f"join{level}")(x)
        return self.head(x)


def unet(classes: int, **options: Any) -> UNet:
    """31.0 million parameters with 3 channels and 64 to 1024 inside. Options as `UNet`'s."""
    return UNet(classes, **options)
