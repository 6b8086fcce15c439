"""Functions of minidl's Tensors on torch's tensors: minidl's graph computes their gradients, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from minidl.autograd import enable_grad
from minidl.tensors import Tensor


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], is_grad_enabled: bool, *tensors: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.variables = [
            None if t is None else Tensor(t.detach(), requires_grad=need and is_grad_enabled)
            for t, need in zip(tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with enable_grad():
            ctx.results = function(*ctx.variables)
        return tuple(None if y is None else y.data for y in ctx.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors  # raises an error if one was changed in place
        for y, dy in zip(ctx.results, gradients, strict=True):
            if dy is not None and y.requires_grad:
                y.backward(Tensor(dy), retain_graph=True)
        computed = [None if t is None or t.grad is None else t.grad.data for t in ctx.variables]
        for t in ctx.variables:
            if t is not None:
                t.grad = None
        return None, None, *computed


def recorded(function: Callable[..., Any], *tensors: torch.Tensor | None) -> Any:
    """Return the results, Tensors or None, of a function of Tensors as torch's tensors, with their gradients."""
    return _Recorded.apply(function, torch.is_grad_enabled(), *tensors)  # type: ignore[no-untyped-call]
