"""Second derivatives of linear operations: their backward as recorded operations on Tensors.

`backward(create_graph=True)` and `autograd.grad` call `Function.second` instead of `Function.backward`. Most functions
in `minidl.ops` have one definition for both. Functions without `second` are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations

Raw = Callable[[torch.Tensor], torch.Tensor]


def second(*functions: type[Function]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the second derivative of these functions."""

    def register(derivative: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            function.recorded_backward = staticmethod(derivative)
        return derivative

    return register


def first(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    """Return the gradient of the first input; others are settings."""
    return dx, *(None for _ in ctx.needs[1:])
