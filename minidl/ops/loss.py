"""Losses. The gradient of cross-entropy is computed with the loss and waits, multiplied by what comes back if not 1."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import cross_entropy as entropy
from minidl.kernels import loss as elements
from minidl.tensor import Tensor

__all__ = ["binary_cross_entropy_with_logits", "cross_entropy", "mse_loss"]


class CrossEntropy(Function):
    none_is_one = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
        smoothing: float,
    ) -> torch.Tensor:
        ctx.save(x, target, weight)
        ctx.options = ignore_index, reduction, smoothing
        ctx.made = entropy.cross_entropy_parts(x, target, weight, ignore_index, reduction, smoothing, ctx.needs[0])
        return ctx.made.loss

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        # The gradient is given away, scaled where it lies: a second walk through a retained graph makes it again.
        made, ctx.made = ctx.made, None
        if made is None:
            x, target, weight = ctx.saved
            ignore_index, reduction, smoothing = ctx.options
            made = entropy.cross_entropy_parts(x, target, weight, ignore_index, reduction, smoothing, True)
        grad = made.grad
        if dy is not None or made.divisor is not None:
            grad = entropy.cross_entropy_grad_(grad, dy, made.divisor)
        return grad, None, None, None, None, None


class MSELoss(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        ctx.save(x, target)
        ctx.reduction = reduction
        return elements.mse_loss(x, target, reduction)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, target = ctx.saved
        return *elements.mse_loss_grad(dy, x, target, ctx.reduction, ctx.needs[:2]), None


class BinaryCrossEntropyWithLogits(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: str,
        pos_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save(x, target, weight, pos_weight)
        ctx.reduction = reduction
        return elements.binary_cross_entropy_with_logits(x, target, weight, reduction, pos_weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, target, weight, pos_weight = ctx.saved
        grads = elements.binary_cross_entropy_with_logits_grad(
            dy, x, target, weight, ctx.reduction, pos_weight, ctx.needs[:2]
        )
        return *grads, None, None, None


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of softmax(x) with classes or probabilities, as torch.nn.functional.cross_entropy.

    Shapes: x [N], [R, N] or [R, N, ...] logits of N classes; target [], [R] or [R, ...] of int64 or int32 classes, or
    x's shape and dtype for probabilities; weight [N], a factor for each class. Rows whose target is `ignore_index`
    count nothing. The mean is over the weights of the other rows' targets (NaN when there is none), or over the rows
    for probabilities; "none" gives the loss of each row. No gradient reaches target or weight.
    Raises TypeError for dtypes, ValueError for shapes, devices or options that do not fit, IndexError on the CPU for a
    target that is no class; on a GPU, where looking would wait for the device, such a row becomes NaN.
    """
    _refuse_grad("cross_entropy", target=target, weight=weight)
    return CrossEntropy.apply(x, target, weight, ignore_index, reduction, label_smoothing)


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """(x - target)^2 of two tensors of one shape: its mean, its sum, or each element's with "none".

    Raises TypeError for dtypes, ValueError for shapes, devices or a reduction that do not fit.
    """
    return MSELoss.apply(x, target, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy of sigmoid(x) with targets in [0, 1] of x's shape: mean, sum, or each element's.

    `weight` is a factor for each element, `pos_weight` one for the target's part; both broadcast to x's shape, and no
    gradient reaches them. Raises as `mse_loss`.
    """
    _refuse_grad("binary_cross_entropy_with_logits", weight=weight, pos_weight=pos_weight)
    return BinaryCrossEntropyWithLogits.apply(x, target, weight, reduction, pos_weight)


def _refuse_grad(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient, which it cannot get; pass {name}.detach()")
