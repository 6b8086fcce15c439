"""Losses. Cross-entropy computes its gradient together with the loss; backward only scales it."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import cross_entropy as entropy
from minidl.kernels import loss as elements
from minidl.tensors import Tensor

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
        # The gradient is scaled in place and given away; a second backward through a retained graph computes it again.
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
    """Cross-entropy of softmax(x) and the target classes or probabilities, as torch.nn.functional.cross_entropy.

    Shapes: x [N], [R, N] or [R, N, ...] logits of N classes; target [], [R] or [R, ...] of int64 or int32 classes, or
    x's shape and dtype for probabilities; weight [N], a factor for each class. Rows whose target is `ignore_index`
    are left out. "mean" divides by the sum of the weights of the remaining targets (NaN if there are none), or by the
    number of rows for probabilities; "none" gives the loss of each row. target and weight get no gradient.
    Raises TypeError for dtypes, ValueError for shapes, devices or options that do not fit. A target outside the classes
    raises IndexError on the CPU; on a GPU, where the check would wait for the device, its loss is NaN.
    """
    _refuse_grad("cross_entropy", target=target, weight=weight)
    return CrossEntropy.apply(x, target, weight, ignore_index, reduction, label_smoothing)


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """(x - target)^2 of two tensors of the same shape: "mean", "sum" or "none" (elementwise).

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
    """Binary cross-entropy of sigmoid(x) and targets from 0 to 1 in x's shape: "mean", "sum" or "none" (elementwise).

    `weight` is a factor for each element, `pos_weight` a factor for the positive term; both broadcast to x's shape and
    get no gradient. Raises as `mse_loss`.
    """
    _refuse_grad("binary_cross_entropy_with_logits", weight=weight, pos_weight=pos_weight)
    return BinaryCrossEntropyWithLogits.apply(x, target, weight, reduction, pos_weight)


def _refuse_grad(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient, but {op} computes none for it; pass {name}.detach()")
