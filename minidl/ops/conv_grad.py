"""Gradients of convolutions by recorded operations, for gradients of every order.

A convolution is linear in its input and in its weight. Its gradients are convolutions again: of the input a transposed
one, of the weight `GradWeight`, whose own gradients are a convolution and a transposed one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import conv as kernels
from minidl.kernels.conv.geometry import Geometry
from minidl.ops.activation_grad import epilogue_grad
from minidl.ops.conv import Conv2d, JoinedConv2d
from minidl.ops.conv_sequence import Conv1d, ConvTranspose1d
from minidl.ops.conv_transpose import ConvTranspose2d
from minidl.ops.join import Cat
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


def _convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return Conv2d.apply(x, weight, None, geometry, None, None)


def _conv_transpose(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return ConvTranspose2d.apply(x, weight, None, geometry, None, None)


@recordable(grad_input=_conv_transpose, convolve=_convolve)
class GradWeight(Function):
    """The gradient of a convolution's weight, linear in x and in the gradient dz of the result."""

    grad_input, convolve = staticmethod(kernels.grad_input), Conv2d.infer

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dz: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        ctx.save(x, dz)
        ctx.geometry = geometry
        return kernels.grad_weight(x, dz, geometry)

    @classmethod
    def backward(cls, ctx: Any, ddw: Any) -> Any:
        x, dz = ctx.saved
        dx = cls.grad_input(dz, ddw, ctx.geometry) if ctx.needs[0] else None
        return dx, cls.convolve(x, ddw, ctx.geometry) if ctx.needs[1] else None, None


def _operands(ctx: Any) -> list[Tensor | None]:
    """Return the inputs, the weight and the result as variables; forward saved other tensors with their values."""
    *inputs, weight, y = ctx.context.saved
    added = getattr(ctx, "at", None)  # the extra dimension of size 1 of sequences

    def variable(of_value: Callable[[torch.Tensor], Any], raw: torch.Tensor) -> Tensor:
        return of_value(raw) if added is None else of_value(raw.squeeze(added)).unsqueeze(added)

    operands: list[Tensor | None] = [variable(partial(ctx.input, i), raw) for i, raw in enumerate((*inputs, weight))]
    return [*operands, None if y is None else variable(ctx.output, y)]


# The gradients of an input and a weight by (ctx, dz, weight) and (ctx, dz, x); a transposed convolution swaps x and dz.
GRADIENTS: dict[tuple[Any, ...], dict[str, Callable[..., Any]]] = {
    (Conv2d, JoinedConv2d, Conv1d): {
        "grad_input": lambda ctx, dz, weight: _conv_transpose(dz, weight, ctx.geometry),
        "grad_weight": lambda ctx, dz, x: GradWeight.apply(x, dz, ctx.geometry),
    },
    (ConvTranspose2d, ConvTranspose1d): {
        "grad_input": lambda ctx, dz, weight: _convolve(dz, weight, ctx.geometry),
        "grad_weight": lambda ctx, dz, x: GradWeight.apply(dz, x, ctx.geometry),
    },
}
for functions, gradients in GRADIENTS.items():
    for function in functions:
        recordable(operands=_operands, concat=partial(Cat.apply, 1), epilogue_grad=epilogue_grad, **gradients)(function)
