"""Layers whose weight is divided by its greatest singular value: they stretch no input.

    w' = weight / sigma,  sigma = |W v|,  W = weight as [out, height * width * in]

Power iteration: v, a unit vector that is kept beside the weight, moves to W^T W v / |W^T W v| at each use that records
the weight's gradient in training; weights change little from step to step, so v stays near the first right singular
vector. The gradient goes through sigma, with v held fixed. Miyato, Kataoka, Koyama and Yoshida, arXiv 1802.05957.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl import ops
from minidl.autograd import is_grad_enabled, no_grad
from minidl.nn import init
from minidl.nn.conv import Conv2d
from minidl.nn.layers import Linear
from minidl.nn.module import Module, Parameter
from minidl.tensor import Tensor

FIRST_ITERATIONS = 15


class _Spectral(Module):
    """A layer that uses `normalised()` in place of its weight. weight_v [height * width * in, 1] is a buffer."""

    weight: Parameter

    def reset_direction(self, iterations: int = FIRST_ITERATIONS) -> None:
        """Begin with a random v and so many iterations: call it where the weight has been filled anew."""
        weight = self.weight
        v = Tensor(torch.empty(weight.numel() // weight.shape[0], 1, device=weight.device, dtype=weight.dtype))
        self.register_buffer("weight_v", init.normal_(v))
        for _ in range(iterations):
            self._iterate(self._stretched())

    def normalised(self) -> Tensor:
        """The weight with a greatest singular value of about 1."""
        y = self._stretched()
        weight = self.weight / ops.norm(y)
        if self.training and self.weight.requires_grad and is_grad_enabled():
            self._iterate(y.detach())
        return weight

    def _stretched(self) -> Tensor:
        # A copy: v moves before the gradient of this product is taken.
        return ops.matmul(self._matrix(), self.weight_v.clone())  # [out, 1]

    def _iterate(self, y: Tensor) -> None:
        with no_grad():
            v = ops.matmul(self._matrix().T, y)
            self.weight_v.copy_(v / ops.norm(v))

    def _matrix(self) -> Tensor:
        """[out, ...] in the order of the memory of a convolution's weight, which is channels-last."""
        weight: Tensor = self.weight.permute(0, 2, 3, 1) if self.weight.ndim == 4 else self.weight
        return weight.reshape(weight.shape[0], -1)


class SpectralConv2d(Conv2d, _Spectral):
    """`Conv2d` with spectral normalisation: arguments, shapes and the names of weight and bias are its."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reset_direction()

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(
            x, self.normalised(), self.bias, self.stride, self.padding, self.dilation, self.groups, self.act,
            pool=self.pool,
        )  # fmt: skip


class SpectralLinear(Linear, _Spectral):
    """`Linear` with spectral normalisation: arguments, shapes and the names of weight and bias are its."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reset_direction()

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.normalised(), self.bias, self.act)
