"""Random cases of convolutions."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels.activation import Activation
from minidl.testing.specs.base import Case
from minidl.testing.specs.make import Make


def _bias_and_act(make: Make, channels: int) -> tuple[torch.Tensor | None, Activation]:
    bias = make.tensor(channels) if make.integer(0, 1) else None
    return bias, make.choice([None, "relu", ("leaky_relu", 0.25)])


def draw_conv(axes: int, make: Make) -> Case:
    """Draw a case of `conv1d`, `conv2d` or `conv3d`."""

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(make.integer(least, most) for _ in range(axes))

    groups = make.choice([1, 1, 1, 2, 3])
    N, C, M = make.choice([2, 1, 3, 0]), make.choice([1, 3, 2, 13, 16, 32]), make.choice([2, 1, 5, 12, 16, 20])
    kernel, stride, dilation = each(1, 5 if axes < 3 else 3), each(1, 3), each(1, 2)
    padding: Any = make.choice(["numbers", "numbers", "numbers", "same", "valid"] + ["causal"] * (axes == 1))
    low: tuple[int, ...] = (0,) * axes
    if padding == "numbers":
        low = padding = each(0, 3)
    elif padding == "same":
        stride, low = (1,) * axes, tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, low, strict=True)]
    size = [smallest + make.choice([0, 1, 2, 5, 9] if axes < 3 else [0, 1, 3]) for smallest in least]
    bias, act = _bias_and_act(make, groups * M)
    x, weight = make.tensor(N, groups * C, *size), make.tensor(groups * M, C, *kernel)
    return Case((x, weight, bias, stride, padding, dilation, groups, act))


def draw_transposed(axes: int, make: Make) -> Case:
    """Draw a case of `conv_transpose1d`, `conv_transpose2d` or `conv_transpose3d`."""

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(make.integer(least, most) for _ in range(axes))

    groups = make.choice([1, 1, 1, 2, 3])
    N, C, M = make.choice([2, 1, 3, 0]), make.choice([1, 3, 2, 13, 16, 32]), make.choice([2, 1, 3, 5, 12, 16])
    kernel, stride, dilation = each(1, 5 if axes < 3 else 3), each(1, 3), each(1, 2)
    ends = tuple(make.integer(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    size = (make.choice([1, 2, 5, 9]), make.choice([1, 3, 4, 10]))[:axes]
    if axes == 3:
        size = each(1, 3)
    padding = []
    for i in range(axes):
        full = (size[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + ends[i]
        padding.append(min(make.integer(0, 3), full // 2))
    bias, act = _bias_and_act(make, groups * M)
    x, weight = make.tensor(N, groups * C, *size), make.tensor(groups * C, M, *kernel)
    return Case((x, weight, bias, stride, tuple(padding), ends, groups, dilation, act))
