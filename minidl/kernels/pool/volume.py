"""Pooling of volumes [N, C, D, H, W]: of all slices as images, then along the depth of images [D, H W].

Between both steps values have the dtype of the computation, so results and gradients are rounded once. Every channel
of a contiguous volume is pooled as a volume of one channel, and results are contiguous; all others are in
torch.channels_last_3d.
"""

import torch

from minidl.kernels.pool.geometry import Windows
from minidl.kernels.pool.kernels import avg_pool2d, avg_pool2d_grad, max_pool2d, max_pool2d_grad
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


def by_channel(x: torch.Tensor) -> bool:
    """Return whether every channel of x is pooled as a volume of one channel."""
    return x.shape[1] > 1 and x.is_contiguous()


def _volumes(x: torch.Tensor, alone: bool) -> torch.Tensor:
    """Return x in torch.channels_last_3d, with every channel as a volume if `alone`."""
    x = x.reshape(x.shape[0] * x.shape[1], 1, *x.shape[2:]) if alone else x
    return x.contiguous(memory_format=torch.channels_last_3d)


def _seen(x: torch.Tensor, *size: int) -> torch.Tensor:
    """Return a view of x [N, C, ...], channels-last, with other sizes in place of N and ...: [size[0], C, ...]."""
    return x.movedim(1, -1).reshape(*size, x.shape[1]).movedim(-1, 1)


def _result(x: torch.Tensor, lead: torch.Size, *size: int) -> torch.Tensor:
    """Return images as volumes [*lead, *size]."""
    volumes = lead[0] if x.shape[1] == lead[1] else lead[0] * lead[1]
    return _seen(x, volumes, *size).reshape(*lead, *size)


@replayed
def max_pool3d(
    x: torch.Tensor, slices: Windows, depth: Windows, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return y, and the taps of the maxima in both steps, as images, None unless `keep`."""
    volumes = _volumes(x, by_channel(x))
    N, D = len(volumes), x.shape[2]
    pooled, inside = max_pool2d(_seen(volumes, N * D, *slices.size), slices, keep, launch.acc_torch(x.dtype))
    y, along = max_pool2d(_seen(pooled, N, *depth.size), depth, keep, x.dtype)
    return _result(y, x.shape[:2], depth.output[0], *slices.output), inside, along


@replayed
def max_pool3d_grad(
    dy: torch.Tensor, inside: torch.Tensor, along: torch.Tensor, slices: Windows, depth: Windows
) -> torch.Tensor:
    """Return dx from dy and the taps."""
    N, D = len(along), depth.size[0]
    volumes = _volumes(dy, len(dy) < N)
    pooled = max_pool2d_grad(_seen(volumes, N, *depth.output), along, depth, launch.acc_torch(dy.dtype))
    dx = max_pool2d_grad(_seen(pooled, N * D, *slices.output), inside, slices, dy.dtype)
    return _result(dx, dy.shape[:2], D, *slices.size)


@replayed
def avg_pool3d(x: torch.Tensor, slices: Windows, depth: Windows) -> torch.Tensor:
    """Return the means of windows."""
    volumes = _volumes(x, by_channel(x))
    N, D = len(volumes), x.shape[2]
    pooled = avg_pool2d(_seen(volumes, N * D, *slices.size), slices, launch.acc_torch(x.dtype))
    y = avg_pool2d(_seen(pooled, N, *depth.size), depth, x.dtype)
    return _result(y, x.shape[:2], depth.output[0], *slices.output)


@replayed
def avg_pool3d_grad(dy: torch.Tensor, slices: Windows, depth: Windows, alone: bool) -> torch.Tensor:
    """Return dx from dy; `alone` is `by_channel` of x."""
    volumes = _volumes(dy, alone)
    N, D = len(volumes), depth.size[0]
    pooled = avg_pool2d_grad(_seen(volumes, N, *depth.output), depth, launch.acc_torch(dy.dtype))
    dx = avg_pool2d_grad(_seen(pooled, N * D, *slices.output), slices, dy.dtype)
    return _result(dx, dy.shape[:2], D, *slices.size)
