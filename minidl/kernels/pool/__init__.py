"""Maximum and average pooling of images, adaptive and global averages, and their gradients.

    x, dx  [N, C, H, W]        y, dy  [N, C, OH, OW]
    y[n, c, oh, ow] = max or mean over r, s of x[n, c, oh * stride - padding + r * dilation, ...]

Shapes are as in torch. x is read as it is if it is in `torch.channels_last` or contiguous, where every channel is an
image of one channel, and the result has the same order; x in another order is copied, and results are channels-last. A
block of BLOCK_P pixels by BLOCK_C channels loops over the window.

Padding counts as -inf for a maximum and as 0 for a mean. A mean divides by the window size with padding
(`count_include_pad`) or without it, or by `divisor_override`. An adaptive window for output o of O has the inputs from
floor(o I / O) up to ceil((o + 1) I / O), exclusive.

Results do not depend on scheduling: in a gradient, each pixel adds its windows in order; if windows do not overlap,
each window writes its pixels. Read `geometry` and `problem` first, then `kernels`.
"""

from typing import Any

import torch

from minidl.kernels import check
from minidl.kernels.check import Pair
from minidl.kernels.pool.geometry import (
    Windows,
    adaptive_volume_windows,
    adaptive_windows,
    volume_windows,
    windows,
)
from minidl.kernels.pool.kernels import avg_pool2d, avg_pool2d_grad, max_pool2d, max_pool2d_grad, planes

__all__ = [
    "Pair", "Windows", "adaptive_volume_windows", "adaptive_windows", "avg_pool2d", "avg_pool2d_grad", "checked",
    "max_pool2d", "max_pool2d_grad", "planes", "volume_windows", "windows",
]  # fmt: skip


def checked(op: str, x: torch.Tensor, shape: str = "N, C, H, W") -> Any:
    """Return (H, W) of an image tensor. Raises TypeError unless floating, ValueError unless it has the named shape."""
    check.floating(op, x=x)
    if x.dim() != len(shape.split(", ")):
        raise ValueError(f"{op}: input has shape {list(x.shape)}, expected [{shape}]; add dimensions with unsqueeze")
    return tuple(x.shape[2:])
